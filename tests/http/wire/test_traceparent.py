"""The header ``traceparent``, as W3C specifies it."""

from __future__ import annotations

import pytest

from cairn.http.wire.traceparent import read_traceparent

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
VALID = f"00-{TRACE}-{SPAN}-01"


@pytest.mark.parametrize(
    ("header", "read"),
    [
        (VALID, VALID),
        (f" {VALID}\t", VALID),
        (f"00-{TRACE}-{SPAN}-00", f"00-{TRACE}-{SPAN}-00"),
        # A later version may add fields, and is read as far as this one goes.
        (f"cc-{TRACE}-{SPAN}-01-what-the-future-will-be-like", f"cc-{TRACE}-{SPAN}-01"),
        (f"cc-{TRACE}-{SPAN}-01", f"cc-{TRACE}-{SPAN}-01"),
    ],
)
def test_a_valid_header_is_read(header: str, read: str):
    """Its four fields are read, without the spaces around it and the fields of later versions."""
    assert read == read_traceparent([header])


@pytest.mark.parametrize(
    "header",
    [
        "",
        "00",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE}-{SPAN}-01-extra",
        f"00-{TRACE}-{SPAN}-01.extra",
        f"cc-{TRACE}-{SPAN}-01.extra",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        VALID.upper(),
        f"00-{TRACE}x-{SPAN}-01",
        f"00-{TRACE[1:]}-{SPAN}-01",
        f"0x-{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-0",
        f"00-{'é' * 32}-{SPAN}-01",
        f"00-{'٣' * 32}-{SPAN}-01",
        "x" * 100_000,
    ],
)
def test_an_invalid_header_is_ignored(header: str):
    """The request begins a trace of its own."""
    assert read_traceparent([header]) is None


def test_one_header_counts():
    """No header names no caller, and of two it is unknown which one counts."""
    assert read_traceparent([]) is None
    assert read_traceparent([VALID, VALID]) is None
