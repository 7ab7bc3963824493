"""INV-5: slabs, blocks in memory and block files."""

from __future__ import annotations

from collections.abc import Iterator

from cairn.journal import events as ev
from cairn.journal.invariants.sentences import Violation, broken
from cairn.journal.state import Block, Model, Slab, State


def acquired(state: State, event: ev.SlabAcquired) -> Iterator[Violation]:
    session = state.session(event.session)
    if session.slab is not None:
        yield broken("INV-5", "a second slab for one session", session.slab.id, event.slab)
    if state.model is not None:
        yield from _capacity(state.model, event.capacity_tokens)
    yield from opened(state, event)


def _capacity(model: Model, capacity: int) -> Iterator[Violation]:
    """A slab has full blocks, and no more than the context. A pass finds one that is too small."""
    chunk = model.block_tokens
    most = -(-model.context_tokens // chunk) * chunk
    if capacity % chunk or capacity > most:
        due = f"up to {most}, in blocks of {chunk}"
        yield broken("INV-5", "a slab of a capacity that is never asked for", due, capacity)


def opened(state: State, event: ev.SlabAcquired | ev.ShadowStarted) -> Iterator[Violation]:
    yield from _pool_measured(event, state.pool.slabs + 1, state.pool.slab_bytes + event.bytes)
    model = state.model
    if model is not None and event.pool_slabs > model.pool_slabs:
        yield broken("INV-5", "more slabs than the pool has", model.pool_slabs, event.pool_slabs)
    if model is not None and event.pool_bytes > model.pool_bytes:
        yield broken("INV-5", "slabs over the budget", model.pool_bytes, event.pool_bytes)


def released(state: State, event: ev.SlabReleased) -> Iterator[Violation]:
    yield from _given_back(state, event, state.session(event.session).slab)


def _given_back(
    state: State, event: ev.SlabReleased | ev.ShadowEnded, slab: Slab | None
) -> Iterator[Violation]:
    if slab is None or slab.id != event.slab:
        yield broken(
            "INV-5", "a slab was released that the session does not have", slab, event.slab
        )
        return
    if slab.bytes != event.bytes:
        yield broken("INV-5", "a slab of another size", slab.bytes, event.bytes)
    yield from _pool_measured(event, state.pool.slabs - 1, state.pool.slab_bytes - slab.bytes)


def gave_back(state: State, event: ev.ShadowEnded) -> Iterator[Violation]:
    yield from _given_back(state, event, state.shadow.slab if state.shadow is not None else None)


def _pool_measured(
    event: ev.SlabAcquired | ev.SlabReleased | ev.ShadowStarted | ev.ShadowEnded,
    slabs: int,
    size: int,
) -> Iterator[Violation]:
    if event.pool_slabs != slabs:
        yield broken("INV-5", "slabs do not add up", slabs, event.pool_slabs)
    if event.pool_bytes != size:
        yield broken("INV-5", "bytes of slabs do not add up", size, event.pool_bytes)


def evicted(state: State, event: ev.BlockEvicted) -> Iterator[Violation]:
    block = state.blocks[event.key]
    if not block.present:
        yield broken("INV-5", "a block evicted twice", "in memory", "gone")
        return
    if state.is_pinned(event.key):
        who = sorted(session for session, keys in state.pins.items() if event.key in keys)
        yield broken("INV-5", "a pinned block evicted", "one that no session is working with", who)
    if block.bytes != event.bytes:
        yield broken("INV-5", "a block of another size", block.bytes, event.bytes)
    possible = _removed_for(state, block)
    if event.reason not in possible:
        yield broken("INV-5", "a block evicted for no reason", sorted(possible), event.reason)
    yield from store_measured(
        state, blocks=state.pool.blocks - 1, size=state.pool.block_bytes - block.bytes, event=event
    )


def _removed_for(state: State, block: Block) -> set[ev.RemovalReason]:
    """Why a block may leave memory. A TTL may be that of a longer chain, so it is not looked up."""
    possible: set[ev.RemovalReason] = {"space", "expired"}
    if state.model is not None and state.model.kv_window:
        possible.add("window")
    if state.is_short(block):
        possible.add("superseded")
    return possible


def store_measured(
    state: State,
    *,
    blocks: int,
    size: int,
    event: ev.BlockSealed | ev.BlockEvicted | ev.BlockLoaded | ev.BlockAdopted,
) -> Iterator[Violation]:
    if event.memory_blocks != blocks:
        yield broken("INV-5", "blocks in memory do not add up", blocks, event.memory_blocks)
    if event.memory_bytes != size:
        yield broken("INV-5", "bytes of blocks do not add up", size, event.memory_bytes)
    budget = state.model.blocks_bytes if state.model else 0
    if event.memory_bytes > budget:
        yield broken("INV-5", "blocks over the budget", budget, event.memory_bytes)
    most = state.model.blocks_max if state.model else 0
    if most and event.memory_blocks > most:
        yield broken("INV-5", "more blocks than allowed", most, event.memory_blocks)


def rejected(state: State, event: ev.BlockFileRejected) -> Iterator[Violation]:
    if event.node is None and state.blocks[event.key].file_bytes is None:
        yield broken("INV-5", "a file was rejected that did not exist", "a file", event.reason)


def dropped(state: State, event: ev.BlockFileRemoved) -> Iterator[Violation]:
    if event.reason not in ("space", "expired"):
        yield broken("INV-5", "a file removed for no reason", "space or expired", event.reason)
    size = state.blocks[event.key].file_bytes
    if size != event.bytes:
        yield broken(
            "INV-5", "a file was removed that did not exist, or another one", size, event.bytes
        )
        return
    pool = state.pool
    yield from disk_measured(pool.disk_blocks - 1, pool.disk_bytes - size, event)


def found(state: State, event: ev.BlockFilesScanned) -> Iterator[Violation]:
    yield from disk_measured(state.pool.disk_blocks, state.pool.disk_bytes, event)


def disk_measured(
    blocks: int, size: int, event: ev.BlockSpilled | ev.BlockFileRemoved | ev.BlockFilesScanned
) -> Iterator[Violation]:
    if event.disk_blocks != blocks:
        yield broken("INV-5", "block files do not add up", blocks, event.disk_blocks)
    if event.disk_bytes != size:
        yield broken("INV-5", "bytes of block files do not add up", size, event.disk_bytes)


def closed(state: State, event: ev.SessionClosed) -> Iterator[Violation]:
    slab = state.session(event.session).slab
    if slab is not None:
        yield broken("INV-5", "a session closed with its slab", None, slab)
