"""``ops stop``: stops the server that uses a data directory, as SIGTERM does, and waits for it."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import click

from cairn.journal.errors import JournalError
from cairn.journal.events import BlockSpilled, RequestCancelled, RequestFinished
from cairn.ops.cli import Unreadable
from cairn.ops.common.locations import example, journal_options, options_of, url_of
from cairn.ops.common.output import counted
from cairn.ops.common.program import program
from cairn.ops.serve.api_keys import api_key_option
from cairn.ops.state.running import Running, health_of, is_the_server, running

STILL_RUNNING = 1
"""The exit code if the server has not ended in time."""

_POLL_S = 0.1
_REPORT_S = 5.0
LOOKS = 20
"""How often the lock is read again if it names a process that is not the server."""


@click.command(epilog=example("ops stop", "ops stop --data-dir ~/other", "ops stop --now"))
@journal_options
@api_key_option
@click.option(
    "--wait",
    type=click.FloatRange(0),
    metavar="SECONDS",
    help="How long to wait for the end of the server. By default until it has ended.",
)
@click.option(
    "--now", is_flag=True, help="Do not let running requests finish: what is committed stays."
)
def stop(
    data_dir: Path, journal: str | None, api_key: str | None, wait: float | None, now: bool
) -> None:
    """
    Stop the running server, and wait until it has ended.

    Finds the server that uses the data directory, on any port, and sends it SIGTERM: it accepts no
    new requests, gives running ones the time of its option --drain, and writes its cache to disk.
    Ctrl-C ends the wait; the server stops all the same.

    \b
    Exit code
      0  it has ended, or no server was running
      1  it had not ended within --wait
      2  it could not be stopped
    """
    server = running(data_dir)
    if server is None:
        click.echo(f"No server uses {data_dir}.", err=True)
        return
    server = _settled(server)
    before = _before(server, journal, api_key)
    _signal(server)
    click.echo(_begin_words(server, before.health), err=True)
    began_s = time.monotonic()
    if not _ended(server, wait, began_s, now=now):
        click.echo(
            f"It is still stopping after {time.monotonic() - began_s:.0f} s. `{program()} stop "
            f"--now{options_of(data_dir)}` ends it at once.",
            err=True,
        )
        sys.exit(STILL_RUNNING)
    waited_s = time.monotonic() - began_s
    click.echo(f"Stopped after {waited_s:.1f} s{_waited_words(data_dir, journal, before)}.")


@attrs.frozen
class _Before:
    """
    The server before the signal.

    Attributes:
        health: what it answered; None if it did not.
        position: of the journal's last row; None if that is not known.
    """

    health: Mapping[str, Any] | None
    position: int | None


def _settled(server: Running) -> Running:
    """
    The server, once its recorded id is certainly its own.

    Raises:
        Unreadable: it is not.
    """
    for _ in range(LOOKS):
        if is_the_server(server):
            return server
        time.sleep(_POLL_S)  # it may have taken the lock just now, and not written its id yet
        server = running(server.data_dir) or server
    named = "no process id" if server.pid is None else f"process {server.pid}"
    raise Unreadable(
        f"A server uses {server.data_dir}, but {named}, which its lock names, is not that server: "
        "it may run in a container, on another machine or for another user. Stop it there. Nothing "
        "was sent."
    )


def _signal(server: Running) -> None:
    assert server.pid is not None
    try:
        os.kill(server.pid, signal.SIGTERM)
    except ProcessLookupError:
        return  # it has ended by itself
    except PermissionError as error:
        raise Unreadable(
            f"You may not stop {server.words}: it is another user's. Ask that user, or use sudo."
        ) from error


def _before(server: Running, journal: str | None, key: str | None) -> _Before:
    health = health_of(server.url, key) if server.url is not None else None
    return _Before(health, position_of(url_of(server.data_dir, journal)))


def position_of(url: str) -> int | None:
    """The position of a journal's last row; None if that is not known."""
    from cairn.journal.rows.database.schema import schema_revision
    from cairn.journal.rows.store_sql import SqlStore

    try:
        if schema_revision(url) is None:
            return None
        store = SqlStore.open(url, read_only=True)
        try:
            return store.head()[0]
        finally:
            store.close()
    except JournalError:
        return None


def _begin_words(server: Running, health: Mapping[str, Any] | None) -> str:
    words = f"Stopping {server.words}"
    queue = (health or {}).get("queue")
    if not queue or not (queue["running"] or queue["queued"]):
        return f"{words} ..."
    requests = counted(queue["running"] + queue["queued"], "request")
    return f"{words}: it finishes {requests} first, as long as its option --drain allows ..."


def _ended(server: Running, wait_s: float | None, began_s: float, *, now: bool) -> bool:
    """
    Wait until the lock is free, or another server's. False if that takes too long.

    Args:
        now: send the signal again until then. Two at once would be one for the server.
    """
    reported_s = began_s
    while True:
        now_s = time.monotonic()
        after = running(server.data_dir)
        if after is None or after.pid != server.pid:
            return True
        if wait_s is not None and now_s - began_s >= wait_s:
            return False
        if now_s - reported_s >= _REPORT_S:
            reported_s = now_s
            click.echo(f"... still stopping after {now_s - began_s:.0f} s", err=True)
        time.sleep(_POLL_S)
        if now and is_the_server(server):
            _signal(server)


def _waited_words(data_dir: Path, journal: str | None, before: _Before) -> str:
    """What the server did after the signal, by its journal; empty if nothing."""
    if before.position is None:
        return ""
    from cairn.journal.rows.store_sql import SqlStore

    kinds = (RequestFinished.kind, RequestCancelled.kind, BlockSpilled.kind)
    counts = dict.fromkeys(kinds, 0)
    try:
        store = SqlStore.open(url_of(data_dir, journal), read_only=True)
        try:
            for row in store.read(before.position, kinds=kinds):
                counts[row.kind] += 1
        finally:
            store.close()
    except JournalError:
        return ""
    finished, cancelled, written = counts.values()
    parts = [
        f"{counted(finished, 'request')} finished" if finished else "",
        f"{counted(cancelled, 'request')} cut off" if cancelled else "",
        f"{counted(written, 'block')} written to disk" if written else "",
    ]
    words = ", ".join(filter(None, parts))
    return f": {words}" if words else ""
