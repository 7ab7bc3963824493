"""The fold gives what a slow and simple one gives, over any history that a server can make."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable

import attrs
import pytest
from hypothesis import example, given
from immutables import Map

from cairn.journal import events as ev
from cairn.journal.ledger import Outcome
from cairn.journal.lifecycle import SessionState
from cairn.journal.state import EMPTY, Block, Pins, Pool, SessionId, State, apply, lengthened
from tests.journal.model import (
    BLOCK_BYTES,
    FILE_BYTES,
    SLAB_BYTES,
    TAPES,
    Driver,
    Talk,
    World,
    plain,
    played,
    profile,
    tape,
)

HELLO = ("user", (10, 11))


@profile(100)
@given(TAPES)
def test_the_fold_equals_the_model(data: bytes):
    """After every append, the state is what the model gives for the same events."""
    driver = played(data)
    world = World()

    for place, (recorded, state) in enumerate(zip(driver.recorded, driver.states, strict=True)):
        world.take(recorded)
        if state.position == recorded.position and (place % 7 == 0 or place > 300):
            assert world.seen() == plain(state)
    assert world.seen() == plain(driver.state)


@profile(60)
@given(TAPES)
def test_a_state_stays_as_it_was(data: bytes):
    """Folding an event changes nothing in the state before it."""
    driver = played(data)
    state = EMPTY

    for recorded in driver.recorded[:200]:
        before = copy.copy(plain(state))
        after = apply(state, recorded)

        assert before == plain(state)
        state = after


def test_a_block_is_pinned_by_the_state_that_is_asked():
    """
    Whatever state was read before: a later one, an earlier one, or one with the same keys in
    another session.
    """
    one, other = SessionId("one"), SessionId("other")
    first = Map({one: ("a", "b"), other: ("c",)})
    longer = first.set(one, ("a", "b", "d"))
    pins: list[Pins] = [first, longer, longer.delete(other), Map({other: ("a", "b")}), Map()]
    states = [State(pins=held) for held in pins]

    for state in (state for pair in itertools.product(states, repeat=2) for state in pair):
        due = {key for keys in state.pins.values() for key in keys}
        assert due == {key for key in "abcd" if state.is_pinned(key)}


def adds_up(driver: Driver, state: State) -> None:
    """
    The state's memory accounts equal a count of the driver's own slabs, blocks and files, and pins
    are those of the working sessions.
    """
    for name, session in state.sessions.items():
        at_work = session.state in (
            SessionState.PREFILLING,
            SessionState.DECODING,
            SessionState.SETTLING,
        )
        pinned = state.pins.get(name, ())
        assert at_work or not pinned or session.state is SessionState.RESTORING
        assert not at_work or set(session.slab_keys) <= set(pinned)
    works_with = {key for keys in state.pins.values() for key in keys}
    # A request that joined another one may also wait for blocks that are not sealed yet.
    pinned_here = {key for key in state.blocks if state.is_pinned(key)}
    assert pinned_here == works_with & set(state.blocks)
    slabs = len(driver.slabs) + (driver.check is not None)
    assert slabs == sum(s.slab is not None for s in state.sessions.values()) + bool(state.shadow)
    there = dict.fromkeys(driver.store, BLOCK_BYTES)
    assert there == {key: block.bytes for key, block in state.blocks.items() if block.present}
    files = dict.fromkeys(driver.files, FILE_BYTES)
    blocks = state.blocks.items()
    assert files == {key: b.file_bytes for key, b in blocks if b.file_bytes is not None}
    assert state.pool == Pool(
        slabs=slabs,
        slab_bytes=slabs * SLAB_BYTES,
        blocks=len(there),
        block_bytes=sum(there.values()),
        block_tokens=sum(state.blocks[key].tokens for key in there),
        disk_blocks=len(files),
        disk_bytes=sum(files.values()),
    )


class Counting(Driver):
    """Counts memory after each append."""

    def take(self, outcome: Outcome) -> None:
        """Keep an outcome's rows, which leave memory unchanged."""
        super().take(outcome)
        if self.state.model is not None:  # at the end of a run, memory is emptied after the row
            adds_up(self, self.state)


