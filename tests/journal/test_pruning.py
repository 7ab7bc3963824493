"""A prune is prepared without a change, and what it leaves reads as the whole journal did."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import attrs
import pytest

from cairn.journal import events as ev
from cairn.journal import pruning
from cairn.journal.agents import Agents
from cairn.journal.errors import HeadMoved, StoreError
from cairn.journal.ledger import Clock, Ledger
from cairn.journal.pruning import (
    PreparedPrune,
    PruneOptions,
    files_removed,
    orphaned_blocks,
    prepare_prune,
)
from cairn.journal.replay import Report, replay
from cairn.journal.retention import NeededIds, Survey
from cairn.journal.rows.base import forgotten, histories_of, loaded_of, state_of, with_ids
from cairn.journal.rows.codec import Row, decode
from cairn.journal.rows.histories import NO_HISTORIES, Histories, histories_at
from cairn.journal.rows.store import MemoryStore
from cairn.journal.state import State
from tests.support.journals import (
    JUNE_US,
    NOTES,
    SLAB_BYTES,
    TENANT,
    Builder,
    aged,
    beside_files,
    broken,
    in_mid_request,
    speaking,
    tampered,
)

FAR = 2**60
MARCH = 1_772_323_200_000_000
FIRST_RUN = next(n for n, row in enumerate(aged(), start=1) if row.kind == "server_stopped")


def numbered() -> Clock:
    """A clock with another id for each event."""
    numbers = iter(range(10**6))
    return Clock(
        new_id=lambda: f"new-{next(numbers)}", now_us=lambda: JUNE_US * 2, version="0.0.test"
    )


def prepared(store: MemoryStore, before_us: int = MARCH, **options: bool) -> PreparedPrune:
    """A prune of the sessions of January, if nothing else is asked for."""
    return prepare_prune(store, PruneOptions(before_us=before_us, **options), numbered())


def read(store: MemoryStore) -> Report:
    """The replay of what a store has."""
    return replay(store.read(), base=store.base())


def test_a_prune_is_prepared_then_done():
    """Nothing changes before ``commit``. The rest stays, and an event records the prune."""
    store = MemoryStore(aged())
    prune = prepared(store, close_idle=True)
    assert (aged(), None) == (store.rows, store.base())
    assert ["s1", "s2"] == [span.session for span in prune.closed]
    assert (FIRST_RUN, len(aged()) - FIRST_RUN) == (prune.removed, prune.left)
    assert {"boot-1"} == prune.runs
    prune.commit(store)
    young = aged()[FIRST_RUN:]
    assert [*young, *prune.rows] == list(store.read())
    assert prune.base == store.base()
    event = decode(store.rows[-1]).event
    assert isinstance(event, ev.JournalPruned)
    assert prune.base is not None
    assert (FIRST_RUN, 2, prune.base.digest) == (event.rows, event.sessions, event.base_digest)
    assert (aged()[0].time_us, aged()[FIRST_RUN - 1].time_us) == (event.first_us, event.last_us)
    after = read(store)
    assert (["s3"], ()) == (list(after.state.sessions), after.findings)
    assert replay(aged()).state.session("s3") == after.state.session("s3")


def test_nothing_can_be_removed():
    """Open sessions stay unless they are closed first; then nothing is written either."""
    store = MemoryStore(aged())
    prune = prepared(store)
    assert (None, (), (), 0) == (prune.base, prune.rows, prune.closed, prune.removed)
    assert prune.plan.held_by is not None
    assert "s1" == prune.plan.held_by.session
    prune.commit(store)
    assert (aged(), None) == (store.rows, store.base())


def agents_of(store: MemoryStore) -> Agents:
    """The agents of what a store has."""
    agents = histories_of(store.base()).fold()
    for row in store.read():
        agents.see(decode(row))
    return agents


def test_an_agent_keeps_no_row():
    """
    Its session is open, and the old rows of it go. The base has the turns and how it was created,
    and the token ids with which its session goes on; of an agent that was deleted it has nothing.
    """
    rows = speaking().rows
    store = MemoryStore(rows)
    prune = prepared(store)
    cut = next(row.position for row in rows if row.kind == "server_stopped")
    assert (cut, 0, None) == (prune.plan.cut, prune.plan.sessions, prune.plan.held_by)
    prune.commit(store)
    base = store.base()
    assert base is not None
    kept = histories_of(base)
    assert (["notes"], {"r3", "r4"}) == ([one.name for one in kept.agents], {*kept.places})
    kinds = ["agent_created", *["turn_stored", "request_finished"] * 2]
    assert kinds == [row.kind for row in kept.rows]
    assert {row.position: row for row in rows if row in kept.rows} == kept.by_position()
    after = read(store)
    assert () == after.findings
    assert ({NOTES}, True) == (with_ids(state_of(base)), NOTES in after.state.sessions)
    whole = replay([*rows, *prune.rows])
    assert whole.head == after.head
    assert whole.state.session(NOTES) == after.state.session(NOTES)
    agents = agents_of(store)
    notes = agents.find("notes", TENANT)
    assert notes is not None
    assert (3, "r5") == (notes.turns, notes.head)
    assert 3 == len(agents.history(notes)) == len(agents.turns)


def test_a_later_prune_of_an_agent():
    """The base goes on from the one before; once the agent is deleted, it has nothing of it."""
    store = MemoryStore(speaking().rows)
    prepared(store).commit(store)
    prepared(store, FAR).commit(store)
    kept = histories_of(store.base())
    assert {"r3", "r4", "r5"} == {*kept.places}
    assert 7 == len(kept.rows)
    assert () == read(store).findings
    report = read(store)
    ledger = Ledger(numbered(), state=report.state, head=report.head)
    deleted = ev.AgentDeleted(agent="notes", tenant=TENANT)
    store.append(ledger.propose([deleted, ev.SessionClosed(session=NOTES, reason="-")]).rows)
    prepared(store, FAR).commit(store)
    assert NO_HISTORIES == histories_of(store.base())
    assert () == read(store).findings


def test_an_agent_that_is_deleted_before_the_cut():
    """A base that is made again for it has nothing of it, and of the others what it had."""
    prune = prepared(MemoryStore(speaking().rows))
    assert prune.cut is not None
    base, cut = prune.cut.later([], (set(), set()))
    assert NO_HISTORIES == histories_of(base) == cut.histories
    assert base.digest == cut.pruned.base_digest != prune.cut.pruned.base_digest
    same, _ = prune.cut.later([], agents_of(MemoryStore(speaking().rows)).needed())
    assert prune.base == same


def test_an_agent_that_is_at_work():
    """
    The rows of a request, and those up to where the session releases its slab, are not cut apart. A
    quarantined session keeps them until it is closed.
    """
    rows = speaking().rows
    received = [row.position for row in rows if row.kind == "request_received"]
    for end in (received[0] + 1, received[0] + 20):
        held = prepared(MemoryStore(rows[:end]), FAR).plan
        assert held.held_by is not None
        assert (NOTES, received[0]) == (held.held_by.session, held.held_by.first)
    made = speaking()
    made.start()
    first = len(made.rows) + 1
    made.crash(NOTES)
    store = MemoryStore(made.rows)
    held = prepared(store, FAR).plan
    assert held.held_by is not None
    assert first <= held.held_by.first <= len(made.rows)
    assert held.cut == held.held_by.first - 1
    prune = prepared(store, FAR, close_quarantined=True)
    assert (1, None) == (prune.plan.sessions, prune.plan.held_by)
    prune.commit(store)
    assert () == tuple(found for found in read(store).findings if not found.recorded)


def test_other_agents_are_refused(monkeypatch: pytest.MonkeyPatch):
    """A base that loses a turn of an agent would be our bug; nothing is changed."""

    def too_little(*given: object) -> Histories:
        found = histories_at(*given)  # type: ignore[arg-type]
        return found.limited_to(({agent.created for agent in found.agents}, {"r3"}))

    monkeypatch.setattr(pruning, "histories_at", too_little)
    store = MemoryStore(speaking().rows)
    with pytest.raises(StoreError, match=r"\(other agents\). This is a bug in Cairn"):
        prepared(store)
    assert store.base() is None


def test_a_second_prune():
    """It begins at the base of the first one, and replaces it."""
    store = MemoryStore(aged())
    prepared(store, close_idle=True).commit(store)
    first = store.base()
    assert first is not None
    prune = prepared(store, FAR, close_idle=True)
    assert prune.base is not None
    assert prune.base.position == first.position + prune.removed
    prune.commit(store)
    assert ((), {}) == (read(store).findings, dict(read(store).state.sessions.items()))
    assert 0 == prepared(store, FAR, close_idle=True).removed


def test_blocks_that_are_gone_leave_at_a_prune():
    """
    However often sessions come and go, state and base have the blocks of the last ones. One that
    comes again is a new block, and nothing is broken by that.
    """
    store = MemoryStore()
    made = Builder()
    for number in range(1, 6):
        made.start()
        made.turn(f"s{number}", f"r{number}", ["Well"], range(90, 100), (61, 62))
        made.turn(f"t{number}", f"q{number}", ["So"], range(number * 100, number * 100 + 10), (7,))
        of_round = len(made.ledger.state.blocks)
        made.stop()
        for name in (f"s{number}", f"t{number}"):
            made.propose(ev.SessionClosed(session=name, reason="-"))
        assert made.bug is None
        store.append(made.rows)
        prepared(store, FAR).commit(store)
        after, base = read(store), store.base()
        assert base is not None
        assert () == after.findings
        assert (0, 4) == (len(after.state.blocks), len(state_of(base).blocks))
        assert 4 == of_round
        made.ledger = Ledger(made.ledger.clock, state=after.state, head=after.head)
        made.rows.clear()


def test_a_cut_within_a_run():
    """The base has the run and the model that were there, and the next base has them from it."""
    made = Builder()
    made.start()
    for number, time_us in enumerate((0, JUNE_US, JUNE_US + 10**12), start=1):
        made.time_us = max(made.time_us, time_us)
        made.turn(f"s{number}", f"r{number}", ["Well"], range(90, 100), (61, 62))
        gone = ev.SlabReleased(
            session=f"s{number}", slab=1, bytes=SLAB_BYTES, pool_slabs=0, pool_bytes=0, reason="-"
        )
        made.propose(gone, ev.SessionClosed(session=f"s{number}", reason="-"))
    store = MemoryStore(made.rows)
    prepared(store).commit(store)
    first = store.base()
    prepared(store, JUNE_US + 10**11).commit(store)
    second = store.base()
    assert first is not None
    assert second is not None
    assert first.position < second.position
    loaded = decode(made.rows[1]).event
    for base in (first, second):
        assert ("boot-1", loaded) == (state_of(base).boot, loaded_of(base))
    assert {"boot-1"} == prepared(store).runs
    assert () == read(store).findings


@pytest.mark.parametrize("quarantined", [False, True])
def test_a_quarantined_session(quarantined: bool):
    """It is closed only by its own option. The record of the bug is then pruned too."""
    rows, bug_id = broken("INV-7")
    store = MemoryStore(rows)
    prune = prepared(store, close_idle=True, close_quarantined=quarantined)
    assert quarantined == (prune.base is not None)
    prune.commit(store)
    report = read(store)
    assert () == tuple(found for found in report.findings if not found.recorded)
    assert quarantined == (bug_id not in {found.bug_id for found in report.findings})


def test_a_lost_server():
    """Its loss is recorded before sessions are closed, and not recorded if none is."""
    store = MemoryStore(in_mid_request().rows)
    assert () == prepared(store, 0, close_idle=True).rows
    prune = prepared(store, close_idle=True)
    kinds = [row.kind for row in prune.rows]
    assert (["server_lost", "session_closed"], None) == (kinds, prune.base)
    prune.commit(store)
    prepared(store, FAR).commit(store)
    base = store.base()
    assert base is not None
    assert base.state is not None
    assert b"35777" not in base.state
    assert () == read(store).findings


def test_a_broken_journal():
    """What is broken must be looked at before it may be removed."""
    undecodable = aged()
    undecodable[3] = attrs.evolve(undecodable[3], public=b"no event")
    for rows in (tampered(), undecodable):
        with pytest.raises(StoreError, match=r"INV-8 at row 4 .*Nothing was pruned"):
            prepared(MemoryStore(rows), close_idle=True)


def test_a_session_that_cannot_be_closed():
    """It has a slab although no server runs: the journal lacks the start of a run."""
    made = Builder()
    made.start()
    made.stop()
    made.propose(decode(made.rows[1]).event)
    made.turn("s1", "r1", ["Hello"], range(11, 21), (21, 22))
    assert () == replay(made.rows).findings
    with pytest.raises(StoreError, match=r"^Session s1 cannot be closed: .*slab.* Nothing was"):
        prepared(MemoryStore(made.rows), FAR, close_idle=True)


def blind_to_loss(feed: Callable[..., None]) -> Callable[..., None]:
    """A survey that ignores that a server was lost."""

    def blind(self: Survey, recorded: ev.Recorded, state: State) -> None:
        if not isinstance(recorded.event, ev.ServerLost):
            feed(self, recorded, state)

    return blind


def test_a_base_with_texts_is_refused(monkeypatch: pytest.MonkeyPatch):
    """A cut in the middle of a request would be our bug. It is found before anything is changed."""
    monkeypatch.setattr(Survey, "feed", blind_to_loss(Survey.feed))
    with pytest.raises(StoreError, match="texts would be left in the base"):
        prepared(MemoryStore(in_mid_request().rows), close_idle=True)


def test_another_state_is_refused(monkeypatch: pytest.MonkeyPatch):
    """Likewise a base that gives another state, or on which another decision is made."""

    test = ev.SelfTestFinished(
        fingerprint="x",
        base_fingerprint="x",
        findings={},
        passed=True,
        error_max=0.0,
        decode_shapes=(),
        row_class=(),
        row_class_reason="",
        without_drafts="",
        duration_us=0,
        from_cache=False,
    )

    def too_much(state: State, kept: NeededIds) -> State:
        return attrs.evolve(forgotten(state, kept), self_tests=state.self_tests.set("x", test))

    for wrong, what in (
        (too_much, "another state"),
        (lambda state, _: forgotten(state, NeededIds()), "another decision"),
    ):
        monkeypatch.setattr(pruning, "forgotten", wrong)
        with pytest.raises(StoreError, match=rf"\({what}\). This is a bug in Cairn"):
            prepared(MemoryStore(aged()), close_idle=True)


class Growing(MemoryStore):
    """A store to which a server appends whenever it has been read."""

    def __init__(self, rows: list[Row], later: list[Row]) -> None:
        super().__init__(rows)
        self.later = later

    def read(self, after: int | None = None, *, stream: str | None = None) -> Iterator[Row]:
        """The rows that were there; then there is one more."""
        found = list(super().read(after, stream=stream))
        self.append(self.later[:1])
        del self.later[:1]
        yield from found


def test_a_server_appends_meanwhile():
    """Each pass ends where the first one did, and the result is that of the journal at rest."""
    store = Growing(aged()[:-3], aged()[-3:])
    prune = prepared(store, close_idle=True)
    assert [] == store.later
    still = prepared(MemoryStore(aged()[:-3]), close_idle=True)
    assert (still.base, still.rows, still.left) == (prune.base, prune.rows, prune.left)
    with pytest.raises(HeadMoved):
        prune.commit(store)
    assert aged() == store.rows


def test_a_journal_that_is_pruned_meanwhile():
    """The passes would not be over the same rows, so the caller is asked to try again."""
    store = MemoryStore(aged())

    def watched(rows: Iterable[Row], _: str, __: int) -> Iterator[Row]:
        yield from list(rows)
        prepared(store, close_idle=True).commit(store)

    with pytest.raises(StoreError, match="pruned while it was read"):
        prepare_prune(store, PruneOptions(before_us=MARCH), numbered(), watched=watched)


def test_passes_are_watched():
    """Each pass has a name and a number of rows, for a progress bar."""
    seen = []

    def watched(rows: Iterable[Row], name: str, count: int) -> Iterator[Row]:
        found = list(rows)
        seen.append((name, count, len(found)))
        return iter(found)

    options = PruneOptions(before_us=MARCH, close_idle=True)
    prepare_prune(MemoryStore(aged()), options, numbered(), watched=watched)
    rows, left = len(aged()), len(aged()) - FIRST_RUN
    assert [("read", rows, rows), ("fold", rows, rows), ("check", left, left)] == seen


def test_blocks_of_pruned_conversations():
    """Blocks that only pruned rows name are orphans, and the removal of their files is recorded."""
    made, shared, only = beside_files(300)
    made.start()
    made.turn("s3", "r3", ["Hello", "No", "Well"], (*range(11, 19), 90, 91), (61, 62))
    made.stop()
    store = MemoryStore(made.rows)
    prepared(store, close_idle=True).commit(store)
    base = store.base()
    assert base is not None
    report, orphans = orphaned_blocks(store.read(), base)
    assert (only, ()) == (set(orphans), report.findings)
    assert read(store) == report
    rows = files_removed(report, orphans, orphans, numbered())
    store.append(rows)
    after = read(store)
    assert () == after.findings
    assert len(only) == len(rows)
    pool = after.state.pool
    assert (len(shared), 300 * len(shared)) == (pool.disk_blocks, pool.disk_bytes)
