"""
Prepares forgetting a session: which rows are sealed with its keys, which blocks are its own, and
which other sessions have the same text.

Nothing is changed here. `ops forget`, or the server (``actors/sessions/forgetting.py``), closes it,
removes the files of its own blocks, appends ``session_forgotten``, and removes the keys last: until
then nothing is forgotten, and after a crash the same steps can be done again.

``find`` also verifies the journal, for a command. A server, which has the fold, reads ``Traces``
alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from itertools import chain

import attrs
import msgspec

from cairn.journal import events as ev
from cairn.journal.agents import Agent, Agents
from cairn.journal.errors import StoreError
from cairn.journal.replay import Replay, Report
from cairn.journal.retention import NAMING, keys_in
from cairn.journal.rows.base import Base, histories_of
from cairn.journal.rows.codec import Row, decode
from cairn.journal.rows.sealing import key_id, subject_of
from cairn.journal.runs import Runs
from cairn.journal.state import Block, Session, State, is_known
from cairn.journal.tenants import agent_session, session_tenant

OF_THE_SERVER = frozenset({ev.SessionForgotten.kind, ev.SessionReleased.kind})
"""The kinds of rows without texts on the server's stream that say something of a session."""

OF_OTHERS = NAMING | {ev.SessionForgotten.kind, ev.TurnStored.kind, ev.TurnAdopted.kind}
"""The kinds of rows by which it is known which other sessions have the same text."""


@attrs.frozen(kw_only=True)
class Found:
    """
    What a journal says of a session that is to be forgotten.

    Attributes:
        traces: what the rows have of it, from which most of the others follow.
        report: the replay of the whole journal.
        agent: the agent whose session it is, if that exists.
        needed_by: other agents whose histories begin with turns of it.
        rows: how many rows are sealed with its keys.
        plain: the private rows of it that are not sealed.
        key_ids: the ids of the keys that these rows name.
        forgotten: the ids of keys that are to be removed, by a row of an earlier try.
        blocks: the keys of its blocks that the journal has.
        removed: those of them that no other session names.
        same_text: the other sessions that name one of them, that a decision compared with it, or
            that have a copy of a turn of it.
        runs: the server's runs in the rows.
        shared: where its files are, see ``Runs``.
    """

    session: str
    traces: Traces
    report: Report
    agent: Agent | None
    needed_by: tuple[Agent, ...]
    rows: int
    plain: int
    key_ids: tuple[str, ...]
    forgotten: frozenset[str]
    blocks: tuple[str, ...]
    removed: tuple[str, ...]
    same_text: tuple[str, ...]
    runs: frozenset[str]
    shared: bool | None

    @property
    def own_blocks(self) -> dict[str, Block]:
        """The blocks that are removed."""
        return {key: self.report.state.blocks[key] for key in self.removed}

    def event(self, stored: Iterable[str]) -> ev.SessionForgotten:
        """
        The event with which it is forgotten.

        Args:
            stored: the ids of its keys that are stored, whether a row names them or not.
        """
        return self.traces.event(self.report.state, stored)


def find(
    session: str,
    first: Iterable[Row],
    second: Iterable[Row],
    base: Base | None,
    opened: Callable[[Row], Row] = lambda row: row,
) -> Found:
    """
    Read a journal twice, and find what belongs to a session.

    Args:
        first, second: all rows of the journal, once for each pass.
        opened: opens a row of the base, as ``Store.opened`` does.

    Raises:
        StoreError: the journal failed verification.
    """
    fold, runs, kept = Replay(base), Runs(), histories_of(base)
    agents = kept.fold()
    begins = fold.state
    runs.boots.update([begins.boot] if begins.boot is not None else [])
    traces = Traces(session)
    traces.see_base(begins)
    rows_in_base = tuple(map(opened, kept.rows))
    in_base = ((row, decode(row)) for row in rows_in_base)
    for row, recorded in chain(in_base, ((row, fold.feed(row)) for row in first)):
        if recorded is None:
            continue
        if recorded.position > begins.position:
            runs.see(recorded)
            agents.see(recorded)
        traces.see_own(row, recorded)
    report = fold.report()
    broken = [found for found in report.findings if not found.recorded]
    if broken:
        raise StoreError(
            f"The journal failed verification: {broken[0].invariant} at {broken[0].where} "
            f"({broken[0].message}). Nothing was forgotten. Run `ops verify` to see what is broken."
        )
    traces.see_state(begins)  # again, because others are compared with all blocks of the session
    for row in chain(rows_in_base, second):
        if row.kind in OF_OTHERS:
            traces.see_other(decode(row).event)
    traces.see_state(report.state)
    return Found(
        session=session,
        traces=traces,
        report=report,
        agent=agent_with(agents, session),
        needed_by=needing(agents, session),
        rows=traces.rows,
        plain=traces.plain,
        key_ids=tuple(sorted(traces.key_ids)),
        forgotten=frozenset(traces.forgotten),
        blocks=traces.blocks(report.state),
        removed=traces.removed(report.state),
        same_text=traces.same_text,
        runs=frozenset(runs.boots),
        shared=runs.shared,
    )


