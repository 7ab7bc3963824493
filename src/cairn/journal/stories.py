"""
What a journal tells about a session or a bug: what became of each request, which violations concern
a session, and which rows led to a violation. Pure.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable

import attrs

from cairn.journal import events as ev
from cairn.journal.errors import DamagedRow, UnknownEvent
from cairn.journal.replay import Finding, Report
from cairn.journal.rows.base import Base, state_of
from cairn.journal.rows.codec import Row, decode
from cairn.journal.state import SessionId, State

_LED_ROWS = 12


@attrs.define(kw_only=True)
class RequestStory:
    """
    What became of one request.

    Attributes:
        position: the row that received it.
        path: empty if none was selected.
        joined: the requests whose blocks it waited for, in order.
        prompt, reused, prefilled, generated: in tokens.
        from_slab, in_part: of the reused tokens, those that the slab held, and those of a partial
            match. The others are those of whole blocks from the pool.
        end: its finish reason, ``cancelled (STAGE)``, the invariant that broke, ``lost`` if its
            server ended during it; ``open`` if it goes on.
    """

    request: str
    position: int
    path: str = ""
    reason: str | None = None
    joined: tuple[str, ...] = ()
    prompt: int = 0
    reused: int = 0
    from_slab: int = 0
    in_part: int = 0
    sealed_blocks: int = 0
    prefilled: int = 0
    generated: int = 0
    end: str = "open"

    @property
    def from_pool(self) -> int:
        """The reused tokens of whole blocks that were copied in."""
        return self.reused - self.from_slab - self.in_part


def request_stories(rows: Iterable[Row], state: State) -> list[RequestStory]:
    """
    The requests of a session. Damaged rows are skipped: they are findings.

    Args:
        rows: of the session's stream, in order.
        state: the fold up to the end of the journal.
    """
    found: list[RequestStory] = []
    for row in rows:
        with contextlib.suppress(DamagedRow, UnknownEvent):
            recorded = decode(row)
            if isinstance(recorded.event, ev.RequestReceived):
                request, prompt = recorded.event.request, recorded.event.prompt_tokens
                story = RequestStory(request=request, position=row.position, prompt=prompt)
                found.append(story)
            elif found:
                _continue(found[-1], recorded.event)
    for story in found:
        # The server stopped or was lost during it, which is on the server's stream.
        if story.end == "open" and story.request not in state.requests:
            story.end = "lost"
    return found


def _continue(story: RequestStory, event: ev.Event) -> None:
    """Add an event to the story of the request before it."""
    match event:
        case ev.PrefixJoined():
            story.joined = (*story.joined, event.leader)
        case ev.PathSelected():
            story.path, story.reason = event.path, event.reason
            story.reused = event.reused_tokens
            story.from_slab = event.tokens_from_slab
            story.in_part = event.tokens_from_partial
        case ev.CacheExtended(step="prefill"):
            story.prefilled += event.end - event.start
            story.generated += len(event.sampled)
        case ev.CacheExtended(step="decode"):
            story.generated += len(event.sampled)
        case ev.BlockSealed():
            story.sealed_blocks += 1
        case ev.RequestFinished():
            story.end = event.finish_reason
        case ev.RequestCancelled():
            story.end = f"cancelled ({event.stage})"
        case ev.InvariantViolated() if story.end == "open":
            story.end = event.invariant
        case _:
            pass  # not part of the story


def findings_of(report: Report, session: str, last: int) -> list[Finding]:
    """
    The violations that concern a session: its own, those of shadow checks of its answers, and the
    unrecorded ones of no session (a changed row, an eviction) that its decisions may depend on.

    Args:
        last: the session's last row. All rows before it matter, because its decisions were made on
            the state that they imply.
    """
    return [
        finding
        for finding in report.findings
        if finding.concerns == session
        or (finding.session is None and not finding.recorded and finding.position <= last)
    ]


@attrs.frozen(kw_only=True)
class BugStory:
    """
    What led to a violation.

    Attributes:
        rows: the last rows of its stream, up to the one that broke the invariant.
        violated: the event that recorded it; None if it is not on record.
        fingerprint: of the model that was loaded.
    """

    rows: tuple[Row, ...]
    violated: ev.InvariantViolated | None
    fingerprint: str | None


def bug_story(rows: Iterable[Row], finding: Finding, base: Base | None = None) -> BugStory:
    """
    What led to a violation.

    Args:
        rows: all rows of the journal, in order; read no further than needed.
        base: what replaces the rows before these.
    """
    stream = f"session/{finding.session}" if finding.session else None
    led: deque[Row] = deque(maxlen=_LED_ROWS)
    fingerprint = None
    with contextlib.suppress(ValueError):  # a damaged base is a finding of its own
        model = state_of(base).model if base is not None else None
        fingerprint = model.fingerprint if model is not None else None
    for row in rows:
        if row.position <= finding.position and stream in (None, row.stream):
            led.append(row)
        if row.kind not in (ev.ModelLoaded.kind, ev.InvariantViolated.kind):
            continue
        with contextlib.suppress(DamagedRow, UnknownEvent):
            match decode(row).event:
                case ev.ModelLoaded() as loaded if row.position <= finding.position:
                    fingerprint = loaded.fingerprint
                case ev.InvariantViolated() as found if found.bug_id == finding.bug_id:
                    return BugStory(rows=tuple(led), violated=found, fingerprint=found.fingerprint)
                case _:
                    pass  # another model or another bug
    return BugStory(rows=tuple(led), violated=None, fingerprint=fingerprint)


def pruned_names(report: Report, base: Base | None) -> dict[str, str]:
    """
    The ids of the bugs and sessions that were pruned, with "Bug" or "Session". Of a session that
    was idle in the base, one row is left: the one that closed it.

    Args:
        report: the replay from the base.
    """
    try:
        then = state_of(base) if base is not None else None
    except ValueError:  # of a damaged base it is unknown what was pruned
        then = None
    if then is None:
        return {}
    gone = dict.fromkeys(then.faults, "Bug")
    for stream, seq in then.streams.items():
        session = stream.removeprefix("session/")
        # One that is open still is an agent's, which goes on.
        closed = SessionId(session) not in report.state.sessions
        left = closed and SessionId(session) in then.sessions
        if stream != session and report.state.streams.get(stream, 0) <= seq + left:
            gone[session] = "Session"
    return gone
