"""
Connections to the database of a journal.

One connection writes; SQLite can be damaged if two write or checkpoint (up to 3.51.2). All others
open read-only, even while the server runs. On PostgreSQL a connection that may write has the
journal's lock from its beginning to its end, so that a lost one is replaced only by one that has
the lock again.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Literal, TypeVar

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError, NoSuchModuleError

from cairn.journal.errors import StoreError
from cairn.journal.rows.database import postgres
from cairn.journal.rows.database.failures import store_errors
from cairn.journal.rows.database.urls import file_of, parsed_url, place_name

T = TypeVar("T")

BUSY_S = 5.0
"""How long the database waits for another process's lock, in seconds."""

PAGE_BYTES = 2048
"""The page of a new SQLite journal. A commit writes whole pages, and most have few rows."""

LOG_BYTES = 4 * 1024 * 1024
"""
The size at which SQLite writes its log into the file, and to which it cuts it back after that. It
grows beyond that while a program keeps reading the journal in one transaction.
"""

Sync = Literal["full", "normal"]
"""
When rows count as committed: when they are on the disk, or when the operating system has them, so
that the last ones may be lost if that fails.
"""


def in_database(url: str, doing: str, work: Callable[[sa.Connection], T]) -> T:
    """
    A step in a transaction of its own, without the lock of the journal: it must not change rows.

    Args:
        doing: what it does to the journal, for the message of an error.

    Raises:
        StoreError: the database cannot be reached, or refuses.
    """
    parsed = parsed_url(url)
    with store_errors(place_name(parsed), doing):
        connection = postgres.unlocked(parsed)
        try:
            with connection.begin():
                return work(connection)
        finally:
            let_go(connection)


def log_of(path: Path) -> Path:
    """The write-ahead log of an SQLite file."""
    return path.with_name(f"{path.name}-wal")


def size_of(path: Path) -> int:
    """The size of a file; 0 if there is none."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def connected(url: sa.URL, *, mode: str, sync: Sync = "full") -> sa.Connection:
    place = place_name(url)
    path = file_of(url)
    try:
        if path is None:
            with store_errors(place, "connect to"):
                return postgres.connected(
                    url,
                    place,
                    read_only=mode == "ro",
                    may_create=mode == "rwc",
                    wait_s=BUSY_S,
                    is_synced=sync == "full",
                )
        with store_errors(place, "open"):
            try:
                return _sqlite(path, mode, sync)
            except DBAPIError:
                # A reader of a WAL database has to create files next to it. On a read-only medium
                # no other process can write either, so it is safe to read without them, unless a
                # log remains.
                if mode != "ro" or size_of(log_of(path)):
                    raise
                return _sqlite(path, "ro&immutable=1", sync)
    except ModuleNotFoundError as error:
        raise StoreError(
            f"{place} needs the package {error.name}; install the extra `postgres`."
        ) from error
    except NoSuchModuleError as error:
        raise StoreError(f"{place}: Cairn supports only SQLite and PostgreSQL.") from error


def _sqlite(path: Path, mode: str, sync: Sync) -> sa.Connection:
    address = f"{path.absolute().as_uri()}?mode={mode}"

    def connect() -> sqlite3.Connection:
        # No implicit transactions: `begun` below says when one begins.
        made = sqlite3.connect(
            address, uri=True, timeout=BUSY_S, isolation_level=None, check_same_thread=False
        )
        if mode.startswith("rw"):
            made.execute(f"PRAGMA page_size = {PAGE_BYTES}")  # has no effect on an existing file
            made.execute("PRAGMA journal_mode = WAL")
            made.execute(f"PRAGMA synchronous = {sync}")
            ((page,),) = made.execute("PRAGMA page_size").fetchall()
            made.execute(f"PRAGMA wal_autocheckpoint = {LOG_BYTES // page}").fetchall()
            made.execute(f"PRAGMA journal_size_limit = {LOG_BYTES}").fetchall()
            # Pruning a journal removes rows; their texts should not remain anywhere.
            made.execute("PRAGMA secure_delete = ON").fetchall()
        else:
            made.execute("SELECT 1 FROM sqlite_schema LIMIT 1").fetchall()  # fails now, not later
        return made

    engine = sa.create_engine("sqlite://", creator=connect, poolclass=sa.NullPool)

    @sa.event.listens_for(engine, "begin")
    def begun(connection: sa.Connection) -> None:
        # A writer takes its lock at once, so that what it reads cannot change before it writes.
        connection.exec_driver_sql("BEGIN IMMEDIATE" if mode.startswith("rw") else "BEGIN")

    return engine.connect()


def let_go(connection: sa.Connection) -> None:
    connection.close()
    connection.engine.dispose()
