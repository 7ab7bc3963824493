"""
Where a recurrent state is kept: which sealed blocks carry one. Pure.

A layer with a state cannot be cut back to a token: what it was there is gone. So some blocks carry
the states of all such layers as they are at the block's end. Which do follows from their place
alone, as everything in a block must: a key has one digest, whoever seals it.

Besides, a slab keeps the states of the end of its last block, whether that block carries them or
not, so that it can be cut back behind an answer.
"""

from __future__ import annotations

import attrs

MOST_BLOCKS = 8
"""
The farthest that two checkpoints lie apart, in blocks: what lies behind the last one is computed
again where no slab has it.
"""

STATES_A_SLAB = 2
"""
How many states of a layer a slab has room for: the one that passes go on from, and one to be cut
back to.
"""


@attrs.frozen(kw_only=True)
class Checkpoints:
    """
    The rule.

    Attributes:
        block_tokens: C.
        blocks: each so-manieth block of a sequence carries states.
    """

    block_tokens: int
    blocks: int

    @classmethod
    def of(cls, block_tokens: int, token_bytes: int, state_bytes: int) -> Checkpoints:
        """
        So often that the states take no more than the keys and values beside them, as far as
        ``MOST_BLOCKS`` allows.

        Args:
            token_bytes: bytes of keys and values that a token takes in all layers.
            state_bytes: bytes of the states of all layers.
        """
        block_bytes = block_tokens * token_bytes
        blocks = -(-state_bytes // block_bytes) if block_bytes else MOST_BLOCKS
        return cls(block_tokens=block_tokens, blocks=max(1, min(blocks, MOST_BLOCKS)))

    def at(self, tokens: int) -> bool:
        """Whether the block that ends behind so many tokens carries states."""
        return tokens % (self.block_tokens * self.blocks) == 0

    def last(self, blocks: int) -> int:
        """How many of so many blocks from the front lie up to the last one that carries states."""
        return blocks - blocks % self.blocks
