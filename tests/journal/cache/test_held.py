"""What the journal counts as held in memory: each token once."""

from __future__ import annotations

import attrs
from immutables import Map

from cairn.journal.cache.held import states_held, tokens_held, tokens_in_slabs
from cairn.journal.state import Pool, Session, SessionId, State
from tests.journal.cache.test_eviction import chain, held
from tests.support.journals import MODEL


def test_a_token_counts_once():
    """
    Tokens of blocks count. Of slabs, tokens in no block count: the tail after the last chunk, and
    chunks whose block was evicted. Two slabs with the same blocks add nothing to them.
    """
    blocks = chain("a", 3, 100)
    blocks[2] = attrs.evolve(blocks[2], present=False)

    def due(*sessions: Session) -> int:
        return tokens_held(
            State(
                model=MODEL,
                blocks=Map({block.key: block for block in blocks}),
                sessions=Map({one.id: one for one in sessions}),
                pool=Pool(blocks=2, block_bytes=20, block_tokens=8),
            )
        )

    at_rest = attrs.evolve(held("a0", "a1"), cached_tokens=8)
    at_work = attrs.evolve(held("a0"), cached_tokens=7)
    pressed_out = attrs.evolve(held("a0", "a1", "a2"), cached_tokens=12)
    assert 8 == due()
    assert 8 == due(at_rest)
    assert 8 == due(attrs.evolve(at_work, slab=None, slab_keys=(), cached_tokens=0))
    assert 8 + 3 == due(at_rest, at_work)
    assert 8 + 3 + 4 == due(at_rest, at_work, pressed_out)


def test_what_a_window_has_let_go_is_not_held():
    """Of a slab that drops tokens, its sinks and what begins at its window count."""
    model = attrs.evolve(MODEL, kv_sinks=2, kv_window=16, kv_rows=28)
    session = attrs.evolve(held(), cached_tokens=40, window_start=20)
    state = State(model=model, sessions=Map({session.id: session}))
    assert 2 + 20 == tokens_held(state)


def test_nothing_is_held_without_a_model():
    """Between two runs of a server, nothing is in memory."""
    assert 0 == tokens_held(State())


def test_tokens_in_slabs():
    """One number for each slab that has tokens in it."""
    filled = attrs.evolve(held("a0"), cached_tokens=6)
    empty = attrs.evolve(held(), id=SessionId("empty"))
    none = attrs.evolve(held(), id=SessionId("none"), slab=None, cached_tokens=3)
    sessions = Map({one.id: one for one in (filled, empty, none)})
    assert [6] == list(tokens_in_slabs(State(model=MODEL, sessions=sessions)))


def test_a_slab_without_tokens_has_no_states():
    """States are counted at the end of the tokens of a slab."""
    model = attrs.evolve(MODEL, state_blocks=1)
    for cached_tokens, expected in ((0, 0), (3, 1)):
        session = attrs.evolve(held(), cached_tokens=cached_tokens)
        state = State(model=model, sessions=Map({session.id: session}))
        assert expected == states_held(state)
