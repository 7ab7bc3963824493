"""
``ops doctor``: this machine, looked over before the server is started.

1. A check never raises: what goes wrong in it is its finding.
2. MLX is imported in another process, so that a crash is a finding too.
3. Nothing is changed, and the journal is opened read-only.
"""

from __future__ import annotations

import http.client
import json
import os
import shutil
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Literal

import attrs
import click

from cairn.engine import blas
from cairn.journal.codec import chain_fault
from cairn.journal.errors import JournalError
from cairn.ops.where import example, journal_options, url_of

_PORT = 8000
_IMPORT_S = 120
_HEALTH_S = 1
_HEALTH_BYTES = 65536
_LAST_ROWS = 1000
_GIB = 1 << 30
_WAL_FIXED = (3, 51, 3)
_COLORS = {"ok": "green", "warn": "yellow", "fail": "red"}

_PROBE = """
import mlx.core as mx
total = (mx.ones((4, 4)) @ mx.ones((4, 4))).sum().item()
assert total == 64, total
from cairn.engine.blas import loaded_blas
used = loaded_blas()
print(mx.__version__, mx.default_device().type.name, used.name if used else "-")
"""


@attrs.frozen
class Found:
    """
    What a check came to.

    Attributes:
        advice: what to do; empty where nothing is to be done.
    """

    status: Literal["ok", "warn", "fail"]
    fact: str
    advice: str = ""


@click.command(epilog=example("ops doctor", "ops doctor --data-dir /srv/cairn --port 9000"))
@journal_options
@click.option("--port", type=click.IntRange(1, 65535), default=_PORT, show_default=True)
def doctor(data_dir: Path, journal: str | None, port: int) -> None:
    """
    Check this machine, and say what to do.

    A line for each check: ok, warn or fail.

    \b
    Exit code
      0  nothing fails
      1  something does
    """
    failed = False
    url = url_of(data_dir, journal)
    for name, check in checks(data_dir, url, port):
        found = check()
        failed = failed or found.status == "fail"
        advice = f" - {found.advice}" if found.advice else ""
        mark = click.style(f"{found.status:<4}", fg=_COLORS[found.status])
        click.echo(f"{mark}  {name:<8}  {found.fact}{advice}")
    sys.exit(1 if failed else 0)


def checks(data_dir: Path, url: str, port: int) -> Iterator[tuple[str, Callable[[], Found]]]:
    """
    The checks by name, in the order in which they are made.
    """
    yield "python", check_python
    yield "blas", check_blas
    yield "mlx", check_mlx
    yield "sqlite", lambda: check_sqlite(url, sqlite3.sqlite_version_info)
    yield "journal", lambda: check_journal(url)
    yield "disk", lambda: check_disk(data_dir)
    yield "port", lambda: check_port(port)


def check_python() -> Found:
    """
    The interpreter's version.
    """
    version = ".".join(map(str, sys.version_info[:3]))
    if (3, 11) <= sys.version_info[:2] <= (3, 13):
        return Found("ok", version)
    return Found("fail", version, "use Python 3.11, 3.12 or 3.13: make env PYTHON=...")


def check_blas() -> Found:
    """
    What matrix products would be computed with on a Linux CPU.
    """
    real, words = blas.describe()
    if real:
        return Found("ok", words)
    return Found("warn", words, "answers are right but slow; `make env` builds OpenBLAS")


def check_mlx() -> Found:
    """
    Whether MLX computes here, with the BLAS that the server would have.
    """
    environment = dict(os.environ)
    if not environment.get("LD_PRELOAD") and (found := blas.find_blas()) is not None:
        environment["LD_PRELOAD"] = str(found)
    command = [sys.executable, "-P", "-c", _PROBE]
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=_IMPORT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return Found("fail", f"did not import within {_IMPORT_S} s", "see what else runs here")
    if done.returncode == 0:
        version, device, used = done.stdout.split()
        return Found("ok", f"{version} on the {device}" + (f" with {used}" if used != "-" else ""))
    if done.returncode < 0:
        return Found(
            "fail", f"crashed with signal {-done.returncode}", "install MLX anew: make env"
        )
    last = (done.stderr.strip().splitlines() or ["no message"])[-1]
    return Found("fail", last, "install MLX anew: make env")


def check_sqlite(url: str, version: tuple[int, ...]) -> Found:
    """
    SQLite's version. Below 3.51.3 two connections that write can damage a database; the server has
    one, so it matters only where another program could be the second.
    """
    text = ".".join(map(str, version))
    if version >= _WAL_FIXED or not url.startswith("sqlite"):
        return Found("ok", text)
    if _log_beside(url):
        return Found(
            "warn",
            f"{text}, and the journal is in use",
            "open it with nothing else but `ops` while the server runs: below 3.51.3 a second "
            "writer can damage it",
        )
    return Found("ok", f"{text} (one connection writes, so versions below 3.51.3 will do)")


def _log_beside(url: str) -> bool:
    path = _sqlite_path(url)
    log = path.with_name(f"{path.name}-wal")
    return log.exists() and log.stat().st_size > 0


def _sqlite_path(url: str) -> Path:
    from cairn.journal.store_sql import sqlite_path

    return sqlite_path(url)


def check_journal(url: str) -> Found:
    """
    Whether the journal opens, and whether its last rows are chained.
    """
    from cairn.journal.store_sql import SqlStore, schema_revision

    try:
        if schema_revision(url) is None:
            return Found("ok", "none yet; the server makes one")
        store = SqlStore.open(url, read_only=True)
        try:
            position, _ = store.head()
            rows = store.last(_LAST_ROWS)
        finally:
            store.close()
    except JournalError as error:
        return Found("fail", str(error))
    for before, row in pairwise(rows):
        if chain_fault(row, before.hash) is not None:
            return Found("fail", f"the chain is broken at row {row.position}", "run `ops verify`")
    return Found("ok", f"{position} rows, the last {len(rows)} are chained")


def check_disk(data_dir: Path) -> Found:
    """
    Room where the data directory is, or will be.
    """
    there = next(
        path for path in (data_dir.absolute(), *data_dir.absolute().parents) if path.exists()
    )
    free = shutil.disk_usage(there).free
    fact = f"{free / _GIB:.1f} GiB free at {there}"
    if not os.access(there, os.W_OK):
        return Found("fail", f"{there} cannot be written", "choose another --data-dir")
    if free < _GIB // 4:
        return Found("fail", fact, "free some space: the server stops when it cannot journal")
    if free < 2 * _GIB:
        return Found("warn", fact, "the journal grows; free some space")
    return Found("ok", fact)


def check_port(port: int) -> Found:
    """
    Whether the server could listen.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind(("127.0.0.1", port))
        except PermissionError:
            return Found("fail", f"{port} may not be used", "choose a --port above 1023")
        except OSError as error:
            if _is_cairn(port):
                return Found("ok", f"{port} is in use, and Cairn is there")
            words = f"{port} is in use ({error.strerror}), and not by Cairn"
            return Found("warn", words, "choose another --port")
    return Found("ok", f"{port} is free")


def _is_cairn(port: int) -> bool:
    """
    Whether who listens tells its health as Cairn does.
    """
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_HEALTH_S)
    try:
        connection.request("GET", "/health")
        told = json.loads(connection.getresponse().read(_HEALTH_BYTES))
    except (OSError, http.client.HTTPException, ValueError):
        return False
    finally:
        connection.close()
    return isinstance(told, dict) and {"fingerprint", "journal_position"} <= told.keys()
