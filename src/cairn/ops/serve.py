"""
``ops serve``: the server, from the command line to the last commit.
"""

from __future__ import annotations

import os
import signal
import socket
import sqlite3
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import click
import trio
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from cairn.actors.boot import BootRefused, Settings, booted
from cairn.actors.server import Limits, Server
from cairn.actors.writer import WriterDied
from cairn.engine.builtin import builtin_directory, builtin_fault
from cairn.engine.model_files import adapter_fault, directory_fault, is_path
from cairn.engine.sampling import Sampling
from cairn.http.app import create_app
from cairn.http.serving import bind_socket, serve_http
from cairn.http.serving import url_of as address_of
from cairn.journal.store_sql import SqlStore, migrate, sqlite_path
from cairn.ops.cli import Unreadable
from cairn.ops.home import hold, make_home, tenant_secret
from cairn.ops.logs import set_up_logs
from cairn.ops.preload import preload_blas
from cairn.ops.second_writer import warning
from cairn.ops.where import default_data_dir, example, log_path, url_of

_ENDED_AT_ONCE = 130
# Where things lie is nobody's business who reads a journal.
_PLACES = ("model", "adapter", "journal")
# After the last answer was cut off, its client still has to hear of it.
_LAST_WORDS_S = 10.0


@click.command(
    epilog=example(
        "ops serve",
        "ops serve --model ~/models/Qwen3-4B-4bit --port 8080",
    )
)
@click.option(
    "--model",
    metavar="DIR",
    help="A model directory of mlx-lm, or a hub's name; without it Pebble, which is built in.",
)
@click.option("--adapter", metavar="DIR", help="An adapter (LoRA) of mlx-lm's over the model.")
@click.option("--model-name", metavar="NAME", help="What clients see, if not the directory's name.")
@click.option(
    "--strict-model-names",
    is_flag=True,
    help="Refuse (404) requests for another model than the one served.",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on.")
@click.option(
    "--port", default=8000, show_default=True, type=click.IntRange(0, 65535), help="0: a free one."
)
@click.option(
    "--data-dir",
    type=click.Path(file_okay=False, path_type=Path),
    default=default_data_dir,
    show_default="$CAIRN_DATA_DIR, else ~/.local/share/cairn",
    help="Where the journal, the log and block files lie.",
)
@click.option("--journal", metavar="URL", help="A database for the journal, if not SQLite there.")
@click.option(
    "--chunk-tokens",
    type=click.IntRange(8, 4096),
    help="C, the tokens of a canonical pass (64 on a CPU, 256 on a GPU).",
)
@click.option(
    "--decode-rows",
    type=click.IntRange(1, 64),
    help="W, the rows of a decode pass: so many requests are served at once (4).",
)
@click.option(
    "--kv-cache",
    type=click.Choice(["slab", "mlx-lm"]),
    default="slab",
    show_default=True,
    help="Cairn's cache classes, or mlx-lm's own.",
)
@click.option(
    "--pool-slabs",
    type=click.IntRange(1),
    default=16,
    show_default=True,
    help="Sessions whose KV is held ready at the same time.",
)
@click.option(
    "--pool-mb",
    type=click.IntRange(1),
    help="MiB for them (a quarter of the memory; less beside a large model).",
)
@click.option("--blocks-mb", type=click.IntRange(1), help="MiB for sealed blocks (as much).")
@click.option(
    "--disk-mb",
    default=4096,
    show_default=True,
    type=click.IntRange(0),
    help="MiB for sealed blocks in files, so that a restart is not cold; 0 keeps none.",
)
@click.option(
    "--max-tokens",
    default=1024,
    show_default=True,
    type=click.IntRange(1),
    help="The longest answer where a client names no limit.",
)
@click.option(
    "--queue",
    default=64,
    show_default=True,
    type=click.IntRange(0),
    help="Requests that may wait; the next one gets 429.",
)
@click.option(
    "--heartbeat",
    default=10.0,
    show_default=True,
    type=click.FloatRange(0.05),
    metavar="SECONDS",
    help="How often a client that waits is told that it still does.",
)
@click.option(
    "--drain",
    default=30.0,
    show_default=True,
    type=click.FloatRange(0.0),
    metavar="SECONDS",
    help="How long running answers may go on after SIGTERM.",
)
@click.option(
    "--blas",
    type=click.Choice(["auto", "bundled"]),
    default="auto",
    show_default=True,
    help="On a Linux CPU: preload OpenBLAS, or take what MLX brings. An LD_PRELOAD stays in force.",
)
@click.option(
    "--allow-host", multiple=True, metavar="NAME", help="A further name clients call the server by."
)
@click.option(
    "--accept-unstable", is_flag=True, help="Serve even if the self-test fails; goes on record."
)
@click.option(
    "--accept-tight-memory",
    is_flag=True,
    help="Load a model that may not fit in memory; goes on record.",
)
def serve(**options: Any) -> None:
    """
    Run the server. SIGTERM or Ctrl-C drains it; a second one ends it at once.
    """
    preload_blas(options["blas"])
    model = options["model"]
    if model is not None and is_path(model) and (fault := directory_fault(model)):
        raise Unreadable(fault)
    if model is None and (fault := builtin_fault()):
        raise Unreadable(fault)
    if options["adapter"] is not None and (fault := adapter_fault(options["adapter"])):
        raise Unreadable(fault)
    data_dir: Path = options["data_dir"]
    make_home(data_dir)
    set_up_logs(log_path(data_dir))
    url = url_of(data_dir, options["journal"])
    with hold(data_dir, url) as held:
        try:
            listener = bind_socket(options["host"], options["port"])
        except OSError as error:
            raise Unreadable(
                f"Port {options['port']} on {options['host']} cannot be used: {error.strerror}. "
                "Choose another with --port; --port 0 takes a free one."
            ) from error
        held.answers_at(address_of(listener))
        migrate(url)
        if url.startswith("sqlite"):
            told = warning(sqlite_path(url), sqlite3.sqlite_version_info)
            if told is not None:
                click.echo(f"Warning: {'; '.join(told)}.", err=True)
        store = SqlStore.open(url)
        try:
            trio.run(_serve, options, store, listener, data_dir)
        except BaseExceptionGroup as failed:
            raise _told(failed) from failed
        finally:
            store.close()
    click.echo("Stopped.", err=True)


class Stopped(Unreadable):
    """
    The server ran and cannot go on.
    """

    exit_code = 1


def _told(failed: BaseExceptionGroup[BaseException]) -> BaseException:
    """
    What ended the server: a sentence where it is the operator's or the world's, else what it is.
    Where several things failed at once, why it did not start comes first.
    """
    errors = list(_leaves(failed))
    for error in errors:
        # The class of a refused model lives behind MLX.
        refused = isinstance(error, BootRefused | Unreadable)
        if refused or type(error).__name__ == "ModelRefused":
            return Unreadable(str(error))
    for error in errors:
        if isinstance(error, WriterDied):
            return Stopped(f"The server stopped. {error.__cause__}")
    return errors[0] if len(errors) == 1 else failed


def _leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    """
    The errors in a group of groups.
    """
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error


async def _serve(
    options: dict[str, Any], store: SqlStore, listener: socket.socket, data_dir: Path
) -> None:
    stop = trio.Event()
    async with trio.open_nursery() as nursery:
        serving = trio.Event()
        await nursery.start(_signals, stop, serving)
        with ShownProgress() as progress:
            settings = _settings(options, data_dir)
            booting = booted(settings, store, tenant_secret(data_dir), progress)
            async with booting as server:
                progress.close()
                serving.set()
                nursery.start_soon(_drain, server, stop)
                await serve_http(
                    create_app(
                        server,
                        hosts_allowed=options["allow_host"],
                        strict_model_names=options["strict_model_names"],
                    ),
                    listener,
                    shutdown=stop,
                    on_ready=lambda url: _greet(url, server, options),
                    grace_s=settings.limits.drain_s + _LAST_WORDS_S,
                )
        nursery.cancel_scope.cancel()


async def _drain(server: Server, stop: trio.Event) -> None:
    """
    Turn new requests away while those that run come to their end.
    """
    await stop.wait()
    await server.drain()


async def _signals(
    stop: trio.Event,
    serving: trio.Event,
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """
    The first signal drains, the second ends the process: what is committed is on disk. Before there
    is anything to drain, the first one ends it.
    """
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        task_status.started()
        async for _ in signals:
            if not serving.is_set():
                click.echo("Stopped before it served anything.", err=True)
                os._exit(_ENDED_AT_ONCE)
            if stop.is_set():
                os._exit(_ENDED_AT_ONCE)
            click.echo(
                "Stopping when the running answers are done; once more ends at once.", err=True
            )
            stop.set()


def _settings(options: dict[str, Any], data_dir: Path) -> Settings:
    budgets = {
        name: options[option] * 1024 * 1024
        for name, option in (("pool_bytes", "pool_mb"), ("blocks_bytes", "blocks_mb"))
        if options[option] is not None
    }
    kept = ("chunk_tokens", "decode_rows", "kv_cache", "pool_slabs", "accept_unstable")
    return Settings(
        model=options["model"] or str(builtin_directory()),
        model_name=options["model_name"],
        adapter=options["adapter"],
        accept_tight=options["accept_tight_memory"],
        limits=Limits(
            queue=options["queue"],
            max_tokens=options["max_tokens"],
            heartbeat_s=options["heartbeat"],
            drain_s=options["drain"],
        ),
        on_record={
            name: value
            for name, value in options.items()
            if isinstance(value, str | int | float | bool) and name not in _PLACES
        }
        | {"python": sysconfig.get_python_version()},
        blocks_folder=data_dir / "blocks",
        disk_bytes=options["disk_mb"] * 1024 * 1024,
        **budgets,
        **{name: options[name] for name in kept},
    )


class ShownProgress:
    """
    Bars on stderr for what lasts, where somebody looks.
    """

    def __init__(self) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        console = Console(stderr=True)
        self._bars = Progress(
            *columns, console=console, transient=True, disable=not console.is_terminal
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> ShownProgress:
        self._bars.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __call__(self, what: str, done: int, total: int) -> None:
        self._bars.start()  # again, where something lasts when the server stops
        if what not in self._tasks:
            self._tasks[what] = self._bars.add_task(what, total=total)
            if self._bars.disable:
                click.echo(f"{what} ...", err=True)
        self._bars.update(self._tasks[what], completed=done, total=total)

    def close(self) -> None:
        """
        Take the bars away. Again does no harm.
        """
        self._bars.stop()


def _greet(url: str, server: Server, options: dict[str, Any]) -> None:
    """
    What somebody wants to know who started a server, and a line to try it with.
    """
    facts = server.facts
    journal = options["journal"] or (options["data_dir"] / "journal.db").absolute()
    body = '{"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 32}'
    curl = f"curl {url}/v1/chat/completions -H 'content-type: application/json'"
    shape = f"C = {facts.chunk_tokens}, W = {facts.decode_rows}, {facts.kv_cache} cache"
    lines = (
        f"Cairn serves {facts.model} at {url}",
        f"  fingerprint  {facts.fingerprint}  ({shape})",
        *([f"  adapter      {options['adapter']}"] if options["adapter"] else []),
        f"  context      {facts.context_tokens} tokens",
        f"  sampling     {_sampling(facts.defaults)}, where a request says nothing of it",
        f"  journal      {journal}",
        f"  try it       {curl} -d '{body}'",
    )
    print("\n".join(lines), flush=True)


def _sampling(defaults: Sampling) -> str:
    """
    Defaults for people: the temperature, and what is not off.
    """
    told = {name: getattr(defaults, name) for name in attrs.fields_dict(Sampling)}
    changed = {name: told[name] for name in told if told[name] != getattr(Sampling(), name)}
    return ", ".join(
        f"{name} {value:g}"
        for name, value in ({"temperature": told["temperature"]} | changed).items()
    )
