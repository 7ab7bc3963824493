"""``ops serve``: the server's command line."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from cairn.engine.ttl import seconds_of
from cairn.http.access.cors import read_origin
from cairn.ops.common.locations import default_data_dir, example
from cairn.ops.serve.api_keys import KEYS_VARIABLE
from cairn.ops.serve.models_option import models_option
from cairn.ops.serve.preload import preload_blas


def _is_number(context: click.Context, parameter: click.Parameter, value: float) -> float:
    """A range takes what is no number, since that is neither below nor above anything."""
    if math.isnan(value):
        raise click.BadParameter("nan is no number.", context, parameter)
    return value


def _lifetime(context: click.Context, parameter: click.Parameter, value: str) -> int:
    try:
        return seconds_of(value)
    except ValueError as error:
        raise click.BadParameter(f"{value!r} {error}.", context, parameter) from error


def _of_window(context: click.Context, parameter: click.Parameter, value: int) -> int:
    """
    Refuse an option of the policy ``sink_window`` under another one, where it would change nothing.
    """
    name = parameter.name or ""
    if (
        context.get_parameter_source(name) is not ParameterSource.DEFAULT
        and context.params["kv_policy"] != "sink_window"
    ):
        raise click.UsageError(
            f"{parameter.opts[0]} is about --kv-policy sink_window, and the policy is "
            f"{context.params['kv_policy']}. Give --kv-policy sink_window too, or leave "
            f"{parameter.opts[0]} out.",
            context,
        )
    return value


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
    "--block-tokens",
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
    is_eager=True,  # read before what is said of it, wherever it stands
    help="What a token attends to: all before it, or the first tokens and a window of the last. "
    "That bounds the memory of a session at rest, and changes answers past the window.",
)
@click.option(
    "--sink-tokens",
    type=click.IntRange(0, 4096),
    default=4,
    show_default=True,
    callback=_of_window,
    help="The first tokens, under --kv-policy sink_window.",
)
@click.option(
    "--window-tokens",
    type=click.IntRange(32),
    default=4096,
    show_default=True,
    callback=_of_window,
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
    "--slab-idle",
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
    "--no-prewarm",
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
    help="How often a waiting client is sent a sign that its request is still queued or running.",
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
    """Run the server. SIGTERM or Ctrl-C drains it; a second one ends it at once."""
    preload_blas(options["blas"])
    # Not before the process was started anew: what is loaded by then is loaded twice.
    from cairn.ops.serve.run import run

    run(options)
