"""The shapes of the models with random weights that can be measured. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import attrs


@attrs.frozen(kw_only=True)
class Size:
    """The shape of a Qwen3."""

    layers: int = 8
    hidden_size: int = 256
    intermediate_size: int = 768
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 32
    context_tokens: int = 32_768

    @property
    def told(self) -> str:
        """For readers."""
        return f"random weights, {self.layers} layers of {self.hidden_size}"


DEFAULT: Final = "8x256"

SIZES: Final[Mapping[str, Size]] = {
    DEFAULT: Size(),
    # The layers of Qwen3-0.6B, of which there are 28.
    "4x1024": Size(
        layers=4, hidden_size=1024, intermediate_size=3072, heads=16, kv_heads=8, head_dim=128
    ),
}
"""By name: the number of layers, and their width."""
