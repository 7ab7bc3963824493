"""
One line for each request in the log: its path, what was reused and computed, and how long it took;
and one for each shadow check.

A projection of committed events, like the metrics: the log says what the journal says, under the
same ids.
"""

from __future__ import annotations

from collections.abc import Callable

import structlog

from cairn.journal import events as ev
from cairn.journal.timelines import Prewarmed, Timeline, Timelines

log = structlog.get_logger("cairn")

Follower = Callable[[Timeline | Prewarmed], None]
"""Is given each request and each prewarm, once it ended."""


class RequestLog:
    """Follows requests through the journal and logs each once, when it ends."""

    def __init__(self) -> None:
        self._timelines = Timelines()
        self._followers: list[Follower] = []

    def follow(self, follower: Follower) -> None:
        """Pass each request and each prewarm on to ``follower``, once it ended."""
        self._followers.append(follower)

    def __call__(self, recorded: ev.Recorded) -> None:
        """Take in a committed event."""
        event = recorded.event
        match event:
            case ev.RequestRejected():
                log.warning(
                    "request rejected",
                    request=event.request,
                    tenant=event.tenant,
                    status=event.status,
                    code=event.code,
                )
            case ev.EmbeddingsComputed():
                log.info(
                    "embeddings",
                    request=event.request,
                    tenant=event.tenant,
                    model=event.model,
                    inputs=event.inputs,
                    tokens=event.tokens,
                    computed_ms=event.duration_us // 1000,
                )
            case ev.InvariantViolated():
                log.error(
                    "invariant violated",
                    bug_id=event.bug_id,
                    invariant=event.invariant,
                    session=event.session,
                    request=event.request,
                    row=event.at_position,
                    fact=event.message,
                )
            case ev.ShadowEnded():
                _shadow(event, event.result)
            case ev.ShadowSkipped():
                _shadow(event, f"skipped: {event.reason}")
            case _:
                pass
        ended = self._timelines.see(recorded)
        if isinstance(ended, Timeline):
            _request(ended)
        if ended is not None:
            for follower in self._followers:
                follower(ended)


def _request(line: Timeline) -> None:
    received, path, first, rate = line.received, line.path, line.first_us, line.tokens_a_second
    assert line.ended_us is not None
    log.info(
        "request",
        request=received.request,
        session=received.session,
        **({} if line.bug_id is None else {"bug_id": line.bug_id}),
        path=None if path is None else path.path,
        reason=None if path is None else path.reason,
        prompt_tokens=received.prompt_tokens,
        reused_tokens=0 if path is None else path.reused_tokens,
        rerendered_tokens=0 if path is None else path.rerendered_tokens,
        prefilled_tokens=0 if line.prefilled is None else line.prefilled.tokens,
        generated_tokens=line.generated_tokens,
        first_token_ms=None if first is None else (first - line.received_us) // 1000,
        total_ms=(line.ended_us - line.received_us) // 1000,
        tokens_a_second=None if rate is None else round(rate, 1),
        ended=line.ended,
        words=received.words,  # shown on a terminal, and in no file
    )


def _shadow(event: ev.ShadowEnded | ev.ShadowSkipped, how: str) -> None:
    log.info("shadow check", request=event.request, session=event.of_session, ended=how)
