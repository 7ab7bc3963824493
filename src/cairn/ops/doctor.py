"""
``ops doctor``: checks this machine before the server is started.

1. A check never raises: an error in it is its finding.
2. MLX is imported in another process, so that a crash is a finding too.
3. Nothing is changed, and the journal is opened read-only.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Literal

import attrs
import click

from cairn.engine.errors import EngineFault
from cairn.engine.machine import blas
from cairn.engine.machine.memory import budgets_for, machine_memory, memory_fault
from cairn.engine.model.builtin import builtin_directory
from cairn.engine.model.files import directory_fault, weights_bytes
from cairn.engine.model.models_file import ModelsFault, read_models
from cairn.engine.row_class import RowClass
from cairn.journal.errors import JournalError
from cairn.journal.events import SelfTestFinished
from cairn.journal.rows.base import Base, state_of
from cairn.journal.rows.codec import GENESIS, Row, chain_fault, decode
from cairn.ops.chat.client import NotCairn, look
from cairn.ops.cli import Unreadable
from cairn.ops.common.completions import complete_model
from cairn.ops.common.heads import HeadFiles, is_elsewhere
from cairn.ops.common.locations import (
    bytes_on_disk,
    example,
    journal_options,
    options_of,
    self_tests_folder,
    url_of,
)
from cairn.ops.common.output import counted, printable, size_text
from cairn.ops.common.passes import TEST_AGAIN, decode_text, drafts_text, prefill_text, was_busy
from cairn.ops.common.program import as_called
from cairn.ops.fleet.fingerprints import differences, loaded_models
from cairn.ops.journal.growth import Growth, growth
from cairn.ops.journal.readers import readers_warning
from cairn.ops.serve.models_option import models_option
from cairn.ops.serve.second_writer import WAL_FIXED, warning
from cairn.ops.state.running import health_of, running

_PORT = 8000
IMPORT_S = 120
_LAST_ROWS = 1000
_GIB = 1 << 30
_SCARCE_DAYS = 30
_COLORS = {"ok": "green", "warn": "yellow", "fail": "red"}

PROBE = """
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
    The result of a check.

    Attributes:
        advice: what to do; empty if there is nothing to do.
    """

    status: Literal["ok", "warn", "fail"]
    fact: str
    advice: str = ""


@click.command(
    epilog=example(
        "ops doctor", "ops doctor --models models.toml", "ops doctor --report report.json"
    )
)
@journal_options
@models_option
@click.option(
    "--port",
    type=click.IntRange(1, 65535),
    default=_PORT,
    show_default=True,
    help="The port that the server will use.",
)
@click.option(
    "--report",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Also write a report of this machine as JSON, for others to read. Takes two minutes.",
)
@click.option(
    "--model",
    metavar="DIR",
    shell_complete=complete_model,
    help="The model of the report. Default: Pebble.",
)
def doctor(
    data_dir: Path,
    journal: str | None,
    port: int,
    models: Path | None,
    report: Path | None,
    model: str | None,
) -> None:
    """
    Check this machine, and say what to fix.

    Prints a line for each check: ok, warn or fail. Changes nothing; the server may be running.

    With --report, a server of its own runs the self-test of a model and is measured for a minute.
    The report has the checks, the fingerprint, the grain, what the self-test found, and the tokens
    a second. It has no text of a conversation.

    \b
    Exit code
      0  no check failed
      1  a check failed, or the server of the report did not start
    """
    if model is not None and report is None:
        raise click.UsageError("--model is for the report. Add --report FILE, or omit --model.")
    failed = False
    said: list[Mapping[str, str]] = []
    url = url_of(data_dir, journal)
    options = options_of(data_dir, journal)
    for name, check in checks(data_dir, url, port, models, options, journal):
        found = check()
        failed = failed or found.status == "fail"
        advice = f" - {found.advice}" if found.advice else ""
        words = as_called(f"{found.fact}{advice}")
        mark = click.style(f"{found.status:<4}", fg=_COLORS[found.status])
        click.echo(f"{mark}  {name:<8}  {words}")
        said.append({"name": name, "status": found.status, "fact": found.fact})
    if report is not None:
        failed = not _reported(report, model, said) or failed
    sys.exit(1 if failed else 0)


def _reported(path: Path, model: str | None, checked: list[Mapping[str, str]]) -> bool:
    """Write a report. Returns whether its server started and answered."""
    from cairn.ops.state.report import write_report

    fault = write_report(path, model, checked, lambda step: click.echo(f"{step} ...", err=True))
    if fault is not None:
        click.echo(f"{fault} The report says what was found.", err=True)
    click.echo(f"Written: {path}", err=True)
    return fault is None


def checks(
    data_dir: Path,
    url: str,
    port: int,
    models: Path | None = None,
    options: str = "",
    journal: str | None = None,
) -> Iterator[tuple[str, Callable[[], Found]]]:
    """
    The checks by name, in the order in which they run.

    Args:
        models: a file of models, if there is one.
        options: with which another command finds the journal.
        journal: the option that names it.
    """
    yield "python", check_python
    yield "blas", check_blas
    yield "mlx", check_mlx
    if models is None:
        yield "model", check_model
    else:
        # Pebble is checked if the file lists it.
        yield "models", lambda: check_models(models)
    yield "selftest", check_self_tests
    yield "sqlite", lambda: check_sqlite(url, sqlite3.sqlite_version_info)
    yield "journal", lambda: check_journal(url, options, journal is None and is_elsewhere(data_dir))
    yield "heads", lambda: check_heads(data_dir, journal, options)
    yield "bits", lambda: check_bits(url)
    if url.startswith("postgresql"):
        yield "fleet", lambda: check_fleet(url)
    yield "disk", lambda: check_disk(data_dir, url)
    yield "memory", lambda: check_memory(models)
    yield "server", lambda: check_server(data_dir)
    yield "port", lambda: check_port(port)


def check_python() -> Found:
    """The interpreter's version."""
    version = ".".join(map(str, sys.version_info[:3]))
    if (3, 11) <= sys.version_info[:2] <= (3, 13):
        return Found("ok", version)
    return Found("fail", version, "use Python 3.11, 3.12 or 3.13: make env PYTHON=...")


