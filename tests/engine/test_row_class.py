"""Row classes: where the rows of a pass are, for all positions and sizes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.engine.errors import EngineFault
from cairn.engine.mlx.passes.search import candidates, one_shape
from cairn.engine.row_class import RowClass

BLOCKS = st.sampled_from([4, 16, 64, 256])
FAR = 1 << 30
OPEN = RowClass(segment=64, quantum=1, least=16, most=256, product=1_100_000)
PLACED = RowClass(segment=64, quantum=12, least=12, most=252, product=0)


@given(block=BLOCKS, data=st.data())
def test_rows_are_at_their_place(block: int, data: st.DataObject) -> None:
    """Modulo the quantum, in a number of rows that the class has, at positions from 0 on."""
    row_class = data.draw(st.sampled_from(list(candidates(block, has_low_rank=True))))
    start = data.draw(st.integers(0, 5000))
    tokens = data.draw(st.integers(1, row_class.most_tokens(start)))
    positions = data.draw(st.sampled_from([FAR, start + tokens]))

    front, rows = row_class.rows(start, tokens, positions)

    assert 0 <= front <= start
    assert (start - front) % row_class.quantum == 0
    assert rows % row_class.quantum == 0
    assert row_class.least <= rows <= row_class.most
    assert front + tokens <= rows
    assert rows == row_class.rows(start, tokens, FAR)[1]


@given(block=BLOCKS, data=st.data())
def test_one_row_is_computed_in_the_fewest_rows_at_its_place(
    block: int, data: st.DataObject
) -> None:
    """They are rows of the pass, and begin at a multiple of the quantum."""
    row_class = data.draw(st.sampled_from(list(candidates(block))))
    start = data.draw(st.integers(0, 5000))
    tokens = data.draw(st.integers(1, row_class.most_tokens(start)))
    front, rows = row_class.rows(start, tokens, FAR)
    last = front + tokens - 1

    found = row_class.rows_for_one(last, rows)

    assert 0 <= found.start <= last < found.stop <= rows
    assert found.start % row_class.quantum == 0
    assert found.stop - found.start == row_class.least


@given(block=BLOCKS, blocks=st.integers(0, 50))
def test_every_candidate_takes_the_passes_of_the_canonical_schedule(
    block: int, blocks: int
) -> None:
    """C tokens from every multiple of C on."""
    assert all(block <= one.most_tokens(blocks * block) for one in candidates(block))


def test_the_candidates_end_with_one_shape() -> None:
    """No class is tried twice, and each has C as its segment."""
    found = list(candidates(64))
    assert one_shape(64) == found[-1]
    assert len(set(found)) == len(found)
    assert {64} == {one.segment for one in found}
    assert (1, 1) == (found[0].quantum, found[0].least)


@pytest.mark.parametrize(
    ("start", "tokens", "positions", "expected"),
    [
        pytest.param(100, 1, FAR, (0, 16), id="dummies come after"),
        pytest.param(100, 40, FAR, (0, 40), id="none are needed"),
        pytest.param(100, 1, 101, (15, 16), id="before, at the last position"),
        pytest.param(3, 1, 4, (3, 16), id="as far as there are positions"),
    ],
)
def test_rows_of_an_open_class(
    start: int, tokens: int, positions: int, expected: tuple[int, int]
) -> None:
    """Its least number is filled with dummies."""
    assert expected == OPEN.rows(start, tokens, positions)


@pytest.mark.parametrize(
    ("start", "tokens", "positions", "expected"),
    [(100, 1, FAR, (4, 12)), (100, 9, FAR, (4, 24)), (107, 1, 108, (11, 12)), (0, 12, 12, (0, 12))],
)
def test_rows_of_a_class_with_places(
    start: int, tokens: int, positions: int, expected: tuple[int, int]
) -> None:
    """Dummies before the tokens bring them to their place."""
    assert expected == PLACED.rows(start, tokens, positions)


@pytest.mark.parametrize("tokens", [0, 249])
def test_a_pass_of_too_many_tokens(tokens: int) -> None:
    """Or of none is refused."""
    with pytest.raises(EngineFault, match="has 1 to 248 tokens"):
        PLACED.rows(100, tokens, FAR)


def test_queries_of_an_attention() -> None:
    """Few keys need the whole segment, more need fewer dummies; without a product always all."""
    assert (5, 64) == OPEN.queries(5, 3, 64, 32)
    assert (0, 17) == OPEN.queries(5, 3, 2048, 32)
    assert (0, 40) == OPEN.queries(5, 40, 2048, 32)
    assert (5, 64) == PLACED.queries(5, 3, 2048, 32)


@pytest.mark.parametrize("row_class", [OPEN, PLACED])
def test_fields_make_the_same_class(row_class: RowClass) -> None:
    """The journal has the fields; no fields are no class."""
    assert row_class == RowClass.of(row_class.fields)
    assert RowClass.of(()) is None


@pytest.mark.parametrize(
    "fields",
    [
        (64, 1, 16),
        (64, 12, 16, 252, 0, 0),
        (64, 12, 12, 250, 0, 0),
        (0, 1, 1, 4, 0, 0),
        (64, 1, 1, 4, 0, -1),
    ],
)
def test_fields_that_are_no_class(fields: tuple[int, ...]) -> None:
    """They are not taken from a journal."""
    with pytest.raises(EngineFault, match="not a row class"):
        RowClass.of(fields)
