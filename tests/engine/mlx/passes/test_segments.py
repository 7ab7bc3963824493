"""Attention of passes that begin anywhere, compared with mlx-lm's own over the same keys."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.base import create_causal_mask, scaled_dot_product_attention

from cairn.engine.errors import EngineFault
from cairn.engine.mlx.cache import SlabCache, WindowCache
from cairn.engine.mlx.passes import segments
from cairn.engine.mlx.passes.attention import attend
from cairn.engine.mlx.passes.segments import Cut, SegmentCache
from cairn.engine.row_class import RowClass

HEADS, KV_HEADS, DIM, TOKENS, WINDOW = 4, 2, 8, 40, 11
CLASSES = [
    RowClass(segment=16, quantum=1, least=5, most=64, product=2000),
    RowClass(segment=16, quantum=6, least=6, most=60, product=0),
    RowClass(segment=16, quantum=16, least=16, most=16, product=0),
]
normal: Any = mx.random.normal
mx.random.seed(0)
QUERIES = normal((1, HEADS, TOKENS, DIM))
KEYS = normal((1, KV_HEADS, TOKENS, DIM))
VALUES = normal((1, KV_HEADS, TOKENS, DIM))
SINKS = normal((HEADS,))


def slab(window: int | None = None, capacity: int = 48) -> SlabCache:
    """An empty layer."""
    keys, values = (mx.zeros((1, KV_HEADS, capacity, DIM)) for _ in "kv")
    return WindowCache(keys, values, window) if window else SlabCache(keys, values)


def filled(cut: Cut, rows: mx.array) -> mx.array:
    """Rows of a pass, with numbers in place of dummies that spoil what they reach."""
    shape = list(rows.shape)
    front, after = ((*shape[:2], n, DIM) for n in (cut.front, cut.rows - cut.front - cut.tokens))
    own = rows[:, :, cut.start : cut.start + cut.tokens]
    return mx.concatenate([mx.full(front, 1e4), own, mx.full(after, 1e4)], axis=2)


def passed(cache: SlabCache, row_class: RowClass, tokens: int, **more: Any) -> mx.array:
    """One pass; what the rows of its tokens attend to."""
    front, rows = row_class.rows(cache.offset, tokens, 1 << 30)
    cut = Cut(row_class, start=cache.offset, tokens=tokens, front=front, rows=rows)
    view = SegmentCache(cache, cut)
    assert cut.start - front == view.offset
    keys, values = view.update_and_fetch(filled(cut, KEYS), filled(cut, VALUES))
    found = attend(filled(cut, QUERIES), keys, values, cache=view, scale=0.3, **more)
    assert (1, HEADS, rows, DIM) == found.shape
    return found[:, :, front : front + tokens]


def plain(window: int | None, **more: Any) -> mx.array:
    """mlx-lm's attention over all tokens."""
    mask = create_causal_mask(TOKENS, 0, window_size=window)
    found: mx.array = scaled_dot_product_attention(
        QUERIES, KEYS, VALUES, cache=None, scale=0.3, mask=mask, **more
    )
    return found


@pytest.mark.parametrize("sinks", [None, SINKS], ids=["", "sinks"])
@pytest.mark.parametrize("window", [None, WINDOW], ids=["", "window"])
@pytest.mark.parametrize("row_class", CLASSES, ids=["open", "placed", "one shape"])
@pytest.mark.parametrize("capacity", [48, 40], ids=["", "within a segment"])
def test_attention_is_mlx_lms(
    row_class: RowClass, window: int | None, sinks: mx.array | None, capacity: int
) -> None:
    """In passes that begin and end anywhere, over several segments too."""
    more = {} if sinks is None else {"sinks": sinks}
    cache, parts = slab(window, capacity), []
    for tokens in (1, 3, 10, 14, 2, 1, 9):
        left = min(tokens, row_class.most_tokens(cache.offset))
        parts.append(passed(cache, row_class, left, **more))
    while cache.offset < TOKENS:
        left = min(TOKENS - cache.offset, row_class.most_tokens(cache.offset))
        parts.append(passed(cache, row_class, left, **more))

    assert mx.allclose(plain(window, **more), mx.concatenate(parts, axis=2), atol=1e-5)
    assert mx.array_equal(KEYS, cache.keys[:, :, :TOKENS])
    assert mx.array_equal(VALUES, cache.values[:, :, :TOKENS])


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("row_class", CLASSES, ids=["open", "placed", "one shape"])
def test_rows_that_were_cut_off_reach_nothing(row_class: RowClass, bad: float) -> None:
    """Not even if they are not numbers, in the same pass, in later ones, or after decoding."""
    clean, cache = slab(), slab()
    for one in (clean, cache):
        passed(one, row_class, 9)
    cache.update_and_fetch(*(mx.full((1, KV_HEADS, 25, DIM), bad) for _ in "kv"))
    cache.trim(25)

    for tokens in (1, 3, 8, 9, 4):
        left = min(tokens, row_class.most_tokens(cache.offset))
        expected = passed(clean, row_class, left)
        assert mx.array_equal(expected, passed(cache, row_class, left))
    assert cache.offset > 16, "only one segment was tried"


def test_a_model_with_a_mask_of_its_own_fails() -> None:
    """A window that the slab does not have, a mask, or keys that are used as an array."""
    cut = Cut(CLASSES[0], start=0, tokens=5, front=0, rows=5)
    view = SegmentCache(slab(), cut)
    view.make_mask(5, return_array=True)
    with pytest.raises(TypeError, match="a window of 3 over a cache that shows all"):
        view.make_mask(5, window_size=3)
    with pytest.raises(TypeError, match="6 rows at 0 in a pass of 5"):
        view.update_and_fetch(KEYS[:, :, :6], VALUES[:, :, :6])
    keys, values = view.update_and_fetch(KEYS[:, :, :5], VALUES[:, :, :5])
    with pytest.raises(TypeError, match="a mask of its own"):
        attend(QUERIES[:, :, :5], keys, values, scale=1.0, mask="causal")
    with pytest.raises(TypeError, match="changed the queries or the values"):
        attend(QUERIES[:, :, :5], keys, VALUES, scale=1.0)
    with pytest.raises(TypeError):
        QUERIES @ keys


def test_a_pass_that_does_not_fit() -> None:
    """The slab does not change."""
    cache = slab(capacity=16)
    with pytest.raises(EngineFault, match="17 rows at 0 do not fit"):
        passed(cache, CLASSES[0], 17)
    assert 0 == cache.offset


def test_masks_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The least recently used ones are dropped; the last one stays, however large it is."""
    monkeypatch.setattr(segments, "MASKS_BYTES", 3 * 4 * 64)
    for keys in (64, 65, 66, 67):
        segments.mask_of(0, 1, keys, 16, None, mx.float32)
    assert 2 == len(segments.masks)
    segments.mask_of(0, 16, 1024, 16, None, mx.float32)
    assert 1 == len(segments.masks)