def check_blas() -> Found:
    """The BLAS that would compute matrix products on a Linux CPU."""
    real, words = blas.describe()
    if real or ("LD_PRELOAD" not in os.environ and blas.copy_path() is not None):
        return Found("ok", words)
    return Found("warn", words, "answers are correct but slow; install Cairn again, or OpenBLAS")


def check_mlx() -> Found:
    """Whether MLX works here, with the BLAS that the server would use."""
    environment = dict(os.environ)
    if not environment.get("LD_PRELOAD") and (found := blas.find_blas()) is not None:
        environment["LD_PRELOAD"] = str(found)
    command = [sys.executable, "-P", "-c", PROBE]
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=IMPORT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return Found(
            "fail",
            f"did not import within {IMPORT_S} s",
            "check what else is running on this machine",
        )
    if done.returncode == 0:
        version, device, used = done.stdout.split()
        return Found("ok", f"{version} on the {device}" + (f" with {used}" if used != "-" else ""))
    if done.returncode < 0:
        return Found(
            "fail", f"crashed with signal {-done.returncode}", "install MLX again: make env"
        )
    last = (done.stderr.strip().splitlines() or ["no message"])[-1]
    return Found("fail", last, "install MLX again: make env")


def check_model() -> Found:
    """Whether the built-in model is installed completely."""
    where = builtin_directory()
    if fault := directory_fault(str(where)):
        return Found("fail", fault, "install Cairn again, or serve another model with --model")
    return Found("ok", f"{where.name}, {size_text(weights_bytes(where))}")


