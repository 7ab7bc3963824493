"""
The KV cache of a session: a slab of arrays that the model uses as its own cache.

``SlabCache`` is mlx-lm's ``KVCache`` over arrays of a fixed capacity that exist before the first
token. It knows the first token that it holds, and it refuses to grow: mlx-lm would enlarge the
arrays without anything counting them.

``WindowCache`` is for a layer that attends to a window. It holds all tokens too, and shows the
model only the window. What a pass sees therefore follows from its position, whatever the cache held
before, and a layer with a window can be cut back, shared and sealed like any other.

A layer with a recurrent state has a ``StateCache`` (``cairn.engine.mlx.state``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import attrs
import mlx.core as mx
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import CacheList, ChunkedKVCache, KVCache, RotatingKVCache

from cairn.engine.errors import CannotTrim, EngineFault
from cairn.engine.growth import Growth
from cairn.engine.mlx.state import StateCache, StateShape
from cairn.journal.cache.checkpoints import STATES_A_SLAB
from cairn.journal.cache.windows import SinkWindow
from cairn.journal.events import Coverage


class SlabCache(KVCache):  # type: ignore[misc]  # mlx-lm has no types
    """
    One layer's keys and values, ``(1, kv_heads, capacity, head_dim)`` each.

    Attributes:
        start: the first position that is held; 0 for full attention.
        offset: the position after the last token that is held.
        stale: before this position, rows after ``offset`` may be those of tokens that were cut off.
    """

    def __init__(self, keys: mx.array, values: mx.array) -> None:
        super().__init__()
        self.keys = keys
        self.values = values
        self.start = 0
        self.stale = 0

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """
        Add rows and return all rows so far. Modifies the arrays in place.

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

    def update_and_fetch_each(
        self, keys: mx.array, values: mx.array
    ) -> list[tuple[mx.array, mx.array]]:
        """
        Add rows, and return for each of them what a pass of that row alone would be shown.
        Modifies the arrays in place.

        Raises:
            EngineFault: the rows do not fit.
        """
        SlabCache.update_and_fetch(self, keys, values)
        end: int = self.offset
        shown = []
        for last in range(end - keys.shape[2], end):
            rows = slice(self.first_shown(last), last + 1)
            shown.append((self.keys[..., rows, :], self.values[..., rows, :]))
        return shown

    def first_shown(self, place: int) -> int:
        """The first position that the token at a position attends to."""
        return 0

    def add(self, keys: mx.array, values: mx.array, segment: int) -> None:
        """
        Add rows. Sets rows that were cut off to zero up to the end of the last segment, which
        attention masks: even with no weight, a value that is not finite would spoil the sum.
        Modifies the arrays in place.

        Args:
            keys: (1, kv_heads, rows, head_dim).
            values: likewise.
            segment: C.

        Raises:
            EngineFault: the rows do not fit.
        """
        SlabCache.update_and_fetch(self, keys, values)
        end: int = self.offset
        until = min(-(-end // segment) * segment, self.stale)
        if end < until:
            self.keys[..., end:until, :] = 0
            self.values[..., end:until, :] = 0

    def trim(self, n: int) -> int:
        """Cut off the last tokens. Their rows stay in the arrays."""
        self.stale = max(self.stale, self.offset)
        cut: int = super().trim(n)
        return cut


class WindowCache(SlabCache):
    """
    One layer's keys and values, where a token attends only to the last ``window`` tokens, itself
    included.

    Attributes:
        window: the tokens that a token attends to.
    """

    def __init__(self, keys: mx.array, values: mx.array, window: int) -> None:
        super().__init__(keys, values)
        self.window = window

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """
        Add rows and return those that any of them attends to, the oldest first. Modifies the arrays
        in place.

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
            window_size: the model's window, if it differs from what it reported before.

        Raises:
            EngineFault: it is longer: the layers of the model contradict each other.
        """
        before, window = self._before(), window_size or self.window
        if window > self.window:
            raise EngineFault(f"a mask over {window} tokens for a window of {self.window}")
        if before + rows > window or (return_array and rows > 1):
            mask: mx.array = create_causal_mask(rows, before, window_size=window)
            return mask
        return "causal" if rows > 1 else None

    def first_shown(self, place: int) -> int:
        """The first position that the token at a position attends to."""
        return max(0, place - self.window + 1)

    def _before(self) -> int:
        """How many earlier tokens the next one may attend to."""
        offset: int = self.offset
        return min(offset, self.window - 1)


class SinkCache(SlabCache):
    """
    One layer's keys and values under ``SinkWindow``: the sinks, followed by a window of the last
    tokens and as many before it as there is room for. What a pass is shown follows from its
    position.

    Attributes:
        start: the first position after the sinks that is held; 0 if nothing was dropped.
    """

    def __init__(
        self, keys: mx.array, values: mx.array, policy: SinkWindow, capacity_tokens: int
    ) -> None:
        """
        Args:
            keys: (1, kv_heads, rows, head_dim), with the rows of the policy, or of the capacity if
                that is less.
            capacity_tokens: the longest sequence.
        """
        super().__init__(keys, values)
        self.offset: int = 0
        self._policy = policy
        self._capacity = capacity_tokens

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """
        Add rows and return those that any of them attends to, the oldest first. Drops what there is
        no room for. Modifies the arrays in place.

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
            raise EngineFault(f"{keys.shape[2]} rows at {place} do not fit after their window")
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
            raise EngineFault(f"the model has a window of its own, of {window_size} tokens")
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
        Cut off the last tokens.

        Raises:
            CannotTrim: what the next pass would attend to was dropped. Nothing has changed.
        """
        end = self.offset - n
        if end and not self._policy.reaches(self.start, end):
            raise CannotTrim(f"a slab that begins at {self.start} cannot be cut back to {end}")
        self.offset = end
        self.start = self.start if end else 0
        return n

    def row_of(self, token: int) -> int:
        """The row of the arrays that a token has, or would have."""
        return token - self.start + self._policy.sinks if self.start else token

    def resume(self, place: int) -> None:
        """
        Continue after the sinks with the tokens from ``place`` on; those between are left out.

        Raises:
            EngineFault: the sinks are not there.
        """
        if self.offset < self._policy.sinks or place < self.offset:
            raise EngineFault(f"a slab that ends at {self.offset} cannot continue at {place}")
        self.start = self.offset = place

    def let_go(self, start: int) -> None:
        """Drop all tokens between the sinks and a position, and move the rest up to the sinks."""
        if start == self.start:
            return
        remaining = slice(self.row_of(start), self.row_of(self.offset))
        sinks = self._policy.sinks
        rows = slice(sinks, sinks + remaining.stop - remaining.start)
        self.keys[..., rows, :] = mx.contiguous(self.keys[..., remaining, :])
        self.values[..., rows, :] = mx.contiguous(self.values[..., remaining, :])
        self.start = start

    def _shown(self, array: mx.array, place: int) -> mx.array:
        """
        The rows that a pass at ``place`` attends to, in an array whose shape follows from the
        position alone.
        """
        first, end = self._policy.first(place), self.row_of(self.offset)
        if first == self._policy.sinks:  # no gap after the sinks
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
        """The keys and values of one token, in bytes."""
        size: int = self.dtype.size
        return self.kv_heads * (self.key_dim + self.value_dim) * size

    @property
    def state_bytes(self) -> int:
        """What it keeps independent of the number of tokens: nothing."""
        return 0

    @property
    def dtypes(self) -> tuple[mx.Dtype, ...]:
        """The dtypes of its arrays."""
        return (self.dtype,)


AnyShape = LayerShape | StateShape


@attrs.define(kw_only=True)
class HeldSlab:
    """
    A slab in use: one cache for each layer, in the form that the model takes.

    Attributes:
        layers: the caches, with lists of several for one layer flattened.
        fixed: whether its arrays exist from the start. Other caches are mlx-lm's own and grow.
        set_apart_bytes: how much growing caches may take.
        ran: the rows that passes have added, for models none of whose layers counts its tokens.
    """

    id: int
    capacity_tokens: int
    caches: list[Any]
    fixed: bool = True
    set_apart_bytes: int = 0
    ran: int = 0
    layers: list[Any] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.layers = flat(self.caches)

    @property
    def states(self) -> list[StateCache]:
        """The layers that have a recurrent state and can be cut back."""
        return [layer for layer in self.layers if isinstance(layer, StateCache)]

    @property
    def attending(self) -> list[Any]:
        """The layers that keep keys and values."""
        return [layer for layer in self.layers if not isinstance(layer, StateCache)]

    def passed(self, rows: int) -> None:
        """
        Count the rows of a pass. To be called before its arrays are evaluated.

        Raises:
            EngineFault: it did not leave a state in every layer that has one.
        """
        self.ran += rows
        for layer in self.states:
            layer.passed(rows)

    def keep_states(self) -> None:
        """Save the states as they are now, to be cut back to."""
        for layer in self.states:
            layer.keep()

    def trim(self, end: int) -> None:
        """
        Cut all layers back to ``[0, end)``.

        Raises:
            CannotTrim: KV or a state that is needed at the end is gone. Nothing has changed.
        """
        if not all(layer.can_be_cut_back(end) for layer in self.states):
            raise CannotTrim(f"no state of {end} tokens was kept")
        for layer in self.attending:
            layer.trim(layer.offset - end)
        for layer in self.states:
            layer.cut_back(end)

    def compact(self) -> None:
        """
        Have growing arrays release the larger arrays that they were cut from. To be called after a
        prefill pass was evaluated; a decode pass leaves only one row more.
        """
        if self.fixed:
            return
        slices = [layer for layer in self.layers if type(layer) not in _WHOLE]
        for layer in slices:
            vars(layer).update(tree_map(_cut_loose, dict(vars(layer))))
        mx.eval([array for layer in slices for array in _arrays(layer)])

    def stay_within(self) -> None:
        """
        Check that growing arrays are within what was reserved for them.

        Raises:
            EngineFault: they are larger.
        """
        if not self.fixed and (live := self.live_bytes) > self.set_apart_bytes:
            raise EngineFault(
                f"the caches of {self.end} tokens take {live} bytes, but only "
                f"{self.set_apart_bytes} were reserved for {self.capacity_tokens} tokens"
            )

    @property
    def nbytes(self) -> int:
        """
        The size of its fixed arrays. For growing ones, what was reserved for them, or what they
        take if that is more.
        """
        if not self.fixed:
            return max(self.set_apart_bytes, self.live_bytes)
        return sum(layer.nbytes for layer in self.layers)

    @property
    def live_bytes(self) -> int:
        """The size of its arrays at this moment, growing ones included."""
        if self.fixed:
            return self.nbytes
        return sum(bytes_of(layer) for layer in self.layers)

    @property
    def end(self) -> int:
        """The position after the last token, by the first layer that counts its tokens."""
        spans = self._spans()
        return spans[0][1] if spans else self.ran

    def arrays(self) -> list[Any]:
        """All arrays that must be evaluated after a pass."""
        if not self.fixed:
            return [layer.state for layer in self.layers]
        held = [array for layer in self.attending for array in (layer.keys, layer.values)]
        return held + [array for layer in self.states for array in layer.arrays]

    def coverage(self) -> Coverage:
        """What each layer that counts its tokens holds, run-length encoded."""
        return runs(self._spans())

    def _spans(self) -> list[tuple[int, int]]:
        layers = (layer for layer in self.layers if counts_tokens(layer))
        return [(getattr(layer, "start", 0), _end(layer)) for layer in layers]


_WHOLE = (KVCache, RotatingKVCache, ChunkedKVCache)
"""Classes whose arrays after a pass are not slices of larger ones."""


def _cut_loose(value: Any) -> Any:
    return mx.contiguous(value, allow_col_major=True) if isinstance(value, mx.array) else value


def bytes_of(cache: Any) -> int:
    """The size of a cache's arrays at this moment, whatever its class names them."""
    return sum(array.nbytes for array in _arrays(cache))


def _arrays(cache: Any) -> list[mx.array]:
    held: Any = tree_flatten(vars(cache))
    return [array for _, array in held if isinstance(array, mx.array)]


def flat(caches: Sequence[Any]) -> list[Any]:
    """The caches of all layers, with lists of several for one layer flattened."""
    found: list[Any] = []
    for cache in caches:
        found.extend(flat(cache.caches) if isinstance(cache, CacheList) else [cache])
    return found


def counts_tokens(cache: Any) -> bool:
    """
    Whether a layer's cache knows how many tokens it covers. mlx-lm's own for a recurrent state does
    not.
    """
    return isinstance(cache, StateCache) or isinstance(getattr(cache, "offset", None), int)


def _end(cache: Any) -> int:
    end: int = cache.tokens if isinstance(cache, StateCache) else cache.offset
    return end


def runs(spans: Sequence[tuple[int, int]]) -> Coverage:
    """Spans of layers, run-length encoded."""
    found: list[tuple[int, int, int]] = []
    for start, end in spans:
        if found and found[-1][1:] == (start, end):
            found[-1] = (found[-1][0] + 1, start, end)
        else:
            found.append((1, start, end))
    return tuple(found)


class SlabPool:
    """Opens and closes slabs, and measures what is held."""

    def __init__(
        self,
        shapes: Sequence[AnyShape],
        *,
        own_classes: bool,
        growing: Callable[[], list[Any]],
        growth: Growth | None = None,
        policy: SinkWindow | None = None,
        together: Sequence[int] = (),
    ) -> None:
        """
        Args:
            shapes: of each layer; empty if the model's caches grow.
            own_classes: False to use mlx-lm's ``KVCache`` over the same arrays; only for layers
                without a window.
            growing: makes the model's own caches.
            growth: how much those take; required without shapes.
            policy: what a token attends to; None for what the layers define.
            together: how many of the shapes each layer of the model keeps in one list, 0 for a
                layer that keeps one without a list; empty if all do.
        """
        if not shapes and growth is None:
            raise ValueError("the memory of the model's own caches was not measured")
        self._growth = growth
        self._together = tuple(together)
        self._policy = policy
        self._shapes = tuple(shapes)
        self._growing = growing
        self._own = own_classes
        self._held: dict[int, HeldSlab] = {}
        self._opened = 0

    def slab_bytes(self, capacity_tokens: int) -> int:
        """The size of a slab with a capacity."""
        if self._growth is not None:
            return self._growth.bytes_at(capacity_tokens)
        states = STATES_A_SLAB * sum(shape.state_bytes for shape in self._shapes)
        rows = self._rows(capacity_tokens)
        return rows * sum(shape.token_bytes for shape in self._shapes) + states

    def open(self, capacity_tokens: int) -> HeldSlab:
        """Allocate a slab."""
        self._opened += 1
        if not self._shapes:
            caches = self._growing()
        else:
            caches = self._lists([self._layer(shape, capacity_tokens) for shape in self._shapes])
        slab = HeldSlab(
            id=self._opened,
            capacity_tokens=capacity_tokens,
            caches=caches,
            fixed=bool(self._shapes),
            set_apart_bytes=0 if self._growth is None else self._growth.bytes_at(capacity_tokens),
        )
        if slab.fixed:
            mx.eval(slab.arrays())
        self._held[slab.id] = slab
        return slab

    def close(self, slab_id: int) -> HeldSlab:
        """
        Release a slab.

        Raises:
            EngineFault: it is not open.
        """
        slab = self._held.pop(slab_id, None)
        if slab is None:
            raise EngineFault(f"slab {slab_id} is released but not held")
        return slab

    def get(self, slab_id: int) -> HeldSlab:
        """
        The slab with a number.

        Raises:
            EngineFault: it is not open.
        """
        slab = self._held.get(slab_id)
        if slab is None:
            raise EngineFault(f"slab {slab_id} is not held")
        return slab

    def measure(self) -> tuple[int, int]:
        """
        (open slabs, their bytes), counted again at each call: their arrays, and what is reserved
        for those that grow.
        """
        return len(self._held), sum(slab.nbytes for slab in self._held.values())

    def live_bytes(self) -> int:
        """The size of the arrays of all slabs at this moment, counted again at each call."""
        return sum(slab.live_bytes for slab in self._held.values())

    def _rows(self, capacity: int) -> int:
        return capacity if self._policy is None else min(capacity, self._policy.rows)

    def _lists(self, layers: list[Any]) -> list[Any]:
        """The caches in the form that the model takes."""
        left = iter(layers)
        if not self._together:
            return layers
        return [
            CacheList(*islice(left, together)) if together else next(left)
            for together in self._together
        ]

    def _layer(self, shape: AnyShape, capacity: int) -> Any:
        if isinstance(shape, StateShape):
            return StateCache(shape)
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
