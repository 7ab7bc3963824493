"""
Low-rank layers of an adapter, which always run over the same number of rows in a prefill pass.

A product with as few columns as the rank of an adapter is computed with another kernel than the
layers of the model. It gives a row the same bits for far fewer numbers of rows, and would leave the
whole model with passes of one shape. So this product alone is padded, which costs little.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
from mlx_lm.tuner.lora import LoRALinear


class PaddedLoRA(LoRALinear):  # type: ignore[misc]  # mlx-lm has no types
    """
    A linear layer with a low-rank one beside it.

    Attributes:
        rows: over how many rows the low-rank one runs at least.
    """

    rows: int = 0

    def __call__(self, hidden: mx.array) -> mx.array:
        """
        Args:
            hidden: (..., rows, columns).
        """
        count = hidden.shape[-2]
        if count >= self.rows:
            computed: mx.array = super().__call__(hidden)
            return computed
        unchanged = [(0, 0)] * (hidden.ndim - 2)
        padded = mx.pad(hidden, [*unchanged, (0, self.rows - count), (0, 0)])
        beside = (self.scale * ((padded @ self.lora_a) @ self.lora_b)).astype(hidden.dtype)
        whole: mx.array = self.linear(hidden) + beside[..., :count, :]
        return whole


def low_rank_layers(model: Any) -> list[PaddedLoRA]:
    """The low-rank layers of a model that can be padded. Modifies their class, once."""
    found: list[PaddedLoRA] = []
    for _, module in model.named_modules():
        if type(module) in (LoRALinear, PaddedLoRA):
            module.__class__ = PaddedLoRA
            found.append(module)
    return found


@contextmanager
def padded(layers: Sequence[PaddedLoRA], rows: int) -> Iterator[None]:
    """Let these layers run over at least so many rows."""
    for layer in layers:
        layer.rows = rows
    try:
        yield
    finally:
        for layer in layers:
            layer.rows = 0
