"""
Prepares a prune: where to cut, the base for the cut, and the proof that nothing else changes.

``retention`` says where a journal may be cut. What would be left is read before anything is
changed, and must give the same state as the whole journal. Only ``PreparedPrune.commit`` changes
the store: the cut and the event that records it are one transaction.

The journal is read up to three times. A server may append meanwhile, so each pass ends where the
first one did.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, takewhile

import attrs

from cairn.journal import events as ev
from cairn.journal.agents import Agents
from cairn.journal.errors import StoreError
from cairn.journal.ledger import Clock, Ledger
from cairn.journal.replay import Replay, Report, replay
from cairn.journal.retention import NAMING, NeededIds, Plan, Span, Survey, keys_in
from cairn.journal.rows.base import (
    Base,
    base_of,
    forgotten,
    forgotten_ids,
    histories_of,
    loaded_of,
    pruned_at,
    with_ids,
)
from cairn.journal.rows.codec import Row, decode
from cairn.journal.rows.histories import Histories, histories_at
from cairn.journal.rows.store import Store
from cairn.journal.runs import Runs, lost_run
from cairn.journal.state import Block, State
from cairn.journal.tenants import agent_of

Watched = Callable[[Iterable[Row], str, int], Iterator[Row]]
"""Passes rows on, for a progress bar. Arguments: the rows, the name of the pass, how many rows."""


def _unwatched(rows: Iterable[Row], _: str, __: int) -> Iterator[Row]:
    return iter(rows)


@attrs.frozen(kw_only=True)
class PruneOptions:
    """
    What to prune.

    Attributes:
        before_us: remove rows that are older, in microseconds since 1970.
        close_idle: first close idle sessions that were last used before then.
        close_quarantined: first close quarantined sessions that were last used before then.
    """

    before_us: int
    close_idle: bool = False
    close_quarantined: bool = False


@attrs.frozen(kw_only=True)
class CutState:
    """
    What a base is made of.

    Attributes:
        state: the fold up to the cut, with all texts.
        head: the hash of the last row that is removed.
        loaded: the last model that these rows load.
        needed: the token ids that rows after the cut need.
        histories: of the agents that exist at the end of the rows.
        pruned: the event of the prune, as if no row came after those that were read.
    """

    state: State
    head: str
    loaded: ev.ModelLoaded | None
    needed: NeededIds
    histories: Histories
    pruned: ev.JournalPruned

    def later(
        self, events: Iterable[ev.Event], agents: tuple[set[int], set[str]]
    ) -> tuple[Base, CutState]:
        """
        The base for the same cut after more rows, and what it is made of.

        Args:
            agents: what the agents need that exist now.
        """
        needed = NeededIds(sessions=set(self.needed.sessions), blocks=dict(self.needed.blocks))
        for event in events:
            needed.see(event)
        histories = self.histories.limited_to(agents)
        base = base_of(forgotten(self.state, needed), self.head, self.loaded, histories)
        pruned = attrs.evolve(self.pruned, base_digest=base.digest)
        return base, attrs.evolve(self, needed=needed, histories=histories, pruned=pruned)


@attrs.frozen(kw_only=True)
class PreparedPrune:
    """
    A prune that was checked and not done yet.

    Attributes:
        state: the fold of the whole journal, without the new rows.
        plan: where to cut, and what keeps the cut from going further.
        closed: the sessions that are closed first.
        base: None if no row can be removed.
        cut: what the base is made of; None if there is none.
        rows: to be appended: sessions closed, and the event of the prune.
        removed: how many rows are removed.
        left: how many rows stay, not counting the new ones.
        runs: the server's runs in all rows, removed or not.
        shared: where its files are, see ``Runs``.
    """

    state: State
    plan: Plan
    closed: tuple[Span, ...]
    base: Base | None
    cut: CutState | None
    rows: tuple[Row, ...]
    removed: int
    left: int
    runs: frozenset[str]
    shared: bool | None

    def commit(self, store: Store) -> None:
        """
        Do it. The store still has to remove the rows that the base replaces.

        Raises:
            HeadMoved: the journal was changed since the prune was prepared; nothing is removed.
            StoreError: the store could not write.
        """
        if self.base is not None:
            store.cut(self.base, self.rows)
        else:
            store.append(self.rows)


def prepare_prune(
    store: Store, options: PruneOptions, clock: Clock, *, watched: Watched = _unwatched
) -> PreparedPrune:
    """
    Prepare a prune. Changes nothing.

    Raises:
        StoreError: the journal failed verification, it was pruned while it was read, or a session
            cannot be closed.
    """
    old = store.base()
    begins = old.position if old is not None else 0
    fold, seen = Replay(old), Runs()
    if fold.state.boot is not None:
        seen.boots.add(fold.state.boot)
    survey = Survey(options.before_us, fold.state, histories_of(old).fold())
    passes = _Passes(store, old, store.head()[0], watched)
    for row in passes.rows("read", begins):
        recorded = fold.feed(row)
        if recorded is not None:
            survey.feed(recorded, fold.state)
            seen.see(recorded)
    report = fold.report()
    broken = [found for found in report.findings if not found.recorded]
    if broken:
        raise StoreError(
            f"The journal failed verification: {broken[0].invariant} at row {broken[0].position} "
            f"({broken[0].message}). Nothing was pruned. Run `ops verify` to see what is broken."
        )
    ledger = Ledger(clock, state=report.state, head=report.head)
    rows, closed = _close_sessions(ledger, survey, options, clock)
    plan = survey.plan(closed)
    base, cut = None, None
    if plan.cut > begins:
        base, cut = _base_at(passes, plan, options, report.state, survey.agents)
        rows += ledger.propose([cut.pruned]).rows
        left = passes.rows("check", base.position)
        _prove(left, base, cut.needed, rows, ledger, survey.agents)
    end = base.position if base is not None else begins
    return PreparedPrune(
        state=report.state,
        plan=plan,
        closed=closed,
        base=base,
        cut=cut,
        rows=rows,
        removed=end - begins,
        left=report.state.position - end,
        runs=frozenset(seen.boots),
        shared=seen.shared,
    )


@attrs.frozen
class _Passes:
    """
    Passes over the same rows of a journal.

    Attributes:
        base: the base when the first pass began.
        end: the last row then.
    """

    store: Store
    base: Base | None
    end: int
    watched: Watched

    def rows(self, name: str, after: int) -> Iterator[Row]:
        """
        The rows in ``(after, end]``.

        Raises:
            StoreError: the journal was pruned since the first pass began.
        """
        rows = takewhile(lambda row: row.position <= self.end, self.store.read(after))
        yield from self.watched(rows, name, self.end - after)
        if self.store.base() != self.base:
            raise StoreError("The journal was pruned while it was read. Run this again.")


def _close_sessions(
    ledger: Ledger, survey: Survey, options: PruneOptions, clock: Clock
) -> tuple[tuple[Row, ...], tuple[Span, ...]]:
    """
    Close the sessions that the options name: (rows to append, the sessions). Changes ledger and
    survey.

    Raises:
        StoreError: a session cannot be closed.
    """
    rows: list[Row] = []
    lost = lost_run(ledger.state)
    trial = Ledger(clock, state=ledger.state, head=ledger.head)
    trial.propose(lost)
    spans = survey.closable(
        trial.state, idle=options.close_idle, quarantined=options.close_quarantined
    )
    if spans and lost:
        outcome = ledger.propose(lost)
        rows.extend(outcome.rows)
        for recorded in outcome.recorded:
            # A request that was open then ends here, and its session cannot be cut before.
            survey.feed(recorded, ledger.state)
    for span in spans:
        outcome = ledger.propose([ev.SessionClosed(session=span.session, reason="retention")])
        if outcome.bug is not None:
            raise StoreError(
                f"Session {span.session} cannot be closed: {outcome.bug.message}. Nothing was "
                "pruned. Leave out --close-idle and --close-quarantined."
            )
        rows.extend(outcome.rows)
    return tuple(rows), spans


def _base_at(
    passes: _Passes, plan: Plan, options: PruneOptions, ends: State, agents: Agents
) -> tuple[Base, CutState]:
    """
    The base for a cut, and what it is made of.

    Args:
        ends: the fold up to the last row.
        agents: their fold up to there.
    """
    old, cut = passes.base, plan.cut
    fold, wanted, histories = Replay(old), agents.needed(), histories_of(old)
    then, texts = histories.fold(), dict(histories.by_position())
    times: list[int] = []
    loaded = loaded_of(old) if old is not None else None
    # The sessions of agents go on.
    kept = NeededIds(sessions={name for name in ends.sessions if agent_of(name) is not None})
    state, head = fold.state, ""
    for row in passes.rows("fold", fold.state.position):
        if row.position <= cut:
            recorded = fold.feed(row)
            times = [*times[:1], row.time_us]
            state, head = fold.state, row.hash
            assert recorded is not None  # all rows were read before, and none was damaged
            if isinstance(recorded.event, ev.ModelLoaded):
                loaded = recorded.event
            then.see(recorded)
            if _is_of_agents(recorded.event, wanted):
                texts[row.position] = row
        elif row.kind in NAMING:
            kept.see(decode(row).event)
    histories = histories_at(then, wanted, texts)
    base = base_of(forgotten(state, kept), head, loaded, histories)
    pruned = ev.JournalPruned(
        cut=base.position,
        head=base.head,
        rows=base.position - (old.position if old is not None else 0),
        sessions=plan.sessions,
        first_us=times[0],
        last_us=times[-1],
        before_us=options.before_us,
        base_digest=base.digest,
    )
    made_of = CutState(
        state=state, head=head, loaded=loaded, needed=kept, histories=histories, pruned=pruned
    )
    return base, made_of


def _is_of_agents(event: ev.Event, wanted: tuple[set[int], set[str]]) -> bool:
    """Whether a row may have a text of an agent."""
    match event:
        case ev.AgentCreated() | ev.SessionAdopted() | ev.SessionReleased():
            return True
        case (
            ev.TurnStored(request=request)
            | ev.RequestFinished(request=request)
            | ev.TurnAdopted(request=request)
        ):
            return request in wanted[1]
        case _:
            return False


def _prove(
    left: Iterable[Row],
    base: Base,
    kept: NeededIds,
    rows: Sequence[Row],
    ledger: Ledger,
    agents: Agents,
) -> None:
    """
    Read what would be left, and compare.

    Args:
        left: the rows after the cut.
        kept: the token ids that the base may have.
        rows: what would be appended.
        agents: their fold up to the end of the rows.

    Raises:
        StoreError: it is not the same, which is a bug in Cairn.
    """
    fold, agents_left = Replay(base), histories_of(base).fold()
    begins = fold.state
    for row in chain(left, rows):
        recorded = fold.feed(row)
        assert recorded is not None
        agents_left.see(recorded)
    for row in rows:
        agents.see(decode(row))
    report = fold.report()
    due = pruned_at(ledger.state, base.position, kept)
    broken = [found for found in report.findings if not found.recorded]
    what = broken[0].message if broken else None
    if what is None and (report.state != due or report.head != ledger.head):
        what = "another state"
    if what is None and not _are_same(agents_left, agents):
        what = "other agents"
    private = not with_ids(begins) <= kept.sessions
    private = private or begins.blocks != forgotten_ids(begins.blocks, kept.blocks)
    if what is None and (begins.requests or private):
        what = "texts would be left in the base"
    if what is not None:
        raise StoreError(
            f"The rows after row {base.position} would not read as the whole journal does "
            f"({what}). This is a bug in Cairn; nothing was pruned. Please report it."
        )


def _are_same(found: Agents, due: Agents) -> bool:
    """Whether both folds have the same agents with the same histories."""
    _, turns = due.needed()
    return found.of(None, released=True) == due.of(None, released=True) and all(
        found.turns.held(request) == due.turns.held(request) for request in turns
    )


def orphaned_blocks(rows: Iterable[Row], base: Base) -> tuple[Report, dict[str, Block]]:
    """
    The blocks that only pruned conversations had, by their keys, and the replay of what is left.

    A block may belong to many conversations; it is an orphan when no row that is left names it. All
    rows of an open session are left, so they name all that it has.

    Args:
        rows: what is left.
    """
    named = set[str]()
    report = replay(
        rows, base=base, watch=lambda recorded, _: named.update(keys_in(recorded.event))
    )
    return report, {key: block for key, block in report.state.blocks.items() if key not in named}


def files_removed(
    report: Report, blocks: Mapping[str, Block], keys: Iterable[str], clock: Clock
) -> tuple[Row, ...]:
    """
    The rows to append after the files of blocks were removed.

    Args:
        report: the replay up to the head.
        keys: the blocks among ``blocks`` whose files, which are on record, were removed.
    """
    ledger = Ledger(clock, state=report.state, head=report.head)
    pool = report.state.pool
    count, size = pool.disk_blocks, pool.disk_bytes
    removed = []
    for key in sorted(keys):
        taken = blocks[key].file_bytes
        assert taken is not None
        count, size = count - 1, size - taken
        removed.append(
            ev.BlockFileRemoved(
                key=key, bytes=taken, disk_blocks=count, disk_bytes=size, reason="space"
            )
        )
    outcome = ledger.propose(removed)
    assert outcome.bug is None, outcome.bug
    return outcome.rows
