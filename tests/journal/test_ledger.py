"""The ledger numbers, checks, chains and folds; a refused event does not change the state."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import pytest
from hypothesis import given

from cairn.journal import events as ev
from cairn.journal.errors import BugError
from cairn.journal.ledger import Clock, Ledger, Outcome, broken_keys
from cairn.journal.rows.codec import GENESIS, chain_fault
from cairn.journal.state import EMPTY
from tests.journal.model import FP_A, TAPES, Driver, Talk, Violated, plain, played, profile

NOTE = ev.OperatorActed(action="note", detail="-")
OPEN = ev.SessionOpened(session="s1", tenant="t1", fingerprint=FP_A, group=None, named=False)
SETTLED = ev.SessionSettled(session="s1", canonical_tokens=0, complete=True)


@pytest.fixture
def ledger() -> Ledger:
    """A ledger with predictable ids and times."""
    count = iter(range(1, 10_000))
    return Ledger(
        Clock(new_id=lambda: f"id-{next(count)}", now_us=lambda: next(count), version="0.1")
    )


def kinds(outcome: Outcome) -> list[str]:
    """The kinds of an outcome's events, in order."""
    return [recorded.event.kind for recorded in outcome.recorded]


def test_events_are_numbered_and_chained(ledger: Ledger):
    """Positions go up by one over all streams, sequence numbers within each; rows are chained."""
    outcome = ledger.propose([NOTE, OPEN, NOTE, ev.SessionClosed(session="s1", reason="-")])

    assert [1, 2, 3, 4] == [row.position for row in outcome.rows]
    assert ["server", "session/s1", "server", "session/s1"] == [r.stream for r in outcome.rows]
    assert [1, 1, 2, 2] == [row.seq for row in outcome.rows]
    assert [GENESIS, *(row.hash for row in outcome.rows)] == [
        *(row.previous_hash for row in outcome.rows),
        ledger.head,
    ]
    assert None is outcome.bug
    assert 4 == len({row.event_id for row in outcome.rows})


def test_nothing_proposed_is_nothing_changed(ledger: Ledger):
    """An empty proposal gives no rows."""
    assert Outcome(rows=(), recorded=(), bug=None) == ledger.propose([])
    assert (EMPTY, GENESIS) == (ledger.state, ledger.head)


def test_what_comes_after_a_violation_is_dropped(ledger: Ledger):
    """
    Events before the violating one are recorded, it has no effect, and those after it are not
    recorded.
    """
    ledger.propose([OPEN])
    outcome = ledger.propose([NOTE, SETTLED, NOTE, ev.SessionClosed(session="s1", reason="-")])

    expected = ["operator_acted", "session_settled", "invariant_violated", "session_quarantined"]
    assert expected == kinds(outcome)
    assert 5 == ledger.state.position
    assert isinstance(outcome.bug, BugError)
    assert "INV-6" == outcome.bug.invariant
    fault = ledger.state.faults[outcome.bug.bug_id]
    assert (3, 4) == (fault.event.at_position, fault.position)
    assert outcome.bug.bug_id == ledger.state.session("s1").bug_id
    for one, other in zip((None, *outcome.rows), outcome.rows, strict=False):
        assert None is chain_fault(other, one.hash if one else other.previous_hash)


def test_a_place_that_is_taken(ledger: Ledger):
    """A late writer's event is not even recorded, only the violation is."""
    ledger.propose([OPEN])
    before = ledger.state
    outcome = ledger.propose([SETTLED], expected_seq=1)

    assert ["invariant_violated", "session_quarantined"] == kinds(outcome)
    violated = outcome.recorded[0].event
    assert isinstance(violated, ev.InvariantViolated)
    assert ("INV-6", "2", "1") == (violated.invariant, violated.expected, violated.actual)
    assert before.position == violated.at_position
    assert "quarantined" == ledger.state.session("s1").state


