"""Numbers, times and bars as pages show them."""

from __future__ import annotations

from typing import Any

import pytest

from cairn.http.explorer import shown
from cairn.http.sessions.objects import BarObject, EventObject
from cairn.http.wire.placeholders import DOCUMENT, IMAGE


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


def test_kinds_that_alternate_are_folded():
    """Each chunk of a prefill with its block; what is left of a pattern is shown by itself."""
    rows = [row(1, "slab_acquired")]
    for at in range(2, 8, 2):
        rows += [row(at, "cache_extended", step="prefill"), row(at + 1, "block_sealed")]
    rows.append(row(8, "cache_extended", step="prefill"))
    found = list(shown.folded(rows))
    assert [
        ("slab_acquired", 1, 1, 1),
        ("cache_extended (prefill), block_sealed", 2, 7, 3),
        ("cache_extended (prefill)", 8, 8, 1),
    ] == [(one.kind, one.first.position, one.last.position, one.times) for one in found]
    assert [] == list(shown.folded([]))


def test_code_in_a_sentence():
    """What is between backticks, escaped as the rest is."""
    assert "a <code>&lt;b&gt;</code> &lt;c&gt;" == shown.coded("a `<b>` <c>")
    assert "a <code>b</code> c`d" == shown.coded("a `b` c`d")
    assert "a`b" == shown.coded("a`b")
    assert "" == shown.coded("")


def test_control_tokens_are_not_shown():
    """A diff has what people wrote; a difference of nothing else is shown as it is."""
    assert "Hello\nYou" == shown.unmarked(" Hello<|im_end|>\n<|im_start|>You")
    assert "<|im_end|>" == shown.unmarked("<|im_end|>")


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


@pytest.mark.parametrize(
    ("words", "seen"),
    [
        (f"What is this?{IMAGE}", "What is this? [an image was left out]"),
        (f"{IMAGE[:30]}… … And now?", "[an image was left out] … And now?"),
        (DOCUMENT, "[a document was left out]"),
        ("an image [an imaginary one]", "an image [an imaginary one]"),
        ("", ""),
    ],
)
def test_what_was_left_out(words: str, seen: str) -> None:
    """The placeholder of a part is short, apart from the words, and never cut."""
    assert seen == shown.brief(words)
