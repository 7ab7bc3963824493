"""
The KV cache of a session: a slab of arrays that are the model's own cache.

``SlabCache`` is mlx-lm's ``KVCache`` over arrays of a fixed capacity that are there before the
first token. It knows the first token that it holds, and it refuses to grow: mlx-lm would enlarge
the arrays and nobody would have counted them.

``WindowCache`` is one for a layer that attends to a window. It too holds all tokens, and shows the
model the window alone. So what a pass sees follows from its place, whatever was held before, and a
layer with a window can be cut back, shared and sealed like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import CacheList, KVCache

from cairn.engine.reports import EngineFault, Forgotten
from cairn.journal.events import Coverage
from cairn.journal.windows import SinkWindow


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


class WindowCache(SlabCache):
    """
    One layer's keys and values, where a token attends to itself and so many less one before it.

    Attributes:
        window: the tokens that a token attends to.
    """

    def __init__(self, keys: mx.array, values: mx.array, window: int) -> None:
        super().__init__(keys, values)
        self.window = window

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """
        Add rows and give those that any of them attends to, the oldest first. Changes the arrays in
        place.

        Raises:
            EngineFault: the rows do not fit.
        """
        first = self.offset - self._before()
        all_keys, all_values = super().update_and_fetch(keys, values)
        return all_keys[..., first:, :], all_values[..., first:, :]

    def make_mask(
        self, rows: int, window_size: int | None = None, return_array: bool = False
    ) -> mx.array | str | None:
        """
        Which of these each of the next rows attends to; None for all.

        Args:
            window_size: where the model wants another window than it told before.

        Raises:
            EngineFault: it wants a longer one: its layers contradict each other.
        """
        before, window = self._before(), window_size or self.window
        if window > self.window:
            raise EngineFault(f"a mask over {window} tokens for a window of {self.window}")
        if before + rows > window or (return_array and rows > 1):
            mask: mx.array = create_causal_mask(rows, before, window_size=window)
            return mask
        return "causal" if rows > 1 else None

    def _before(self) -> int:
        """
        How many tokens before the next one it may attend to.
        """
        offset: int = self.offset
        return min(offset, self.window - 1)


class SinkCache(SlabCache):
    """
    One layer's keys and values under ``SinkWindow``: the sinks, and behind them a window of the
    last tokens with what else there is room for. A pass is shown sinks and window by its place.

    Attributes:
        start: the first token past the sinks that is held; 0 while none was let go.
    """

    def __init__(
        self, keys: mx.array, values: mx.array, policy: SinkWindow, capacity_tokens: int
    ) -> None:
        """
        Args:
            keys: (1, kv_heads, rows, head_dim), the rows being those of the policy, or of the
                capacity where that is less.
            capacity_tokens: the longest sequence.
        """
        super().__init__(keys, values)
        self.offset: int = 0
        self._policy = policy
        self._capacity = capacity_tokens

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """
        Add rows and give those that any of them attends to, the oldest first. Lets go what there is
        no room for. Changes the arrays in place.

        Raises:
            EngineFault: the rows do not fit.
        """
        place = self.offset
        end = place + keys.shape[2]
        if end > self._capacity:
            raise EngineFault(
                f"{keys.shape[2]} rows at {place} do not fit a slab of {self._capacity} tokens"
            )
        self.let_go(self._policy.start_after(self.start, place, end, self._capacity))
        if self.row_of(end) > self.keys.shape[2]:
            raise EngineFault(f"{keys.shape[2]} rows at {place} do not fit behind their window")
        self.keys[..., self.row_of(place) : self.row_of(end), :] = keys
        self.values[..., self.row_of(place) : self.row_of(end), :] = values
        self.offset = end
        return self._shown(self.keys, place), self._shown(self.values, place)

    def make_mask(
        self, rows: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        """
        Which of these each of the next rows attends to; None for all.

        Raises:
            EngineFault: the model has a window of its own.
        """
        if window_size is not None:
            raise EngineFault(f"a model's own window of {window_size} under a window by choice")
        if rows == 1:
            return None
        policy, place = self._policy, self.offset
        if place + rows <= policy.sinks + policy.window and not return_array:
            return "causal"
        query = mx.arange(place, place + rows)[:, None]
        first = policy.first(place)
        shown = mx.arange(first, place + rows)
        if first > policy.sinks:
            shown = mx.concatenate([mx.arange(policy.sinks), shown])
        else:
            shown = mx.arange(place + rows)
        near = (shown > query - policy.window) | (shown < policy.sinks)
        return (shown <= query) & near

    def trim(self, n: int) -> int:
        """
        Cut the last tokens off.

        Raises:
            Forgotten: what the next pass would attend to was let go. Nothing has changed.
        """
        end = self.offset - n
        if end and not self._policy.reaches(self.start, end):
            raise Forgotten(f"a slab that begins at {self.start} cannot be cut back to {end}")
        self.offset = end
        self.start = self.start if end else 0
        return n

    def row_of(self, token: int) -> int:
        """
        The row of the arrays that a token has, or would have.
        """
        return token - self.start + self._policy.sinks if self.start else token

    def resume(self, place: int) -> None:
        """
        Go on behind the sinks with the tokens from ``place`` on: all between them is left out.

        Raises:
            EngineFault: the sinks are not there.
        """
        if self.offset < self._policy.sinks or place < self.offset:
            raise EngineFault(f"a slab that ends at {self.offset} cannot go on at {place}")
        self.start = self.offset = place

    def let_go(self, start: int) -> None:
        """
        Have the window begin later: what it holds then moves up to the sinks.
        """
        if start == self.start:
            return
        kept = slice(self.row_of(start), self.row_of(self.offset))
        sinks = self._policy.sinks
        rows = slice(sinks, sinks + kept.stop - kept.start)
        self.keys[..., rows, :] = mx.contiguous(self.keys[..., kept, :])
        self.values[..., rows, :] = mx.contiguous(self.values[..., kept, :])
        self.start = start

    def _shown(self, array: mx.array, place: int) -> mx.array:
        """
        The rows that a pass at ``place`` attends to, in an array of a form that follows from the
        place alone.
        """
        first, end = self._policy.first(place), self.row_of(self.offset)
        if first == self._policy.sinks:  # nothing lies between
            return array[..., :end, :]
        window = array[..., self.row_of(first) : end, :]
        if not self._policy.sinks:
            return window
        return mx.concatenate([array[..., : self._policy.sinks, :], window], axis=2)


@attrs.frozen(kw_only=True)
class LayerShape:
    """
    What one layer keeps for a token.

    Attributes:
        window: the tokens that a token attends to; None for all.
    """

    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: mx.Dtype
    window: int | None = None

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
    def live_bytes(self) -> int:
        """
        The size of its arrays at this moment, also of those that grow.
        """
        if self.fixed:
            return self.nbytes
        held: Any = tree_flatten([vars(layer) for layer in flat(self.caches)])
        return sum(array.nbytes for _, array in held if isinstance(array, mx.array))

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
        policy: SinkWindow | None = None,
    ) -> None:
        """
        Args:
            shapes: of each layer; empty where the model's caches grow as they will.
            own_classes: False to use mlx-lm's ``KVCache`` over the same arrays; for layers without
                a window only.
            growing: makes the model's own caches.
            policy: what a token attends to; None for what the layers say.
        """
        self._policy = policy
        self._shapes = tuple(shapes)
        self._growing = growing
        self._own = own_classes
        self._held: dict[int, HeldSlab] = {}
        self._opened = 0

    def slab_bytes(self, capacity_tokens: int) -> int:
        """
        The size of a slab of that capacity.
        """
        return self._rows(capacity_tokens) * sum(shape.token_bytes for shape in self._shapes)

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

    def live_bytes(self) -> int:
        """
        Bytes of the arrays of all slabs at this moment, counted anew.
        """
        return sum(slab.live_bytes for slab in self._held.values())

    def _rows(self, capacity: int) -> int:
        return capacity if self._policy is None else min(capacity, self._policy.rows)

    def _layer(self, shape: LayerShape, capacity: int) -> Any:
        rows = self._rows(capacity)
        keys = mx.zeros((1, shape.kv_heads, rows, shape.key_dim), shape.dtype)
        values = mx.zeros((1, shape.kv_heads, rows, shape.value_dim), shape.dtype)
        if self._policy is not None:
            return SinkCache(keys, values, self._policy, capacity)
        if shape.window is not None:
            return WindowCache(keys, values, shape.window)
        if self._own:
            return SlabCache(keys, values)
        cache = KVCache()
        cache.keys, cache.values = keys, values
        return cache
