"""
The KV cache of a session: a slab of arrays that are the model's own cache.

``SlabCache`` is mlx-lm's ``KVCache`` over arrays of a fixed capacity that are there before the
first token. It knows the first token that it holds, and it refuses to grow: mlx-lm would enlarge
the arrays and nobody would have counted them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import mlx.core as mx
from mlx_lm.models.cache import CacheList, KVCache

from cairn.engine.reports import EngineFault
from cairn.journal.events import Coverage


class SlabCache(KVCache):  # type: ignore[misc]  # mlx-lm has no types
    """
    One layer's keys and values, ``(1, kv_heads, capacity, head_dim)`` each.

    Attributes:
        start: the first token that is held; 0 for full attention.
        offset: one past the last token that is held.
    """

    def __init__(self, keys: mx.array, values: mx.array) -> None:
        super().__init__()
        self.keys = keys
        self.values = values
        self.start = 0

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """
        Add rows and give all rows so far. Changes the arrays in place.

        Raises:
            EngineFault: the rows do not fit.
        """
        capacity = self.keys.shape[2]
        if self.offset + keys.shape[2] > capacity:
            raise EngineFault(
                f"{keys.shape[2]} rows at {self.offset} do not fit a slab of {capacity} tokens"
            )
        added: tuple[mx.array, mx.array] = super().update_and_fetch(keys, values)
        return added


@attrs.frozen(kw_only=True)
class LayerShape:
    """
    What one layer keeps for a token.
    """

    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: mx.Dtype

    @property
    def token_bytes(self) -> int:
        """
        Bytes of one token's keys and values.
        """
        size: int = self.dtype.size
        return self.kv_heads * (self.key_dim + self.value_dim) * size


@attrs.define(kw_only=True)
class HeldSlab:
    """
    A slab in use: one cache for each layer.

    Attributes:
        fixed: whether its arrays have been there since it was opened. Other caches are mlx-lm's own
            and grow as they will.
        ran: rows that passes have put in, for models none of whose layers counts its tokens.
    """

    id: int
    capacity_tokens: int
    caches: list[Any]
    fixed: bool = True
    ran: int = 0

    @property
    def nbytes(self) -> int:
        """
        The size of its fixed arrays, as they are.
        """
        if not self.fixed:
            return 0
        return sum(cache.keys.nbytes + cache.values.nbytes for cache in self.caches)

    @property
    def end(self) -> int:
        """
        One past the last token, by the first layer that counts its tokens.
        """
        spans = self._spans()
        return spans[0][1] if spans else self.ran

    def arrays(self) -> list[Any]:
        """
        All that is to be evaluated after a pass.
        """
        if not self.fixed:
            return [layer.state for layer in flat(self.caches)]
        return [array for cache in self.caches for array in (cache.keys, cache.values)]

    def coverage(self) -> Coverage:
        """
        What each layer that counts its tokens holds, equal neighbours counted together.
        """
        return runs(self._spans())

    def _spans(self) -> list[tuple[int, int]]:
        layers = (layer for layer in flat(self.caches) if counts_tokens(layer))
        return [(getattr(layer, "start", 0), layer.offset) for layer in layers]


def flat(caches: Sequence[Any]) -> list[Any]:
    """
    The caches of all layers, those that a layer keeps together taken apart.
    """
    found: list[Any] = []
    for cache in caches:
        found.extend(flat(cache.caches) if isinstance(cache, CacheList) else [cache])
    return found


def counts_tokens(cache: Any) -> bool:
    """
    Whether a layer's cache knows how many tokens it covers; a recurrent state does not.
    """
    return isinstance(getattr(cache, "offset", None), int)


def runs(spans: Sequence[tuple[int, int]]) -> Coverage:
    """
    Spans of layers, run-length encoded.
    """
    found: list[tuple[int, int, int]] = []
    for start, end in spans:
        if found and found[-1][1:] == (start, end):
            found[-1] = (found[-1][0] + 1, start, end)
        else:
            found.append((1, start, end))
    return tuple(found)


class SlabPool:
    """
    Opens and closes slabs, and measures what is held.
    """

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        *,
        own_classes: bool,
        growing: Callable[[], list[Any]],
    ) -> None:
        """
        Args:
            shapes: of each layer; empty where the model's caches grow as they will.
            own_classes: False to use mlx-lm's ``KVCache`` over the same arrays.
            growing: makes the model's own caches.
        """
        self._shapes = tuple(shapes)
        self._growing = growing
        self._own = own_classes
        self._held: dict[int, HeldSlab] = {}
        self._opened = 0

    def slab_bytes(self, capacity_tokens: int) -> int:
        """
        The size of a slab of that capacity.
        """
        return capacity_tokens * sum(shape.token_bytes for shape in self._shapes)

    def open(self, capacity_tokens: int) -> HeldSlab:
        """
        Allocate a slab.
        """
        self._opened += 1
        if not self._shapes:
            caches = self._growing()
        else:
            caches = [self._layer(shape, capacity_tokens) for shape in self._shapes]
        slab = HeldSlab(
            id=self._opened,
            capacity_tokens=capacity_tokens,
            caches=caches,
            fixed=bool(self._shapes),
        )
        if slab.fixed:
            mx.eval(slab.arrays())
        self._held[slab.id] = slab
        return slab

    def close(self, slab_id: int) -> HeldSlab:
        """
        Give a slab back.

        Raises:
            EngineFault: it is not held.
        """
        slab = self._held.pop(slab_id, None)
        if slab is None:
            raise EngineFault(f"slab {slab_id} is released but not held")
        return slab

    def get(self, slab_id: int) -> HeldSlab:
        """
        The slab of that id.

        Raises:
            EngineFault: it is not held.
        """
        slab = self._held.get(slab_id)
        if slab is None:
            raise EngineFault(f"slab {slab_id} is not held")
        return slab

    def measure(self) -> tuple[int, int]:
        """
        (slabs held, bytes of their arrays), counted anew.
        """
        return len(self._held), sum(slab.nbytes for slab in self._held.values())

    def _layer(self, shape: LayerShape, capacity: int) -> Any:
        keys = mx.zeros((1, shape.kv_heads, capacity, shape.key_dim), shape.dtype)
        values = mx.zeros((1, shape.kv_heads, capacity, shape.value_dim), shape.dtype)
        if self._own:
            return SlabCache(keys, values)
        cache = KVCache()
        cache.keys, cache.values = keys, values
        return cache
