"""
Draws tokens on the device. Each row of logits is processed separately, so that one session's draw
does not depend on any other session.

A request's parameters are never constants of a function under ``mx.compile``, as they are in
mlx-lm's ``apply_top_p`` and similar functions. Those trace again for each new value and keep the
result forever, and on a CPU they run a C++ compiler on the engine's thread while all requests wait.
The functions inside the wrapper are not accessible. The small functions below compute the same
numbers with plain operations.
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
    The logits that a token is drawn from, in float32: the model's, with biases and penalties
    applied. They depend only on the row and the tokens before it, not on other rows of the pass.

    Args:
        logits: ``(vocabulary,)``; not modified.
        draw: includes the tokens of prompt and answer that the penalties need.
    """
    sampling = draw.sampling
    row = logits.astype(mx.float32)[None]
    answer = mx.array(draw.answer, dtype=mx.uint32)
    both = mx.array((*draw.prompt, *draw.answer), dtype=mx.uint32)
    # mlx-lm's default context is 20 tokens; most other servers use all, so the window covers all.
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
    The logits in float32, with minus infinity for all tokens that are not allowed.

    Args:
        logits: ``(vocabulary,)``; not modified.
        allowed: ``(vocabulary,)``; not modified.
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
        The token id, as a scalar array that is not evaluated yet.
    """
    if sampling.temperature < COLDEST:
        return mx.argmax(logprobs)
    left = candidates(logprobs, sampling)
    return mx.random.categorical(left * (1.0 / sampling.temperature), key=mx.random.key(key))


def candidates(logprobs: mx.array, sampling: Sampling) -> mx.array:
    """
    The row with minus infinity for all tokens that are excluded by ``top_p``, then ``min_p``, then
    ``top_k``, each applied to what the previous one left.
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
    """Keep the likeliest tokens that together have this share of the probability, and ties."""
    ascending = mx.sort(row)
    masses = mx.exp(ascending)
    above = mx.cumsum(masses, reverse=True, inclusive=False)
    whole = above[:1] + masses[:1]
    dropped = mx.sum(above >= share * whole, keepdims=True)
    return mx.where(row < mx.take(ascending, dropped), -math.inf, row)


def likeliest(logprobs: mx.array, count: int) -> tuple[tuple[int, float], ...]:
    """The ``count`` likeliest tokens of a row with their log-probabilities; ties by token id."""
    if count == 0:
        return ()
    row = np.array(logprobs)
    order = np.lexsort((np.arange(row.shape[0]), -row))[:count]
    return tuple((int(token), float(row[token])) for token in order)