@profile(60)
@given(TAPES)
def test_memory_adds_up(data: bytes):
    """After each append, the accounts equal the memory in use."""
    driver = played(data, kind=Counting)
    assert len(driver.rows) > 10
    adds_up(driver, driver.state)


def without_a_pin(state: State) -> State:
    """A session pins all but one of its blocks."""
    name, keys = next(iter(state.pins.items()))
    return attrs.evolve(state, pins=state.pins.set(name, keys[1:]))


def with_a_session_that_forgot(state: State) -> State:
    """A session works, and pins nothing."""
    return attrs.evolve(state, pins=Map())


def with_a_session_in_progress(state: State) -> State:
    """An idle session still pins its blocks."""
    sessions = {
        name: attrs.evolve(s, state=SessionState.IDLE) for name, s in state.sessions.items()
    }
    return attrs.evolve(state, sessions=Map(sessions))


def with_another_size(state: State) -> State:
    """A block is recorded as larger than it is."""
    block = next(block for block in state.blocks.values() if block.present)
    return with_block(state, attrs.evolve(block, bytes=block.bytes + 1))


def with_a_block_that_is_gone(state: State) -> State:
    """A block in memory is recorded as missing."""
    block = next(block for block in state.blocks.values() if block.present)
    return with_block(state, attrs.evolve(block, present=False))


def with_a_file_that_is_not(state: State) -> State:
    """A block without a file is recorded as written."""
    block = next(block for block in state.blocks.values() if block.file_bytes is None)
    return with_block(state, attrs.evolve(block, file_bytes=FILE_BYTES))


def with_block(state: State, block: Block) -> State:
    """The state with one block recorded wrongly."""
    return attrs.evolve(state, blocks=state.blocks.set(block.key, block))


def with_one_more(name: str) -> Callable[[State], State]:
    """Makes a state whose pool counts one too many."""

    def damaged(state: State) -> State:
        more = {name: getattr(state.pool, name) + 1}
        return attrs.evolve(state, pool=attrs.evolve(state.pool, **more))

    damaged.__name__ = f"one more of {name}"
    return damaged


@pytest.mark.parametrize(
    "damaged",
    [
        *(with_one_more(field.name) for field in attrs.fields(Pool)),
        without_a_pin,
        with_a_session_that_forgot,
        with_a_session_in_progress,
        with_another_size,
        with_a_block_that_is_gone,
        with_a_file_that_is_not,
    ],
    ids=lambda damaged: damaged.__name__,
)
def test_control_what_does_not_add_up_is_seen(damaged: Callable[[State], State]):
    """The control: with one wrong count of a working session, the accounts do not add up."""
    driver = Driver(blocks_kept=40)
    driver.start()
    talk = Talk(tenant="t1", group=None, name=None, parts=(("user", tuple(range(10, 30))),))
    session = driver.ask(talk)
    assert session is not None
    while not driver.state.pins:
        driver.step(session)
    for key in driver.spillable()[:1]:
        driver.spill(key)
    driver.step(session)
    adds_up(driver, driver.state)

    with pytest.raises(AssertionError):
        adds_up(driver, damaged(driver.state))


@profile(60)
@given(TAPES)
@example(bytes(range(200)))
def test_reuse_gives_the_bits_of_a_cold_prefill(data: bytes):
    """The driver's KV is that of a cold prefill after every prefill, and every key has one KV."""
    driver = played(data)
    known: dict[str, str] = {}

    for recorded in driver.recorded:
        event = recorded.event
        if isinstance(event, ev.BlockSealed):
            assert known.setdefault(event.key, event.digest) == event.digest


