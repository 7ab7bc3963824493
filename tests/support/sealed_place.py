"""A data directory with a sealed journal, and a server on it whose engine is fake."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from typing import Any

import attrs

from cairn.actors.journal_keys import open_keys, read_keys
from cairn.actors.requests.messages import ForgottenSession
from cairn.actors.server import Server
from cairn.journal import events as ev
from cairn.journal.replay import Report, replay
from cairn.journal.rows.codec import Row, decode
from cairn.journal.rows.database.schema import migrate
from cairn.journal.rows.database.urls import journal_url
from cairn.journal.rows.store_sql import SqlStore
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
    """
    A data directory with a sealed journal.

    Attributes:
        url: of the journal, if it is that of a node; None for a file in the directory.
    """

    folder: Path
    url: str | None = None

    @property
    def _where(self) -> tuple[Path, str]:
        """Where the file of its keys would be, and its URL."""
        return self.folder / "keys.db", self.url or journal_url(self.folder)

    @contextlib.asynccontextmanager
    async def serving(self, **changes: Any) -> AsyncIterator[Server]:
        """A server over the fake engine, with a journal, keys, a snapshot and block files."""
        path, url = self._where
        migrate(url)
        keys = open_keys(path, url)
        settings = {
            "keys": keys,
            "reader": lambda: SqlStore.open(url, read_only=True, keys=keys),
            "snapshot": self.folder / "snapshot",
            "blocks_folder": self.folder / "blocks",
            "disk_bytes": FILES,
        }
        with closing(keys):
            store: Any = SqlStore.open(url, keys=keys)
            async with serving_fake(store, **{**settings, **changes}) as server:
                yield server
            store.close()

    def rows(self) -> list[Row]:
        """The rows of the journal, opened with the keys that are left."""
        path, url = self._where
        keys = read_keys(path, url)
        assert keys is not None
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
        keys = read_keys(*self._where)
        assert keys is not None
        with closing(keys):
            return session in keys.subjects()


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
