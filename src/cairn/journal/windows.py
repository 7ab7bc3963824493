"""
The KV policy ``sink_window``: the first tokens (the *sinks*) and a window of the last are attended
to, and nothing between them. Pure.

What a pass attends to follows from its place alone. What a slab holds is more than that, as much as
it has room for, so that it can be cut back behind an answer: tokens are let go when the rows of a
pass would not fit, and then all that the pass does not attend to. Which they are follows from what
was held, the pass, and the slab.

Positions are those of the sequence, whatever was let go. ``start`` is the first token past the
sinks that is held; 0 where none was let go.
"""

from __future__ import annotations

import attrs

_SPARE_CHUNKS = 2
_SPARE_SHARE = 4
LEAST_CHUNKS = 4
"""
The shortest window, in chunks: what the self-test computes lies within it.
"""


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
    def of(cls, sinks: int, window: int, chunk_tokens: int) -> SinkWindow:
        """
        The policy with slabs that hold a chunk, and a quarter of the window for answers, besides.
        """
        spare = max(_SPARE_CHUNKS * chunk_tokens, window // _SPARE_SHARE)
        rows = -(-(sinks + window + spare) // chunk_tokens) * chunk_tokens
        return cls(sinks=sinks, window=window, rows=rows)

    def first(self, place: int) -> int:
        """
        The first token past the sinks that one at ``place`` attends to.
        """
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

    def reaches(self, start: int, end: int) -> bool:
        """
        Whether a slab from ``start`` on can be cut back to ``end``: what the next pass attends to
        is there.
        """
        return start <= self.first(end)
