"""A data directory with a sealed journal, and a server on it whose engine is fake."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from typing import Any

import attrs

from cairn.actors.journal_keys import KeyFile
from cairn.actors.requests.messages import ForgottenSession
from cairn.actors.server import Server
from cairn.journal import events as ev
from cairn.journal.replay import Report, replay
from cairn.journal.rows.codec import Row, decode
from cairn.journal.rows.store_sql import SqlStore, journal_url, migrate
from tests.support.in_process_server import (
    ask,
    chat,
    generate,
    local,
    serving_fake,
    wait_idle,
)

LONG = "A long first message, so that there are blocks to be reused: " + "x" * 150
OTHER = "Something else that is long enough to fill several blocks. " + "y" * 150
FILES = 1 << 24


@attrs.frozen
class Place:
    """A data directory with a sealed journal."""

    folder: Path

    @contextlib.asynccontextmanager
    async def serving(self, **changes: Any) -> AsyncIterator[Server]:
        """A server over the fake engine, with a journal, keys, a snapshot and block files."""
        keys, url = KeyFile.open(self.folder / "keys.db"), journal_url(self.folder)
        settings = {
            "keys": keys,
            "reader": lambda: SqlStore.open(url, read_only=True, keys=keys),
            "snapshot": self.folder / "snapshot",
            "blocks_folder": self.folder / "blocks",
            "disk_bytes": FILES,
        }
        with closing(keys):
            migrate(url)
            store: Any = SqlStore.open(url, keys=keys)
            async with serving_fake(store, **{**settings, **changes}) as server:
                yield server
            store.close()

    def rows(self) -> list[Row]:
        """The rows of the journal, opened with the keys that are left."""
        keys = KeyFile.read(self.folder / "keys.db")
        assert keys is not None
        url = journal_url(self.folder)
        with closing(keys), closing(SqlStore.open(url, read_only=True, keys=keys)) as store:
            return list(store.read())

    def report(self) -> Report:
        """The replay of the journal; without a finding."""
        report = replay(self.rows())
        assert () == report.findings
        return report

    def events(self, kind: type[ev.Event]) -> list[Any]:
        """The events of a kind."""
        return [one for row in self.rows() if isinstance(one := decode(row).event, kind)]

    def readable(self, session: str) -> set[bool]:
        """Whether the prompts of a session can be read."""
        found = [decode(row) for row in self.rows() if row.stream == f"session/{session}"]
        return {one.unread is None for one in found if isinstance(one.event, ev.RequestReceived)}

    def has_key(self, session: str) -> bool:
        """Whether a key of a session is stored."""
        with closing(sqlite3.connect(self.folder / "keys.db")) as database:
            query = "SELECT count(*) FROM keys WHERE subject = ?"
            return bool(database.execute(query, (session,)).fetchone()[0])


async def talked(server: Server, text: str = LONG, **of: Any) -> str:
    """A conversation of two turns; its session."""
    first = await ask(server, generate(chat(text), **of))
    await wait_idle(server)
    await ask(server, generate(chat(text, first.text, "And then?"), **of))
    await wait_idle(server)
    return first.accepted.session


async def forget(server: Server, name: str, **how: Any) -> ForgottenSession:
    """Have a session of the local tenant forgotten."""
    sessions = local(server).sessions(of_all=False)
    session = sessions.find(name)
    assert session is not None
    return await sessions.forget(session, **{"with_agent": False, **how})
