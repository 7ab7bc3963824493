"""
Prefill passes that may begin and end anywhere.

The bits of a row depend on the number of rows of its pass (``engine/row_class.py`` says which
passes agree) and on the number of keys that its attention adds up. So a pass has the rows of its
class, dummies included, and the query at position p attends to the keys up to the end of its
segment of C tokens, those after p masked. What is added up then follows from p alone.

``SegmentCache`` is what the model sees of a layer's slab in such a pass. It returns
``SegmentKeys``, which are no arrays: attention recognises them (``attention.py``), and a model
that uses its keys in any other way fails. Such a model has no row class, and its passes are those
of the canonical schedule.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import attrs
import mlx.core as mx
from mlx_lm.models.cache import KVCache

from cairn.engine.mlx.cache import SinkCache, SlabCache, WindowCache
from cairn.engine.mlx.state import StateCache
from cairn.engine.row_class import RowClass

MASKS_BYTES = 16 << 20
_POWERS = math.log2(math.e)


@attrs.frozen
class Cut:
    """
    A pass over the tokens ``[start, start + tokens)``.

    Attributes:
        front: the dummies before them.
        rows: all rows.
        again: whether the slab has the first of the tokens already, and keeps the row that it has.
    """

    row_class: RowClass
    start: int
    tokens: int
    front: int
    rows: int
    again: bool = False

    @property
    def held(self) -> int:
        """Where the slab ends before the pass."""
        return self.start + self.again


@attrs.frozen
class SegmentKeys:
    """
    The keys or the values of a pass: the whole array of the slab, ``(1, kv_heads, capacity,
    head_dim)``, and which rows the pass added. Not an array itself.
    """

    array: mx.array
    cut: Cut
    window: int | None


class SegmentCache(KVCache):  # type: ignore[misc]  # mlx-lm has no types
    """
    A layer's slab as a pass sees it. Writes the rows of tokens, and drops those of dummies.

    Attributes:
        first: what the pass computed for a token that the slab had already: keys and values,
            ``(1, kv_heads, 1, head_dim)`` each; empty if there is none.
    """

    def __init__(self, cache: SlabCache, cut: Cut) -> None:
        super().__init__()
        self._cache = cache
        self._cut = cut
        self._window: int | None = getattr(cache, "window", None)
        self.first: tuple[mx.array, ...] = ()

    @property
    def offset(self) -> int:
        """The position of the first row of the pass. Never negative, which some models need."""
        place: int = self._cache.offset - self._cut.again - self._cut.front
        return place

    @offset.setter
    def offset(self, value: int) -> None:
        if value != 0:  # KVCache.__init__ sets 0
            raise AttributeError("the position of a pass is that of its slab, and cannot be set")

    def make_mask(
        self, rows: int, return_array: bool = False, window_size: int | None = None
    ) -> None:
        """
        No mask: attention makes its own for each segment.

        Raises:
            TypeError: the model's window differs from that of the slab.
        """
        if window_size is not None and window_size != self._window:
            raise TypeError(
                f"a window of {window_size} over a cache that shows {self._window or 'all'}"
            )

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[SegmentKeys, SegmentKeys]:
        """
        Add the rows of the pass's tokens to the slab. Modifies its arrays in place.

        Args:
            keys: (1, kv_heads, rows, head_dim).
            values: likewise.

        Raises:
            EngineFault: the rows do not fit.
            TypeError: the model has another number of rows than the pass.
        """
        cut = self._cut
        if keys.shape[2] != cut.rows or self._cache.offset != cut.held:
            raise TypeError(
                f"{keys.shape[2]} rows at {self._cache.offset} in a pass of {cut.rows} at "
                f"{cut.held}"
            )
        if cut.again:
            first = slice(cut.front, cut.front + 1)
            self.first = keys[:, :, first], values[:, :, first]
        live = slice(cut.front + cut.again, cut.front + cut.tokens)
        self._cache.add(keys[:, :, live], values[:, :, live], cut.row_class.segment)
        return (
            SegmentKeys(self._cache.keys, cut, self._window),
            SegmentKeys(self._cache.values, cut, self._window),
        )


def unsupported(caches: Sequence[Any]) -> str | None:
    """Why passes over these caches cannot be cut anywhere; None if they can."""
    other = {type(cache).__name__ for cache in caches} - {SlabCache.__name__, WindowCache.__name__}
    found = sorted(_IN_WORDS.get(name, name) for name in other)
    return f"it keeps {' and '.join(found)}" if found else None


_IN_WORDS = {
    SinkCache.__name__: "a window of tokens (--kv-policy sink_window)",
    StateCache.__name__: "states",
    KVCache.__name__: "mlx-lm's own caches (--kv-cache mlx-lm)",
}


def segment_caches(caches: Sequence[SlabCache], cut: Cut) -> list[SegmentCache]:
    """The view of each layer in a pass."""
    return [SegmentCache(cache, cut) for cache in caches]


def attend(
    plain: Callable[..., mx.array],
    queries: mx.array,
    keys: SegmentKeys,
    values: Any,
    *,
    scale: float,
    mask: Any,
    **kwargs: Any,
) -> mx.array:
    """
    Attention of a pass, segment by segment.

    Args:
        plain: mlx-lm's attention.
        queries: (1, heads, rows, head_dim).
        kwargs: what the model passes on, such as ``sinks``.

    Returns:
        (1, heads, rows, head_dim); zeros for dummies.

    Raises:
        TypeError: the model has a mask of its own, or uses keys and values in another way.
    """
    if mask is not None:
        raise TypeError("the model made a mask of its own for a pass over segments")
    if not isinstance(values, SegmentKeys) or queries.shape[:1] + queries.shape[2:3] != (
        1,
        keys.cut.rows,
    ):
        raise TypeError("the model changed the queries or the values of a pass over segments")
    cut, segment = keys.cut, keys.cut.row_class.segment
    _, heads, _, head_dim = queries.shape
    value_dim = values.array.shape[3]
    more = {name: value for name, value in kwargs.items() if value is not None}
    # A GPU has a kernel for all of it.
    in_steps = not more and mx.default_device().type == mx.DeviceType.cpu
    together = heads // keys.array.shape[1] if in_steps else 1
    parts: list[mx.array] = []
    if cut.front:
        parts.append(mx.zeros((1, heads, cut.front, value_dim), queries.dtype))
    position, end = cut.start, cut.start + cut.tokens
    while position < end:
        until = keys_until(position, end, segment)
        begin = 0
        if keys.window is not None:  # of the first query of the segment, so that all have the same
            begin = max(0, (until - segment - keys.window + 1) // segment * segment)
        live = min(end, until) - position
        place = position - (until - segment)
        width = min(head_dim, value_dim) * together
        before, count = cut.row_class.queries(place, live, until - begin, width)
        row = cut.front + position - cut.start
        own = queries[:, :, row : row + live]
        shown = _keys(keys.array, begin, until), _keys(values.array, begin, until)
        mask_at = partial(mask_of, segment=segment, window=keys.window, dtype=own.dtype)
        if in_steps:
            # Without a window all earlier keys are seen, and the mask is that of the segment alone.
            covers = until - begin if keys.window is not None else min(segment, until - begin)
            mask = mask_at(place, live, covers)
            parts.append(_in_steps(own, *shown, scale, mask, before, count))
        else:
            attended = plain(
                _padded(own, before, count),
                *shown,
                cache=None,
                scale=scale,
                mask=mask_at(place - before, count, until - begin),
                **more,
            )
            parts.append(attended[:, :, before : before + live])
        position += live
    after = cut.rows - cut.front - cut.tokens
    if after:
        parts.append(mx.zeros((1, heads, after, value_dim), queries.dtype))
    return mx.concatenate(parts, axis=2) if len(parts) > 1 else parts[0]


def _in_steps(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    mask: mx.array,
    before: int,
    count: int,
) -> mx.array:
    """
    Attention in single steps, of which only the products run over dummies too: on a CPU the softmax
    takes most of the time. The heads that share keys are rows of one product.

    In float32 the weights are powers of two of scores that were scaled for that, which takes half
    the time of MLX's softmax, and they are divided by their sum after the second product.

    Args:
        queries: (1, heads, tokens, head_dim).
        keys, values: (1, kv_heads, keys, head_dim).
        mask: (tokens, last keys), added to the scores of the last keys.
        before, count: the dummies before the queries, and all queries of each head.

    Returns:
        (1, heads, tokens, head_dim).
    """
    _, heads, tokens, _ = queries.shape
    kv_heads, among = keys.shape[1], slice(before, before + tokens)
    together = heads // kv_heads
    in_powers = queries.dtype == mx.float32
    factor = scale * _POWERS if in_powers else scale
    rows = _padded(queries * factor, before, count).reshape(1, kv_heads, together * count, -1)
    scores = (rows @ keys.swapaxes(-1, -2)).reshape(1, heads, count, -1)[:, :, among]
    seen = scores.shape[-1] - mask.shape[-1]
    scores = mx.concatenate([scores[..., :seen], scores[..., seen:] + mask], axis=-1)
    if in_powers:
        weights = mx.power(2.0, scores - mx.max(scores, axis=-1, keepdims=True))
    else:
        weights = mx.softmax(scores, axis=-1, precise=True)
    all_weights = _padded(weights, before, count).reshape(1, kv_heads, together * count, -1)
    attended = (all_weights @ values).reshape(1, heads, count, -1)[:, :, among]
    return attended / mx.sum(weights, axis=-1, keepdims=True) if in_powers else attended


def _padded(rows: mx.array, before: int, count: int) -> mx.array:
    """``(1, heads, tokens, width)`` with zeros before and after, up to ``count`` rows a head."""
    after = count - before - rows.shape[2]
    return mx.pad(rows, [(0, 0), (0, 0), (before, after), (0, 0)]) if before or after else rows


def keys_until(position: int, end: int, segment: int) -> int:
    """
    Where the keys of a position end: with its segment, wherever the pass ends.
    """
    return (position // segment + 1) * segment


def _keys(array: mx.array, begin: int, until: int) -> mx.array:
    """The rows of a segment's attention. A slab may end before its last segment does."""
    capacity = array.shape[2]
    if until <= capacity:
        return array[:, :, begin:until]
    missing = [(0, 0), (0, 0), (0, until - capacity), (0, 0)]
    return mx.pad(array[:, :, begin:capacity], missing)


