"""
The cache of the policy ``sink_window``: what passes are shown, by a twin that keeps everything.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cairn.engine.errors import CannotTrim, EngineFault
from cairn.engine.mlx.cache import SinkCache
from cairn.journal.cache.windows import SinkWindow

CHUNK, CAPACITY = 4, 256


def cache_of(policy: SinkWindow) -> SinkCache:
    """An empty cache with one number a token."""
    rows = min(policy.rows, CAPACITY)
    return SinkCache(mx.zeros((1, 1, rows, 1)), mx.zeros((1, 1, rows, 1)), policy, CAPACITY)


def ran(cache: SinkCache, rows: int) -> list[set[int]]:
    """
    Run a pass whose keys are the positions of its tokens, and tell for each row which it was shown.
    """
    place = cache.offset
    mask: Any = cache.make_mask(rows)
    numbers = mx.arange(place, place + rows).astype(mx.float32).reshape(1, 1, rows, 1)
    keys, values = cache.update_and_fetch(numbers, numbers)
    assert mx.array_equal(keys, values)
    shown: Any = keys.flatten().tolist()
    if mask is None:
        return [set(shown)] * rows
    if isinstance(mask, str):
        return [set(shown[: len(shown) - rows + row + 1]) for row in range(rows)]
    seen: Any = mask.tolist()
    return [{key for key, sees in zip(shown, row, strict=True) if sees} for row in seen]


@settings(max_examples=25, deadline=None)
@given(
    sinks=st.integers(0, 6),
    window=st.integers(16, 24),
    steps=st.lists(st.tuples(st.booleans(), st.integers(1, 30)), min_size=4, max_size=9),
)
def test_each_token_is_shown_sinks_and_window(
    sinks: int, window: int, steps: list[tuple[bool, int]]
) -> None:
    """
    Chunks, single tokens and cuts back, in any order: each token is shown the sinks and its window,
    and what is held is what the policy gives. A cut that is refused would have lost some of it.
    """
    policy = SinkWindow.of(sinks, window, CHUNK)
    cache, start = cache_of(policy), 0
    for decodes, count in steps:
        end = cache.offset // CHUNK * CHUNK
        try:
            cache.trim(cache.offset - end)
        except CannotTrim:
            needed = set(range(max(0, end - window + 1), end)) - set(range(sinks))
            assert min(needed) < cache.start
            cache.trim(cache.offset)
        start = cache.start
        for _ in range(count):
            rows, place = 1 if decodes else CHUNK, cache.offset
            if place + rows > CAPACITY:
                break
            start = policy.start_after(start, place, place + rows, CAPACITY)
            for row, shown in enumerate(ran(cache, rows)):
                token = place + row
                near = range(max(0, token - window + 1), token + 1)
                assert {*range(min(sinks, token + 1)), *near} == shown
            assert start == cache.start
            assert cache.keys.shape[2] == min(policy.rows, CAPACITY)


def test_a_slab_of_a_window_does_not_grow() -> None:
    """Past its capacity nothing is added, whatever there is room for."""
    cache = cache_of(SinkWindow.of(4, 16, CHUNK))
    while cache.offset < CAPACITY:
        ran(cache, CHUNK)

    with pytest.raises(EngineFault, match="do not fit a slab of 256 tokens"):
        ran(cache, 1)

    assert CAPACITY == cache.offset


def test_a_model_with_a_window_of_its_own_is_no_model_for_it() -> None:
    """Two windows over each other are refused, not guessed at."""
    with pytest.raises(EngineFault, match="a window of its own, of 9 tokens"):
        cache_of(SinkWindow.of(4, 16, CHUNK)).make_mask(4, window_size=9)
