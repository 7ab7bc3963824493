"""
Prepares forgetting a session: which rows are sealed with its keys, which blocks are its own, and
which other sessions have the same text.

Nothing is changed here. `ops forget` closes it, removes the files of its own blocks, appends
``session_forgotten``, and removes the keys last: until then nothing is forgotten, and after a crash
the same steps can be done again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain

import attrs

from cairn.journal import events as ev
from cairn.journal.agents import Agent
from cairn.journal.errors import StoreError
from cairn.journal.replay import Replay, Report
from cairn.journal.retention import keys_in
from cairn.journal.rows.base import Base, histories_of
from cairn.journal.rows.codec import Row, decode
from cairn.journal.rows.sealing import key_id, subject_of
from cairn.journal.runs import Runs
from cairn.journal.state import Block, Session, State
from cairn.journal.tenants import session_tenant


@attrs.frozen(kw_only=True)
class Found:
    """
    What a journal says of a session that is to be forgotten.

    Attributes:
        report: the replay of the whole journal.
        agent: the agent whose session it is, if that exists.
        needed_by: other agents whose histories begin with turns of it.
        rows: how many rows are sealed with its keys.
        plain: the private rows of it that are not sealed.
        key_ids: the ids of the keys that these rows name.
        forgotten: the ids of keys that are to be removed, by a row of an earlier try.
        blocks: the keys of its blocks that the journal has.
        removed: those of them that no other session names.
        same_text: the other sessions that name one of them, or quote a few words of it.
        runs: the server's runs in the rows.
    """

    session: str
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
        return ev.SessionForgotten(
            of_session=self.session,
            tenant=session_tenant(self.session),
            rows=self.rows,
            key_ids=tuple(sorted({*self.key_ids, *stored})),
            blocks=self.blocks,
            removed=self.removed,
            same_text=self.same_text,
        )


def find(session: str, first: Iterable[Row], second: Iterable[Row], base: Base | None) -> Found:
    """
    Read a journal twice, and find what belongs to a session.

    Args:
        first, second: all rows of the journal, once for each pass.

    Raises:
        StoreError: the journal failed verification.
    """
    fold, runs, kept = Replay(base), Runs(), histories_of(base)
    agents = kept.fold()
    begins = fold.state
    runs.boots.update([begins.boot] if begins.boot is not None else [])
    own = _keys_of(begins, session)
    key_ids = set[str]()
    rows = plain = 0
    in_base = ((row, decode(row)) for row in kept.rows)
    for row, recorded in chain(in_base, ((row, fold.feed(row)) for row in first)):
        if recorded is None:
            continue
        if recorded.position > begins.position:
            runs.see(recorded)
            agents.see(recorded)
        if getattr(recorded.event, "session", None) == session:
            own.update(keys_in(recorded.event))
        if row.private is not None and subject_of(recorded.event) == session:
            named = key_id(row.private)
            plain += named is None
            rows += named is not None
            key_ids.update([named] if named is not None else [])
    report = fold.report()
    broken = [found for found in report.findings if not found.recorded]
    if broken:
        raise StoreError(
            f"The journal failed verification: {broken[0].invariant} at {broken[0].where} "
            f"({broken[0].message}). Nothing was forgotten. Run `ops verify` to see what is broken."
        )
    own |= _keys_of(report.state, session)
    blocks = sorted(own & set(report.state.blocks))
    sharing = dict(_others(session, second, (begins, report.state), own))
    shared = set[str]().union(*sharing.values())
    mine = next((one for one in agents.of(None) if one.session == session), None)
    return Found(
        session=session,
        report=report,
        agent=mine,
        needed_by=tuple(
            one
            for one in agents.of(None)
            if one != mine and any(place.session == session for place in agents.history(one))
        ),
        rows=rows,
        plain=plain,
        key_ids=tuple(sorted(key_ids)),
        forgotten=fold.forgotten,
        blocks=tuple(blocks),
        removed=tuple(key for key in blocks if key not in shared),
        same_text=tuple(sorted(sharing)),
        runs=frozenset(runs.boots),
    )


def _others(
    session: str, rows: Iterable[Row], states: Iterable[State], own: set[str]
) -> Iterator[tuple[str, set[str]]]:
    """
    The other sessions that name blocks of ``own``, each with those, and those whose decision quotes
    a few words of the session, which may have none.
    """
    found: dict[str, set[str]] = {}

    def see(name: str, keys: Iterable[str]) -> None:
        if name != session and (same := own.intersection(keys)):
            found.setdefault(name, set()).update(same)

    for state in states:
        for name, held in state.sessions.items():
            see(name, _held(held))
    for row in rows:
        event = decode(row).event
        serving: str | None = getattr(event, "session", None)
        if serving is not None:
            see(serving, keys_in(event))
            if serving != session and _quotes(event, session):
                found.setdefault(serving, set())
    return iter(found.items())


def _quotes(event: ev.Event, session: str) -> bool:
    """Whether a decision has a few words of a session that it was compared with."""
    match event:
        case ev.PathSelected(nearest=nearest, diverged_from=words):
            return nearest == session and words is not None
        case _:
            return False


def _keys_of(state: State, session: str) -> set[str]:
    return {key for name, held in state.sessions.items() if name == session for key in _held(held)}


def _held(session: Session) -> tuple[str, ...]:
    """The blocks that a session names in the fold, by which its pruned rows are known."""
    return (*session.slab_keys, *session.work_keys)
