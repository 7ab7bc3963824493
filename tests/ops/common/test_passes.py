"""What the self-test found, in words."""

from __future__ import annotations

import attrs
import pytest

from cairn.engine.row_class import RowClass
from cairn.ops.common.passes import decode_text, drafts_text, prefill_text


def row_class(quantum: int, least: int, most: int) -> RowClass:
    """A class over segments of 64 tokens."""
    return RowClass(segment=64, quantum=quantum, least=least, most=most, product=0)


@pytest.mark.parametrize(
    ("found", "reason", "text"),
    [
        (None, "it keeps states", "reuse in whole blocks (it keeps states)"),
        (row_class(1, 5, 256), "", "reuse to the token with passes of 5 to 256 rows"),
        (
            row_class(12, 12, 252),
            "",
            "reuse to the token with passes of 12 to 252 rows in steps of 12",
        ),
        (
            attrs.evolve(row_class(1, 8, 256), low_rank=256),
            "",
            "reuse to the token with passes of 8 to 256 rows, an adapter's layers over 256",
        ),
        (
            row_class(64, 64, 64),
            "the search took longer than 180 s",
            "reuse to the token with passes of 64 rows (the search took longer than 180 s)",
        ),
    ],
)
def test_prefill(found: RowClass | None, reason: str, text: str):
    """Reuse to the token or in blocks, and the rows of a pass."""
    assert text == prefill_text(found, reason)


def test_decode_and_drafts():
    """The numbers of rows if there are several, and why there are no drafts."""
    assert " in passes of 2 or 4 rows" == decode_text((2, 4))
    assert "" == decode_text((4,))
    assert "drafts from prompt and answer, with the same bits" == drafts_text("")
    assert "off: --no-speculation" == drafts_text("--no-speculation")
