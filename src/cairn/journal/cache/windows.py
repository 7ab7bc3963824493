"""
The KV policy ``sink_window``: tokens attend to the first tokens (the *sinks*) and to a window of
the last ones, and to nothing in between. Pure.

What a pass attends to follows from its position alone. A slab holds more than that, as much as it
has room for, so that it can be trimmed after an answer. Tokens are dropped when the rows of a pass
would not fit, and then all at once that the pass does not attend to. Which ones follows from what
the slab held, the pass, and the slab's size.

Only two kinds of blocks are copied into a slab: those with the sinks, and those from the first
token of the window on. Everything between them was dropped by the time a pass reaches their end.

Positions are those of the sequence, whatever was dropped. ``start`` is the first token after the
sinks that is held; 0 if none was dropped.
"""

from __future__ import annotations

import attrs

_SPARE_CHUNKS = 2
_SPARE_SHARE = 4
LEAST_CHUNKS = 4
"""The shortest window, in chunks: everything that the self-test computes is within it."""


@attrs.frozen(kw_only=True)
class SinkWindow:
    """
    The policy.

    Attributes:
        sinks: number of tokens, from the first one on.
        window: number of tokens up to and including the one that attends.
        rows: the most tokens that a slab holds.
    """

    sinks: int
    window: int
    rows: int

    @classmethod
    def of(cls, sinks: int, window: int, block_tokens: int) -> SinkWindow:
        """The policy with slabs that also hold a chunk, and a quarter of the window for answers."""
        spare = max(_SPARE_CHUNKS * block_tokens, window // _SPARE_SHARE)
        rows = -(-(sinks + window + spare) // block_tokens) * block_tokens
        return cls(sinks=sinks, window=window, rows=rows)

    def first(self, place: int) -> int:
        """The first token after the sinks that the token at ``place`` attends to."""
        return max(self.sinks, place - self.window + 1)

    def start_after(self, start: int, place: int, end: int, capacity_tokens: int) -> int:
        """
        The first token that is held after a pass over ``[place, end)``.

        Args:
            start: the first token that was held before it.
            capacity_tokens: the capacity of the slab.
        """
        begin = max(start, self.sinks)
        if self.sinks + end - begin <= min(self.rows, capacity_tokens):
            return start
        return self.first(place)

    def sink_blocks(self, block_tokens: int) -> int:
        """How many blocks at the beginning hold the sinks."""
        return -(-self.sinks // block_tokens)

    def first_block(self, blocks: int, block_tokens: int) -> int:
        """
        The block with the first token after the sinks that the token after ``blocks`` blocks
        attends to.
        """
        return self.first(blocks * block_tokens) // block_tokens

    def resumed_at(self, kept: int, blocks: int, block_tokens: int) -> int | None:
        """
        The block from which copying resumes after the sinks, for a slab that holds ``kept`` blocks
        and is to hold ``blocks``; None if no block is left out.
        """
        first = self.first_block(blocks, block_tokens)
        return first if first > max(kept, self.sink_blocks(block_tokens)) else None

    def copied(self, kept: int, blocks: int, block_tokens: int) -> tuple[int, ...]:
        """
        The places of the blocks to copy into a slab that holds ``kept`` of them and is to hold
        ``blocks``: those with the sinks, and those of the window at the end. No later token attends
        to anything in between.
        """
        resumed = self.resumed_at(kept, blocks, block_tokens)
        if resumed is None:
            return tuple(range(kept, blocks))
        return (*range(kept, self.sink_blocks(block_tokens)), *range(resumed, blocks))

    def middle(self, blocks: int, block_tokens: int) -> range:
        """
        The places of the blocks, out of so many, that may leave memory when a conversation becomes
        idle. The next request does not attend to them, even if it continues from somewhat before
        the end, by up to as many tokens as a slab has room for in addition to sinks and window.
        """
        spare = self.rows - self.sinks - self.window
        first = self.first(max(0, blocks * block_tokens - spare)) // block_tokens
        return range(self.sink_blocks(block_tokens), first)

    def reaches(self, start: int, end: int) -> bool:
        """
        Whether a slab that holds tokens from ``start`` on can be trimmed to ``end``: it has all
        that the next pass attends to.
        """
        return start <= self.first(end)
