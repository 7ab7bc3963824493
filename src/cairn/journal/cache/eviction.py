"""
Decides what to evict from memory and disk. Pure decisions over the journal's fold.

The order follows from the journal alone, so a replay sees the same one. It is in
``eviction_order.py``: callers that decide often pass an ``Order`` that has followed the events.
Without one, it is built from the state, which takes longer the more blocks there are.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import islice, takewhile

from cairn.journal.cache.eviction_order import Order
from cairn.journal.lifecycle import SessionState
from cairn.journal.state import Block, Model, Session, State

_ARRAYS_A_LAYER = 4
_ARRAY_ENTRY_BYTES = 128


def room_for_block(
    state: State, size: int, keep: Collection[str] = (), *, order: Order | None = None
) -> tuple[str, ...] | None:
    """
    The blocks to evict so that a block of ``size`` bytes fits, or None if nothing could make room.

    Frees more than is needed, see ``_ample``, so that a full store does not evict for every block.
    No block is evicted before the blocks that are built on it. Short blocks are evicted before all
    others, because each saves fewer tokens.

    Args:
        keep: blocks to keep, in addition to those that are pinned.
        order: the order of this state.
    """
    if state.model is None or size > state.model.blocks_bytes:
        return None
    over, over_count = _over_budget(state, state.model, size)
    if over <= 0 and over_count <= 0:
        return ()
    ample = over + _ample(size, state.model.blocks_bytes) if over > 0 else 0
    ample_count = over_count + _ample(1, state.model.blocks_max) if over_count > 0 else 0
    freed, chosen = 0, dict[str, None]()
    for block in _in_order(state, order or Order(state)):
        if freed >= ample and len(chosen) >= ample_count:
            break
        if block.key not in chosen and not state.is_pinned(block.key) and block.key not in keep:
            chosen[block.key] = None
            freed += block.bytes
    return tuple(chosen) if freed >= over and len(chosen) >= over_count else None


def _in_order(state: State, order: Order) -> Iterator[Block]:
    """The blocks in memory, the first to evict first. Short ones come twice, also among others."""
    yield from sorted(
        (state.blocks[key] for key in order.short), key=lambda one: (order.rank(one), one.key)
    )
    yield from (block for block, _ in order.memory.in_order())


def block_fits(state: State, size: int) -> bool:
    """Whether a block of ``size`` bytes fits without evicting any."""
    return state.model is not None and max(_over_budget(state, state.model, size)) <= 0


def _over_budget(state: State, model: Model, size: int) -> tuple[int, int]:
    """
    By how many bytes, and by how many blocks, one more block of ``size`` bytes is too much. Up to 0
    if it fits.
    """
    pool = state.pool
    over_count = pool.blocks + 1 - model.blocks_max if model.blocks_max else 0
    return pool.block_bytes + size - model.blocks_bytes, over_count


def room_for_prewarm(
    state: State, size: int, *, order: Order | None = None
) -> tuple[str, ...] | None:
    """
    Like ``room_for_block``, for a block of a prewarm, which no request is waiting for. Never evicts
    a block that is held ready in a slab.
    """
    if state.model is None or block_fits(state, size):
        return room_for_block(state, size)
    return room_for_block(state, size, held_ready(state), order=order)


def held_ready(state: State) -> frozenset[str]:
    """The blocks of all sessions whose KV is held ready in a slab. Prewarm never evicts them."""
    return frozenset(
        key for session in state.sessions.values() for key in _needed(state, session.slab_keys)
    )


def _needed(state: State, keys: tuple[str, ...]) -> tuple[str, ...]:
    """
    The blocks of a chain that a slab needs in order to continue it. Under ``sink_window`` these are
    the blocks of the sinks and of the window, otherwise all.
    """
    model = state.model
    if model is None or model.policy is None:
        return keys
    return tuple(keys[place] for place in model.policy.copied(0, len(keys), model.block_tokens))


def release_idle(state: State, session: Session) -> tuple[str, ...]:
    """
    The blocks of an idle conversation under ``sink_window`` that are in memory, but no longer in
    the window of any conversation. The blocks nearest to the window come first. Looks only at
    blocks that were there when the session was last idle, or came since.
    """
    found: list[str] = []
    model, keys = state.model, chain_of(session)
    if model is None or model.policy is None:
        return ()
    for place in reversed(model.policy.middle(len(keys), model.block_tokens)):
        block = state.blocks.get(keys[place])
        if block is None or not block.present:
            break
        if not state.is_pinned(keys[place]) and _in_no_window(state, keys[place]):
            found.append(keys[place])
    return tuple(found)


def is_out_of_windows(state: State, key: str) -> bool:
    """
    Whether a block can leave memory under ``sink_window``: it is in memory, nothing is using it,
    and it is not among the sinks of any conversation, nor in its window or just before that.
    """
    return not state.is_pinned(key) and _in_no_window(state, key)


def _in_no_window(state: State, key: str) -> bool:
    block, model = state.blocks[key], state.model
    if model is None or model.policy is None or not block.present:
        return False
    place = block.start // model.block_tokens
    for session in state.sessions.values():
        keys = chain_of(session)
        has_it = place < len(keys) and keys[place] == key
        if has_it and place not in model.policy.middle(len(keys), model.block_tokens):
            return False
    return True


def chain_of(session: Session) -> tuple[str, ...]:
    """The blocks that a session continues from: those in its slab, else those of its prompt."""
    if session.slab_keys or session.request is not None:
        return session.slab_keys or session.work_keys
    return session.last.prompt_keys if session.last is not None else ()


def file_bytes_at_most(state: State, size: int) -> int:
    """
    An upper bound for the file of a block of ``size`` bytes: its KV and states, and a header with
    about a hundred bytes for each array. A layer has keys and values, or the arrays of its state;
    no layer of mlx-lm has more than four.
    """
    layers = state.model.layers if state.model is not None else 0
    return size + 1024 + layers * _ARRAYS_A_LAYER * _ARRAY_ENTRY_BYTES


def room_for_file(
    state: State,
    block: Block,
    size: int,
    keep: Collection[str] = (),
    *,
    order: Order | None = None,
) -> tuple[str, ...] | None:
    """
    The blocks whose files to drop so that a file of ``size`` bytes for ``block`` fits, or None if
    dropping all that are less likely to be used soon would not be enough. The blocks that it is
    built on keep their files, because it could not be found without them. Uses the order in which
    blocks leave memory, and likewise frees more than is needed.

    Args:
        keep: blocks whose files stay.
        order: the order of this state.
    """
    over = state.pool.disk_bytes + size - state.disk_budget
    if over <= 0:
        return ()
    if size > state.disk_budget:
        return None
    ample = over + _ample(size, state.disk_budget)
    built_on = _built_on(state, block)
    order = order or Order(state)
    of_block = order.rank(block)
    freed, chosen = 0, []
    for other, rank in order.files.in_order():
        if freed >= ample or rank >= of_block:
            break
        if other.key not in keep and other.key not in built_on:
            chosen.append(other.key)
            freed += other.file_bytes or 0
    return tuple(chosen) if freed >= over else None


def files_over_budget(state: State, order: Order | None = None) -> tuple[str, ...]:
    """The blocks whose files to drop so that the rest fits the budget, in that order."""
    over = state.pool.disk_bytes - state.disk_budget
    chosen = []
    for block, _ in (order or Order(state)).files.in_order():
        if over <= 0:
            break
        chosen.append(block.key)
        over -= block.file_bytes or 0
    return tuple(chosen)


def blocks_to_write(state: State, order: Order | None = None) -> tuple[str, ...]:
    """
    The blocks in memory that have no file yet, the most valuable first: in reverse to the order of
    eviction, but each after its predecessor in the chain, without which it cannot be found.

    Args:
        order: the order of this state.
    """
    rank_of = (order or Order(state)).rank
    unwritten = {
        block.key: block
        for block in state.blocks.values()
        if block.usable
        and block.file_bytes is None
        and block.node is None
        and not state.is_short(block)
    }
    chosen: dict[str, None] = {}
    for block in sorted(
        unwritten.values(), key=lambda block: (rank_of(block), block.key), reverse=True
    ):
        chain = []
        at: Block | None = block
        while at is not None and at.key not in chosen:
            chain.append(at.key)
            at = unwritten.get(at.parent or "")
        chosen.update(dict.fromkeys(reversed(chain)))
    return tuple(chosen)


def slab_fits(state: State, size: int) -> bool:
    """Whether a slab of ``size`` bytes can be opened now."""
    if state.model is None:
        return False
    pool = state.pool
    return pool.slabs < state.model.pool_slabs and pool.slab_bytes + size <= state.model.pool_bytes


def slab_to_release(state: State) -> Session | None:
    """
    The idle session that is to give up its slab: the least recently used. None if no session with a
    slab is idle.
    """
    resting = [
        session
        for session in state.sessions.values()
        if session.slab is not None and session.state is SessionState.IDLE
    ]
    return min(resting, key=lambda session: session.last_used, default=None)


def settling_slab_to_release(state: State) -> Session | None:
    """
    The least recently used session that settles and has a slab, or None.

    Its next request computes what is missing.
    """
    settling = (
        session
        for session in state.sessions.values()
        if session.slab is not None and session.state is SessionState.SETTLING
    )
    return min(settling, key=lambda session: session.last_used, default=None)


def slab_can_fit(state: State, size: int) -> bool:
    """Whether a slab of ``size`` bytes fits into an empty pool."""
    return state.model is not None and state.model.pool_slabs > 0 and size <= state.model.pool_bytes


def slab_will_come(state: State, at_work: Collection[str]) -> bool:
    """
    Whether a slab will become free without eviction: a request that has one will end, or a
    quarantined session will release its own. A request with a slab waits for none without one: see
    ``join`` in ``paths.py``.

    Args:
        at_work: the sessions whose actors run. That of a quarantined session ends when it has
            released its slab, or could not.
    """
    serving = {*state.requests.values()}
    return any(
        session.slab is not None
        and (
            session.id in serving
            or (session.state is SessionState.QUARANTINED and session.id in at_work)
        )
        for session in state.sessions.values()
    )


def can_spare_slab(state: State, session: Session) -> bool:
    """
    Whether a session is idle and can do without its slab: blocks in memory hold all KV of the slab
    but that of a last block that is not full, and the last of them its states, so that resuming
    takes a copy and a short pass at most.
    """
    rule = state.model.checkpoints if state.model is not None else None
    blocks = len(session.slab_keys)
    return (
        session.slab is not None
        and session.state is SessionState.IDLE
        and (rule is None or rule.last(blocks) == blocks)
        and all(state.blocks[key].usable for key in _needed(state, session.slab_keys))
    )


def slab_to_spare(state: State, size: int) -> Session | None:
    """
    The idle session whose slab alone makes room for one of ``size`` bytes, and that can do without
    it. The least recently used; None if there is none.
    """
    if state.model is None:
        return None
    over = state.pool.slab_bytes + size - state.model.pool_bytes
    spare = [
        session
        for session in state.sessions.values()
        if session.slab is not None
        and session.slab.bytes >= over
        and can_spare_slab(state, session)
    ]
    return min(spare, key=lambda session: session.last_used, default=None)


def session_to_forget(state: State, most: int) -> Session | None:
    """
    The session to close when more than ``most`` are open: the least recently used of the idle ones.
    Quarantined sessions stay, so that a request that names one learns of its bug.
    """
    if len(state.sessions) <= most:
        return None
    resting = [
        session
        for session in state.sessions.values()
        if session.state in (SessionState.IDLE, SessionState.COLD) and session.slab is None
    ]
    return min(resting, key=lambda session: session.last_used, default=None)


def _ample(size: int, budget: int) -> int:
    """
    How much to free in addition to what a block needs, in bytes, or in blocks if its size is 1:
    sixteen times its size, but at most a tenth of the budget. It is not a fixed share of the budget
    because the session that seals the block waits until all of them are evicted.
    """
    return min(16 * size, budget // 10)


def moment_us(state: State, now_us: int) -> int:
    """
    The time to compare a TTL with: the clock's, but never before the time of the last row. TTLs are
    counted from the rows, so what has expired stays expired if the clock is set back.

    Args:
        now_us: the clock's time, in microseconds since 1970.
    """
    return max(now_us, state.time_us)


def expired(
    state: State, order: Order, now_us: int, most: int, without: Collection[str] = ()
) -> tuple[str, ...]:
    """
    The blocks whose TTL is over, ``most`` of them at most, the ends of chains first. Leaves out
    blocks that a session is using, and blocks before another whose TTL is not over.

    Args:
        order: the order of the state.
        now_us: microseconds since 1970.
        without: blocks that could not be removed.
    """
    over = takewhile(lambda one: one[1] <= now_us, order.expiry.in_order())
    loose = (
        block.key
        for block, _ in over
        if not state.is_pinned(block.key) and block.key not in without
    )
    return tuple(islice(loose, most))


def next_expiry(order: Order) -> int | None:
    """When the next TTL ends, in microseconds since 1970; None if none does."""
    _, of_blocks = next(order.expiry.in_order(), (None, None))
    ends = (of_blocks, order.resting.first_us())
    return min((end for end in ends if end is not None), default=None)


def sessions_over(order: Order, now_us: int) -> tuple[Session, ...]:
    """The idle sessions whose TTL is over, the least recently used first."""
    over = order.resting.ended(now_us).values()
    return tuple(sorted(over, key=lambda session: session.last_used))


def _built_on(state: State, block: Block) -> frozenset[str]:
    """The blocks before this one in its chain."""
    found = []
    parent = block.parent
    while parent is not None and parent in state.blocks:
        found.append(parent)
        parent = state.blocks[parent].parent
    return frozenset(found)
