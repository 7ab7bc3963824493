"""
Drawing tokens on the device. Each row of logits is drawn from by itself, so that the draw of one
session depends on nothing of another's.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p

from cairn.engine.sampling import COLDEST, Sampling


def log_probabilities(logits: mx.array) -> mx.array:
    """
    Log-probabilities of one row, ``(vocabulary,)``, in float32.
    """
    logits = logits.astype(mx.float32)
    return logits - mx.logsumexp(logits)


def draw(logprobs: mx.array, sampling: Sampling, key: int) -> mx.array:
    """
    Draw a token from one row.

    Args:
        logprobs: ``(vocabulary,)``, float32.
        key: the 64-bit key of this token, ``sampling.token_key``.

    Returns:
        The token id, an array without dimensions, not evaluated.
    """
    if sampling.temperature < COLDEST:
        return mx.argmax(logprobs)
    kept = logprobs[None]
    if sampling.top_p < 1.0:
        kept = apply_top_p(kept, sampling.top_p)
    if sampling.min_p > 0.0:
        kept = apply_min_p(kept, sampling.min_p)
    if 0 < sampling.top_k < logprobs.shape[-1]:
        kept = apply_top_k(kept, sampling.top_k)
    return mx.random.categorical(kept[0] * (1.0 / sampling.temperature), key=mx.random.key(key))


def likeliest(logprobs: mx.array, count: int) -> tuple[tuple[int, float], ...]:
    """
    The ``count`` likeliest tokens of a row with their log-probabilities; by id among equals.
    """
    if count == 0:
        return ()
    row = np.array(logprobs)
    order = np.lexsort((np.arange(row.shape[0]), -row))[:count]
    return tuple((int(token), float(row[token])) for token in order)
