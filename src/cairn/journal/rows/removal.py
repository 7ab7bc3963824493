"""
Which rows a base has replaced and a prune has still to remove.

A cut puts the base in the place of the rows in one transaction; the rows themselves are removed
after it, a few at a time and the first ones first. So those that are left are the last ones of the
chain up to the base: they end with the row that the base names, and each is chained to the next.
Readers pass over them. Any other row up to the base is at a position where none can be.
"""

from __future__ import annotations

from collections.abc import Iterable

Link = tuple[object, object, object]
"""Position, hash and previous hash of a row, as they are stored."""

REMOVED_ROWS = 500
"""How many rows are removed in one transaction: a commit that comes meanwhile waits for it."""


class Replaced:
    """
    Finds the rows that a base has replaced: ``feed`` it those up to the base in reverse order.

    Attributes:
        first: the first of them that was found; one above ``last`` if there is none yet.
        last: the row that the base ends with.
    """

    def __init__(self, position: int, head: str) -> None:
        """
        Args:
            position, head: of the base.
        """
        self.first, self.last = position + 1, position
        self._hash: object = head

    def feed(self, links: Iterable[Link]) -> int:
        """Go on with earlier rows. Returns how many of them the base has replaced."""
        found = 0
        for position, row_hash, previous_hash in links:
            if position != self.first - 1 or row_hash != self._hash:
                break
            self.first, self._hash = self.first - 1, previous_hash
            found += 1
        return found

    def __contains__(self, position: int) -> bool:
        return self.first <= position <= self.last
