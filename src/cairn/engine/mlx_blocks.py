"""
Sealed blocks in memory: copies of a full chunk of canonical KV, and their digests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import mlx.core as mx
from blake3 import blake3

from cairn.engine.mlx_cache import HeldSlab, SinkCache
from cairn.engine.reports import EngineFault


@attrs.frozen(kw_only=True)
class SealedBlock:
    """
    Keys and values of one chunk for all layers, ``(kv_heads, C, head_dim)`` each.
    """

    keys: tuple[mx.array, ...]
    values: tuple[mx.array, ...]

    @property
    def nbytes(self) -> int:
        """
        The size of its arrays.
        """
        return sum(array.nbytes for array in (*self.keys, *self.values))


def cut(slab: HeldSlab, start: int, end: int) -> SealedBlock:
    """
    Copy the rows ``[start, end)`` of all layers out of a slab. Does not change the slab.

    The copies are evaluated before this returns: a slice that is still pending would make the
    slab's next update copy the whole slab.
    """
    rows = [_rows(cache, start, end) for cache in slab.caches]
    block = SealedBlock(
        keys=tuple(
            mx.contiguous(c.keys[0, :, kept, :]) for c, kept in zip(slab.caches, rows, strict=True)
        ),
        values=tuple(
            mx.contiguous(c.values[0, :, kept, :])
            for c, kept in zip(slab.caches, rows, strict=True)
        ),
    )
    mx.eval(block.keys, block.values)
    return block


def _rows(cache: Any, start: int, end: int) -> slice:
    """
    Where tokens lie in the arrays of a layer.

    Raises:
        EngineFault: they were let go.
    """
    if not isinstance(cache, SinkCache):
        return slice(start, end)
    if start < cache.start:
        raise EngineFault(f"tokens from {start} on of a slab that begins at {cache.start}")
    return slice(cache.row_of(start), cache.row_of(end))


def digest(block: SealedBlock) -> str:
    """
    A strong hash over shapes, types and bytes of a block's arrays.
    """
    found = blake3()
    for array in (*block.keys, *block.values):
        found.update(f"{array.shape}{array.dtype}".encode())
        # numpy knows no bfloat16; bytes are bytes.
        if array.size:
            octets: Any = array.view(mx.uint8)
            found.update(memoryview(octets).cast("B"))
    return found.hexdigest()


def paste(slab: HeldSlab, blocks: Sequence[SealedBlock], start: int) -> int:
    """
    Copy blocks into a slab from ``start`` on, where it must end now. Changes the slab.

    Returns:
        One past the last token that the slab holds now.
    """
    end = start
    for layer, cache in enumerate(slab.caches):
        if cache.offset != start:
            raise EngineFault(f"blocks at {start} on a layer that ends at {cache.offset}")
        if isinstance(cache, SinkCache):
            for block in blocks:
                cache.update_and_fetch(block.keys[layer][None], block.values[layer][None])
            end = cache.offset
            continue
        keys = mx.concatenate([block.keys[layer] for block in blocks], axis=1)
        values = mx.concatenate([block.values[layer] for block in blocks], axis=1)
        end = start + keys.shape[1]
        cache.keys[..., start:end, :] = keys[None]
        cache.values[..., start:end, :] = values[None]
        cache.offset = end
    mx.eval(slab.arrays())
    return end


class BlockStore:
    """
    The sealed blocks that are in memory, by key. Which of them leave is decided by the sequencer.
    """

    def __init__(self) -> None:
        self._blocks: dict[str, SealedBlock] = {}
        self._bytes = 0

    def put(self, key: str, block: SealedBlock) -> None:
        """
        Keep a block. One that is there under this key stays as it is.
        """
        if key not in self._blocks:
            self._blocks[key] = block
            self._bytes += block.nbytes

    def __contains__(self, key: str) -> bool:
        return key in self._blocks

    def get(self, key: str) -> SealedBlock:
        """
        The block of that key.

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
        """
        (blocks in memory, their bytes), by the store's own count.
        """
        return len(self._blocks), self._bytes
