"""Times to live as clients and operators write them."""

from __future__ import annotations

import pytest

from cairn.engine.ttl import MOST_S, seconds_of


@pytest.mark.parametrize(
    ("written", "seconds"),
    [
        *((0, 0), ("90", 90), ("90s", 90), ("5m", 300), ("24h", 86_400), ("7d", 604_800)),
        ("3650d", MOST_S),
    ],
)
def test_a_time(written: int | str, seconds: int) -> None:
    """Seconds as a number, or a text with a unit."""
    assert seconds == seconds_of(written)


@pytest.mark.parametrize("written", [-1, "", "soon", "1.5h", " 5m", "5 m", "5y", 10**11])
def test_no_time(written: int | str) -> None:
    """The message says what is possible."""
    with pytest.raises(ValueError, match="a number of seconds, or a text such as '5m'"):
        seconds_of(written)


@pytest.mark.parametrize("written", [MOST_S + 1, "3651d"])
def test_a_time_that_is_too_long(written: int | str) -> None:
    """The longest is ten years."""
    with pytest.raises(ValueError, match=f"at most ten years .{MOST_S} seconds"):
        seconds_of(written)