def test_every_kind_of_event_is_played():
    """The histories above have every kind of event, so that no arm of the fold is untested."""
    elsewhere = {"blocks_quarantined", "admission_closed", "journal_stalled", "journal_pruned"}
    elsewhere |= {"agent_deleted", "session_forgotten"}  # see test_records.py, test_forgetting.py
    elsewhere |= {"session_released", "session_adopted", "turn_adopted"}  # see test_handover.py
    wanted = {kind.kind for kind in ev.ALL_EVENTS} - elsewhere
    seen: set[str] = set()

    for seed in range(40):
        seen |= {recorded.event.kind for recorded in played(tape(seed, 600)).recorded}

    assert wanted == wanted & seen


def _busy_sessions(count: int) -> Driver:
    """Sessions that are all serving the same conversation."""
    driver = Driver(pool_slabs=count)
    driver.start()
    for _ in range(count):
        driver.ask(Talk(tenant="t1", group=None, name=None, parts=(HELLO,)))
    return driver


@pytest.mark.parametrize("kind", ["stopped", "lost"])
def test_requests_end_in_the_order_in_which_they_came(kind: str):
    """
    The state after a run does not depend on the order of a map's keys, which differs in every
    process.
    """
    driver = _busy_sessions(9)
    driver.end_run(kind)

    expected = tuple(f"s{n}" for n in range(1, 10))
    assert [expected] == list(driver.state.tips.values())
    assert [expected] == list(driver.state.parts.values())


def test_the_end_of_a_run_takes_the_model_with_it():
    """Between two runs nothing is loaded, held or open, but sealed digests are still known."""
    driver = _busy_sessions(2)
    driver.finish("s1")
    driver.end_run("lost")
    state = driver.state

    assert (None, None, 0, 0) == (state.boot, state.model, state.pool.slabs, state.pool.blocks)
    assert {} == dict(state.requests)
    assert {"idle"} == {str(session.state) for session in state.sessions.values()}
    assert {False} == {block.present for block in state.blocks.values()}
    assert not state.pins


def test_a_quarantine_ends_the_request_in_hand():
    """A quarantined session has no request any more, nor any pin."""
    driver = _busy_sessions(1)
    driver.crash("s1")
    session = driver.state.session("s1")

    assert (None, driver.bugs[0]) == (session.request, session.bug_id)
    assert not driver.state.pins
    assert {} == dict(driver.state.requests)

    direct = _busy_sessions(1)
    direct.propose(ev.SessionQuarantined(session="s1", bug_id="from elsewhere"))
    assert {} == dict(direct.state.requests)
    assert direct.state.session("s1").request is None


def test_an_event_that_does_not_fit_raises():
    """Folding an event that was not checked raises, and the state is unchanged."""
    driver = _busy_sessions(1)
    before = plain(driver.state)
    for event in (
        ev.SessionSettled(session="s1", canonical_tokens=0, complete=True),
        ev.SessionClosed(session="missing", reason="-"),
        ev.BlockEvicted(key="nothing", bytes=1, memory_blocks=0, memory_bytes=0, reason="space"),
    ):
        place = ev.Recorded(
            position=99, stream=event.stream, seq=1, event_id="-", time_us=0, event=event
        )
        with pytest.raises((AssertionError, LookupError)):
            apply(driver.state, place)

    assert before == plain(driver.state)


def test_a_lengthened_state_has_one_more_row_and_nothing_else():
    """A violating event has a position in the journal and in its stream, and no effect."""
    driver = _busy_sessions(1)
    place = ev.Recorded(
        position=driver.state.position + 1,
        stream="session/s1",
        seq=9,
        event_id="-",
        time_us=0,
        event=ev.SessionClosed(session="s1", reason="-"),
    )
    longer = plain(lengthened(driver.state, place))

    assert driver.state.position + 1 == longer["position"]
    assert 9 == longer["streams"]["session/s1"]
    for name, value in plain(driver.state).items():
        if name not in ("position", "streams"):
            assert value == longer[name]
