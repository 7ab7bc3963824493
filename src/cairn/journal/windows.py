"""
The KV policy ``sink_window``: the first tokens (the *sinks*) and a window of the last are attended
to, and nothing between them. Pure.

What a pass attends to follows from its place alone. What a slab holds is more than that, as much as
it has room for, so that it can be cut back behind an answer: tokens are let go when the rows of a
pass would not fit, and then all that the pass does not attend to. Which they are follows from what
was held, the pass, and the slab.

Of blocks only those are copied into a slab that hold the sinks, and those from the window's first
token on: all that lies between was let go by the time that a pass comes to their end.

Positions are those of the sequence, whatever was let go. ``start`` is the first token past the
sinks that is held; 0 where none was let go.
"""

from __future__ import annotations

import attrs

_SPARE_CHUNKS = 2
_SPARE_SHARE = 4
LEAST_CHUNKS = 4
"""The shortest window, in chunks: what the self-test computes lies within it."""


@attrs.frozen(kw_only=True)
class SinkWindow:
    """
    The policy.

    Attributes:
        sinks: so many tokens from the first on.
        window: so many tokens up to the one that attends, with itself.
        rows: the most tokens that a slab holds.
    """

    sinks: int
    window: int
    rows: int

    @classmethod
    def of(cls, sinks: int, window: int, block_tokens: int) -> SinkWindow:
        """
        The policy with slabs that hold a chunk, and a quarter of the window for answers, besides.
        """
        spare = max(_SPARE_CHUNKS * block_tokens, window // _SPARE_SHARE)
        rows = -(-(sinks + window + spare) // block_tokens) * block_tokens
        return cls(sinks=sinks, window=window, rows=rows)

    def first(self, place: int) -> int:
        """The first token past the sinks that one at ``place`` attends to."""
        return max(self.sinks, place - self.window + 1)

    def start_after(self, start: int, place: int, end: int, capacity_tokens: int) -> int:
        """
        The first token that is held behind a pass over ``[place, end)``.

        Args:
            start: the first one before it.
            capacity_tokens: of the slab.
        """
        begin = max(start, self.sinks)
        if self.sinks + end - begin <= min(self.rows, capacity_tokens):
            return start
        return self.first(place)

    def sink_blocks(self, block_tokens: int) -> int:
        """How many blocks from the front hold the sinks."""
        return -(-self.sinks // block_tokens)

    def first_block(self, blocks: int, block_tokens: int) -> int:
        """
        The block that holds the first token past the sinks that the one behind so many blocks
        attends to.
        """
        return self.first(blocks * block_tokens) // block_tokens

    def resumed_at(self, kept: int, blocks: int, block_tokens: int) -> int | None:
        """
        The block from which copying goes on behind the sinks, where a slab holds ``kept`` blocks
        and is to hold ``blocks``; None where nothing is left out.
        """
        first = self.first_block(blocks, block_tokens)
        return first if first > max(kept, self.sink_blocks(block_tokens)) else None

    def copied(self, kept: int, blocks: int, block_tokens: int) -> tuple[int, ...]:
        """
        The blocks that are copied into a slab that holds ``kept`` of them and is to hold
        ``blocks``, by their places: those with the sinks, and those of the window at the end. What
        lies between them no token attends to from there on.
        """
        resumed = self.resumed_at(kept, blocks, block_tokens)
        if resumed is None:
            return tuple(range(kept, blocks))
        return (*range(kept, self.sink_blocks(block_tokens)), *range(resumed, blocks))

    def middle(self, blocks: int, block_tokens: int) -> range:
        """
        The places of the blocks, of so many, that may leave memory when a conversation rests: what
        its next request attends to is there without them, also where that goes on from somewhat
        before the end, by as much as a slab has room for besides sinks and window.
        """
        spare = self.rows - self.sinks - self.window
        first = self.first(max(0, blocks * block_tokens - spare)) // block_tokens
        return range(self.sink_blocks(block_tokens), first)

    def reaches(self, start: int, end: int) -> bool:
        """
        Whether a slab from ``start`` on can be cut back to ``end``: what the next pass attends to
        is there.
        """
        return start <= self.first(end)
