"""
How fast a journal grows, for whoever tells it.
"""

from __future__ import annotations

import time
from bisect import bisect_left

from cairn.journal.errors import JournalError
from cairn.ops.where import bytes_on_disk

GROWTH_DAYS = 7
_DAY_US = 86_400_000_000


def growth(url: str) -> float:
    """
    By how many bytes a journal grew a day in the last days; 0 where that cannot be told.

    Reckoned from the share of its rows that are of these days, and from its size on disk: positions
    have no gaps, so few of them are looked at. One that has not been there for so long grew in the
    days since its first row.

    Args:
        url: of the journal, which is opened read-only.
    """
    from cairn.journal.store_sql import SqlStore, schema_revision

    size = sum(bytes_on_disk(url))
    try:
        if not size or schema_revision(url) is None:
            return 0.0
        store = SqlStore.open(url, read_only=True)
        try:
            base = store.base()
            low, high = (base.position if base is not None else 0), store.head()[0]
            rows = high - low
            now_us = time.time_ns() // 1000
            since = now_us - GROWTH_DAYS * _DAY_US
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
        return 0.0  # to say what is wrong with it is not what was asked
    if not rows or began_us is None:
        return 0.0
    # Less than an hour is too short to judge by.
    days = min(GROWTH_DAYS, max((now_us - began_us) / _DAY_US, 1 / 24))
    return size * (high + 1 - first) / rows / days
