"""
What caches that grow as they will take for so many tokens: at most that, and told beforehand. Pure.
"""

from __future__ import annotations

import attrs

STEP_TOKENS = 256
"""mlx-lm's caches grow by so many tokens at a time."""


def steps(tokens: int) -> int:
    """How many steps so many tokens have begun."""
    return -(-tokens // STEP_TOKENS)


@attrs.frozen(kw_only=True)
class LayerGrowth:
    """
    What the cache of one layer takes.

    Attributes:
        constant_bytes: whatever the number of tokens.
        step_bytes: for each ``STEP_TOKENS`` tokens that were begun.
        until_tokens: up to so many tokens it grows; None for all.
        most_bytes: what it takes past them, and never more.
    """

    constant_bytes: int = 0
    step_bytes: int = 0
    until_tokens: int | None = None
    most_bytes: int = 0

    def bytes_at(self, tokens: int) -> int:
        """What it takes at most for so many tokens."""
        grown = self.constant_bytes + steps(tokens) * self.step_bytes
        if self.until_tokens is None:
            return grown
        return self.most_bytes if tokens > self.until_tokens else min(grown, self.most_bytes)


@attrs.frozen(kw_only=True)
class Growth:
    """What the caches of all layers take."""

    layers: tuple[LayerGrowth, ...]

    def bytes_at(self, tokens: int) -> int:
        """What they take at most for so many tokens."""
        return sum(layer.bytes_at(tokens) for layer in self.layers)

    def context_within(self, size: int, most_tokens: int, block_tokens: int) -> int:
        """
        The longest context, of at most ``most_tokens``, whose chunks all fit into ``size``
        bytes.
        """
        fits, fails = 0, -(-most_tokens // block_tokens) + 1
        while fails - fits > 1:
            middle = (fits + fails) // 2
            if self.bytes_at(middle * block_tokens) <= size:
                fits = middle
            else:
                fails = middle
        return min(most_tokens, fits * block_tokens)
