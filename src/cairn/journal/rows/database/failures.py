"""What an error of a database means for a journal, and what an operator can do about it."""

from __future__ import annotations

import errno
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy.exc import DBAPIError, IntegrityError

from cairn.journal.errors import (
    HeadMoved,
    StoreError,
    StoreFull,
    StoreLocked,
    StoreLost,
    StoreUnready,
)
from cairn.journal.rows.database import postgres

_ROOM_BYTES = 64 * 1024  # the least that SQLite's shared memory and a few rows take
MAKE_ROOM = "Free some space on its disk; what was journaled before is safe."


@contextmanager
def store_errors(place: str, doing: str, make_room: str = MAKE_ROOM) -> Iterator[None]:
    """
    Convert errors of the database to errors of the journal.

    Args:
        make_room: what to do if the disk is full.
    """
    try:
        yield
    except IntegrityError as error:
        raise HeadMoved(
            f"Another writer appended to {place}. Let one server at a time use a journal."
        ) from error
    except Exception as error:
        # A driver's error is raw if it comes from a connection that replaces a lost one.
        raw = error.orig if isinstance(error, DBAPIError) else error
        if not (isinstance(raw, sqlite3.Error) or type(raw).__module__.startswith("psycopg")):
            raise
        fact = str(raw)
        first = (fact.strip().splitlines() or ["no message"])[0].rstrip(".")
        unready = _unready(raw, place)
        advice = make_room if unready is StoreFull else _advice(fact)
        raise (unready or StoreError)(
            f"Cannot {doing} {place}: {first}. {advice}".strip()
        ) from error


def _unready(error: BaseException | None, place: str) -> type[StoreUnready] | None:
    """What a database error means if the same may succeed later; None if it does not."""
    name, state = getattr(error, "sqlite_errorname", ""), getattr(error, "sqlstate", "")
    is_operational = any(kind.__name__ == "OperationalError" for kind in type(error).__mro__)
    # What the server did not report itself is about the connection to it.
    if is_operational and (state is None or state.startswith(postgres.LOST)):
        return StoreLost
    if name.startswith("SQLITE_BUSY") or state == postgres.LOCKED:
        return StoreLocked
    if name.startswith("SQLITE_IOERR"):
        # When over a quota, or when the files next to the database cannot grow, SQLite reports a
        # general disk error.
        return None if _has_room(Path(place).parent) else StoreFull
    return StoreFull if name == "SQLITE_FULL" or state == postgres.DISK_FULL else None


def _has_room(folder: Path) -> bool:
    """Try whether a few rows could be written there."""
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as tried:
            return tried.write(bytes(_ROOM_BYTES)) == _ROOM_BYTES
    except OSError as error:
        return error.errno not in (errno.ENOSPC, errno.EDQUOT)


def _advice(fact: str) -> str:
    """What to do about a database error, by its message: drivers have no codes in common."""
    for words, advice in (
        ("locked", "Another program writes to it; let one server at a time use a journal."),
        (
            "not a database",
            "It is not a Cairn journal. Nothing was changed. Check --data-dir or --journal.",
        ),
        ("malformed", "The file is damaged; keep a copy of it, and restore a backup."),
        ("readonly", "Check who owns the file and its folder."),
        ("unable to open", "Check the path, and who owns the file and its folder."),
        ("I/O", "The disk failed; check it before the server is started again."),
        ("refused", "Check that the database server runs and that the URL names it."),
        ("No such file", "Check that the database server runs and that the URL names it."),
    ):
        if words in fact:
            return advice
    return ""
