"""
What leaves memory and disk first: what was used longest ago, but no block before those built on it.
"""

from __future__ import annotations

import attrs
import pytest
from immutables import Map

from cairn.journal import eviction
from cairn.journal.state import Block, Model, Pool, State

MODEL = Model(
    name="tiny",
    fingerprint="f",
    layers=1,
    chunk_tokens=4,
    decode_rows=1,
    context_tokens=64,
    reusable=True,
    pool_slabs=1,
    pool_bytes=1,
    blocks_bytes=80,
)


def chain(name: str, length: int, used: int) -> list[Block]:
    """
    Blocks of ten bytes, each built on the one before and sealed after it, in memory and in files.
    """
    return [
        Block(
            key=f"{name}{place}",
            parent=f"{name}{place - 1}" if place else None,
            digest="d",
            start=4 * place,
            bytes=10,
            present=True,
            file_bytes=10,
            last_used=used + place,
        )
        for place in range(length)
    ]


def state_of(*blocks: Block) -> State:
    """
    A state with these, and a budget of 80 bytes in memory and on disk.
    """
    there = [block for block in blocks if block.present]
    filed = [block for block in blocks if block.file_bytes is not None]
    pool = Pool(
        blocks=len(there),
        block_bytes=10 * len(there),
        disk_blocks=len(filed),
        disk_bytes=10 * len(filed),
    )
    found = Map({block.key: block for block in blocks})
    return State(model=MODEL, blocks=found, pool=pool, disk_budget=80)


def fresh(block: Block) -> Block:
    """
    A block in memory without a file.
    """
    return attrs.evolve(block, file_bytes=None)


@pytest.mark.parametrize("what", ["memory", "disk"])
def test_the_end_of_a_chain_goes_first(what: str):
    """Room is made from the end of the chain that was used longest ago; its front stays of use."""
    old, new = chain("a", 6, 100), chain("b", 3, 200)
    state = state_of(*old, *new[:2], fresh(attrs.evolve(new[2], present=False)))
    if what == "memory":
        assert ("a5", "a4") == eviction.room_for_block(state, 10)
    else:
        assert ("a5", "a4") == eviction.room_for_file(state, fresh(new[2]), 10)


def test_the_front_is_of_use_as_long_as_its_end():
    """What is built on a block and was used of late keeps it, however long ago it was made."""
    old, new = chain("a", 4, 100), chain("b", 4, 50)
    old[3] = attrs.evolve(old[3], last_used=300)
    state = state_of(*old, *new)
    assert ("b3", "b2") == eviction.room_for_block(state, 10)
    over = attrs.evolve(state, disk_budget=20)
    assert ("b3", "b2", "b1", "b0", "a3", "a2") == eviction.files_over_budget(over)


def test_no_file_is_written_at_the_cost_of_what_it_is_built_on():
    """A chain longer than the budget keeps the files of its front, and no more are written."""
    whole = (longer := chain("a", 10, 100))[:9]
    state = state_of(*whole[:8], fresh(whole[8]))
    assert None is eviction.room_for_file(state, fresh(whole[8]), 10)
    state = state_of(*whole[:8], fresh(whole[8]), *map(fresh, longer[9:]))
    assert None is eviction.room_for_file(state, fresh(longer[9]), 10)


def test_what_is_older_makes_no_room_for_what_is_older_still():
    """A block that was used before all that have files takes none of them away."""
    state = state_of(*chain("a", 8, 100))
    (old,) = chain("b", 1, 50)
    assert None is eviction.room_for_file(state, fresh(old), 10)


def test_what_is_to_stay_stays():
    """Neither what is pinned nor what the caller keeps is chosen."""
    old = chain("a", 8, 100)
    old[7] = attrs.evolve(old[7], pins=1)
    state = state_of(*old)
    assert ("a5", "a4") == eviction.room_for_block(state, 10, {"a6"})
    (new,) = chain("b", 1, 300)
    assert ("a7", "a5") == eviction.room_for_file(state, fresh(new), 10, {"a6"})