# The layers of a pass share masks; in steps and without a window, so do all segments. The least
# recently used ones are dropped. One thread alone runs passes.
masks: OrderedDict[tuple[Any, ...], mx.array] = OrderedDict()


def mask_of(
    place: int, rows: int, keys: int, segment: int, window: int | None, dtype: mx.Dtype
) -> mx.array:
    """
    What is added to the scores of a segment's queries, ``(rows, keys)``: 0, or minus infinity.

    Args:
        place: of the first query in the segment, which the last ``segment`` keys are of.
    """
    key = (place, rows, keys, segment, window, dtype)
    found = masks.get(key)
    if found is not None:
        masks.move_to_end(key)
        return found
    # Dummies beyond the segment see what its last query sees, because a row of nothing but minus
    # infinity would not be a number.
    queries = mx.minimum(mx.arange(place, place + rows), segment - 1)[:, None] + (keys - segment)
    shown = mx.arange(keys)[None]
    seen = shown <= queries
    if window is not None:
        seen = seen & (shown > queries - window)
    found = mx.where(seen, mx.array(0, dtype), mx.array(-mx.inf, dtype))
    mx.eval(found)
    masks[key] = found
    while len(masks) > 1 and sum(mask.nbytes for mask in masks.values()) > MASKS_BYTES:
        masks.popitem(last=False)
    return found
