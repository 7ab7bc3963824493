"""
What leaves memory when something must: pure decisions over the fold of the journal.

The order of least recent use is the journal's order, so a replay sees the same order.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from cairn.journal.lifecycle import Life
from cairn.journal.state import Block, Session, State


def room_for_block(state: State, size: int, keep: Collection[str] = ()) -> tuple[str, ...] | None:
    """
    The blocks to evict so that one of ``size`` bytes fits, or None where nothing could make room.

    A tenth of the budget is freed at once, so that a full store does not look for room at every
    block. No block goes before those that are built on it, see ``_ends_first``.

    Args:
        keep: blocks that stay, beside those that are pinned.
    """
    if state.model is None or size > state.model.blocks_bytes:
        return None
    if state.pool.block_bytes + size <= state.model.blocks_bytes:
        return ()
    there = [block for block in state.blocks.values() if block.present]
    wanted = state.pool.block_bytes + size - state.model.blocks_bytes
    ample = wanted + state.model.blocks_bytes // 10
    freed, chosen = 0, []
    for block, _ in _ends_first(state, there):
        if freed >= ample:
            break
        if block.pins == 0 and block.key not in keep:
            chosen.append(block.key)
            freed += block.bytes
    return tuple(chosen) if freed >= wanted else None


def file_bytes_at_most(state: State, size: int) -> int:
    """
    What a file of a block of ``size`` bytes takes at most: its KV, and a header that tells of two
    arrays a layer.
    """
    layers = state.model.layers if state.model is not None else 0
    return size + 1024 + 512 * layers


def room_for_file(
    state: State, block: Block, size: int, keep: Collection[str] = ()
) -> tuple[str, ...] | None:
    """
    The blocks whose files are to be removed so that one of ``size`` bytes for ``block`` fits, or
    None where nothing that was used before it could make room. What it is built on stays: without
    that it could not be found. In the order in which blocks leave memory, and likewise a tenth of
    the budget at once.

    Args:
        keep: blocks whose files stay.
    """
    over = state.pool.disk_bytes + size - state.disk_budget
    if over <= 0:
        return ()
    if size > state.disk_budget:
        return None
    filed = [other for other in state.blocks.values() if other.file_bytes is not None]
    freed, chosen = 0, []
    for other, last_used in _ends_first(state, [*filed, block]):
        if freed >= over + state.disk_budget // 10 or last_used >= block.last_used:
            break
        if other.key not in keep:
            chosen.append(other.key)
            freed += other.file_bytes or 0
    return tuple(chosen) if freed >= over else None


def files_over_budget(state: State) -> tuple[str, ...]:
    """
    The blocks whose files are to be removed so that the others keep the budget, in that order.
    """
    over = state.pool.disk_bytes - state.disk_budget
    chosen = []
    filed = [block for block in state.blocks.values() if block.file_bytes is not None]
    for block, _ in _ends_first(state, filed):
        if over <= 0:
            break
        chosen.append(block.key)
        over -= block.file_bytes or 0
    return tuple(chosen)


def blocks_to_write(state: State) -> tuple[str, ...]:
    """
    The blocks in memory that no file has, those first that are worth most: the last used, but each
    behind the one before it in its chain, without which it cannot be found.
    """
    unwritten = {
        block.key: block
        for block in state.blocks.values()
        if block.usable and block.file_bytes is None
    }
    chosen: dict[str, None] = {}
    for block in sorted(unwritten.values(), key=lambda block: -block.last_used):
        chain = []
        at: Block | None = block
        while at is not None and at.key not in chosen:
            chain.append(at.key)
            at = unwritten.get(at.parent or "")
        chosen.update(dict.fromkeys(reversed(chain)))
    return tuple(chosen)


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


def _ends_first(state: State, blocks: Iterable[Block]) -> list[tuple[Block, int]]:
    """
    Blocks in the order in which they can be done without, each with when it was last of use: the
    least recently used first, but each behind those that are built on it. A block without the one
    before it cannot be found, so the front of a chain is of use as long as its end is.
    """
    found = {block.key: block for block in blocks}
    used = {key: block.last_used for key, block in found.items()}
    for block in sorted(found.values(), key=lambda block: -block.start):
        before = state.blocks.get(block.parent or "")
        while before is not None and before.key not in used:  # it is not among these itself
            before = state.blocks.get(before.parent or "")
        if before is not None:
            used[before.key] = max(used[before.key], used[block.key])
    order = sorted(found.values(), key=lambda block: (used[block.key], -block.start))
    return [(block, used[block.key]) for block in order]
