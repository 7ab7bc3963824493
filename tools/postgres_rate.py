"""
How many rows a second a journal on PostgreSQL takes, by the rows of a commit.

Starts a server of its own, with all that makes commits durable, in a temporary folder::

    python -P tools/postgres_rate.py
"""

from __future__ import annotations

import time
from contextlib import closing

import attrs

from cairn.journal.rows.codec import GENESIS, Row
from cairn.journal.rows.database.schema import migrate
from cairn.journal.rows.store_sql import SqlStore
from tests.support.journals import healthy
from tests.support.processes.postgres import DURABLE, running_postgres

_SIZES = (1, 10, 100, 1000)
_SECONDS = 5.0


def rows(count: int) -> list[Row]:
    """Rows like those of a conversation, each after the one before, with hashes made up."""
    like, made, before = healthy(), list[Row](), GENESIS
    for position in range(1, count + 1):
        row = attrs.evolve(
            like[position % len(like)],
            position=position,
            seq=position,
            event_id=f"event-{position:032}",
            previous_hash=before,
            hash=f"{position:064}",
        )
        made.append(row)
        before = row.hash
    return made


def rate(store: SqlStore, waiting: list[Row], size: int) -> tuple[float, int]:
    """Append rows for a while; returns rows a second, and how many. They leave ``waiting``."""
    done, began = 0, time.perf_counter()
    while (passed := time.perf_counter() - began) < _SECONDS and len(waiting) >= size:
        store.append(waiting[:size])
        del waiting[:size]
        done += size
    return done / passed, done


def main() -> None:
    """Measure each size once, one after the other, in one journal."""
    waiting = rows(200_000)
    size_of = sum(len(row.public) + len(row.private or b"") for row in waiting[:1000]) // 1000
    print(f"payload of a row: {size_of} bytes; fsync, synchronous_commit: on")
    with running_postgres(DURABLE) as server:
        url = server.new_database()
        migrate(url)
        with closing(SqlStore.open(url)) as store:
            for size in _SIZES:
                found, done = rate(store, waiting, size)
                print(f"{size:5} rows a commit: {found:8.0f} rows a second ({done} rows)")


if __name__ == "__main__":
    main()
