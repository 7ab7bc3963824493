"""
Row classes: prefill passes whose bits do not depend on how a sequence is cut into passes. Pure.

A kernel adds up a row of a matrix product in an order that depends on the number of rows, but for
many numbers it is the same order. Some kernels also take rows in groups, so that a row's place
within its group matters. A row class says which passes a device computes in the same way. It is
measured on the loaded model (``mlx/passes/search.py``) and never derived from the sizes of its
layers.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from cairn.engine.errors import EngineFault

OUT_OF_TIME = "the search took longer than"
"""How the reason of a search begins that had no time to find a class, or a cheaper one."""


@attrs.frozen(kw_only=True)
class RowClass:
    """
    Which prefill passes give a token the same bits.

    Attributes:
        segment: C. The query at position p attends to the keys up to the end of its segment, the
            next multiple of C after p, with those after p masked.
        quantum: in a pass, the row of position p is at a place that equals p modulo this number,
            and the number of rows is a multiple of it.
        least: the fewest rows of a pass, dummies included.
        most: the most rows of a pass, dummies included.
        product: queries x keys x head_dim of an attention is at least this number, if necessary
            with dummies; 0 if an attention always has all C queries of its segment, each at its
            place.
        low_rank: how many rows the low-rank layers of an adapter have at least; 0 if as many as the
            pass.
    """

    segment: int
    quantum: int
    least: int
    most: int
    product: int
    low_rank: int = 0

    def __attrs_post_init__(self) -> None:
        whole = not self.most % self.quantum and not self.least % self.quantum
        ascending = 1 <= self.quantum <= self.least <= self.most
        if self.segment < 1 or min(self.product, self.low_rank) < 0 or not (whole and ascending):
            raise EngineFault(f"not a row class: {attrs.astuple(self)}")

    @classmethod
    def of(cls, fields: Sequence[int]) -> RowClass | None:
        """
        The class with these fields; None without any. The inverse of ``fields``.

        Raises:
            EngineFault: they are not those of a class.
        """
        if not fields:
            return None
        names = [field.name for field in attrs.fields(cls)]
        if len(names) != len(fields):
            raise EngineFault(f"not a row class: {tuple(fields)}")
        return cls(**dict(zip(names, fields, strict=True)))

    @property
    def fields(self) -> tuple[int, ...]:
        """All attributes in their order, for the journal."""
        found: tuple[int, ...] = attrs.astuple(self)
        return found

    def most_tokens(self, start: int) -> int:
        """The most tokens of a pass that begins at a position."""
        return self.most - start % self.quantum

    def rows(self, start: int, tokens: int, positions: int) -> tuple[int, int]:
        """
        The dummies before the tokens of a pass, and all of its rows.

        The rows are at the positions from ``start`` minus these dummies on, which is never less
        than 0. Dummies go before the tokens instead of after them where they would be at positions
        that the model does not have.

        Args:
            positions: how many positions the model has.

        Raises:
            EngineFault: the pass would have too many rows, or no tokens.
        """
        if not 1 <= tokens <= self.most_tokens(start):
            raise EngineFault(
                f"a prefill pass at {start} has 1 to {self.most_tokens(start)} tokens, not {tokens}"
            )
        front = start % self.quantum
        rows = _multiple(max(front + tokens, self.least), self.quantum)
        beyond = start - front + rows - positions
        if beyond > 0:
            moved = _multiple(beyond, self.quantum)
            spare = (rows - front - tokens) // self.quantum * self.quantum
            front += min(moved, spare, start // self.quantum * self.quantum)
        return front, rows

    def rows_for_one(self, row: int, rows: int) -> slice:
        """
        The fewest rows of a pass in which one of them has its bits.

        Args:
            row: its place in the pass.
            rows: all rows of the pass.
        """
        first = min(row // self.quantum * self.quantum, rows - self.least)
        return slice(first, first + self.least)

    def queries(self, place: int, tokens: int, keys: int, head_dim: int) -> tuple[int, int]:
        """
        The dummies before the queries of an attention within one segment, and all its queries.

        Args:
            place: of the first query in its segment.
            tokens: the queries that are not dummies.
            keys: the keys of the segment's attention.
        """
        least = -(-self.product // (keys * head_dim)) if self.product else self.segment
        if least >= self.segment:
            return place, self.segment
        return 0, max(tokens, least)


def _multiple(number: int, of: int) -> int:
    """The least multiple that is not less than a number."""
    return -(-number // of) * of
