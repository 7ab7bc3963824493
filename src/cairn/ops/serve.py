"""
``ops serve``: the server, from the command line to the last commit.
"""

from __future__ import annotations

import math
import os
import signal
import socket
import sqlite3
import sysconfig
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import click
import trio

from cairn.actors.boot import BootRefused, Settings, booted, booted_models
from cairn.actors.limits import Limits
from cairn.actors.models import Models
from cairn.actors.server import Server
from cairn.actors.writer import WriterDied
from cairn.engine.builtin import builtin_directory, builtin_fault
from cairn.engine.heap import use_one_heap
from cairn.engine.lifetime import seconds_of
from cairn.engine.model_files import adapter_fault, directory_fault, is_path
from cairn.engine.models_file import ModelList
from cairn.http.access import Keys
from cairn.http.app import create_app
from cairn.http.cors import ANY, read_origin
from cairn.http.serving import bind_socket, is_loopback, serve_http
from cairn.http.serving import url_of as address_of
from cairn.journal.store import Store
from cairn.journal.store_sql import SqlStore, migrate, sqlite_path
from cairn.ops.api_keys import KEYS_VARIABLE, read_keys
from cairn.ops.cli import Unreadable
from cairn.ops.greeting import greet
from cairn.ops.home import hold, make_home, root_secret
from cairn.ops.logs import set_up_logs
from cairn.ops.models_option import choices_of, models_option, read_models_option
from cairn.ops.preload import preload_blas
from cairn.ops.second_writer import warning
from cairn.ops.serve_shown import ShownProgress as ShownProgress
from cairn.ops.where import default_data_dir, example, log_path, url_of

_ENDED_AT_ONCE = 130
# Where things lie is nobody's business who reads a journal.
_PLACES = ("model", "models", "adapter", "journal")
# After the last answer was cut off, its client still has to hear of it.
_LAST_WORDS_S = 10.0


def _is_number(context: click.Context, parameter: click.Parameter, value: float) -> float:
    """
    A range takes what is no number, since that is neither below nor above anything.
    """
    if math.isnan(value):
        raise click.BadParameter("nan is no number.", context, parameter)
    return value


def _lifetime(context: click.Context, parameter: click.Parameter, value: str) -> int:
    try:
        return seconds_of(value)
    except ValueError as error:
        raise click.BadParameter(f"{value!r} {error}.", context, parameter) from error


def _origins(_: click.Context, __: click.Parameter, given: tuple[str, ...]) -> tuple[str, ...]:
    try:
        return tuple(map(read_origin, given))
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


