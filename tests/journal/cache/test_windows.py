"""Which blocks a conversation under ``sink_window`` needs, and which may leave memory."""

from __future__ import annotations

import attrs
import pytest
from immutables import Map

from cairn.journal.cache import eviction
from cairn.journal.cache.windows import SinkWindow
from cairn.journal.lifecycle import SessionState
from cairn.journal.paths import Ask, chain_to_load
from cairn.journal.state import Session, SessionId, State
from tests.journal.cache.test_eviction import chain, held
from tests.journal.model import blocks_ahead
from tests.support.journals import MODEL

POLICY = SinkWindow.of(2, 16, 4)


def test_what_the_next_token_attends_to_is_copied():
    """Wherever it is and however many sinks there are, none of it is left out."""
    for sinks in (0, 2, 4, 7):
        policy = SinkWindow.of(sinks, 16, 4)
        for blocks in range(1, 40):
            for kept in range(blocks):
                tokens = {4 * one + n for one in policy.copied(kept, blocks, 4) for n in range(4)}
                seen = {*range(sinks), *range(policy.first(4 * blocks), 4 * blocks)}
                assert {token for token in seen if 4 * kept <= token < 4 * blocks} <= tokens
                assert len(tokens) <= policy.rows
                if kept == 0:
                    middle = policy.middle(blocks, 4)
                    assert not tokens & {4 * one + n for one in middle for n in range(4)}


def windowed(session: Session, blocks: int, *gone: int) -> State:
    """A chain with some blocks evicted from memory, and the session that has it."""
    found = [
        attrs.evolve(block, present=place not in gone)
        for place, block in enumerate(chain("a", blocks, 100))
    ]
    model = attrs.evolve(MODEL, kv_sinks=2, kv_window=16, kv_rows=POLICY.rows)
    return State(
        model=model,
        blocks=Map({block.key: block for block in found}),
        sessions=Map({session.id: session}),
    )


@pytest.mark.parametrize(
    ("gone", "due"),
    [((), 20), (range(1, 16), 20), ((16,), 16), ((17, 16), 16), ((0,), 0), ((19,), 19)],
)
def test_a_chain_without_its_middle_can_be_continued(gone: tuple[int, ...], due: int):
    """It continues up to the last place at which sinks and window exist."""
    keys = tuple(f"a{place}" for place in range(20))
    empty = attrs.evolve(held(), slab=None)
    state = windowed(empty, 20, *gone)
    assert (0, due) == blocks_ahead(state, empty, keys)


def test_what_no_window_needs_may_leave():
    """The middle, except what another conversation has in its window."""
    keys = tuple(f"a{place}" for place in range(20))
    session = held(*keys)
    state = windowed(session, 20)
    middle = POLICY.middle(20, 4)
    assert tuple(keys[place] for place in reversed(middle)) == eviction.release_idle(state, session)
    other = attrs.evolve(held(*keys[:12]), id=SessionId("other"))
    both = attrs.evolve(state, sessions=state.sessions.set(other.id, other))
    stays = {keys[place] for place in range(12)} - {keys[p] for p in POLICY.middle(12, 4)}
    found = eviction.release_idle(both, session)
    assert {keys[place] for place in middle} - stays == set(found)
    assert stays & {keys[place] for place in middle}


def test_the_blocks_that_a_slab_needs_are_those_that_would_be_copied():
    """A session whose middle has left memory can still do without its slab."""
    keys = tuple(f"a{place}" for place in range(20))
    session = attrs.evolve(held(*keys), state=SessionState.IDLE, cached_tokens=80)
    middle = POLICY.middle(20, 4)
    assert eviction.can_spare_slab(windowed(session, 20, *middle), session)
    assert not eviction.can_spare_slab(windowed(session, 20, 0), session)
    assert not eviction.can_spare_slab(windowed(session, 20, 19), session)


def test_a_slab_whose_window_has_moved_is_not_reused():
    """It cannot be trimmed to where the next prompt differs."""
    keys = tuple(f"a{place}" for place in range(20))
    session = attrs.evolve(held(*keys), cached_tokens=80, window_start=60)
    state = windowed(session, 20)
    assert (20, 0) == blocks_ahead(state, session, keys)
    assert (0, 10) == blocks_ahead(state, session, keys[:10])


def test_where_a_block_has_left_the_search_ends():
    """Blocks before it were looked at when the session was last idle."""
    keys = tuple(f"a{place}" for place in range(20))
    session = held(*keys)
    *_, last = POLICY.middle(20, 4)
    assert () == eviction.release_idle(windowed(session, 20, last), session)
    assert not eviction.is_out_of_windows(windowed(session, 20, last), keys[last])
    assert eviction.is_out_of_windows(windowed(session, 20), keys[last])


@pytest.mark.parametrize(("gone", "loaded"), [((), False), ((3,), False), ((18,), True)])
def test_what_is_loaded_is_what_would_be_copied(gone: tuple[int, ...], loaded: bool):
    """Sinks and window of a chain, if one of these blocks is only in a file."""
    keys = tuple(f"a{place}" for place in range(20))
    state = attrs.evolve(windowed(held(), 20, *gone), disk_budget=1, sessions=Map())
    ask = Ask(
        tenant="t",
        fingerprint="f",
        chain=(("user", "u", "v"),),
        session_name=None,
        group=None,
        cache_prompt=True,
        cache_mode="full",
    )
    copied = tuple(keys[place] for place in POLICY.copied(0, 20, 4))
    found = chain_to_load(state, None, ask, keys, (0,) * 81, 90)
    assert (copied if loaded else ()) == found
