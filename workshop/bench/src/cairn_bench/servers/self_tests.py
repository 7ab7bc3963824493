"""
The findings of self-tests, for the next servers of the same model.

A server tests each fingerprint once, and reads the findings from its journal at its next start.
The servers of a bench have journals of their own; so each begins with the rows of an earlier one
up to its self-test, as if it had been started before. A server that has another fingerprint tests
itself all the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, TypeAlias

from cairn.journal.codec import Row
from cairn.journal.errors import StoreError
from cairn.journal.store_sql import SqlStore, journal_url, migrate
from cairn_bench.servers.processes import Kind, Running

Start: TypeAlias = Callable[[Kind, Path, Path], contextlib.AbstractContextManager[Running]]
"""Start a server of a kind over a model, with a folder for its data."""

_OPTIONS: Final = ("--block-tokens", "--decode-rows")
_FINISHED: Final = "self_test_finished"

_Key: TypeAlias = tuple[str, ...]


class SelfTests:
    """
    Remembers what the self-tests of servers found.

    Args:
        start: starts a server.
    """

    def __init__(self, start: Start) -> None:
        self._start = start
        self._rows: dict[_Key, list[Row]] = {}

    @contextlib.contextmanager
    def running(self, kind: Kind, model: Path, folder: Path) -> Iterator[Running]:
        """A server, whose journal has the self-test of an earlier one."""
        key, data = _key(kind, model), folder / "data"
        rows = self._rows.get(key)
        if kind.is_ours and rows and not data.exists():
            _write(data, rows)
        with self._start(kind, model, folder) as server:
            if kind.is_ours and not rows:
                self._rows[key] = _read(data)
            yield server


def _key(kind: Kind, model: Path) -> _Key:
    """What a self-test depends on, as far as servers of a bench differ in it."""
    pairs = zip(kind.command, kind.command[1:], strict=False)
    return (str(model), *(part for pair in pairs if pair[0] in _OPTIONS for part in pair))


def _read(data: Path) -> list[Row]:
    """The rows of a journal up to its last self-test; none if there is none."""
    try:
        store = SqlStore.open(journal_url(data), read_only=True)
    except StoreError:
        return []
    try:
        rows = list(store.read())
    finally:
        store.close()
    ends = [place for place, row in enumerate(rows, start=1) if row.kind == _FINISHED]
    return rows[: ends[-1]] if ends else []


def _write(data: Path, rows: list[Row]) -> None:
    data.mkdir(parents=True)
    migrate(journal_url(data))
    store = SqlStore.open(journal_url(data))
    try:
        store.append(rows)
    finally:
        store.close()
