"""How fast a journal grows, for ``ops journal`` and ``ops doctor``."""

from __future__ import annotations

import time
from bisect import bisect_left

import attrs

from cairn.journal.errors import JournalError
from cairn.ops.common.locations import bytes_on_disk
from cairn.ops.common.output import counted, size_text

GROWTH_DAYS = 7
_DAY_S = 86_400


@attrs.frozen
class Growth:
    """
    How much a journal grew in the last days.

    Attributes:
        size: in bytes.
        seconds: the time in which it grew: the last days, or since its first row.
    """

    size: float
    seconds: float

    @property
    def is_short(self) -> bool:
        """
        Whether the time is too short to give a daily rate: loading a model and trying things out is
        not a day's use.
        """
        return self.seconds < _DAY_S

    @property
    def daily(self) -> float:
        """Bytes per day. Meaningless if ``is_short``."""
        return self.size * _DAY_S / max(self.seconds, 1)

    def __str__(self) -> str:
        """For people: the size per day, or per time if that is short."""
        if not self.is_short:
            return f"{size_text(self.daily)} a day"
        return f"{size_text(self.size)} in {_span(self.seconds)}"


_UNKNOWN = Growth(size=0.0, seconds=GROWTH_DAYS * _DAY_S)


def growth(url: str) -> Growth:
    """
    How much a journal grew in the last days, or since its first row if it is younger; 0 if that
    cannot be determined. An estimate from its size without the write-ahead log, and the share of
    rows of these days.
    Positions have no gaps, so it reads only a few rows.

    Args:
        url: of the journal; it is opened read-only.
    """
    from cairn.journal.rows.database.schema import schema_revision
    from cairn.journal.rows.store_sql import SqlStore

    try:
        if not sum(bytes_on_disk(url)) or schema_revision(url) is None:
            return _UNKNOWN
        store = SqlStore.open(url, read_only=True)
        try:
            size = store.size_bytes()
            base = store.base()
            low, high = (base.position if base is not None else 0), store.head()[0]
            rows = high - low
            now_us = time.time_ns() // 1000
            since = now_us - GROWTH_DAYS * _DAY_S * 1_000_000
            first = (
                low
                + 1
                + bisect_left(
                    range(low + 1, high + 1), since, key=lambda at: store.time_at(at) or 0
                )
            )
            began_us = store.time_at(low + 1)
        finally:
            store.close()
    except JournalError:
        return _UNKNOWN  # other commands report what is wrong with the journal
    if not rows or began_us is None:
        return _UNKNOWN
    seconds = min(GROWTH_DAYS * _DAY_S, max((now_us - began_us) / 1e6, 0.0))
    return Growth(size * (high + 1 - first) / rows, seconds)


def _span(seconds: float) -> str:
    """A time of less than a day, for people."""
    if seconds < 60:
        return "less than a minute"
    if seconds < 3600:
        return counted(int(seconds / 60), "minute")
    return counted(int(seconds / 3600), "hour")
