"""
Checkpoints: which sealed blocks contain recurrent states. Pure.

A layer with a recurrent state cannot be trimmed to any token, because its earlier states are gone.
So some blocks contain the states of all such layers at the end of the block. Which ones follows
from their position alone, like everything in a block: a key has one digest, whichever request seals
it.

In addition, a slab keeps the states at the end of its last block, whether or not that block
contains them, so that the slab can be trimmed after an answer.
"""

from __future__ import annotations

import attrs

MOST_BLOCKS = 8
"""
The most blocks from one checkpoint to the next: tokens after the last checkpoint are computed again
if no slab has them.
"""

STATES_A_SLAB = 2
"""
How many states of a layer a slab has room for: the one that passes continue from, and one to trim
to.
"""


@attrs.frozen(kw_only=True)
class Checkpoints:
    """
    The rule.

    Attributes:
        block_tokens: C.
        blocks: every ``blocks``-th block of a sequence contains states.
    """

    block_tokens: int
    blocks: int

    @classmethod
    def of(cls, block_tokens: int, token_bytes: int, state_bytes: int) -> Checkpoints:
        """
        The rule with the most frequent checkpoints whose states take no more memory than the keys
        and values next to them, but no fewer than one in ``MOST_BLOCKS``.

        Args:
            token_bytes: bytes of keys and values that a token takes in all layers.
            state_bytes: bytes of the states of all layers.
        """
        block_bytes = block_tokens * token_bytes
        blocks = -(-state_bytes // block_bytes) if block_bytes else MOST_BLOCKS
        return cls(block_tokens=block_tokens, blocks=max(1, min(blocks, MOST_BLOCKS)))

    def at(self, tokens: int) -> bool:
        """Whether the block that ends after so many tokens contains states."""
        return tokens % (self.block_tokens * self.blocks) == 0

    def last(self, blocks: int) -> int:
        """
        How many of the first ``blocks`` blocks there are up to the last one that contains states.
        """
        return blocks - blocks % self.blocks
