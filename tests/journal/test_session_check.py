"""A session's rows are checked one by one, each against the row before it."""

from collections.abc import Callable
from typing import Any

import attrs
import pytest

from cairn.journal.rows.codec import Row, row_hash
from cairn.journal.session_check import RowsCheck
from tests.support.journals import healthy

ROWS = healthy()
OWN = [row.position for row in ROWS if row.stream == "session/s1"]


def checked(change: Callable[[Row], Row | None], *, at: int = 2, pruned: int = 0) -> RowsCheck:
    """
    What is found of the session's rows.

    Args:
        change: of one of them.
        at: which one.
        pruned: the last row that is gone.
    """
    check = RowsCheck("session/s1")
    for place, position in enumerate(OWN):
        row: Row | None = ROWS[position - 1]
        if place == at:
            row = change(ROWS[position - 1])
        check.feed(position, row, ROWS[position - 2] if position - 1 > pruned else None)
    return check


def test_rows_that_hold():
    """All are counted, and of which the row before is not there."""
    check = checked(lambda row: row)
    assert [] == check.faults
    assert (len(OWN), OWN[0], OWN[-1], 0) == (check.rows, check.first, check.last, check.unlinked)
    assert 1 == checked(lambda row: row, pruned=OWN[0] - 1).unlinked


def rehashed(row: Row, **changes: Any) -> Row:
    """A row with other values, and the hash that belongs to them."""
    changed = attrs.evolve(row, **changes)
    return attrs.evolve(changed, hash=row_hash(changed))


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        (lambda _: None, "the row is missing"),
        (lambda row: rehashed(row, stream="session/s2"), "the row is another one"),
        (lambda row: rehashed(row, position=row.position + 1), "the row is another one"),
        (lambda row: rehashed(row, seq=row.seq + 1), "it is not the next row of its session"),
        (lambda row: rehashed(row, previous_hash="1" * 64), ""),
        (lambda row: rehashed(row, public=b"{}"), "it is no event"),
    ],
    ids=["missing", "stream", "position", "seq", "link", "event"],
)
def test_a_row_that_does_not_hold(change: Callable[[Row], Row | None], fact: str):
    """It is named by its position, with what is wrong."""
    check = checked(change)
    assert OWN[2] in {one.position for one in check.faults}
    assert any(fact in one.fact for one in check.faults)
