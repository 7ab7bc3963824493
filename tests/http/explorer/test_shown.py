"""Numbers, times and bars as pages show them."""

from __future__ import annotations

from typing import Any

import pytest

from cairn.http.explorer import shown
from cairn.http.sessions.objects import BarObject, EventObject


def bar(**tokens: int) -> BarObject:
    """The tokens of a turn; those that are not named are 0."""
    names = ("prompt", "from_slab", "from_blocks", "from_partial", "prewarmed")
    none = dict.fromkeys((*names, "computed", "generated"), 0)
    return BarObject(**{**none, **tokens})


def row(position: int, kind: str, **payload: Any) -> EventObject:
    """A row of this kind."""
    return EventObject(
        position=position,
        seq=position,
        kind=kind,
        version=1,
        time_us=0,
        event_id="e",
        previous_hash="p",
        hash="h",
        payload=payload,
    )


def test_what_was_prewarmed_is_apart():
    """It is taken from the slab's part first, then from that of the blocks; the sum is the same."""
    parts = shown.turn_bar(
        bar(prompt=100, from_slab=20, from_blocks=40, from_partial=5, prewarmed=30, computed=35)
    )
    assert [("blocks", 35, 0), ("prewarmed", 30, 35), ("computed", 35, 65)] == [
        (one.kind, one.amount, one.start) for one in parts
    ]


def test_rows_are_folded_by_kind_and_step():
    """Rows that follow each other, and no others."""
    rows = [
        row(1, "cache_extended", step="prefill"),
        row(2, "cache_extended", step="decode"),
        row(3, "cache_extended", step="decode"),
        row(4, "tokens_emitted"),
        row(5, "cache_extended", step="decode"),
    ]
    assert [
        ("cache_extended (prefill)", 1, 1),
        ("cache_extended (decode)", 2, 3),
        ("tokens_emitted", 4, 4),
        ("cache_extended (decode)", 5, 5),
    ] == [(one.kind, one.first.position, one.last.position) for one in shown.folded(rows)]


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (shown.share(999, 1000), "99 %"),
        (shown.share(1000, 1000), "100 %"),
        (shown.share(0, 0), "–"),
        (shown.size(512), "512 B"),
        (shown.size(3 * 1024**2 // 2), "1.5 MiB"),
        (shown.size(5 * 1024**3), "5.0 GiB"),
        (shown.duration(31_400), "31 ms"),
        (shown.duration(1_500_000), "1.5 s"),
        (shown.duration(150_000_000), "2 min"),
        (shown.ago(10, 1_000_000), "now"),
        (shown.ago(0, 7_300_000_000), "2 h ago"),
        (shown.span(3 * 86_400_000_000), "3 d"),
        (shown.plural(1, "turn"), "1 turn"),
        (shown.plural(1200, "turn"), "1,200 turns"),
        (shown.clock(0), "00:00:00"),
        (shown.moment(0), "1970-01-01T00:00:00Z"),
        (shown.cut("abc", 2), "ab…"),
    ],
)
def test_numbers(found: str, expected: str):
    """Figures are as people read them, and never better than they are."""
    assert expected == found