def test_a_place_beyond_the_next(ledger: Ledger):
    """A gap in a stream is recorded as one; the stream continues after it."""
    ledger.propose([OPEN])
    outcome = ledger.propose([ev.SessionClosed(session="s1", reason="-")], expected_seq=5)

    assert [5, 6, 7] == [recorded.seq for recorded in outcome.recorded]
    assert "INV-6" == outcome.bug.invariant  # type: ignore[union-attr]
    assert 7 == ledger.state.streams["session/s1"]
    assert "quarantined" == ledger.state.session("s1").state


def test_the_due_place_is_accepted(ledger: Ledger):
    """Events at the places that their owner expects are accepted, several in a row."""
    ledger.propose([OPEN], expected_seq=1)
    outcome = ledger.propose([ev.SessionClosed(session="s1", reason="-"), OPEN], expected_seq=2)

    assert [2, 3] == [recorded.seq for recorded in outcome.recorded]
    assert None is outcome.bug


@pytest.mark.parametrize(
    "unstorable",
    [
        ev.OperatorActed(action="note", detail="half a character: \ud800"),
        ev.SelfTestFinished(
            fingerprint="f",
            base_fingerprint="f",
            findings={},
            passed=True,
            error_max=float("nan"),
            decode_shapes=(4,),
            row_class=(),
            row_class_reason="",
            without_drafts="",
            duration_us=1,
            from_cache=False,
        ),
        ev.ServerStarted(boot="b", cairn_version="0", settings={"wait_s": float("inf")}),
    ],
    ids=["text", "number", "number in a mapping"],
)
def test_what_cannot_be_stored_leaves_the_ledger_as_it_was(ledger: Ledger, unstorable: ev.Event):
    """
    An event that JSON cannot represent raises, and nothing of the proposal is in the ledger: its
    state is never ahead of the rows that it returned.
    """
    ledger.propose([NOTE])
    state, head = ledger.state, ledger.head
    with pytest.raises(ValueError):
        ledger.propose([OPEN, unstorable])

    assert (state, head) == (ledger.state, ledger.head)
    assert None is ledger.propose([OPEN]).bug


def test_a_crash_takes_its_session_out_of_service():
    """A crash is recorded with its request. The session is quarantined, another one continues."""
    driver = Driver(pool_slabs=3)
    driver.start()
    hello, bye = ("user", (10,)), ("user", (11,))
    driver.ask(Talk(tenant="t1", group=None, name=None, parts=(hello,)))
    driver.ask(Talk(tenant="t1", group=None, name=None, parts=(bye,)))
    driver.crash("s1")

    fault = driver.state.faults[driver.bugs[0]].event
    assert ("CRASH", "s1", "r1") == (fault.invariant, fault.session, fault.request)
    assert ("quarantined", driver.bugs[0]) == (
        driver.state.session("s1").state,
        driver.state.session("s1").bug_id,
    )
    assert {"r2": "s2"} == dict(driver.state.requests)
    driver.finish("s2")
    driver.crash("s1")
    assert 2 == len(driver.state.faults)
    assert driver.bugs[0] == driver.state.session("s1").bug_id


def test_a_crash_of_a_session_that_is_not_open(ledger: Ledger):
    """The crash is recorded, and affects no session."""
    outcome = ledger.record_crash(session="missing", message="it fell", trace="here")

    assert ["invariant_violated"] == kinds(outcome)
    assert None is outcome.recorded[0].event.session  # type: ignore[attr-defined]


@pytest.mark.parametrize("steps", range(1, 14))
def test_a_crash_at_any_step_ends_that_session(steps: int):
    """Whatever the state of a session that crashes, the table has a step to quarantine."""
    driver = Driver()
    driver.start()
    talk = Talk(tenant="t1", group=None, name=None, parts=(("user", tuple(range(10, 19))),))
    driver.ask(talk)
    for _ in range(steps):
        if "s1" in driver.work:
            driver.step("s1")
    driver.crash("s1")

    assert "quarantined" == driver.state.session("s1").state
    assert {} == dict(driver.state.requests)
    assert not driver.state.pins
    if "s1" in driver.slabs:
        driver.release("s1")
    driver.propose(ev.SessionClosed(session="s1", reason="forgotten"))
    assert {} == dict(driver.state.sessions)