def agent_with(agents: Agents, session: str) -> Agent | None:
    """The agent whose session it is, if its history is here; it may have been released."""
    every = agents.of(None, released=True)
    return next((one for one in every if one.session == session), None)


def lost_with(agent: Agent) -> str:
    """What forgetting an agent may do besides, as the end of a sentence."""
    return f", which is lost if {agent.released_to!r} is not adopted yet" if agent.released else ""


def needing(agents: Agents, session: str) -> tuple[Agent, ...]:
    """The agents whose histories begin with turns of a session that is not their own."""
    return tuple(
        one
        for one in agents.of(None, released=True)
        if one.session != session and any(at.session == session for at in agents.history(one))
    )


class Traces:
    """
    What a journal has of a session, and which others have the same text. ``see_own`` gets the rows
    first, so that ``see_other`` can compare the others with all blocks of the session.

    A row may be seen twice.

    Attributes:
        key_ids: the ids of the keys that its rows name.
        forgotten: the ids of keys that are to be removed, by rows of earlier tries.
    """

    def __init__(self, session: str) -> None:
        self._sealed: set[int] = set()
        self._plain: set[int] = set()
        self.key_ids: set[str] = set()
        self.forgotten: set[str] = set()
        self._session = session
        self._own: set[str] = set()
        self._in_base = False
        self._base_blocks: set[str] = set()
        self._others: dict[str, set[str]] = {}
        self._copies: set[str] = set()
        self._turns: dict[bytes, bool] = {}  # digest of the texts to whether it was adopted

    def see_state(self, state: State) -> None:
        """Take in a fold, by which blocks are known whose rows were pruned."""
        for name, held in state.sessions.items():
            if name == self._session:
                self._own.update(_held(held))
        for name, held in state.sessions.items():
            self._see(name, _held(held))

    def see_base(self, state: State) -> None:
        """Take in the fold of the base that takes the place of pruned rows."""
        self._in_base = self._session in state.sessions
        self._base_blocks = set(state.blocks)
        self.see_state(state)

    def see_own(self, row: Row, recorded: ev.Recorded) -> None:
        """Take in a row, as far as it is of the session itself."""
        event = recorded.event
        if getattr(event, "session", None) == self._session:
            self._own.update(keys_in(event))
            if isinstance(event, ev.PathSelected) and event.nearest is not None:
                self._others.setdefault(event.nearest, set())
        if row.private is not None and subject_of(event) == self._session:
            named = key_id(row.private)
            (self._plain if named is None else self._sealed).add(recorded.position)
            self.key_ids.update([named] if named is not None else [])
        if isinstance(event, ev.SessionForgotten) and event.of_session == self._session:
            self.forgotten.update(event.key_ids)
        if (turn := _turn_of(event)) is not None and turn[0] == self._session:
            self._turns[turn[1]] = isinstance(event, ev.TurnAdopted)
        match event:
            case ev.SessionReleased(to=copy) | ev.SessionAdopted(of_agent=copy) if (
                agent_session(event.tenant, event.agent) == self._session
            ):
                self._copies.add(copy)
            case _:
                pass

    def see_other(self, event: ev.Event) -> None:
        """
        Take in an event, as far as it is of another session. One that was forgotten before has its
        text no more; another session may have its name since.
        """
        if isinstance(event, ev.SessionForgotten):
            self._others.pop(event.of_session, None)
        # An adopted turn is a copy. The other one may be that of a fork, or have come back, so it
        # is known by its texts alone.
        if (turn := _turn_of(event)) is not None and turn[0] != self._session:
            adopted = self._turns.get(turn[1])
            if adopted or (adopted is not None and isinstance(event, ev.TurnAdopted)):
                self._others.setdefault(turn[0], set())
        serving: str | None = getattr(event, "session", None)
        if serving is None or serving == self._session:
            return
        self._see(serving, keys_in(event))
        # It begins with the same words, or quotes some of them, also where these fill no block.
        if isinstance(event, ev.PathSelected) and event.nearest == self._session:
            self._others.setdefault(serving, set())

    @property
    def rows(self) -> int:
        """How many rows are sealed with its keys."""
        return len(self._sealed)

    @property
    def plain(self) -> int:
        """How many private rows of it are not sealed."""
        return len(self._plain)

    def blocks(self, state: State) -> tuple[str, ...]:
        """The keys of its blocks that the journal has."""
        return tuple(sorted(self._own & set(state.blocks)))

    def removed(self, state: State) -> tuple[str, ...]:
        """Those of them that no other session names."""
        return tuple(key for key in self.blocks(state) if not self.is_shared(key))

    def is_shared(self, key: str) -> bool:
        """Whether another session names a block of it."""
        return any(key in keys for keys in self._others.values())

    @property
    def same_text(self) -> tuple[str, ...]:
        """
        The other sessions that name one of them, that a decision compared with it, or that have a
        copy of a turn: they begin with the same words, or quote some.
        """
        return tuple(sorted(self._others.keys() - {self._session}))

    def still_readable(
        self, state: State, left_in: str, elsewhere: Iterable[str] = ()
    ) -> tuple[str, ...]:
        """
        Where texts or token ids of the session can be read after it is forgotten, a phrase each.

        Args:
            state: the fold at this moment.
            left_in: where a removed key can still be.
            elsewhere: where other nodes have blocks of it, a phrase each.
        """
        found = ["where its keys were handed over (`ops export --with-keys`, `ops bundle`)"]
        found.append(left_in)
        if self._in_base or self._base_blocks & self._own:
            found.append("its token ids in the base of a prune, and in copies of that")
        if self.same_text:
            found.append("the same beginning, or words that they quote, in the sessions named")
        found += [f"as agent {copy} on another node" for copy in sorted(self._copies)]
        if any(self._session != one.event.session for one in state.faults.values()):
            found.append("what bugs of the server or of other sessions quote of it")
        return (*found, *elsewhere)

    def event(self, state: State, stored: Iterable[str]) -> ev.SessionForgotten:
        """
        The event with which it is forgotten.

        Args:
            state: the fold at this moment.
            stored: the ids of its keys that are stored, whether a row names them or not.
        """
        return ev.SessionForgotten(
            of_session=self._session,
            tenant=session_tenant(self._session),
            rows=self.rows,
            key_ids=tuple(sorted({*self.key_ids, *stored})),
            blocks=self.blocks(state),
            removed=self.removed(state),
            # Of one that was pruned nothing is left.
            same_text=tuple(one for one in self.same_text if is_known(state, one)),
        )

    def _see(self, name: str, keys: Iterable[str]) -> None:
        if name != self._session and (same := self._own.intersection(keys)):
            self._others.setdefault(name, set()).update(same)


def _turn_of(event: ev.Event) -> tuple[str, bytes] | None:
    """Whose turn a row stores, and a digest of its texts; None if it has none that can be read."""
    match event:
        case ev.TurnStored(session=session):
            pass
        case ev.TurnAdopted():
            session = agent_session(event.tenant, event.agent)
        case _:
            return None
    texts = msgspec.json.encode((event.question, event.answer))
    return (session, hashlib.sha256(texts).digest()) if event.question else None


def _held(session: Session) -> tuple[str, ...]:
    """The blocks that a session names in the fold, by which its pruned rows are known."""
    return (*session.slab_keys, *session.work_keys)
