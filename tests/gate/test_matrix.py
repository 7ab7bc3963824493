"""The table of `make gate-matrix`: its cells, and when it fails."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from tests.gate.matrix import Cell, Result, cells, main

FINE = Result(core="Haswell", requests=52, prompt_tokens=200, reused_tokens=50)


def test_each_cell_is_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    """Three kernels, one thread and two, both grains; one that cannot run says why."""

    def run(cell: Cell, requests: int, seed: int) -> Result:
        assert (40, 7) == (requests, seed)
        if cell.core == "SkylakeX":
            return Result(skipped="this processor has no AVX-512")
        row_class = (64, 12, 12, 252, 0, 0) if cell.grain == "1" else ()
        return attrs.evolve(FINE, row_class=row_class)

    assert 0 == main(40, 7, run)
    assert 12 == len(set(cells()))
    out = capsys.readouterr().out
    assert "| Haswell | 1 | 1 | 12 to 252 rows by 12 | 52 | 50 (25%) | 0 |" in out
    assert "| Zen (Haswell's) | 2 | C | none | 52 | 50 (25%) | 0 |" in out
    assert "| SkylakeX | 2 | 1 | skipped: this processor has no AVX-512 |" in out


@pytest.mark.parametrize("bad", [{"differ": 1}, {"wrong": ("row 7: INV-3: a row",)}])
def test_one_cell_that_differs_fails(
    bad: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """An answer with other bits, or a journal with a finding, which is printed."""

    def run(cell: Cell, requests: int, seed: int) -> Result:
        last = cell == Cell(core="SkylakeX", threads=2, grain="C")
        return attrs.evolve(FINE, **bad) if last else FINE

    assert 1 == main(1, 1, run)
    assert ("INV-3" in capsys.readouterr().out) == ("wrong" in bad)
