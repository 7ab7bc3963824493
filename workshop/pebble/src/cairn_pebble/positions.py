"""
Rotary positions with gaps, so that short dialogues teach the model to look far back.

Training on many dialogues of 4,000 tokens costs too much. Most of what a model has to learn for
them is that the text it looks for may be that far away, and rotary embeddings see only distances.
So positions jump between two turns of a short dialogue, as if a long text had come in between. This
follows the randomised positions of Ruoss et al., arXiv 2305.16843, but keeps turns whole, because
within a turn tokens are adjacent in use too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from random import Random
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

_PLAIN_SHARE = 0.25


class GivenRope:
    """
    Rotary embeddings at given positions, in place of mlx-lm's, which count from 0.

    Attributes:
        positions: (B, T), for the next batch.
    """

    def __init__(self, dims: int, base: float) -> None:
        """
        Args:
            dims: the size of a head.
        """
        half = dims // 2
        self._rates = mx.power(base, -mx.arange(half, dtype=mx.float32) / half)
        self.positions: mx.array | None = None

    def __call__(self, states: mx.array, offset: int = 0) -> mx.array:
        """Rotate queries or keys (B, heads, T, dims)."""
        assert self.positions is not None
        angles = self.positions[:, None, :, None] * self._rates
        cosine, sine = mx.cos(angles), mx.sin(angles)
        first, second = mx.split(states, 2, axis=-1)
        turned = [first * cosine - second * sine, first * sine + second * cosine]
        return mx.concatenate(turned, axis=-1)


@contextlib.contextmanager
def positions_from(rope: GivenRope, model: Any) -> Iterator[None]:
    """While the context is active, the mlx-lm model takes its positions from ``rope``."""
    counting = [layer.self_attn.rope for layer in model.layers]
    for layer in model.layers:
        layer.self_attn.rope = rope
    try:
        yield
    finally:
        for layer, before in zip(model.layers, counting, strict=True):
            layer.self_attn.rope = before


def spread_out(
    length: int, turns: npt.NDArray[np.int64], furthest: int, rng: Random
) -> npt.NDArray[np.float32]:
    """
    Positions for the tokens of a dialogue: (length,).

    Args:
        turns: where turns begin.
        furthest: the highest position, unless the dialogue alone is longer. One dialogue in four
            has no gaps.
    """
    steps = np.ones(length, np.float64)
    steps[0] = 0
    room = furthest - length
    later = [int(turn) for turn in turns if 0 < turn < length]
    if room > 0 and later and rng.random() >= _PLAIN_SHARE:
        some = rng.sample(later, rng.randint(1, len(later)))
        shares = [rng.random() for _ in some]
        scale = rng.random() * room / sum(shares)
        for turn, share in zip(some, shares, strict=True):
            steps[turn] += int(share * scale)
    found: npt.NDArray[np.float32] = steps.cumsum().astype(np.float32)
    return found