@click.command(
    epilog=example(
        "ops serve",
        "ops serve --model ~/models/Qwen3-4B-4bit --port 8080",
        "ops serve --models ~/models.toml",
    )
)
@click.option(
    "--model",
    metavar="DIR",
    help="A model directory of mlx-lm, or a hub's name; without it Pebble, which is built in.",
)
@models_option
@click.option("--adapter", metavar="DIR", help="An adapter (LoRA) of mlx-lm's over the model.")
@click.option(
    "--dtype",
    type=click.Choice(["auto", "float32", "model"]),
    default="auto",
    show_default=True,
    help="The weights in float32, or as the model has them. auto: float32 on a CPU, if it fits.",
)
@click.option("--model-name", metavar="NAME", help="What clients see, if not the directory's name.")
@click.option(
    "--strict-model-names",
    is_flag=True,
    help="Refuse (404) requests for another model than those that are served.",
)
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="The address to listen on. One that others reach needs API keys.",
)
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
    "--kv-policy",
    type=click.Choice(["full", "sink_window"]),
    default="full",
    show_default=True,
    help="What a token attends to: all before it, or the first tokens and a window of the last. "
    "That bounds the memory of a session at rest, and changes answers past the window.",
)
@click.option(
    "--sink-tokens",
    type=click.IntRange(0, 4096),
    default=4,
    show_default=True,
    help="The first tokens, under --kv-policy sink_window.",
)
@click.option(
    "--window-tokens",
    type=click.IntRange(32),
    default=4096,
    show_default=True,
    help="The window, likewise; at least four chunks.",
)
@click.option(
    "--pool-slabs",
    type=click.IntRange(1),
    default=16,
    show_default=True,
    help="Sessions whose KV is held ready at the same time.",
)
@click.option(
    "--slab-rest",
    default=60,
    show_default=True,
    type=click.IntRange(0, 86_400),
    metavar="SECONDS",
    help="How long a session at rest keeps its slab, where all of it lies in blocks in memory "
    "too. 0 keeps none.",
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
    "--ttl",
    default="24h",
    show_default=True,
    callback=_lifetime,
    metavar="TIME",
    help="How long a conversation and its blocks are kept after their last use, in memory and in "
    "files, where a client does not say; within the budgets. Seconds, or 5m, 1h, 7d.",
)
@click.option(
    "--min-cache-tokens",
    default=0,
    show_default=True,
    type=click.IntRange(0),
    metavar="TOKENS",
    help="Keep nothing of a shorter prompt for other requests. What does not fill a chunk is never "
    "kept.",
)
@click.option(
    "--no-anticipation",
    is_flag=True,
    help="Settle what was generated, not what the next prompt will begin with.",
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
    # Clients and what stands between give up on a line that is silent for longer.
    type=click.FloatRange(0.05, 15),
    callback=_is_number,
    metavar="SECONDS",
    help="How often a client that waits is told that it still does.",
)
@click.option(
    "--drain",
    default=30.0,
    show_default=True,
    type=click.FloatRange(0.0),
    callback=_is_number,
    metavar="SECONDS",
    help="How long running answers may go on after SIGTERM.",
)
@click.option(
    "--shadow-check",
    default=0.0,
    show_default=True,
    type=click.FloatRange(0.0, 1.0),
    callback=_is_number,
    metavar="SHARE",
    help="The share of answers (0.01: one of a hundred) that are computed once more when nothing "
    "else is to be done, and compared.",
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
    "--api-key-file",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="API keys, a NAME=KEY on each line. Each name is a tenant; tenants share nothing.",
)
@click.option(
    "--api-key",
    multiple=True,
    metavar="[NAME=]KEY",
    help="An API key. It stands in the list of processes: better in a file, or in "
    f"${KEYS_VARIABLE}, with spaces between several.",
)
@click.option(
    "--cors",
    multiple=True,
    metavar="ORIGIN",
    callback=_origins,
    help="A web page's origin, such as http://localhost:3000, that may read answers; * for any.",
)
@click.option(
    "--request-timeout",
    default=3600.0,
    show_default=True,
    type=click.FloatRange(0.0, min_open=True),
    callback=_is_number,
    metavar="SECONDS",
    help="How long a request may take, with its wait in the queue; then it ends with 504.",
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
    use_one_heap()
    models = read_models_option(options)
    model = options["model"]
    if model is not None and is_path(model) and (fault := directory_fault(model)):
        raise Unreadable(fault)
    if model is None and models is None and (fault := builtin_fault()):
        raise Unreadable(fault)
    if options["adapter"] is not None and (fault := adapter_fault(options["adapter"])):
        raise Unreadable(fault)
    given = read_keys(options.pop("api_key"), options.pop("api_key_file"))
    keys = Keys(given) if given is not None else None
    del given  # only digests stay
    if keys is None and ANY in options["cors"]:
        raise Unreadable(
            "Without API keys, --cors '*' would let every page that a browser on this machine "
            "opens talk to the server. Name the origins of your pages, or give keys with "
            "--api-key-file."
        )
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
        if keys is None and not is_loopback(listener):
            listener.close()
            raise Unreadable(
                f"Others reach {options['host']}, and without API keys the server answers this "
                "machine alone. Give each of them a key with --api-key-file FILE (lines of "
                f"NAME=KEY) or ${KEYS_VARIABLE}, or leave --host out."
            )
        held.answers_at(address_of(listener))
        migrate(url)
        if url.startswith("sqlite"):
            told = warning(sqlite_path(url), sqlite3.sqlite_version_info)
            if told is not None:
                click.echo(f"Warning: {'; '.join(told)}.", err=True)
        store = SqlStore.open(url)
        try:
            trio.run(serve_over, options, store, listener, data_dir, keys, models)
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


async def serve_over(
    options: dict[str, Any],
    store: Store,
    listener: socket.socket,
    data_dir: Path,
    keys: Keys | None,
    models: ModelList | None = None,
) -> None:
    """
    Serve with the options of the command over a store, until a signal comes.

    Args:
        models: where there are several, in the place of the option ``--model``.
    """
    options = {**options, "tenants": ", ".join(keys.tenants) if keys is not None else None}
    stop = trio.Event()
    async with trio.open_nursery() as nursery:
        serving = trio.Event()
        await nursery.start(_signals, stop, serving)
        with ShownProgress() as progress:
            settings = _settings(options, data_dir)
            secret = root_secret(data_dir)
            booting: AbstractAsyncContextManager[Server | Models]
            if models is None:
                booting = booted(settings, store, secret, progress)
            else:
                choices, default = choices_of(models, settings), models.default.name
                booting = booted_models(choices, default, store, secret, progress)
            async with booting as server:
                progress.close()
                serving.set()
                nursery.start_soon(_drain, server, stop)
                await serve_http(
                    create_app(
                        server,
                        hosts_allowed=options["allow_host"],
                        strict_model_names=options["strict_model_names"],
                        keys=keys,
                        cors=options["cors"],
                    ),
                    listener,
                    shutdown=stop,
                    on_ready=lambda url: greet(url, server, options),
                    grace_s=settings.limits.drain_s + _LAST_WORDS_S,
                )
        nursery.cancel_scope.cancel()


async def _drain(server: Server | Models, stop: trio.Event) -> None:
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
    kept = (
        *("chunk_tokens", "dtype", "decode_rows", "kv_cache", "pool_slabs", "accept_unstable"),
        "min_cache_tokens",
    )
    return Settings(
        model=options["model"] or str(builtin_directory()),
        model_name=options["model_name"],
        adapter=options["adapter"],
        accept_tight=options["accept_tight_memory"],
        window=(options["sink_tokens"], options["window_tokens"])
        if options["kv_policy"] == "sink_window"
        else None,
        limits=Limits(
            queue=options["queue"],
            max_tokens=options["max_tokens"],
            heartbeat_s=options["heartbeat"],
            drain_s=options["drain"],
            request_s=options["request_timeout"],
            slab_rest_s=options["slab_rest"],
            ttl_s=options["ttl"],
        ),
        on_record={
            name: value
            for name, value in options.items()
            if isinstance(value, str | int | float | bool) and name not in _PLACES
        }
        | {"python": sysconfig.get_python_version()},
        blocks_folder=data_dir / "blocks",
        disk_bytes=options["disk_mb"] * 1024 * 1024,
        anticipate=not options["no_anticipation"],
        shadow_share=options["shadow_check"],
        **budgets,
        **{name: options[name] for name in kept},
    )
