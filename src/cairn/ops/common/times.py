"""Times and ages on the command line."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

_AGE = re.compile(r"(\d{1,9})([smhd])")
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}


def time_of(text: object) -> datetime | None:
    """
    A time in ISO 8601, converted to UTC, which is the default zone. None for anything else, and for
    times outside the years 1 to 9999.
    """
    if not isinstance(text, str):
        return None
    try:
        moment = datetime.fromisoformat(text)
        if moment.tzinfo is None:
            return moment.replace(tzinfo=UTC)
        # The conversion can leave the years 1 to 9999.
        return moment.astimezone(UTC)
    except (ValueError, OverflowError):
        return None


def moment_of(text: str, now: datetime) -> datetime | None:
    """
    A time in ISO 8601, or an age before ``now``: 90s, 10m (minutes), 2h, 1d. None if it is neither,
    or before the year 1.
    """
    age = _AGE.fullmatch(text)
    if age is None:
        return time_of(text)
    try:
        return now - timedelta(**{_UNITS[age[2]]: int(age[1])})
    except OverflowError:
        return None
