"""Runs ``ops serve``: from the lock on the data directory to the last commit."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import sqlite3
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import click
import trio

from cairn.actors.boot import (
    BootRefused,
    JournalBroken,
    Settings,
    StartGivenUp,
    Starting,
    booted,
    booted_models,
)
from cairn.actors.journal_keys import JournalKeys, open_keys
from cairn.actors.models.choice import Choice
from cairn.actors.requests.limits import Limits
from cairn.actors.server import Server
from cairn.actors.settings import SHADOW_SHARE
from cairn.actors.threads.heads import HeadKeeper
from cairn.actors.threads.writer import WriterDied
from cairn.engine.errors import ModelRefused, ModelTooLarge
from cairn.engine.machine.heap import use_one_heap
from cairn.engine.model.builtin import builtin_directory, builtin_fault
from cairn.engine.model.files import adapter_fault, directory_fault, is_path
from cairn.engine.model.models_file import ModelEntry, ModelList, ModelsFault, read_metadata
from cairn.http.access.cors import ANY
from cairn.http.access.keys import Keys
from cairn.http.app import CairnApp, create_app
from cairn.http.server.listen import bind_socket, is_loopback, serve_http
from cairn.http.starting import StartingServer
from cairn.journal.rows.database.fleet import heads_of_others
from cairn.journal.rows.database.other_nodes import OtherNodes
from cairn.journal.rows.database.same_blocks import places_elsewhere
from cairn.journal.rows.database.schema import migrate, strange_words
from cairn.journal.rows.database.urls import sqlite_path
from cairn.journal.rows.store import Store
from cairn.journal.rows.store_sql import SqlStore
from cairn.ops.cli import Unreadable
from cairn.ops.common.heads import HeadFiles
from cairn.ops.common.locations import (
    journal_of,
    log_path,
    options_of,
    self_tests_folder,
    snapshot_path,
    url_of,
)
from cairn.ops.common.logs import set_up_logs
from cairn.ops.common.program import program
from cairn.ops.journal.readers import blocks_warning, readers_warning, secret_warning
from cairn.ops.models.fitting import suggested_words, this_machine
from cairn.ops.models.ready import ready_model
from cairn.ops.serve.api_keys import KEYS_VARIABLE, read_keys
from cairn.ops.serve.banner import greet
from cairn.ops.serve.data_dir import hold, make_home, root_secret
from cairn.ops.serve.models_option import read_models_option
from cairn.ops.serve.progress import ShownProgress
from cairn.ops.serve.recorded_heads import head_keeper, require_known_head
from cairn.ops.serve.second_writer import warning
from cairn.ops.serve.traces import tracing

ENDED_AT_ONCE = 130
"""The exit code if a signal ended the process before it had finished."""

# Paths of this machine are not journaled, nor what is only shown.
_PLACES = (
    "model",
    "models",
    "adapter",
    "journal",
    "checkpoints",
    "journal_key",
    "verbose",
    "blocks",
)
# After the last answer was cut off, its client still has to get the error.
_LAST_WORDS_S = 10.0


def run(options: dict[str, Any]) -> None:
    """
    Run the server until a signal ends it.

    Args:
        options: of the command. Modified: the API keys are removed, and a model is its directory.

    Raises:
        Unreadable: the options cannot be used, or the server cannot continue.
    """
    use_one_heap()
    options["journal"] = journal_of(options["journal"], options["node"])
    models = read_models_option(options)
    if models is None:
        ready = ready_model(options["model"], accept_tight=options["accept_tight_memory"])
        options["model"] = ready.where
        options["model_name"] = options["model_name"] or ready.name
    model = options["model"]
    if model is not None and is_path(model) and (fault := directory_fault(model)):
        raise Unreadable(fault)
    if model is None and models is None and (fault := builtin_fault()):
        raise Unreadable(fault)
    if options["adapter"] is not None and (fault := adapter_fault(options["adapter"])):
        raise Unreadable(fault)
    given = read_keys(options.pop("api_key"), options.pop("api_key_file"))
    keys = Keys(given) if given is not None else None
    del given  # Keys has only their digests
    if keys is None and ANY in options["cors"]:
        raise Unreadable(
            "Without API keys, --cors '*' would let every web page in a browser on this machine "
            "use the server. Name the origins of your pages, or set API keys with --api-key-file."
        )
    data_dir: Path = options["data_dir"]
    make_home(data_dir)
    try:
        set_up_logs(log_path(data_dir), options["log_format"])
    except OSError as error:
        raise Unreadable(
            f"The log {log_path(data_dir)} cannot be written: {error.strerror}. Check what is at "
            "that path, and who owns it."
        ) from error
    url = url_of(data_dir, options["journal"])
    with hold(data_dir, url) as held:
        try:
            listener = bind_socket(options["host"], options["port"])
        except (OSError, UnicodeError) as error:
            raise Unreadable(_cannot_listen(error, options["host"], options["port"])) from error
        if keys is None and not is_loopback(listener):
            listener.close()
            raise Unreadable(
                f"Other machines can reach {options['host']}, and without API keys the server "
                "answers this machine alone. Set keys with --api-key-file FILE (lines of NAME=KEY) "
                f"or ${KEYS_VARIABLE}, or omit --host."
            )
        files = HeadFiles.of(data_dir, options["journal"])
        accepted = require_known_head(files, url, accept=options["accept_lost_rows"])
        migrate(url)
        _warn(secret_warning(data_dir))
        if options["blocks"] is not None:
            _warn(blocks_warning(options["blocks"]))
        if url.startswith("sqlite"):
            _warn(warning(sqlite_path(url), sqlite3.sqlite_version_info))
        sealed = open_keys(files.keys, url, options["journal_key"], root_secret(data_dir))
        store = SqlStore.open(url, sync=options["journal_sync"], keys=sealed)
        if url.startswith("sqlite"):
            _warn(
                readers_warning(sqlite_path(url))
            )  # after opening it, which creates the files beside it
        try:
            if faults := store.schema_faults():
                raise Unreadable(strange_words(store.place, faults))
            with head_keeper(files, options["checkpoints"], accepted) as heads:
                served = trio.run(
                    partial(serve_over, listens=held.record_address),
                    *(options, store, listener, data_dir, keys, models, heads, sealed),
                )
        except BaseExceptionGroup as failed:
            raise _reportable(failed, options_of(data_dir, options["journal"])) from failed
        finally:
            store.close()
            sealed.close()
    with contextlib.suppress(OSError):  # the terminal may be closed
        click.echo("Stopped." if served else "Stopped before the server was ready.", err=True)
    if not served:
        sys.exit(ENDED_AT_ONCE)


def _cannot_listen(error: OSError | UnicodeError, host: str, port: int) -> str:
    """Why the server cannot listen: because of the host or the port."""
    # An invalid host name is an error of its encoding.
    why = error.strerror if isinstance(error, OSError) else "it is not a host name"
    of_host = isinstance(error, socket.gaierror | UnicodeError)
    if of_host or getattr(error, "errno", None) == errno.EADDRNOTAVAIL:
        return (
            f"--host {host} cannot be used: {why}. Choose an address of this machine, or omit "
            "--host."
        )
    return (
        f"Port {port} on {host} cannot be used: {why}. Choose another with --port; --port 0 picks "
        "a free one."
    )


def _warn(warned: tuple[str, str] | None) -> None:
    if warned is not None:
        click.echo(f"Warning: {'; '.join(warned)}.", err=True)


class Stopped(Unreadable):
    """The server was running and cannot continue."""

    exit_code = 1


def _reportable(failed: BaseExceptionGroup[BaseException], where: str) -> BaseException:
    """
    What ended the server: a sentence if it is the operator's or the world's fault, else the error.
    If several things failed at once, the reason why it did not start comes first.

    Args:
        where: the options with which another command finds the journal.
    """
    errors = list(_leaves(failed))
    for error in errors:
        if isinstance(error, JournalBroken):
            return Unreadable(f"{error} Run `ops verify{where}` to see what is broken.")
        if isinstance(error, ModelTooLarge):
            fitting = suggested_words(this_machine(), f"{program()} serve --model")
            return Unreadable(f"{error}{fitting}")
        if isinstance(error, BootRefused | ModelRefused | Unreadable):
            return Unreadable(str(error))
    for error in errors:
        if isinstance(error, WriterDied):
            return Stopped(f"The server stopped. {error.__cause__}")
    return errors[0] if len(errors) == 1 else failed


def _leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    """The errors in a group of groups."""
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
    heads: HeadKeeper | None = None,
    sealed: JournalKeys | None = None,
    listens: Callable[[str], None] = lambda _: None,
) -> bool:
    """
    Serve with the command's options and an open store, until a signal arrives.

    Args:
        models: several models, instead of the option ``--model``.
        heads: keeps the head of the journal outside of it.
        sealed: the keys of its private fields; None to store these plain.
        listens: called with the address once the server answers there, if only that it starts.

    Returns:
        Whether the server was ready when the signal arrived.
    """
    options = {**options, "tenants": ", ".join(keys.tenants) if keys is not None else None}
    starting = Starting()
    try:
        places = (options, store, listener, data_dir)
        await _serve(*places, keys, models, starting, heads, sealed, listens)
    except* StartGivenUp:
        pass  # already journaled
    return not starting.given_up


async def _serve(
    options: dict[str, Any],
    store: Store,
    listener: socket.socket,
    data_dir: Path,
    keys: Keys | None,
    models: ModelList | None,
    starting: Starting,
    heads: HeadKeeper | None,
    sealed: JournalKeys | None,
    listens: Callable[[str], None],
) -> None:
    """
    See ``serve_over``.

    Raises:
        StartGivenUp: in a group.
    """
    stop = trio.Event()
    async with trio.open_nursery() as nursery:
        serving = trio.Event()
        await nursery.start(_signals, stop, serving, starting)
        with ShownProgress() as shown:
            settings = settings_of(options, data_dir, sealed)
            secret = root_secret(data_dir)
            front = StartingServer()

            def progress(what: str, done: int, total: int) -> None:
                shown(what, done, total)
                front.progress(what, done, total)

            app = create_app(
                front,
                hosts_allowed=options["allow_host"],
                strict_model_names=options["strict_model_names"],
                keys=keys,
                cors=options["cors"],
                tool=program("ops"),
            )
            grace_s = settings.limits.drain_s + _LAST_WORDS_S
            ended = trio.Event()
            url = await nursery.start(_listen, app, listener, stop, grace_s, ended)
            listens(url)
            booting: AbstractAsyncContextManager[Server]
            if models is None:
                booting = booted(settings, store, secret, progress, starting, heads=heads)
            else:
                choices, default = choices_of(models, settings), models.default.name
                booting = booted_models(
                    choices,
                    default,
                    store,
                    secret,
                    progress,
                    starting,
                    heads=heads,
                    embedding_models=models.embeddings,
                )
            async with tracing(os.environ) as traces, booting as server:
                shown.close()
                if not starting.given_up:  # after the model was loaded
                    serving.set()
                    nursery.start_soon(_drain, server, stop)
                    if traces is not None:
                        server.follow_requests(traces.follow)
                    front.open(server)
                    greet(url, server, options, traces.exporters if traces is not None else ())
                    await ended.wait()
        nursery.cancel_scope.cancel()


async def _listen(
    app: CairnApp,
    listener: socket.socket,
    stop: trio.Event,
    grace_s: float,
    ended: trio.Event,
    *,
    task_status: trio.TaskStatus[str],
) -> None:
    """Answer requests until ``stop`` is set and the last one has its answer; then set ``ended``."""
    await serve_http(
        app,
        listener,
        shutdown=stop,
        on_ready=task_status.started,
        on_stop=app.streams.stop,
        grace_s=grace_s,
    )
    ended.set()


async def _drain(server: Server, stop: trio.Event) -> None:
    """Refuse new requests while running ones finish."""
    await stop.wait()
    await server.drain()


async def _signals(
    stop: trio.Event,
    serving: trio.Event,
    starting: Starting,
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """
    Drain at the first signal and exit at the second; committed events are already on disk. Before
    the server is ready, the first signal abandons the start.

    A terminal that is closed sends SIGHUP, and its shell another one: only the first counts. With
    ``nohup`` it does not.
    """
    ends = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        ends.append(signal.SIGHUP)
    for unused in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(unused, signal.SIG_IGN)  # by default they end a process at once
    with trio.open_signal_receiver(*ends) as signals:
        task_status.started()
        async for number in signals:
            if stop.is_set() or starting.given_up:
                if number == signal.SIGHUP:
                    continue
                os._exit(ENDED_AT_ONCE)
            if not serving.is_set():
                starting.give_up()
                continue
            with contextlib.suppress(OSError):  # the terminal may be closed
                click.echo("Stopping after the running answers; repeat to stop at once.", err=True)
            stop.set()


def settings_of(
    options: dict[str, Any], data_dir: Path, sealed: JournalKeys | None = None
) -> Settings:
    """The settings that the command's options give."""
    budgets = {
        name: options[option] * 1024 * 1024
        for name, option in (("pool_bytes", "pool_mb"), ("blocks_bytes", "blocks_mb"))
        if options[option] is not None
    }
    share = SHADOW_SHARE if options["shadow_check"] is None else options["shadow_check"]
    same = (
        *("block_tokens", "dtype", "decode_rows", "kv_cache", "pool_slabs", "accept_unstable"),
        *("blocks_max", "min_cache_tokens", "test_again"),
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
            slab_idle_s=options["slab_idle"],
            ttl_s=options["ttl"],
        ),
        node=options["node"],
        on_record={
            name: value
            for name, value in options.items()
            if isinstance(value, str | int | float | bool) and name not in _PLACES
        }
        | {"shadow_check": share, "python": sysconfig.get_python_version()},
        self_tests=self_tests_folder(),
        blocks_folder=(data_dir / "blocks")
        if options["blocks"] is None
        else options["blocks"] / options["node"],
        other_nodes=None
        if options["blocks"] is None
        else OtherNodes(options["journal"], options["node"]),
        snapshot=snapshot_path(data_dir),
        fold_all=options["fold_all"] or (sealed is not None and sealed.is_new),
        keys=sealed,
        keep_s=options["keep"],
        reader=partial(
            SqlStore.open, url_of(data_dir, options["journal"]), read_only=True, keys=sealed
        ),
        elsewhere=partial(places_elsewhere, url_of(data_dir, options["journal"]), options["node"])
        if options["node"] is not None
        else None,
        heads_s=options["see_heads"],
        read_heads=partial(heads_of_others, url_of(data_dir, options["journal"]), options["node"])
        if options["node"] is not None
        else None,
        disk_bytes=None if options["disk_mb"] is None else options["disk_mb"] * 1024 * 1024,
        speculation=not options["no_speculation"],
        prewarm=not options["no_prewarm"],
        special_tokens=options["special_tokens"],
        shadow_share=share,
        shadow_by_default=options["shadow_check"] is None,
        **budgets,
        **{name: options[name] for name in same},
    )


def choices_of(models: ModelList, settings: Settings) -> tuple[Choice, ...]:
    """
    The models with their settings: the command's, unless the file sets them for a model.

    Raises:
        Unreadable: a directory can no longer be read.
    """
    try:
        return tuple(
            Choice(
                entry=entry, settings=_own_settings(entry, settings), metadata=read_metadata(entry)
            )
            for entry in models.entries
        )
    except ModelsFault as fault:
        raise Unreadable(str(fault)) from fault


def _own_settings(entry: ModelEntry, settings: Settings) -> Settings:
    own = ("dtype", "block_tokens", "decode_rows", "pool_bytes", "blocks_bytes", "blocks_max")
    given = {name: value for name in own if (value := getattr(entry, name)) is not None}
    return attrs.evolve(
        settings,
        model=entry.directory,
        model_name=entry.name,
        adapter=entry.adapter,
        **given,
    )
