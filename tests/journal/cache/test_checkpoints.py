"""
Models with recurrent states: some blocks contain them, and no pass continues from anywhere else.
"""

from __future__ import annotations

import attrs
import pytest
from hypothesis import given
from immutables import Map

from cairn.journal import events as ev
from cairn.journal.cache import eviction
from cairn.journal.cache.checkpoints import MOST_BLOCKS, Checkpoints
from cairn.journal.cache.held import states_held
from cairn.journal.lifecycle import SessionState
from cairn.journal.state import State
from tests.journal.cache.test_eviction import chain, held
from tests.journal.model import (
    CHUNKS,
    TAPES,
    Driver,
    Talk,
    Violated,
    World,
    blocks_ahead,
    played,
    profile,
)
from tests.support.journals import MODEL

SYSTEM, HELLO = ("system", tuple(range(1, 9))), ("user", tuple(range(10, 20)))


@pytest.mark.parametrize(
    ("token_bytes", "state_bytes", "blocks"),
    [(10, 1, 1), (10, 640, 1), (10, 641, 2), (10, 64_000_000, MOST_BLOCKS), (0, 1, MOST_BLOCKS)],
)
def test_how_often_a_block_carries_states(token_bytes: int, state_bytes: int, blocks: int) -> None:
    """
    States take no more memory than keys and values, unless they are so large that work counts more.
    """
    rule = Checkpoints.of(64, token_bytes, state_bytes)

    assert blocks == rule.blocks
    assert [blocks, 2 * blocks] == [n for n in range(1, 2 * blocks + 1) if rule.at(64 * n)]
    assert [0, blocks] == [rule.last(blocks - 1), rule.last(2 * blocks - 1)]


@pytest.mark.parametrize("blocks", [1, 2, 3])
@profile(30)
@given(TAPES)
def test_histories_go_on_from_states_alone(blocks: int, data: bytes) -> None:
    """
    Whatever is asked, evicted and lost: a slab is trimmed to the end of its last block or emptied,
    shared blocks end at one that contains states, and each decision equals a search over every
    block.
    """
    driver = played(data, state_blocks=blocks)
    world = World()
    for recorded in driver.recorded:
        event = recorded.event
        chunk = CHUNKS[driver.fingerprint] if world.model is None else world.model["block_tokens"]
        match event:
            case ev.CacheTrimmed():
                sealed = len(world.sessions[event.session]["slab_keys"]) * chunk
                assert event.end in (0, sealed)
            case ev.BlocksRestored():
                assert event.end % (blocks * chunk) == 0
            case _:
                pass
        world.take(recorded)

    found = {
        r.event.invariant for r in driver.recorded if isinstance(r.event, ev.InvariantViolated)
    }
    assert found <= {"CRASH"}  # sessions fail where the tapes say so


def _settling(driver: Driver) -> str:
    """A session that has answered, with sealed blocks in its slab."""
    driver.start()
    talk = Talk(tenant="t1", group=None, name=None, parts=(SYSTEM, HELLO))
    name = driver.ask(talk)
    assert name is not None
    while driver.state.session(name).state != "settling":
        driver.step(name)
    assert len(driver.state.session(name).slab_keys) > 1
    return name


@pytest.mark.parametrize("states", [0, 1])
def test_a_slab_trimmed_to_where_no_state_is_stored(states: int) -> None:
    """INV-1 detects it; without states there is nothing to detect."""
    driver = Driver(pool_slabs=4, blocks_kept=40, spare_tokens=60, state_blocks=states)
    name = _settling(driver)
    if not states:
        driver.trim(name, driver.chunk, "anywhere")
        return
    with pytest.raises(Violated) as caught:
        driver.trim(name, driver.chunk, "anywhere")

    assert caught.value.outcome.bug is not None
    assert "INV-1" == caught.value.outcome.bug.invariant
    assert "no state was kept" in str(caught.value.outcome.bug)


def test_blocks_without_states_are_not_gone_on_from() -> None:
    """Of four blocks, every third contains states: three are reused, and of two blocks, none."""
    driver = Driver(pool_slabs=4, blocks_kept=40, spare_tokens=60, state_blocks=3)
    name = _settling(driver)
    keys = driver.state.session(name).slab_keys
    driver.release(name)
    session = driver.state.session(name)

    assert (0, len(keys) // 3 * 3) == blocks_ahead(driver.state, session, keys)
    assert (0, 0) == blocks_ahead(driver.state, session, keys[:2])


def state_with(blocks: int, count: int, *, slab: bool = True) -> State:
    """An idle session on so many blocks in memory."""
    stones = chain("a", count, 100)
    keys = tuple(block.key for block in stones)
    session = attrs.evolve(held(*keys), state=SessionState.IDLE, cached_tokens=4 * count)
    return State(
        model=attrs.evolve(MODEL, state_blocks=blocks),
        blocks=Map({block.key: block for block in stones}),
        sessions=Map({session.id: session} if slab else {}),
    )


def test_a_slab_is_spared_where_a_block_has_its_states() -> None:
    """The states of an end that no block contains would have to be computed again."""

    def spared(blocks: int, count: int) -> bool:
        state = state_with(blocks, count)
        (session,) = state.sessions.values()
        return eviction.can_spare_slab(state, session)

    assert [True, True, False, True] == [
        spared(blocks, count) for blocks, count in ((0, 3), (1, 3), (2, 3), (2, 4))
    ]


@pytest.mark.parametrize(("blocks", "cut"), [(0, (2, 0)), (1, (0, 2))])
def test_a_slab_that_is_longer_is_not_gone_on_from(blocks: int, cut: tuple[int, int]) -> None:
    """The states are those of its end, so fewer blocks are restored instead of kept."""
    state = state_with(blocks, 3)
    (session,) = state.sessions.values()
    keys = session.slab_keys

    assert (3, 0) == blocks_ahead(state, session, keys)
    assert cut == blocks_ahead(state, session, keys[:2])


def test_states_in_memory_count_once() -> None:
    """
    States of blocks count, and those at the end of a slab if no block in memory contains them.
    """
    assert [0, 3, 2, 2] == [
        states_held(state_with(blocks, count)) for blocks, count in ((0, 3), (1, 3), (2, 3), (2, 4))
    ]
    assert 1 == states_held(state_with(2, 3, slab=False))
    assert 0 == states_held(State())
