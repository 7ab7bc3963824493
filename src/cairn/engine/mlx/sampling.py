"""
Drawing tokens on the device. Each row of logits is drawn from by itself, so that the draw of one
session depends on nothing of another's.

What a request chooses is never a constant of a function under ``mx.compile``, as it is in mlx-lm's
``apply_top_p`` and its neighbours. There each new value is traced anew and kept for good, and on a
CPU it runs a C++ compiler on the engine's thread while everybody waits; what is beneath the wrapper
cannot be reached. The small functions below give the same numbers from plain operations.
"""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx_lm.sample_utils import make_logits_processors

from cairn.engine.reports import DrawSpec
from cairn.engine.sampling import COLDEST, Sampling


def log_probabilities(logits: mx.array) -> mx.array:
    """Log-probabilities of one row, ``(vocabulary,)``, in float32."""
    logits = logits.astype(mx.float32)
    return logits - mx.logsumexp(logits)


def adjusted(logits: mx.array, draw: DrawSpec) -> mx.array:
    """
    The logits that a token is drawn from, in float32: those of the model with biases and penalties.
    They follow from the row and from the tokens before it, whatever else is in the pass.

    Args:
        logits: ``(vocabulary,)``; not changed.
        draw: with the tokens of prompt and answer.
    """
    sampling = draw.sampling
    row = logits.astype(mx.float32)[None]
    answer = mx.array(draw.answer, dtype=mx.uint32)
    both = mx.array((*draw.prompt, *draw.answer), dtype=mx.uint32)
    # mlx-lm looks back 20 tokens, the field over everything: a window as long as what there is.
    over_both = make_logits_processors(
        logit_bias=dict(sampling.logit_bias),
        repetition_penalty=_unless(sampling.repetition_penalty, 1.0),
        repetition_context_size=both.size,
    )
    over_answer = make_logits_processors(
        presence_penalty=sampling.presence_penalty,
        presence_context_size=answer.size,
        frequency_penalty=sampling.frequency_penalty,
        frequency_context_size=answer.size,
    )
    for process in over_both:
        row = process(both, row)
    for process in over_answer:
        row = process(answer, row)
    return row[0]


def only(logits: mx.array, allowed: npt.NDArray[np.bool_]) -> mx.array:
    """
    The logits in float32, with all that may not be drawn at minus infinity.

    Args:
        logits: ``(vocabulary,)``; not changed.
        allowed: likewise.
    """
    return mx.where(mx.array(allowed), logits.astype(mx.float32), -math.inf)


def _unless(value: float, off: float) -> float | None:
    return None if value == off else value


def draw_token(logprobs: mx.array, sampling: Sampling, key: int) -> mx.array:
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
    left = candidates(logprobs, sampling)
    return mx.random.categorical(left * (1.0 / sampling.temperature), key=mx.random.key(key))


def candidates(logprobs: mx.array, sampling: Sampling) -> mx.array:
    """
    The row with all that may not be drawn at minus infinity: by ``top_p``, then ``min_p``, then
    ``top_k``, each on what the one before it left.
    """
    left = logprobs
    if sampling.top_p < 1.0:
        left = _likeliest_share(left, sampling.top_p)
    if sampling.min_p > 0.0:
        left = mx.where(left < mx.max(left) + math.log(sampling.min_p), -math.inf, left)
    if 0 < sampling.top_k < left.size:
        order = mx.argpartition(-left, kth=sampling.top_k - 1)
        left = mx.put_along_axis(left, order[sampling.top_k :], mx.array(-math.inf), axis=0)
    return left


def _likeliest_share(row: mx.array, share: float) -> mx.array:
    """
    Keep the likeliest tokens that have this share of the probability together, and their equals.
    """
    ascending = mx.sort(row)
    masses = mx.exp(ascending)
    above = mx.cumsum(masses, reverse=True, inclusive=False)
    whole = above[:1] + masses[:1]
    dropped = mx.sum(above >= share * whole, keepdims=True)
    return mx.where(row < mx.take(ascending, dropped), -math.inf, row)


def likeliest(logprobs: mx.array, count: int) -> tuple[tuple[int, float], ...]:
    """The ``count`` likeliest tokens of a row with their log-probabilities; by id among equals."""
    if count == 0:
        return ()
    row = np.array(logprobs)
    order = np.lexsort((np.arange(row.shape[0]), -row))[:count]
    return tuple((int(token), float(row[token])) for token in order)
