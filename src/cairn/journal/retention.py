"""
Where a journal may be cut: which of its first rows can be pruned.

A cut at row P removes rows 1 to P and leaves a base in their place. A cut at P is allowed if

1. every row up to P is older than the date that the operator names, and
2. each session with a row up to P goes as a whole: it is closed, and only its closing row may be
   above P. If the server was lost during a request, the session lasts until that was found, and
3. at least one session goes, or a request of an agent, or an agent was deleted, whose texts a base
   may have: no base is made for the rows of a server that only started and stopped, and
4. no violation is cut off from the row that broke the invariant, because they tell one story. If
   that row is a shadow check, it is not cut off from the session whose answer was checked either,
   and
5. the session of an agent, which may stay open for years, is not cut during a request or while it
   holds a slab. It may be cut at any other moment: the base has the session as it was, and the
   texts of the agent's turns (``rows/histories.py``).

The closing row may be above P because sessions overlap: in a journal in daily use there is never a
moment without an open session. The base has the idle session, and the closing row ends it there.

Rules of this module:

1. It reads rows, dates and states, and returns numbers. It removes nothing.
2. What a row did is seen from the state before and after it, because a row that broke an invariant
   names an event without effect.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import attrs

from cairn.journal import events as ev
from cairn.journal.agents import Agents
from cairn.journal.lifecycle import SessionState
from cairn.journal.state import EMPTY, SessionId, State
from cairn.journal.tenants import agent_of
from cairn.journal.turns import Turns

_NEVER = 2**63
"""A row that never comes."""


@attrs.define(kw_only=True)
class Span:
    """
    A session as rows, from its opening to its closing.

    Attributes:
        first: the row that opened it.
        last: the last row that it needs, not counting its closing row.
        last_us: when that row was written.
        used_us: when its last request came, or when it was opened.
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
    What can be pruned.

    Attributes:
        cut: the last row that can go; no higher than the base if none can.
        sessions: how many sessions go with the rows.
        limit: the last row that is old enough, as are all before it.
        held_by: the session that keeps the cut below ``limit``.
        violation: if no session does: the row that broke, and the younger row that reports it.
    """

    cut: int
    sessions: int
    limit: int
    held_by: Span | None
    violation: tuple[int, int] | None = None


class Survey:
    """
    Reads a journal row by row to find what can be pruned: ``feed`` it all rows, then call ``plan``.

    Attributes:
        limit: the last row that is older than the date, as are all before it.
        agents: the fold of the agents.
    """

    def __init__(self, before_us: int, begins: State = EMPTY, agents: Agents | None = None) -> None:
        """
        Args:
            before_us: the date, in microseconds since 1970.
            begins: the fold up to the first row: that of the base.
            agents: the fold of the agents up to there; without one there were none.
        """
        self.limit = begins.position
        self._after = begins.position
        self._before_us = before_us
        self._older = True
        self._spans: list[Span] = []
        self._open: dict[str, Span] = {}
        self._violated: list[tuple[int, int]] = []  # (first row of its story, own row)
        self._checked = (0, "")  # the last shadow check: its row, the checked session
        self._before = begins
        self.agents = Agents(Turns()) if agents is None else agents
        self._busy: dict[str, Span] = {}  # what agents' sessions do, while they do not rest
        self._done: list[Span] = []
        self._deleted: list[int] = []  # where an agent was deleted, whose texts a base may have

    def feed(self, recorded: ev.Recorded, state: State) -> None:
        """
        Apply the next row.

        Args:
            state: the fold up to and including it.
        """
        event, before = recorded.event, self._before
        self._before = state
        self.agents.see(recorded)
        self._older = self._older and recorded.time_us < self._before_us
        if self._older:
            self.limit = recorded.position
        if isinstance(event, ev.ServerStopped | ev.ServerLost | ev.ModelUnloaded):
            for name in list(self._busy):
                self._see_agents(name, recorded, state)
            for name in set(before.requests.values()) - set(state.requests.values()):
                self._seen(name, recorded)
        if isinstance(event, ev.InvariantViolated):
            self._violated.append((self._began(event.at_position), recorded.position))
        if isinstance(event, ev.AgentDeleted):
            self._deleted.append(recorded.position)
        if isinstance(event, ev.ShadowChecked):
            self._checked = recorded.position, event.of_session
        session = getattr(event, "session", None)
        if session is None:
            return
        if agent_of(session) is not None:
            self._see_agents(session, recorded, state)
        was_open, is_open = (SessionId(session) in one.sessions for one in (before, state))
        if is_open and not was_open:
            self._open[session] = _begun(session, recorded)
            self._spans.append(self._open[session])
        elif was_open and not is_open:
            # A session from the base has no span: its earlier rows were pruned with an earlier cut.
            if (closed := self._open.pop(session, None)) is not None:
                closed.closed = recorded.position
        else:
            self._seen(session, recorded)
            if isinstance(event, ev.RequestReceived) and session in self._open:
                self._open[session].used_us = recorded.time_us

    def _began(self, broken: int) -> int:
        """The row with which the story of a violation begins."""
        checked, session = self._checked
        if broken != checked:
            return broken
        firsts = (span.first for span in reversed(self._spans) if span.session == session)
        return next(firsts, broken)  # the session may be from the base

    def _see_agents(self, session: str, recorded: ev.Recorded, state: State) -> None:
        """Note from which row to which the session of an agent does not rest."""
        now = state.sessions.get(SessionId(session))
        rests = now is None or (
            now.state in (SessionState.COLD, SessionState.IDLE) and now.slab is None
        )
        busy = self._busy.get(session)
        if busy is not None:
            busy.last, busy.last_us = recorded.position, recorded.time_us
        if not rests and busy is None:
            self._busy[session] = _begun(session, recorded)
        elif rests and busy is not None:
            self._done.append(self._busy.pop(session))

    def _seen(self, session: str, recorded: ev.Recorded) -> None:
        if (span := self._open.get(session)) is not None:
            span.last, span.last_us = recorded.position, recorded.time_us

    def closable(self, state: State, *, idle: bool, quarantined: bool) -> tuple[Span, ...]:
        """
        The open sessions that were last used before the date and may be closed, in the order in
        which they were opened.

        Args:
            state: the fold up to the end.
            idle: include idle sessions.
            quarantined: include quarantined sessions.
        """
        lives = {SessionState.COLD, SessionState.IDLE} if idle else set()
        lives |= {SessionState.QUARANTINED} if quarantined else set()
        return tuple(
            span
            for span in self._open.values()
            if span.used_us < self._before_us and state.session(span.session).state in lives
        )

    def plan(self, closing: Iterable[Span] = ()) -> Plan:
        """
        The highest row at which the journal may be cut.

        Args:
            closing: open sessions that are going to be closed.
        """
        closing_rows = {span.first for span in closing}
        ending = {span.session for span in closing}
        cut, held_by, violation = self.limit, None, None
        # (first row, last row needed, the open session, whether a violation is the reason)
        wholes: list[tuple[int, int, Span | None, bool]] = [
            (first, last, None, True) for first, last in self._violated
        ]
        wholes += [(span.first, span.last, None, False) for span in self._done]
        wholes += [
            (span.first, span.last if session in ending else _NEVER, span, False)
            for session, span in self._busy.items()
        ]
        gone = [(span.first, False) for span in self._done]
        gone += [(row, False) for row in self._deleted]
        for span in self._spans:
            ends = span.closed is not None or span.first in closing_rows
            if agent_of(span.session) is None:
                wholes.append((span.first, span.last if ends else _NEVER, span, False))
                gone.append((span.first, True))
            elif ends:
                gone.append((span.last, True))
        # From the last one that began to the first: lowering the cut below one can only affect
        # those that began before it.
        for first, last, held, is_violation in sorted(wholes, key=lambda one: one[0], reverse=True):
            if first <= cut < last:
                cut, held_by = first - 1, held or held_by
                violation = (first, last) if is_violation else violation
        removed = [is_session for row, is_session in gone if row <= cut]
        return Plan(
            cut=cut if removed else self._after,
            sessions=sum(removed),
            limit=self.limit,
            held_by=held_by,
            violation=violation if held_by is None else None,
        )

    @property
    def sessions(self) -> tuple[int, int]:
        """How many sessions are (open, closed)."""
        return len(self._open), len(self._spans) - len(self._open)


def _begun(session: str, recorded: ev.Recorded) -> Span:
    return Span(
        session=session,
        first=recorded.position,
        last=recorded.position,
        last_us=recorded.time_us,
        used_us=recorded.time_us,
    )


WHOLE = 1 << 62
"""All token ids of a block."""


@attrs.define
class NeededIds:
    """
    The token ids that a base must keep for the rows after a cut. No others may stay in it: their
    conversations were pruned.

    Attributes:
        sessions: whose token ids a later decision compared with a prompt, and those of agents that
            go on.
        blocks: key of a block to how many of its first ids: ``WHOLE`` if a later row names it as a
            block of its own conversation, else as many as a later decision matched in part.
    """

    sessions: set[str] = attrs.field(factory=set)
    blocks: dict[str, int] = attrs.field(factory=dict)

    def see(self, event: ev.Event) -> None:
        """Apply a row after the cut."""
        self.blocks.update(dict.fromkeys(keys_in(event), WHOLE))
        if isinstance(event, ev.RequestReceived) and agent_of(event.session) is not None:
            self.sessions.add(event.session)  # it goes on, and names what its last prompt had
        if isinstance(event, ev.PathSelected) and event.nearest is not None:
            self.sessions.add(event.nearest)
        if isinstance(event, ev.PathSelected | ev.PrewarmStarted) and event.partial_key is not None:
            most = max(event.tokens_from_partial, self.blocks.get(event.partial_key, 0))
            self.blocks[event.partial_key] = most


NAMING = frozenset(
    kind.kind for kind in (ev.RequestReceived, ev.PathSelected, ev.PrewarmStarted, ev.BlockSealed)
)
"""The kinds of rows that ``NeededIds`` needs to see."""


def keys_in(event: ev.Event) -> Sequence[str]:
    """
    The blocks of a conversation that an event names: those of prompts, and those of answers and
    prewarms, whose keys no prompt may ever have had. What a conversation shares is one of these.
    """
    match event:
        case ev.RequestReceived() | ev.PrewarmStarted():
            return event.new_keys
        case ev.BlockSealed():
            return (event.key,)
        case _:
            return ()