def check_models(path: Path) -> Found:
    """Whether a file of models and all its models can be used."""
    try:
        found = read_models(path)
    except ModelsFault as fault:
        return Found(
            "fail", " ".join(fault.faults), "correct the file, or the directories that it names"
        )
    sizes = [
        (one, weights_bytes(Path(one.directory), Path(one.adapter) if one.adapter else None))
        for one in (*found.entries, *found.embeddings)
    ]
    names = ", ".join(
        f"{one.name} ({size_text(size)}{', the default' if one is found.default else ''}"
        f"{', for embeddings' if one.embeddings else ''})"
        for one, size in sizes
    )
    return Found("ok", names)


def check_self_tests() -> Found:
    """Where the results of self-tests are stored, and whether they can be."""
    folder = self_tests_folder()
    again = "a new data directory runs the self-test of its model again"
    if folder is None:
        return Found("warn", f"no home directory: {again}", "set CAIRN_CACHE_DIR")
    there = _existing(folder)
    if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
        return Found("warn", f"{there} cannot be written: {again}", "set CAIRN_CACHE_DIR")
    stored = sum(1 for _ in folder.glob("*.json"))
    if not stored:
        return Found(
            "ok", f"no result in {folder}; one that was cut off by a busy machine is not stored"
        )
    fact = f"{counted(stored, 'result')} stored in {folder}"
    return Found("ok", f"{fact}; `ops serve --test-again` replaces one")


def check_sqlite(url: str, version: tuple[int, ...]) -> Found:
    """
    SQLite's version. Before 3.51.3, two connections that write can damage a database. The server
    has one, so it matters only if another program could be the second (``second_writer.warning``).
    """
    text = ".".join(map(str, version))
    if version >= WAL_FIXED or not url.startswith("sqlite"):
        return Found("ok", text)
    warned = warning(_sqlite_path(url), version)
    if warned is not None:
        return Found("warn", *warned)
    return Found(
        "ok",
        f"{text} (older than 3.51.3: safe as long as no other program writes to the journal)",
    )


def _nodes_in(url: str) -> list[str]:
    """The nodes of a database that has no other journal; none of an SQLite file."""
    from cairn.journal.rows.database.fleet import nodes_of

    return nodes_of(url) if url.startswith("postgresql") else []


def _sqlite_path(url: str) -> Path:
    from cairn.journal.rows.database.urls import sqlite_path

    return sqlite_path(url)


def check_journal(url: str, options: str = "", elsewhere: bool = False) -> Found:
    """
    Whether the journal can be read, begins where it should, and has an intact end.

    Args:
        options: with which `ops verify` finds it.
        elsewhere: whether the server named another one.
    """
    verify = f"run `ops verify{options}`"
    from cairn.journal.rows.database.schema import schema_revision
    from cairn.journal.rows.store_sql import SqlStore

    try:
        if schema_revision(url) is None:
            if nodes := _nodes_in(url):
                return Found("ok", f"of {', '.join(nodes)}; add --node NAME to check one")
            fact = "not in the data directory; add --journal URL, and --node NAME of a fleet"
            return Found("ok", fact if elsewhere else "none yet; the server creates one")
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
        return Found("fail", fault, verify)
    for before, row in pairwise(rows):
        if chain_fault(row, before.hash) is not None:
            return Found("fail", f"the chain is broken at row {row.position}", verify)
    size = f", {size_text(sum(sizes))}" if (sizes := bytes_on_disk(url)) else ""
    fact = f"up to row {position}{size}; the hashes of the last {len(rows)} rows are correct"
    if url.startswith("sqlite") and (warned := readers_warning(_sqlite_path(url))) is not None:
        return Found("warn", f"{fact}; {warned[0]}", warned[1])
    return Found("ok", fact)


