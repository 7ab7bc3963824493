"""Times and ages as people write them on the command line."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

_AGE = re.compile(r"(\d{1,9})([smhd])")
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}


def time_of(text: object) -> datetime | None:
    """
    A time in ISO 8601, in UTC where it names no zone; None for anything else, and for what lies
    beyond all calendars in UTC.
    """
    if not isinstance(text, str):
        return None
    try:
        moment = datetime.fromisoformat(text)
        if moment.tzinfo is None:
            return moment.replace(tzinfo=UTC)
        # A zone can lead out of the years 1 to 9999.
        return moment.astimezone(UTC)
    except (ValueError, OverflowError):
        return None


def moment_of(text: str, now: datetime) -> datetime | None:
    """
    A time as above, or how long before ``now``: 90s, 10m (minutes), 2h, 1d. None where it is
    neither, or before all calendars.
    """
    age = _AGE.fullmatch(text)
    if age is None:
        return time_of(text)
    try:
        return now - timedelta(**{_UNITS[age[2]]: int(age[1])})
    except OverflowError:
        return None
