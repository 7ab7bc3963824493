"""
What leaves memory when something must: pure decisions over the fold of the journal.

The order of least recent use is the journal's order, so a replay sees the same order.
"""

from __future__ import annotations

from collections.abc import Iterator

from cairn.journal.lifecycle import Life
from cairn.journal.state import Block, Session, State


def room_for_block(state: State, size: int) -> tuple[str, ...] | None:
    """
    The blocks to evict so that one of ``size`` bytes fits, or None where nothing could make room.

    A tenth of the budget is freed at once, so that a full store does not look for room at every
    block. Of blocks used at the same time the later ones of a chain go first: a block without the
    one before it cannot be found.
    """
    if state.model is None or size > state.model.blocks_bytes:
        return None
    if state.pool.block_bytes + size <= state.model.blocks_bytes:
        return ()
    loose = sorted(_loose(state), key=lambda block: (block.last_used, -block.start))
    wanted = state.pool.block_bytes + size - state.model.blocks_bytes
    ample = wanted + state.model.blocks_bytes // 10
    freed, chosen = 0, []
    for block in loose:
        if freed >= ample:
            break
        chosen.append(block.key)
        freed += block.bytes
    return tuple(chosen) if freed >= wanted else None


def slab_fits(state: State, size: int) -> bool:
    """
    Whether a slab of ``size`` bytes can be opened now.
    """
    if state.model is None:
        return False
    pool = state.pool
    return pool.slabs < state.model.pool_slabs and pool.slab_bytes + size <= state.model.pool_bytes


def slab_to_release(state: State) -> Session | None:
    """
    The session at rest that is to give up its slab: the least recently used. None where all work.
    """
    resting = [
        session
        for session in state.sessions.values()
        if session.slab is not None and session.life is Life.IDLE
    ]
    return min(resting, key=lambda session: session.last_used, default=None)


def session_to_forget(state: State, most: int) -> Session | None:
    """
    The session to close where more than ``most`` are open: the least recently used at rest. A
    quarantined one stays, so that who names it hears of its bug.
    """
    if len(state.sessions) <= most:
        return None
    resting = [
        session
        for session in state.sessions.values()
        if session.life in (Life.IDLE, Life.COLD) and session.slab is None
    ]
    return min(resting, key=lambda session: session.last_used, default=None)


def _loose(state: State) -> Iterator[Block]:
    for block in state.blocks.values():
        if block.present and block.pins == 0:
            yield block
