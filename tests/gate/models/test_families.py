"""
How models of mlx-lm's families are served: the page states what a trial finds.

Of each kind one or two families are tried here; ``tools/model_table.py`` tries all.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from model_table import BEGIN, END, PAGE, Row, measured, table, with_table

from tests.support.models.model_families import FAMILIES, QUICK, kind_of


def lines() -> list[str]:
    """The rows of the table in the page."""
    found = PAGE.read_text("utf-8").split(BEGIN)[1].split(END)[0].strip().splitlines()
    return found[2:]


@pytest.mark.long_but("llama", "deepseek_v3", "mamba2", "rwkv7", "qwen3_next", "nemotron_h", "lfm2")
@pytest.mark.gate
@pytest.mark.parametrize("family", QUICK)
def test_a_family_is_served_as_the_page_says(family: str, model_directory: Path) -> None:
    """
    A small model of the family has the same bits warm and cold, alone and among others, while naive
    reuse differs. What its layers keep and how it is served match the page.
    """
    row = measured(family, model_directory)

    assert row.line in lines()
    assert row.same_bits
    assert row.control, "the naive way has the same bits: nothing is proved"


def test_every_kind_is_tried_every_day() -> None:
    """No kind of family is left to the sweep alone."""
    assert set(FAMILIES) == {kind_of(family) for family in QUICK}


def test_the_page_has_every_family_and_no_other() -> None:
    """A new family is on the page, and one that is not served is listed with a reason."""
    documented = [re.findall(r"`([^`]+)`", line)[0] for line in lines()]

    assert [family for families in FAMILIES.values() for family in families] == documented
    for line in lines():
        *_, served, grain, rows, bits, _ = (cell.strip() for cell in line.split("|"))
        found = (served, grain, rows != "", bits)
        assert found in {
            *(("warm", grain, True, "yes") for grain in ("1", "C")),
            ("cold", "", True, "yes"),
        } or (re.match(r"no: .+\.$", served) and not grain + rows + bits), line


def test_a_family_that_contradicts_itself_is_refused(model_directory: Path) -> None:
    """
    A model whose mask is over another window than its cache is refused by name, with a reason.
    """
    row = measured("plamo3", model_directory)

    assert 0 == row.rows
    assert "plamo3" in row.served
    assert "a mask over 101 tokens for a window of 100" in row.served
    assert row.line in lines()


def test_a_family_that_ends_the_process_is_refused(model_directory: Path) -> None:
    """
    A family's module in mlx-lm that exits when its package is missing does not end the server.
    """
    row = measured("olmo", model_directory)

    assert "a package that is not installed" in row.served
    assert row.line in lines()


def test_a_row_that_is_not_served_has_its_reason_alone() -> None:
    """The row gives the reason and claims nothing else; the rest of the page is unchanged."""
    row = Row(kind="dense", family="x", keeps="", served="no: why.", rows=0, same_bits=None)

    page = with_table(f"before\n{BEGIN}\nold\n{END}\nafter\n", table([row]))

    assert "| dense | `x` |  | no: why. |  |  |  |" in page.splitlines()
    assert page.startswith("before\n")
    assert page.endswith("\nafter\n")
    assert "old" not in page