def test_memory_that_does_not_add_up_closes_admission_even_without_a_session():
    """
    An eviction belongs to no session; its violation of INV-5 closes admission all the same, until
    the next start.
    """
    driver = Driver()
    driver.start()
    talk = Talk(tenant="t1", group=None, name=None, parts=(("user", (1, 2, 3, 4, 5)),))
    driver.serve(talk)
    pool, key = driver.state.pool, driver.evictable()[0]
    wrong = ev.BlockEvicted(
        key=key,
        bytes=10,
        memory_blocks=pool.blocks,
        memory_bytes=pool.block_bytes,
        reason="space",
    )
    outcome = driver.ledger.propose([wrong])

    assert outcome.bug is not None
    assert outcome.bug.bug_id == driver.state.admission_bug
    assert driver.state.blocks[key].present
    driver.take(driver.ledger.propose([ev.ServerStopped(boot="boot-1", reason="-")]))
    driver.start()
    assert None is driver.state.admission_bug


def test_what_is_broken_by_a_block():
    """Only a known block with a different digest quarantines the blocks that are built on it."""
    driver = Driver(blocks_kept=40)
    driver.start()
    talk = Talk(tenant="t1", group=None, name=None, parts=(("user", tuple(range(10, 24))),))
    driver.serve(talk)
    keys = driver.state.session("s1").slab_keys

    def shared(*digests: str) -> ev.BlocksRestored:
        return ev.BlocksRestored(
            session="s1",
            request="r",
            start=0,
            end=8,
            keys=keys[: len(digests)],
            digests=digests,
            coverage=(),
            duration_us=0,
        )

    good = driver.state.blocks[keys[0]].digest
    cases: list[tuple[Callable[[], ev.Event | None], tuple[str, ...]]] = [
        (lambda: shared(good, "wrong"), keys[1:]),
        (lambda: shared("wrong"), keys),
        (lambda: shared(good), ()),
        (lambda: NOTE, ()),
        (lambda: None, ()),
    ]
    for event, expected in cases:
        assert tuple(sorted(expected)) == broken_keys(driver.state, event())


def test_a_check_that_finds_another_block():
    """The block explains the answer: it is quarantined, with all after it; the session is not."""
    driver = Driver(blocks_kept=40)
    driver.start()
    driver.serve(Talk(tenant="t1", group=None, name=None, parts=(("user", tuple(range(14))),)))
    while driver.check is None:
        driver.begin_check("s1")
    keys = driver.state.session("s1").slab_keys

    def wrong(event: ev.Event) -> ev.Event:
        if not isinstance(event, ev.ShadowChecked):
            return event
        return attrs.evolve(event, digests=(event.digests[0], "wrong", *event.digests[2:]))

    driver.damage = wrong
    with pytest.raises(Violated):
        driver.end_check("differs")
    in_doubt = {key for key, block in driver.state.blocks.items() if block.bug_id is not None}
    assert set(keys[1:]) <= in_doubt
    assert keys[0] not in in_doubt
    assert "idle" == driver.state.session("s1").state


@profile(25)
@given(TAPES)
def test_a_ledger_goes_on_from_state_and_head(data: bytes):
    """A ledger that is given the state and head of another accepts what that one would accept."""
    driver = played(data)
    other = Ledger(
        Clock(new_id=lambda: "same", now_us=lambda: 5, version="0"),
        state=driver.state,
        head=driver.ledger.head,
    )
    before = plain(other.state)
    outcome = other.propose([NOTE])

    assert None is outcome.bug
    assert None is chain_fault(outcome.rows[0], driver.rows[-1].hash)
    assert before == plain(driver.state)
