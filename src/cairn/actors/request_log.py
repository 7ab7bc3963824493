"""
One line for each request in the log: its path, what was reused and computed, and how long it took;
and one for each shadow check.

A projection of committed events, like the metrics: the log says what the journal says, under the
same ids.
"""

from __future__ import annotations

import attrs
import structlog

from cairn.journal import events as ev

log = structlog.get_logger("cairn")


@attrs.define(kw_only=True)
class _Line:
    session: str
    began_us: int
    prompt_tokens: int
    words: str | None
    path: str | None = None
    reason: str | None = None
    reused_tokens: int = 0
    rerendered_tokens: int = 0
    prefilled_tokens: int = 0
    generated_tokens: int = 0
    first_token_us: int | None = None

    def rate(self, now_us: int) -> float | None:
        """Tokens a second after the first one; None if that says nothing."""
        if self.first_token_us is None or now_us <= self.first_token_us:
            return None
        more = self.generated_tokens - 1
        return round(more * 1e6 / (now_us - self.first_token_us), 1) if more > 0 else None


class RequestLog:
    """Follows requests through the journal and logs each once, when it ends."""

    def __init__(self) -> None:
        self._open: dict[str, _Line] = {}

    def __call__(self, recorded: ev.Recorded) -> None:
        """Take in a committed event."""
        event = recorded.event
        match event:
            case ev.RequestReceived():
                self._open[event.request] = _Line(
                    session=event.session,
                    began_us=recorded.time_us,
                    prompt_tokens=event.prompt_tokens,
                    words=event.words,
                )
            case ev.RequestRejected():
                log.warning(
                    "request rejected",
                    request=event.request,
                    tenant=event.tenant,
                    status=event.status,
                    code=event.code,
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
                self._ended(recorded, event.request, "bug", bug_id=event.bug_id)
            case ev.ShadowEnded():
                _shadow(event, event.result)
            case ev.ShadowSkipped():
                _shadow(event, f"skipped: {event.reason}")
            case _:
                self._went_on(recorded)

    def _went_on(self, recorded: ev.Recorded) -> None:
        event = recorded.event
        line = self._open.get(getattr(event, "request", None) or "")
        if line is None:
            return
        match event:
            case ev.PathSelected():
                line.path, line.reason = event.path, event.reason
                line.reused_tokens = event.reused_tokens
                line.rerendered_tokens = event.rerendered_tokens
            case ev.CacheExtended():
                line.generated_tokens += len(event.sampled)
                if event.step == "prefill":
                    line.prefilled_tokens += event.end - event.start
                if event.sampled and line.first_token_us is None:
                    line.first_token_us = recorded.time_us
            case ev.RequestFinished():
                line.generated_tokens = event.completion_tokens
                self._ended(recorded, event.request, event.finish_reason)
            case ev.RequestCancelled():
                self._ended(recorded, event.request, f"cancelled in {event.stage}")
            case _:
                pass

    def _ended(self, recorded: ev.Recorded, request: str | None, how: str, **ids: str) -> None:
        line = self._open.pop(request or "", None)
        if line is None:
            return
        first = line.first_token_us
        log.info(
            "request",
            request=request,
            session=line.session,
            **ids,
            path=line.path,
            reason=line.reason,
            prompt_tokens=line.prompt_tokens,
            reused_tokens=line.reused_tokens,
            rerendered_tokens=line.rerendered_tokens,
            prefilled_tokens=line.prefilled_tokens,
            generated_tokens=line.generated_tokens,
            first_token_ms=None if first is None else (first - line.began_us) // 1000,
            total_ms=(recorded.time_us - line.began_us) // 1000,
            tokens_a_second=line.rate(recorded.time_us),
            ended=how,
            words=line.words,  # shown on a terminal, and in no file
        )


def _shadow(event: ev.ShadowEnded | ev.ShadowSkipped, how: str) -> None:
    log.info("shadow check", request=event.request, session=event.of_session, ended=how)
