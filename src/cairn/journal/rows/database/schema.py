"""The schema of a journal: its revision, and what another program changed in it."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import sqlite

from cairn.journal.errors import StoreError
from cairn.journal.rows.codec import shown
from cairn.journal.rows.database import key_table, lease, postgres
from cairn.journal.rows.database.connections import connected, let_go
from cairn.journal.rows.database.failures import store_errors
from cairn.journal.rows.database.tables import REVISION, VERSION_TABLE, metadata
from cairn.journal.rows.database.urls import file_of, parsed_url, place_name

_STRANGE = "Cairn did not make it"


def migrate(url: str) -> str | None:
    """
    Bring a journal's schema up to date; creates a journal if there is none.

    Returns:
        The revision before, None for a new journal.

    Raises:
        StoreError: the database is not Cairn's, is newer than this version, or cannot be written.
            It is then unchanged.
    """
    from alembic import command  # slow to load, and only this function needs it
    from alembic.config import Config

    parsed = parsed_url(url)
    place = place_name(parsed)
    before = schema_revision(url)
    if before is not None and before > REVISION:
        raise StoreError(other_revision(place, before))
    if (path := file_of(parsed)) is not None:
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"{path.parent} cannot be made: {error.strerror}.") from error
        _make_private(path)
    connection = connected(parsed, mode="rwc")
    try:
        with store_errors(place, "migrate"), connection.begin():
            config = Config()
            config.set_main_option("script_location", "cairn:migrations")
            config.set_main_option("path_separator", "os")
            config.attributes["connection"] = connection
            command.upgrade(config, "head")
    finally:
        let_go(connection)
    return before


def schema_revision(url: str) -> str | None:
    """
    The revision of a journal's schema; None if there is no journal yet. Changes nothing: opens an
    existing file read-only first, because opening it for writing already changes it.

    Raises:
        StoreError: the database is not Cairn's or cannot be read.
    """
    parsed = parsed_url(url)
    path = file_of(parsed)
    if path is not None and not path.exists():
        return None
    connection = connected(parsed, mode="ro")
    try:
        with store_errors(place_name(parsed), "read"), connection.begin():
            return _revision(connection, place_name(parsed))
    finally:
        let_go(connection)


def strange_words(place: str, faults: Sequence[tuple[str, str]]) -> str:
    """What to do about what another program changed in the database of a journal."""
    what = "; ".join(f"{part}: {fact}" for part, fact in faults)
    return (
        f"Another program changed the database {place} ({what}). Remove what it added, or restore "
        "a backup. `ops verify` checks the rows."
    )


def _make_private(path: Path) -> None:
    """
    Create a file that only its owner can read, whatever the umask. SQLite would use the default
    mode, and gives the files next to it the mode of this one. An existing file keeps its mode.
    """
    # SQLite opens it next, and its errors are better.
    with suppress(OSError):
        if not path.exists():
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))


def _revision(connection: sa.Connection, place: str) -> str | None:
    """The schema's revision; None for a database that is empty."""
    tables = set(sa.inspect(connection).get_table_names())
    if VERSION_TABLE not in tables:
        if tables and (connection.dialect.name == "sqlite" or "events" in tables):
            raise StoreError(
                f"{place} is the database of another program, not a Cairn journal. It was not "
                "changed; choose another with --data-dir or --journal."
            )
        return None
    version = sa.table(VERSION_TABLE, sa.column("version_num", sa.Text))
    found = connection.execute(sa.select(version.c.version_num).limit(2)).scalars().all()
    if len(found) > 1:
        raise StoreError(
            f"{place} names two schemas as its own; another program changed it. Restore a backup."
        )
    return as_text(found[0]) if found else None


def sqlite_faults(raw: sqlite3.Connection) -> list[tuple[str, str]]:
    dialect = sqlite.dialect()
    known = {("table", name) for name in (*metadata.tables, VERSION_TABLE)}
    query = "SELECT type, name FROM sqlite_schema WHERE type != 'index'"
    parts = {(as_text(kind), as_text(name)) for kind, name in raw.execute(query)}
    # SQLite's own names cannot be taken by another program.
    strange = {part for part in parts - known if not part[1].startswith("sqlite_")}
    faults = [(f"{kind} {name}", _STRANGE) for kind, name in sorted(strange)]
    faults += [(f"table {name}", "it is missing") for _, name in sorted(known - parts)]
    for table in metadata.tables.values():
        if ("table", table.name) not in parts:
            continue
        found = {
            as_text(name): (as_text(kind).upper(), bool(required or key), bool(key))
            for _, name, kind, required, _, key, _ in raw.execute(
                f"PRAGMA table_xinfo({table.name})"
            )
        }
        due = {
            column.name: (
                column.type.compile(dialect=dialect),
                not column.nullable,
                column.primary_key,
            )
            for column in table.columns
        }
        faults += _column_faults(table.name, found, due)
    return faults


def _column_faults(
    table: str, found: Mapping[str, object], due: Mapping[str, object]
) -> list[tuple[str, str]]:
    facts = [(name, _STRANGE) for name in found if name not in due]
    facts += [(name, "it is missing") for name in due if name not in found]
    facts += [
        (name, "it was changed") for name in due if name in found and found[name] != due[name]
    ]
    return [(f"column {table}.{name}", fact) for name, fact in facts]


def postgres_faults(connection: sa.Connection) -> list[tuple[str, str]]:
    tables = [*metadata.tables.values(), lease.table, *key_table.metadata.tables.values()]
    names = [table.name for table in tables]
    faults = [(part, _STRANGE) for part in postgres.strange_parts(connection, names)]
    for table in tables:
        faults += _column_faults(table.name, *postgres.columns(connection, table))
    return faults


def other_revision(place: str, revision: str | None) -> str:
    if revision is not None and revision > REVISION:
        return (
            f"{place} was written by a newer Cairn (schema {revision}; this one knows {REVISION}). "
            "Use that version or a newer one; the journal was not changed."
        )
    has = "has no schema yet" if revision is None else f"has schema {revision}, not {REVISION}"
    return f"{place} {has}. Run `ops migrate`."


def as_text(value: Any) -> str:
    if isinstance(value, bytes):
        return value.decode(errors="backslashreplace")
    return shown(value)
