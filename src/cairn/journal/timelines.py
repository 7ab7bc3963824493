"""
When each request was received, got its path, computed and ended: a fold over the events of a run.

The line of a request in the log and its spans come from the same timeline. It has counts and times
alone, but for ``words``, which are private.
"""

from __future__ import annotations

from typing import Any

import attrs

from cairn.journal import events as ev


def tokens_a_second(tokens: int, first_us: int | None, ended_us: int | None) -> float | None:
    """
    The rate of an answer after its first token; None if there is none.

    Args:
        tokens: of the answer.
        first_us: when its first token was drawn.
        ended_us: when it ended.
    """
    if not first_us or not ended_us or ended_us <= first_us or tokens < 2:
        return None
    return (tokens - 1) * 1e6 / (ended_us - first_us)


@attrs.frozen(kw_only=True)
class Stretch:
    """
    Work of one kind for a request: copies of blocks, or passes of the model. Other requests may be
    served in between.

    Attributes:
        began_us, ended_us: of the first and of the last of them, in microseconds since 1970.
        busy_us: how long they took, added up.
        tokens: how many they copied or computed.
        steps: how many events they are.
    """

    began_us: int
    ended_us: int
    busy_us: int
    tokens: int
    steps: int

    def with_step(self, other: Stretch) -> Stretch:
        """This one with a later one."""
        return Stretch(
            began_us=min(self.began_us, other.began_us),
            ended_us=max(self.ended_us, other.ended_us),
            busy_us=self.busy_us + other.busy_us,
            tokens=self.tokens + other.tokens,
            steps=self.steps + other.steps,
        )


@attrs.define(kw_only=True)
class Timeline:
    """
    A request. Times are those of the rows, in microseconds since 1970.

    Attributes:
        received: how the request came.
        received_us: when a session took it.
        model: the name of the model that answers.
        path: None before it is selected; then ``selected_us`` is when it was.
        joined: for how many other requests it waited.
        restored, prefilled, decoded: its work; None if there was none.
        generated_tokens: of the answer.
        first_us: when the first token was drawn.
        ended: how it ended: a finish reason, ``cancelled in STAGE``, ``bug``.
        error: what ended it, if it was neither the model nor the client.
        bug_id: of the bug that ended it.
    """

    received: ev.RequestReceived
    received_us: int
    model: str
    path: ev.PathSelected | None = None
    selected_us: int | None = None
    joined: int = 0
    restored: Stretch | None = None
    prefilled: Stretch | None = None
    decoded: Stretch | None = None
    generated_tokens: int = 0
    first_us: int | None = None
    ended_us: int | None = None
    ended: str | None = None
    finish_reason: ev.FinishReason | None = None
    error: str | None = None
    bug_id: str | None = None

    @property
    def tokens_a_second(self) -> float | None:
        """The rate after the first token; None if there is none."""
        return tokens_a_second(self.generated_tokens, self.first_us, self.ended_us)


@attrs.frozen(kw_only=True)
class Prewarmed:
    """
    A prewarm that ended.

    Attributes:
        session: whose next prompt it prepares.
        request: the session's last one; None if it came before this run.
        tokens: of the beginning of the next prompt.
        computed_tokens: how many of them were computed.
        reason: why it ended early; None if it was finished.
    """

    session: str
    request: str | None
    model: str
    began_us: int
    ended_us: int
    tokens: int
    computed_tokens: int
    reason: ev.AbandonReason | None


#: A client that leaves is no error.
_LEFT = ("prefill", "decode")


class Timelines:
    """The requests in progress: call ``see`` with each event of a run."""

    def __init__(self) -> None:
        self._model = ""
        self._open: dict[str, Timeline] = {}
        self._last: dict[str, str] = {}  # the last request of each session
        self._prewarms: dict[str, tuple[int, ev.PrewarmStarted]] = {}

    def see(self, recorded: ev.Recorded) -> Timeline | Prewarmed | None:
        """
        Apply the next event.

        Returns:
            What ended with it, if anything did.
        """
        event, now_us = recorded.event, recorded.time_us
        match event:
            case ev.ModelLoaded():
                self._model = event.name
            case ev.RequestReceived():
                self._open[event.request] = Timeline(
                    received=event, received_us=now_us, model=self._model
                )
                self._last[event.session] = event.request
            case ev.SessionClosed():
                self._last.pop(event.session, None)
                self._prewarms.pop(event.session, None)
            case ev.PrewarmStarted():
                self._prewarms[event.session] = now_us, event
            case ev.PrewarmFinished():
                return self._prewarmed(event, now_us, None)
            case ev.PrewarmAbandoned():
                return self._prewarmed(event, now_us, event.reason)
            case ev.InvariantViolated():
                error, bug_id = event.invariant, event.bug_id
                return self._ended(event.request, now_us, "bug", error=error, bug_id=bug_id)
            case _:
                return self._went_on(event, now_us)
        return None

    def _went_on(self, event: ev.Event, now_us: int) -> Timeline | None:
        request: str | None = getattr(event, "request", None)
        line = self._open.get(request or "")
        if line is None:
            return None
        match event:
            case ev.PrefixJoined():
                line.joined += 1
            case ev.PathSelected():
                line.path, line.selected_us = event, now_us
            case ev.BlocksRestored():
                line.restored = _longer(line.restored, event, now_us)
            case ev.CacheExtended():
                self._extended(line, event, now_us)
            case ev.RequestFinished():
                line.generated_tokens = event.completion_tokens
                reason = event.finish_reason
                return self._ended(request, now_us, reason, finish_reason=reason)
            case ev.RequestCancelled():
                error = None if event.stage in _LEFT else event.stage
                return self._ended(request, now_us, f"cancelled in {event.stage}", error=error)
            case _:
                pass
        return None

    def _extended(self, line: Timeline, event: ev.CacheExtended, now_us: int) -> None:
        if event.step == "prefill":
            line.prefilled = _longer(line.prefilled, event, now_us)
        elif event.step == "decode":
            line.decoded = _longer(line.decoded, event, now_us)
        line.generated_tokens += len(event.sampled)
        if event.sampled and line.first_us is None:
            line.first_us = now_us

    def _ended(self, request: str | None, now_us: int, how: str, **more: Any) -> Timeline | None:
        line = self._open.pop(request or "", None)
        if line is None:
            return None
        return attrs.evolve(line, ended=how, ended_us=now_us, **more)

    def _prewarmed(
        self,
        event: ev.PrewarmFinished | ev.PrewarmAbandoned,
        now_us: int,
        reason: ev.AbandonReason | None,
    ) -> Prewarmed | None:
        began = self._prewarms.pop(event.session, None)
        if began is None:  # it could not start
            return None
        began_us, started = began
        return Prewarmed(
            session=event.session,
            request=self._last.get(event.session),
            model=self._model,
            began_us=began_us,
            ended_us=now_us,
            tokens=started.tokens,
            computed_tokens=event.computed_tokens,
            reason=reason,
        )


def _longer(
    before: Stretch | None, event: ev.BlocksRestored | ev.CacheExtended, now_us: int
) -> Stretch:
    """The work before an event, with it."""
    step = Stretch(
        began_us=now_us - event.duration_us,
        ended_us=now_us,
        busy_us=event.duration_us,
        tokens=event.end - event.start,
        steps=1,
    )
    return step if before is None else before.with_step(step)
