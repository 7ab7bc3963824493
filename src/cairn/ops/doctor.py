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

from cairn.engine.machine import blas
from cairn.engine.model.builtin import builtin_directory
from cairn.engine.model.files import directory_fault, weights_bytes
from cairn.engine.model.models_file import ModelsFault, read_models
from cairn.journal.base import Base, state_of
from cairn.journal.codec import GENESIS, Row, chain_fault
from cairn.journal.errors import JournalError
from cairn.ops.common.locations import bytes_on_disk, example, journal_options, url_of
from cairn.ops.common.output import size_text
from cairn.ops.journal.growth import Growth, growth
from cairn.ops.journal.readers import readers_warning
from cairn.ops.serve.models_option import models_option
from cairn.ops.serve.second_writer import WAL_FIXED, warning

_PORT = 8000
_IMPORT_S = 120
_HEALTH_S = 1
_HEALTH_BYTES = 65536
_LAST_ROWS = 1000
_GIB = 1 << 30
_SCARCE_DAYS = 30
_COLORS = {"ok": "green", "warn": "yellow", "fail": "red"}

_PROBE = """
import mlx.core as mx
total = (mx.ones((4, 4)) @ mx.ones((4, 4))).sum().item()
assert total == 64, total
from cairn.engine.machine.blas import loaded_blas
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


@click.command(
    epilog=example("ops doctor", "ops doctor --models models.toml", "ops doctor --port 9000")
)
@journal_options
@models_option
@click.option("--port", type=click.IntRange(1, 65535), default=_PORT, show_default=True)
def doctor(data_dir: Path, journal: str | None, port: int, models: Path | None) -> None:
    """
    Check this machine, and say what to fix.

    Prints a line for each check: ok, warn or fail.

    \b
    Exit code
      0  no check fails
      1  a check fails
    """
    failed = False
    url = url_of(data_dir, journal)
    for name, check in checks(data_dir, url, port, models):
        found = check()
        failed = failed or found.status == "fail"
        advice = f" - {found.advice}" if found.advice else ""
        mark = click.style(f"{found.status:<4}", fg=_COLORS[found.status])
        click.echo(f"{mark}  {name:<8}  {found.fact}{advice}")
    sys.exit(1 if failed else 0)


def checks(
    data_dir: Path, url: str, port: int, models: Path | None = None
) -> Iterator[tuple[str, Callable[[], Found]]]:
    """
    The checks by name, in the order in which they are made.

    Args:
        models: a file of models, if there is one.
    """
    yield "python", check_python
    yield "blas", check_blas
    yield "mlx", check_mlx
    if models is None:
        yield "model", check_model
    else:
        # Pebble is looked at where a table has it.
        yield "models", lambda: check_models(models)
    yield "sqlite", lambda: check_sqlite(url, sqlite3.sqlite_version_info)
    yield "journal", lambda: check_journal(url)
    yield "disk", lambda: check_disk(data_dir, url)
    yield "port", lambda: check_port(port)


def check_python() -> Found:
    """The interpreter's version."""
    version = ".".join(map(str, sys.version_info[:3]))
    if (3, 11) <= sys.version_info[:2] <= (3, 13):
        return Found("ok", version)
    return Found("fail", version, "use Python 3.11, 3.12 or 3.13: make env PYTHON=...")


def check_blas() -> Found:
    """What matrix products would be computed with on a Linux CPU."""
    real, words = blas.describe()
    if real:
        return Found("ok", words)
    return Found("warn", words, "answers are right but slow; `make env` builds OpenBLAS")


def check_mlx() -> Found:
    """Whether MLX computes here, with the BLAS that the server would have."""
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


def check_model() -> Found:
    """Whether the built-in model is there, whole."""
    where = builtin_directory()
    if fault := directory_fault(str(where)):
        return Found("fail", fault, "install Cairn again, or serve another with --model")
    return Found("ok", f"{where.name}, {size_text(weights_bytes(where))}")


def check_models(path: Path) -> Found:
    """Whether a file of models can be used, and each of them may be served."""
    try:
        found = read_models(path)
    except ModelsFault as fault:
        return Found("fail", " ".join(fault.faults), "correct the file, or what it names")
    sizes = [
        (one, weights_bytes(Path(one.directory), Path(one.adapter) if one.adapter else None))
        for one in found.entries
    ]
    told = ", ".join(
        f"{one.name} ({size_text(size)}{', the default' if one is found.default else ''})"
        for one, size in sizes
    )
    return Found("ok", told)


