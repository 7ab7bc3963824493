"""Times and ages as people write them."""

from datetime import UTC, datetime, timedelta, timezone

import pytest

from cairn.ops.common.times import moment_of, time_of

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("90s", NOW - timedelta(seconds=90)),
        ("10m", NOW - timedelta(minutes=10)),
        ("2h", NOW - timedelta(hours=2)),
        ("30d", NOW - timedelta(days=30)),
        ("2026-01-31", datetime(2026, 1, 31, tzinfo=UTC)),
        ("2026-01-31T12:00", datetime(2026, 1, 31, 12, tzinfo=UTC)),
        ("2026-01-31T12:00+01:00", datetime(2026, 1, 31, 12, tzinfo=timezone(timedelta(hours=1)))),
    ],
)
def test_a_moment(text: str, moment: datetime) -> None:
    """An age counts back from now; a time without a zone is UTC."""
    assert moment == moment_of(text, NOW)


@pytest.mark.parametrize(
    "text",
    [
        *("", "soon", "30", "1y", "-1d", "999999999d", "9999999999d"),
        *("0001-01-01T00:00+14:00", "9999-12-31T23:59-14:00"),
    ],
)
def test_invalid_times(text: str) -> None:
    """A text that is neither, or a time outside all calendars, is refused."""
    assert moment_of(text, NOW) is None


def test_a_time_is_a_text() -> None:
    """A log line may have any value as its time; an age is not a time."""
    values: tuple[object, ...] = (None, 5, "10m", {})
    assert [None] * 4 == [time_of(value) for value in values]