def check_heads(data_dir: Path, journal: str | None, options: str = "") -> Found:
    """
    The key that signs the checkpoints, and whether the journal has what was recorded of it.

    Args:
        options: with which `ops verify` finds the journal.
    """
    from cairn.journal.rows.database.schema import schema_revision
    from cairn.journal.rows.heads import lost_words
    from cairn.journal.rows.store_sql import SqlStore

    files, url = HeadFiles.of(data_dir, journal), url_of(data_dir, journal)
    try:
        public, recorded = files.public_key(), files.recorded_head()
        if public is None:
            return Found("ok", "no key yet; the server makes one")
        if recorded is not None:
            if schema_revision(url) is None:
                return Found("fail", f"the journal is gone; it had row {recorded.position}")
            with contextlib.closing(SqlStore.open(url, read_only=True)) as store:
                if (words := lost_words(recorded, store)) is not None:
                    return Found("fail", f"rows are lost: {words}", f"run `ops verify{options}`")
    except JournalError as error:
        return Found("fail", str(error))
    up_to = f"recorded up to row {recorded.position}; " if recorded is not None else ""
    return Found("ok", f"{up_to}checkpoints are signed by {public}")


def check_bits(url: str) -> Found:
    """What the last self-test in the journal found about the passes on this device."""
    from cairn.journal.rows.database.schema import schema_revision
    from cairn.journal.rows.store_sql import SqlStore

    tested: SelfTestFinished | None = None
    try:
        if schema_revision(url) is not None:
            store = SqlStore.open(url, read_only=True)
            try:
                rows = store.last(_LAST_ROWS, stream="server")
                found = (row for row in reversed(rows) if row.kind == SelfTestFinished.kind)
                if (row := next(found, None)) is not None:
                    event = decode(row).event
                    tested = event if isinstance(event, SelfTestFinished) else None
            finally:
                store.close()
        elif _nodes_in(url):
            return Found("ok", "of each node; add --node NAME to see one")
        if tested is None:
            return Found("ok", "not tested yet; the server tests a model when it is first loaded")
        prefill = prefill_text(RowClass.of(tested.row_class), tested.row_class_reason)
    except (JournalError, EngineFault) as error:
        return Found("fail", f"the last self-test cannot be read: {error}", "run `ops verify`")
    if not tested.passed:
        failed = ", ".join(name for name, holds in tested.findings.items() if not holds)
        advice = "docs/models.md lists the families that are served"
        return Found("fail", f"the last self-test failed: {failed}", advice)
    decode_shapes = decode_text(tested.decode_shapes).strip() or "in passes of one size"
    drafts = drafts_text(tested.without_drafts)
    fact = f"{prefill}; decoding {decode_shapes}; speculation: {drafts}"
    if was_busy(tested.row_class_reason):
        return Found("warn", fact, TEST_AGAIN)
    return Found("ok", fact)


def check_fleet(url: str) -> Found:
    """
    Whether the nodes that share a database have one fingerprint, and in which fields not. Fails for
    those that run; what another node had last is a warning.
    """
    from cairn.journal.rows.database.fleet import running_nodes

    try:
        nodes, running = loaded_models(url), running_nodes(url)
    except JournalError as error:
        return Found("fail", str(error))
    if not nodes:
        return Found("ok", "no node has a journal in this database")
    up = [node for node in nodes if node in running]
    down = [node for node in nodes if node not in running]
    runs = f"{_listed(up)}; {_listed(down, 'not ')}" if down else _listed(up)
    of_running = differences({node: nodes[node] for node in up})
    if found := of_running or differences(nodes):
        whose = "" if of_running else " of nodes that do not run"
        fact = (
            f"{runs}; fingerprints{whose} differ, and such nodes share nothing and answer with "
            f"other bits: {'; '.join(map(str, found))}"
        )
        advice = "; ".join(dict.fromkeys(one.advice for one in found))
        return Found("fail" if of_running else "warn", fact, advice)
    empty = [node for node, models in nodes.items() if not models]
    fact = f"{runs}; the same fingerprint"
    return Found("ok", f"{fact}; no model loaded yet: {', '.join(empty)}" if empty else fact)


def _listed(nodes: Sequence[str], negation: str = "") -> str:
    """Which nodes run, or do not, in words."""
    return f"{negation}running: {', '.join(nodes) or 'none'}"


