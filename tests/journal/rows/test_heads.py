"""A head names a row by position and hash, and a journal contains it or does not."""

import pytest

from cairn.journal.replay import replay
from cairn.journal.rows.base import base_of
from cairn.journal.rows.codec import GENESIS
from cairn.journal.rows.heads import BEGINNING, Head, lost_words
from cairn.journal.rows.store import MemoryStore
from tests.support.journals import healthy

ROWS = healthy()
CUT = 8


def head_of(position: int) -> Head:
    """The head when this row was the last one."""
    return Head(position, ROWS[position - 1].hash)


def test_the_text_of_a_head():
    """It comes back, in small letters."""
    for head in (BEGINNING, head_of(31)):
        assert head == Head.parse(str(head)) == Head.parse(f" {str(head).upper()}\n")


@pytest.mark.parametrize("text", ["", "1", GENESIS, f"01:{GENESIS}", f"-1:{GENESIS}", "1:abc"])
def test_a_text_that_is_no_head(text: str):
    """Both parts have to be there, each in one form."""
    with pytest.raises(ValueError, match="is not POSITION:HASH"):
        Head.parse(text)


def test_a_journal_contains_its_heads():
    """Each of them, however much was appended since; also none."""
    store = MemoryStore(ROWS)
    assert all(lost_words(head_of(row.position), store) is None for row in ROWS)
    assert lost_words(BEGINNING, MemoryStore()) is None


def test_rows_are_lost():
    """A shorter journal, an empty one, and one with another row there."""
    assert "it ends at row 20, and had row 31 before" == lost_words(
        head_of(31), MemoryStore(ROWS[:20])
    )
    assert "it ends at row 0, and had row 1 before" == lost_words(head_of(1), MemoryStore())
    words = lost_words(Head(5, GENESIS), MemoryStore(ROWS))
    assert f"row 5 has the hash {ROWS[4].hash}, and had {GENESIS} before" == words
    assert "has the hash none" in str(lost_words(head_of(5), MemoryStore(ROWS[9:])))


def test_a_pruned_journal():
    """The head of the base can be compared, those of pruned rows cannot."""
    base = base_of(replay(ROWS, until=CUT).state, ROWS[CUT - 1].hash)
    store = MemoryStore(ROWS[CUT:], base)
    for position in (CUT - 1, CUT, CUT + 1):
        assert lost_words(head_of(position), store) is None
    assert "row 8 has the hash" in str(lost_words(Head(CUT, GENESIS), store))
    assert lost_words(Head(CUT - 1, GENESIS), store) is None
