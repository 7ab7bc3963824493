"""
Where a journal may be cut: which of its first rows can go.

A cut at row P removes rows 1 to P and leaves a base in their place. It is made where

1. every row up to P is older than the date that the operator names, and
2. each session that has a row up to P is whole there: it is closed, and no row of it stands above P
   but its closing one. Where the server was lost in the middle of a request, its session lasts
   until that was found, and
3. at least one session goes: a base is not made for the rows of a server that started and stopped.

A closing row may stand above P because sessions overlap: in a journal in daily use there is never a
moment at which none is open. The base has the session at rest, and the closing row ends it there.

Rule of this module: it is told of rows, dates and states, and gives numbers. It removes nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import attrs

from cairn.journal import events as ev
from cairn.journal.lifecycle import Life
from cairn.journal.state import State


@attrs.define(kw_only=True)
class Span:
    """
    A session as rows, from its opening to its closing.

    Attributes:
        first: the row that opened it.
        last: the last row that it needs, its closing not counted.
        last_us: when that was written.
        used_us: when its last request came, or it was opened.
        closed: the row that closed it.
    """

    session: str
    first: int
    last: int
    last_us: int
    used_us: int
    closed: int | None = None


@attrs.frozen(kw_only=True)
class Plan:
    """
    What can go.

    Attributes:
        cut: the last row that can; no higher than the base where nothing can.
        sessions: how many sessions go with the rows.
        limit: the last row that is old enough, with all before it.
        held_by: the session because of which the cut is lower than that.
    """

    cut: int
    sessions: int
    limit: int
    held_by: Span | None


class Survey:
    """
    What a journal has, seen row by row: ``feed`` it all of them, then ask for a ``plan``.

    Attributes:
        limit: the last row that is older than the date, with all before it.
    """

    def __init__(self, before_us: int, *, after: int = 0) -> None:
        """
        Args:
            before_us: the date: microseconds since 1970.
            after: where the rows begin: the position of the base.
        """
        self.limit = after
        self._after = after
        self._before_us = before_us
        self._older = True
        self._spans: list[Span] = []
        self._open: dict[str, Span] = {}
        self._before: State | None = None

    def feed(self, recorded: ev.Recorded, state: State) -> None:
        """
        Take in the next row.

        Args:
            state: the fold up to and with it.
        """
        event = recorded.event
        self._older = self._older and recorded.time_us < self._before_us
        if self._older:
            self.limit = recorded.position
        if isinstance(event, ev.ServerStopped | ev.ServerLost | ev.ModelUnloaded):
            ended = self._before.requests.values() if self._before is not None else ()
            for name in ended:
                self._seen(name, recorded)
        self._before = state
        session = getattr(event, "session", None)
        if session is None:
            return
        if isinstance(event, ev.SessionOpened):
            self._open[session] = Span(
                session=session,
                first=recorded.position,
                last=recorded.position,
                last_us=recorded.time_us,
                used_us=recorded.time_us,
            )
            self._spans.append(self._open[session])
        elif isinstance(event, ev.SessionClosed):
            # One of the base's has no span: its other rows went with an earlier cut.
            if (closed := self._open.pop(session, None)) is not None:
                closed.closed = recorded.position
        else:
            self._seen(session, recorded)
            if isinstance(event, ev.RequestReceived) and session in self._open:
                self._open[session].used_us = recorded.time_us

    def _seen(self, session: str, recorded: ev.Recorded) -> None:
        if (span := self._open.get(session)) is not None:
            span.last, span.last_us = recorded.position, recorded.time_us

    def closable(self, state: State, *, idle: bool, quarantined: bool) -> tuple[Span, ...]:
        """
        The open sessions whose last use is before the date and that may be closed, in the order in
        which they were opened.

        Args:
            state: the fold up to the end.
            idle: those at rest.
            quarantined: those that a bug took out of service.
        """
        lives = {Life.COLD, Life.IDLE} if idle else set()
        lives |= {Life.QUARANTINED} if quarantined else set()
        return tuple(
            span
            for span in self._open.values()
            if span.used_us < self._before_us and state.session(span.session).life in lives
        )

    def plan(self, closing: Iterable[Span] = ()) -> Plan:
        """
        The highest row at which the journal may be cut.

        Args:
            closing: open sessions that are going to be closed.
        """
        closing_rows = {span.first for span in closing}
        cut, held_by = self.limit, None
        # From the last one that was opened to the first: what lowers the cut below a session can
        # only bring in sessions that were opened before it.
        for span in reversed(self._spans):
            ends = span.closed is not None or span.first in closing_rows
            if span.first <= cut and (not ends or span.last > cut):
                cut, held_by = span.first - 1, span
        sessions = sum(1 for span in self._spans if span.first <= cut)
        return Plan(
            cut=cut if sessions else self._after,
            sessions=sessions,
            limit=self.limit,
            held_by=held_by,
        )

    @property
    def sessions(self) -> tuple[int, int]:
        """
        How many sessions are (open, closed).
        """
        return len(self._open), len(self._spans) - len(self._open)


def compared_with(events: Iterable[ev.Event]) -> Collection[str]:
    """
    The sessions whose token ids the path decisions among these events compared a prompt with.
    """
    return {
        event.nearest
        for event in events
        if isinstance(event, ev.PathSelected) and event.nearest is not None
    }