def _begins_wrong(base: Base | None, first: Row | None) -> str | None:
    """
    What is wrong with the first row, or with the base that replaces pruned rows; None if nothing
    is.
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
        return f"the journal begins at row {first.position}: the rows before it are missing"
    if first is None and base is not None:
        return f"no row follows {at}"
    if first is not None and chain_fault(first, head) is not None:
        return f"the chain is broken at row {first.position}: it does not follow {at}"
    return None


def check_disk(data_dir: Path, url: str) -> Found:
    """The free space where the journal is, or will be, and its growth in the last days."""
    where = _sqlite_path(url).parent if url.startswith("sqlite") else data_dir
    for needed in dict.fromkeys((where, data_dir)):
        if not os.access(_existing(needed), os.W_OK):
            return Found(
                "fail",
                f"{_existing(needed)} cannot be written",
                "choose another --data-dir or --journal",
            )
    there = _existing(where)
    free = shutil.disk_usage(there).free
    return judge_room(free, growth(url), f"{free / _GIB:.1f} GiB free at {there}")


def _existing(path: Path) -> Path:
    return next(p for p in (path.absolute(), *path.absolute().parents) if p.exists())


def judge_room(free: int, grown: Growth, fact: str) -> Found:
    """
    Whether the free space of a disk is enough.

    Args:
        free: in bytes.
        grown: the growth of the journal.
        fact: the free space, in words.
    """
    prune = (
        "`ops journal prune --before 30d --dry-run` shows how much space old sessions would free; "
        "a prune needs up to twice the size of the journal while it runs"
    )
    if free < _GIB // 4:
        advice = f"free some space: on a full disk nothing can be journaled or answered; {prune}"
        return Found("fail", fact, advice)
    if grown.is_short:
        fact += f", and the journal grew by {grown}"
        if free < grown.size:
            return Found("warn", f"{fact}: not enough for the same again", prune)
    elif grown.daily >= 1:
        days = free / grown.daily
        fact += f", and the journal grows by {grown}"
        if days < _SCARCE_DAYS:
            return Found("warn", f"{fact}: enough for {days:.0f} days", prune)
    if free < 2 * _GIB:
        return Found("warn", fact, f"the journal grows; free some space; {prune}")
    return Found("ok", fact)


def check_memory(models: Path | None) -> Found:
    """Whether the largest model fits in this machine's memory, beside the KV of sessions."""
    memory = machine_memory()
    try:
        found = (
            [] if models is None else [Path(one.directory) for one in read_models(models).entries]
        )
    except ModelsFault:
        found = []  # a finding of its own
    place = max(found or [builtin_directory()], key=weights_bytes)
    size = weights_bytes(place)
    budgets = budgets_for(weights_bytes=size, memory_bytes=memory)
    fact = f"{size_text(memory)} of memory; the weights of {place.name} take {size_text(size)}"
    if memory_fault(weights_bytes=size, memory_bytes=memory, budgets=budgets) is not None:
        return Found("warn", fact, "choose a smaller model, or a more quantised one")
    return Found("ok", f"{fact}, and KV may take {size_text(budgets.pool_bytes)}")


def check_server(data_dir: Path) -> Found:
    """Whether a server uses the data directory, and answers."""
    server = running(data_dir)
    if server is None:
        return Found("ok", f"none uses {data_dir}")
    if server.url is None or (health := health_of(server.url, None)) is None:
        return Found("warn", f"{server.words} does not answer", "it may be starting or stopping")
    return Found("ok", f"{server.words} answers: {printable(str(health['status']))}")


def check_port(port: int) -> Found:
    """Whether the server can listen on the port."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind(("127.0.0.1", port))
        except PermissionError:
            return Found("fail", f"{port} is not permitted", "choose a --port above 1023")
        except OSError as error:
            if _is_cairn(port):
                return Found("ok", f"{port} is in use by Cairn")
            words = f"{port} is in use ({error.strerror}), but not by Cairn"
            return Found("warn", words, "choose another --port")
    return Found("ok", f"{port} is free")


def _is_cairn(port: int) -> bool:
    """Whether the server on a port is Cairn, by its ``/health``."""
    try:
        return look(f"http://127.0.0.1:{port}") is not None
    except NotCairn:
        return False
    except Unreadable:  # it requires an API key
        return True
