"""The most memory that growing caches take for a number of tokens, known in advance. Pure."""

from __future__ import annotations

import attrs

STEP_TOKENS = 256
"""mlx-lm's caches grow by this many tokens at a time."""


def steps(tokens: int) -> int:
    """How many steps a number of tokens takes, including a partial last one."""
    return -(-tokens // STEP_TOKENS)


@attrs.frozen(kw_only=True)
class LayerGrowth:
    """
    The memory of the cache of one layer.

    Attributes:
        constant_bytes: independent of the number of tokens.
        step_bytes: for each ``STEP_TOKENS`` tokens begun.
        until_tokens: it grows up to this many tokens; None if it grows without end.
        most_bytes: its size beyond ``until_tokens``, which is its largest.
    """

    constant_bytes: int = 0
    step_bytes: int = 0
    until_tokens: int | None = None
    most_bytes: int = 0

    def bytes_at(self, tokens: int) -> int:
        """The most that it takes for a number of tokens."""
        grown = self.constant_bytes + steps(tokens) * self.step_bytes
        if self.until_tokens is None:
            return grown
        return self.most_bytes if tokens > self.until_tokens else min(grown, self.most_bytes)


@attrs.frozen(kw_only=True)
class Growth:
    """The memory of the caches of all layers."""

    layers: tuple[LayerGrowth, ...]

    def bytes_at(self, tokens: int) -> int:
        """The most bytes that the caches take for a number of tokens."""
        return sum(layer.bytes_at(tokens) for layer in self.layers)

    def context_within(self, size: int, most_tokens: int, block_tokens: int) -> int:
        """
        The longest context of whole blocks, at most ``most_tokens``, that fits into ``size`` bytes.
        """
        fits, fails = 0, -(-most_tokens // block_tokens) + 1
        while fails - fits > 1:
            middle = (fits + fails) // 2
            if self.bytes_at(middle * block_tokens) <= size:
                fits = middle
            else:
                fails = middle
        return min(most_tokens, fits * block_tokens)
