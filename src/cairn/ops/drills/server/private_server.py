"""A complete server for one drill: its own directory, journal, log, secret and loopback port."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import trio

from cairn.actors.boot import Settings, booted
from cairn.actors.requests.limits import Limits
from cairn.actors.server import Server
from cairn.http.app import create_app
from cairn.http.server.listen import bind_socket, serve_http
from cairn.journal.rows.codec import Row
from cairn.journal.rows.database.schema import migrate
from cairn.journal.rows.database.urls import journal_url
from cairn.journal.rows.store_sql import SqlStore
from cairn.ops.common.locations import log_path, self_tests_folder
from cairn.ops.common.logs import logs_in
from cairn.ops.drills.server.client import Client
from cairn.ops.serve.data_dir import make_home, root_secret

_MIB = 1024 * 1024
BLOCK_TOKENS = 16
_SMALL: dict[str, Any] = {
    # Small blocks give a short conversation several of them; two rows serve two sessions at once.
    "block_tokens": BLOCK_TOKENS,
    "decode_rows": 2,
    "pool_slabs": 6,
    "pool_bytes": 64 * _MIB,
    "blocks_bytes": 16 * _MIB,
}


@attrs.frozen
class PrivateServer:
    """
    Attributes:
        server: for the code that damages it.
        client: for requests over HTTP.
    """

    server: Server
    client: Client


@contextlib.asynccontextmanager
async def private_server(
    directory: Path, model: Path, **changes: Any
) -> AsyncIterator[PrivateServer]:
    """
    Serve while the context lasts, then stop in order.

    Args:
        directory: created if it does not exist; journal, log and secret stay in it.
        changes: fields of ``Settings``.

    Raises:
        BootRefused: its journal failed verification.
        WriterDied: its journal could not be written, so it stopped. In a group.
    """
    # A damaged slab must still exist when it is used, however slow the model is.
    limits = Limits(drain_s=5.0, slab_idle_s=3600.0)
    settings = Settings(
        model=str(model), limits=limits, self_tests=self_tests_folder(), **{**_SMALL, **changes}
    )
    make_home(directory)
    migrate(journal_url(directory))
    store = SqlStore.open(journal_url(directory))
    with logs_in(log_path(directory)), contextlib.closing(store):
        async with booted(settings, store, root_secret(directory)) as server:
            stop = trio.Event()
            async with trio.open_nursery() as nursery:
                client = Client(await nursery.start(partial(_serve, server, stop)))
                yield PrivateServer(server, client)
                stop.set()


async def _serve(server: Server, stop: trio.Event, *, task_status: trio.TaskStatus[str]) -> None:
    listener = bind_socket("127.0.0.1", 0)
    app = create_app(server)
    await serve_http(
        app,
        listener,
        shutdown=stop,
        on_ready=task_status.started,
        on_stop=app.streams.stop,
        grace_s=5.0,
    )


def stored_rows(directory: Path) -> list[Row]:
    """The rows of the journal in a directory."""
    store = SqlStore.open(journal_url(directory), read_only=True)
    with contextlib.closing(store):
        return list(store.read())
