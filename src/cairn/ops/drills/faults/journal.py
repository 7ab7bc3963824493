"""Damage to a journal on disk, as a person with a database program could do it."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

import attrs

from cairn.journal import events as ev
from cairn.journal.rows.codec import decode, encode
from cairn.journal.rows.database.urls import journal_url, sqlite_path
from cairn.ops.drills.server.private_server import stored_rows


def row_changed(directory: Path) -> int:
    """Change a number in a row. Returns the position at which the chain breaks."""
    row = next(row for row in stored_rows(directory) if row.kind == ev.RequestReceived.kind)
    event = decode(row).event
    assert isinstance(event, ev.RequestReceived)
    field = b'"prompt_tokens":%d'
    public = row.public.replace(field % event.prompt_tokens, field % (event.prompt_tokens + 1))
    _execute(directory, "UPDATE events SET public = ? WHERE position = ?", (public, row.position))
    return row.position


def row_removed(directory: Path) -> int:
    """Remove a row from the middle. Returns the position at which the chain breaks."""
    row = next(row for row in stored_rows(directory) if row.kind == ev.TokensEmitted.kind)
    _execute(directory, "DELETE FROM events WHERE position = ?", (row.position,))
    return row.position + 1


def tail_rewritten(directory: Path) -> int:
    """
    Change the text of the last answer and rebuild the chain from there, so that it is valid again.
    Returns the position of the first rewritten row.
    """
    rows = stored_rows(directory)
    first = max(row.position for row in rows if row.kind == ev.TokensEmitted.kind)
    head = rows[first - 2].hash
    for row in rows[first - 1 :]:
        recorded = decode(row)
        event = recorded.event
        if isinstance(event, ev.TokensEmitted):
            recorded = attrs.evolve(recorded, event=attrs.evolve(event, text="Other words."))
        made = encode(recorded, head)
        head = made.hash
        _execute(
            directory,
            "UPDATE events SET private = ?, private_digest = ?, previous_hash = ?, hash = ? "
            "WHERE position = ?",
            (made.private, made.private_digest, made.previous_hash, made.hash, made.position),
        )
    return first


def _execute(directory: Path, statement: str, values: tuple[object, ...]) -> None:
    path = sqlite_path(journal_url(directory))
    with contextlib.closing(sqlite3.connect(path, timeout=10)) as database, database:
        done = database.execute(statement, values)
        assert done.rowcount == 1
