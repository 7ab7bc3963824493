"""Sealed blocks in memory: copies of a full chunk of canonical KV, and their digests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, islice, pairwise
from typing import Any

import attrs
import mlx.core as mx
import numpy as np
from blake3 import blake3

from cairn.engine.errors import EngineFault
from cairn.engine.mlx.cache import HeldSlab, SinkCache
from cairn.engine.mlx.state import StateCache


@attrs.frozen(kw_only=True)
class SealedBlock:
    """
    What all layers keep of one chunk.

    Attributes:
        keys: ``(kv_heads, C, head_dim)`` for each layer that attends.
        values: likewise.
        states: the arrays of the layers with a recurrent state, as they are at the end of the
            chunk; empty if the block carries none.
        state_tokens: C if the model has such layers; else 0.
    """

    keys: tuple[mx.array, ...]
    values: tuple[mx.array, ...]
    states: tuple[mx.array, ...] = ()
    state_tokens: int = 0

    @property
    def nbytes(self) -> int:
        """The size of its arrays."""
        return sum(array.nbytes for array in (*self.keys, *self.values, *self.states))

    @property
    def tokens(self) -> int:
        """C."""
        return self.state_tokens or self.keys[0].shape[1]


def arrays_of(block: SealedBlock) -> dict[str, mx.array]:
    """The arrays of a block by the names that they have in a file."""
    arrays = {f"keys.{place}": array for place, array in enumerate(block.keys)}
    arrays |= {f"values.{place}": array for place, array in enumerate(block.values)}
    return arrays | {f"states.{place}": array for place, array in enumerate(block.states)}


def metadata_for(
    block: SealedBlock, key: str, fingerprint: str, digest: str, span: tuple[int, int], run: str
) -> dict[str, str]:
    """
    What a file says of its block.

    Args:
        span: the range of tokens that the block covers.
        run: the id of the run of the server that writes it.
    """
    metadata = {
        "key": key,
        "fingerprint": fingerprint,
        "digest": digest,
        "tokens": f"{span[0]}-{span[1]}",
        "run": run,
    }
    return metadata | ({"state_tokens": str(block.state_tokens)} if block.state_tokens else {})


def block_of(arrays: Mapping[str, mx.array], metadata: Mapping[str, str]) -> SealedBlock:
    """
    The block that a file has, evaluated: MLX reads lazily, so damaged bytes may raise only then.

    Raises:
        Exception: they are not those of a block; MLX raises errors of its own.
    """
    states = range(sum(name.startswith("states.") for name in arrays))
    layers = range((len(arrays) - len(states)) // 2)
    block = SealedBlock(
        keys=tuple(arrays[f"keys.{layer}"] for layer in layers),
        values=tuple(arrays[f"values.{layer}"] for layer in layers),
        states=tuple(arrays[f"states.{place}"] for place in states),
        state_tokens=int(metadata.get("state_tokens", 0)),
    )
    mx.eval(block.keys, block.values, block.states)
    return block


def cut(slab: HeldSlab, start: int, end: int, *, states: bool = False) -> SealedBlock:
    """
    Copy the rows ``[start, end)`` of all layers out of a slab. Does not modify the slab.

    Args:
        states: whether to copy the states too, which must be those of ``end`` tokens.

    Raises:
        EngineFault: the rows were dropped, or the states are of another position.

    The copies are evaluated before this returns: a slice that is still pending would make the
    slab's next update copy the whole slab.
    """
    layers = slab.attending
    rows = [_rows(cache, start, end) for cache in layers]
    block = SealedBlock(
        keys=tuple(
            mx.contiguous(c.keys[0, :, part, :]) for c, part in zip(layers, rows, strict=True)
        ),
        values=tuple(
            mx.contiguous(c.values[0, :, part, :]) for c, part in zip(layers, rows, strict=True)
        ),
        states=tuple(_states(slab.states, end)) if states else (),
        state_tokens=end - start if slab.states else 0,
    )
    mx.eval(block.keys, block.values, block.states)
    return block


def _states(layers: Sequence[StateCache], end: int) -> list[mx.array]:
    found: list[mx.array] = []
    for layer in layers:
        if layer.tokens != end:
            raise EngineFault(
                f"the state covers {layer.tokens} tokens, but the block ends at {end}"
            )
        found.extend(mx.contiguous(array) for array in layer.arrays)
    return found


def pasted(slab: HeldSlab, block: SealedBlock, start: int) -> SealedBlock:
    """
    A block as it is in a slab from ``start`` on, where it was copied to. Not a copy, except for
    states: it must be released before the slab changes, which would otherwise be copied whole. A
    slab holds only the last states; those of a block that is not the last come from the block.
    """
    end = start + block.tokens
    last = bool(block.states) and end == slab.end
    layers = slab.attending
    rows = [_rows(cache, start, end) for cache in layers]
    return attrs.evolve(
        block,
        keys=tuple(c.keys[0, :, part, :] for c, part in zip(layers, rows, strict=True)),
        values=tuple(c.values[0, :, part, :] for c, part in zip(layers, rows, strict=True)),
        states=tuple(_states(slab.states, end)) if last else block.states,
    )


def first_rows(block: SealedBlock, rows: int) -> SealedBlock:
    """The first rows of a block without states. Not a copy."""
    return SealedBlock(
        keys=tuple(array[:, :rows, :] for array in block.keys),
        values=tuple(array[:, :rows, :] for array in block.values),
    )


def pasted_in_part(slab: HeldSlab, block: SealedBlock, start: int, rows: int) -> SealedBlock:
    """
    A block whose first rows are those of a slab from ``start`` on, where they were copied to, and
    whose other rows are its own. So its digest is the block's if the copy and the rest are right.
    """
    part = pasted(slab, first_rows(block, rows), start)

    def joined_with(copied: tuple[mx.array, ...], whole: tuple[mx.array, ...]) -> list[mx.array]:
        both = zip(copied, whole, strict=True)
        return [mx.concatenate([one, other[:, rows:, :]], axis=1) for one, other in both]

    keys, values = joined_with(part.keys, block.keys), joined_with(part.values, block.values)
    mx.eval(keys, values)
    return SealedBlock(keys=tuple(keys), values=tuple(values))


def _rows(cache: Any, start: int, end: int) -> slice:
    """
    The rows of tokens in the arrays of a layer.

    Raises:
        EngineFault: they were dropped.
    """
    if not isinstance(cache, SinkCache):
        return slice(start, end)
    if start < cache.start:
        raise EngineFault(f"no tokens from {start}: the slab begins at {cache.start}")
    return slice(cache.row_of(start), cache.row_of(end))


def digest(block: SealedBlock) -> str:
    """
    A strong hash over shapes, types and bytes of a block's arrays. Their bytes are copied first,
    which takes less time than hashing them row by row where they are in a slab.
    """
    arrays = (*block.keys, *block.values, *block.states)
    header = "".join(f"{array.shape}{array.dtype}" for array in arrays)
    if block.state_tokens:
        header = f"{block.state_tokens} tokens, {len(block.states)} of states{header}"
    found = blake3(header.encode())
    if filled := [array for array in arrays if array.size]:
        octets: Any = joined(filled)
        found.update(np.asarray(memoryview(octets)).data)
    return found.hexdigest()


def joined(arrays: Sequence[mx.array]) -> mx.array:
    """The bytes of arrays in one array, one after the other; not evaluated."""
    return mx.concatenate([array.reshape(-1).view(mx.uint8) for array in arrays])


def row_digest(slab: HeldSlab, row: int) -> str:
    """A strong hash over the keys and values of one token in all layers. Modifies nothing."""
    layers = slab.attending
    rows = [(cache, _rows(cache, row, row + 1)) for cache in layers]
    return octets_digest(
        joined([array[..., part, :] for c, part in rows for array in (c.keys, c.values)])
    )


def octets_digest(octets: mx.array) -> str:
    """A strong hash over an array of bytes."""
    buffer: Any = octets
    return blake3(np.asarray(memoryview(buffer)).data).hexdigest()


def paste(slab: HeldSlab, blocks: Sequence[SealedBlock], start: int) -> int:
    """
    Copy blocks into a slab from ``start`` on, where it must end now. Modifies the slab, which then
    has the states of the last block.

    Returns:
        The position after the last token that the slab now holds.

    Raises:
        EngineFault: it ends elsewhere, or the last block carries no states although layers have
            some.
    """
    ends = list(accumulate((block.tokens for block in blocks), initial=start))
    end = ends[-1]
    places = sum(state.places for state in slab.states)
    if places != len(blocks[-1].states):
        raise EngineFault(f"the last block has {len(blocks[-1].states)} states, not {places}")
    if any(state.tokens != start for state in slab.states):
        raise EngineFault(f"blocks begin at {start}, but a state covers other tokens")
    for layer, cache in enumerate(slab.attending):
        if cache.offset != start:
            raise EngineFault(f"blocks begin at {start}, but a layer ends at {cache.offset}")
        if isinstance(cache, SinkCache):
            for block in blocks:
                cache.update_and_fetch(block.keys[layer][None], block.values[layer][None])
            continue
        for block, (first, last) in zip(blocks, pairwise(ends), strict=True):
            cache.keys[..., first:last, :] = block.keys[layer][None]
            cache.values[..., first:last, :] = block.values[layer][None]
        cache.offset = end
    states = iter(blocks[-1].states)
    for state in slab.states:
        state.put(list(islice(states, state.places)), end)
    mx.eval(slab.arrays())
    return end


class BlockStore:
    """The sealed blocks in memory, by key. The journal decides which of them leave."""

    def __init__(self) -> None:
        self._blocks: dict[str, SealedBlock] = {}
        self._bytes = 0

    def put(self, key: str, block: SealedBlock) -> None:
        """Keep a block. A block that is already there under this key stays as it is."""
        if key not in self._blocks:
            self._blocks[key] = block
            self._bytes += block.nbytes

    def __contains__(self, key: str) -> bool:
        return key in self._blocks

    def get(self, key: str) -> SealedBlock:
        """
        The block with a key.

        Raises:
            EngineFault: it is not in memory.
        """
        block = self._blocks.get(key)
        if block is None:
            raise EngineFault(f"block {key} is not in memory")
        return block

    def evict(self, key: str) -> SealedBlock:
        """
        Drop a block.

        Raises:
            EngineFault: it is not in memory.
        """
        block = self.get(key)
        del self._blocks[key]
        self._bytes -= block.nbytes
        return block

    def measure(self) -> tuple[int, int]:
        """(blocks in memory, their bytes), by the store's own count."""
        return len(self._blocks), self._bytes