def check_sqlite(url: str, version: tuple[int, ...]) -> Found:
    """
    SQLite's version. Below 3.51.3 two connections that write can damage a database; the server has
    one, so it matters only where another program could be the second (``second_writer.warning``).
    """
    text = ".".join(map(str, version))
    if version >= WAL_FIXED or not url.startswith("sqlite"):
        return Found("ok", text)
    told = warning(_sqlite_path(url), version)
    if told is not None:
        return Found("warn", *told)
    return Found(
        "ok",
        f"{text} (below 3.51.3 a second program that writes to the journal can damage it; here "
        "nothing but Cairn should, and it keeps to one)",
    )


def _sqlite_path(url: str) -> Path:
    from cairn.journal.store_sql import sqlite_path

    return sqlite_path(url)


def check_journal(url: str) -> Found:
    """
    Whether the journal opens, whether it begins where it should, and whether its last rows are
    chained.
    """
    from cairn.journal.store_sql import SqlStore, schema_revision

    try:
        if schema_revision(url) is None:
            return Found("ok", "none yet; the server makes one")
        store = SqlStore.open(url, read_only=True)
        try:
            base = store.base()
            position, _ = store.head()
            first = next(store.read(base.position if base is not None else 0), None)
            rows = store.last(_LAST_ROWS)
        finally:
            store.close()
        fault = _begins_wrong(base, first)
    except JournalError as error:
        return Found("fail", str(error))
    if fault is not None:
        return Found("fail", fault, "run `ops verify`")
    for before, row in pairwise(rows):
        if chain_fault(row, before.hash) is not None:
            return Found("fail", f"the chain is broken at row {row.position}", "run `ops verify`")
    size = f", {size_text(sum(sizes))}" if (sizes := bytes_on_disk(url)) else ""
    fact = f"up to row {position}{size}; the last {len(rows)} rows are chained"
    if url.startswith("sqlite") and (told := readers_warning(_sqlite_path(url))) is not None:
        return Found("warn", f"{fact}; {told[0]}", told[1])
    return Found("ok", fact)


def _begins_wrong(base: Base | None, first: Row | None) -> str | None:
    """
    Whether what stands in the place of rows that were pruned is gone or was changed, as far as the
    first row behind it tells.
    """
    if base is None:
        position, head, at = 0, GENESIS, "the beginning"
    else:
        position, head, at = base.position, base.head, "the base of the pruned rows"
        try:
            state_of(base)
        except ValueError as error:
            return f"{at} cannot be used: {error}"
    if first is not None and first.position != position + 1:
        return f"the journal begins at row {first.position}: the rows before it are gone"
    if first is None and base is not None:
        return f"no row follows {at}"
    if first is not None and chain_fault(first, head) is not None:
        return f"the chain is broken at row {first.position}: it does not follow {at}"
    return None


def check_disk(data_dir: Path, url: str) -> Found:
    """Room where the journal is, or will be, against what it grew by in the last days."""
    where = _sqlite_path(url).parent if url.startswith("sqlite") else data_dir
    for needed in dict.fromkeys((where, data_dir)):
        if not os.access(_existing(needed), os.W_OK):
            return Found("fail", f"{_existing(needed)} cannot be written", "choose another place")
    there = _existing(where)
    free = shutil.disk_usage(there).free
    return judge_room(free, growth(url), f"{free / _GIB:.1f} GiB free at {there}")


def _existing(path: Path) -> Path:
    return next(p for p in (path.absolute(), *path.absolute().parents) if p.exists())


def judge_room(free: int, grown: Growth, fact: str) -> Found:
    """
    Whether the free bytes of a disk will do.

    Args:
        grown: what the journal grew by.
    """
    prune = (
        "`ops journal prune --before 30d --dry-run` says what old sessions would give back; while "
        "it prunes, it takes up to twice the space that the journal has"
    )
    if free < _GIB // 4:
        advice = f"free some space: without it nothing is journaled or answered; {prune}"
        return Found("fail", fact, advice)
    if grown.is_short:
        fact += f", and the journal grew by {grown}"
        if free < grown.size:
            return Found("warn", f"{fact}: not enough for as much again", prune)
    elif grown.daily >= 1:
        days = free / grown.daily
        fact += f", and the journal grows by {grown}"
        if days < _SCARCE_DAYS:
            return Found("warn", f"{fact}: enough for {days:.0f} days", prune)
    if free < 2 * _GIB:
        return Found("warn", fact, f"the journal grows; free some space; {prune}")
    return Found("ok", fact)


def check_port(port: int) -> Found:
    """Whether the server could listen."""
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
    """Whether who listens tells its health as Cairn does."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_HEALTH_S)
    try:
        connection.request("GET", "/health")
        told = json.loads(connection.getresponse().read(_HEALTH_BYTES))
    except (OSError, http.client.HTTPException, ValueError):
        return False
    finally:
        connection.close()
    if not isinstance(told, dict):
        return False
    # One with API keys says no more than that it wants one.
    is_open = {"fingerprint", "journal_position"} <= told.keys()
    return is_open or told.get("api_key") == "required"
