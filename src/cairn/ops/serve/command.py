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
    help="An mlx-lm model directory, or a name on the hub. Default: Pebble, the built-in model.",
)
@models_option
@click.option("--adapter", metavar="DIR", help="An mlx-lm adapter (LoRA) for the model.")
@click.option(
    "--dtype",
    type=click.Choice(["auto", "float32", "model"]),
    default="auto",
    show_default=True,
    help="Load the weights in float32, or in the model's own type. auto: float32 on a CPU, "
    "if it fits.",
)
@click.option(
    "--model-name", metavar="NAME", help="The name that clients see. Default: the directory's name."
)
@click.option(
    "--strict-model-names",
    is_flag=True,
    help="Refuse requests for models that are not served (404).",
)
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="The address to listen on. One that other machines can reach requires API keys.",
)
@click.option(
    "--port",
    default=8000,
    show_default=True,
    type=click.IntRange(0, 65535),
    help="The port to listen on; 0 picks a free one.",
)
@click.option(
    "--data-dir",
    type=click.Path(file_okay=False, path_type=Path),
    default=default_data_dir,
    show_default="$CAIRN_DATA_DIR, else ~/.local/share/cairn",
    help="The directory of the journal, the log and the block files.",
)
@click.option(
    "--journal",
    metavar="URL",
    help="A database URL for the journal. Default: SQLite in the data directory.",
)
@click.option(
    "--block-tokens",
    type=click.IntRange(8, 4096),
    help="C, the tokens of a block and of a prefill pass (64 on a CPU, 256 on a GPU).",
)
@click.option(
    "--decode-rows",
    type=click.IntRange(1, 64),
    help="W, the rows of a decode pass: the number of requests that decode at the same time (4).",
)
@click.option(
    "--kv-cache",
    type=click.Choice(["slab", "mlx-lm"]),
    default="slab",
    show_default=True,
    help="Use Cairn's cache classes, or those of mlx-lm.",
)
@click.option(
    "--kv-policy",
    type=click.Choice(["full", "sink_window"]),
    default="full",
    show_default=True,
    is_eager=True,  # read before what is said of it, wherever it stands
    help="What a token attends to: all tokens before it, or the first ones and a window of "
    "the last "
    "ones, which limits the memory of an idle session and changes answers beyond the window.",
)
@click.option(
    "--sink-tokens",
    type=click.IntRange(0, 4096),
    default=4,
    show_default=True,
    callback=_of_window,
    help="The number of first tokens for --kv-policy sink_window.",
)
@click.option(
    "--window-tokens",
    type=click.IntRange(32),
    default=4096,
    show_default=True,
    callback=_of_window,
    help="The window for --kv-policy sink_window; at least four blocks.",
)
@click.option(
    "--pool-slabs",
    type=click.IntRange(1),
    default=16,
    show_default=True,
    help="The number of sessions whose KV cache is in a slab at the same time.",
)
@click.option(
    "--slab-idle",
    default=60,
    show_default=True,
    type=click.IntRange(0, 86_400),
    metavar="SECONDS",
    help="How long an idle session keeps its slab when sealed blocks in memory hold the "
    "same. 0: not "
    "at all.",
)
@click.option(
    "--pool-mb",
    type=click.IntRange(1),
    help="MiB for slabs (a quarter of the memory, or less with a large model).",
)
@click.option("--blocks-mb", type=click.IntRange(1), help="MiB for sealed blocks (as for slabs).")
@click.option(
    "--disk-mb",
    default=4096,
    show_default=True,
    type=click.IntRange(0),
    help="MiB for sealed blocks in files, which stay warm across a restart; 0 writes none.",
)
@click.option(
    "--ttl",
    default="24h",
    show_default=True,
    callback=_lifetime,
    metavar="TIME",
    help="How long a conversation and its blocks are kept after their last use, in memory and in "
    "files, unless the client sets it. The memory limits come first. Seconds, or 5m, 1h, 7d.",
)
@click.option(
    "--min-cache-tokens",
    default=0,
    show_default=True,
    type=click.IntRange(0),
    metavar="TOKENS",
    help="Do not cache shorter prompts for other requests. Less than a full block is never cached.",
)
@click.option(
    "--no-prewarm",
    is_flag=True,
    help="While idle, do not compute the beginning of a session's next prompt.",
)
@click.option(
    "--max-tokens",
    default=1024,
    show_default=True,
    type=click.IntRange(1),
    help="The longest answer, unless the client sets a limit.",
)
@click.option(
    "--queue",
    default=64,
    show_default=True,
    type=click.IntRange(0),
    help="How many requests may wait; further ones get 429.",
)
@click.option(
    "--heartbeat",
    default=10.0,
    show_default=True,
    # Clients and proxies give up on a connection that is silent for longer.
    type=click.FloatRange(0.05, 15),
    callback=_is_number,
    metavar="SECONDS",
    help="How often a waiting client gets a keep-alive.",
)
@click.option(
    "--drain",
    default=30.0,
    show_default=True,
    type=click.FloatRange(0.0),
    callback=_is_number,
    metavar="SECONDS",
    help="How long running requests may continue after SIGTERM.",
)
@click.option(
    "--shadow-check",
    default=0.0,
    show_default=True,
    type=click.FloatRange(0.0, 1.0),
    callback=_is_number,
    metavar="SHARE",
    help="The share of answers (0.01: one in a hundred) that are computed again while the "
    "server is "
    "idle, and compared.",
)
@click.option(
    "--blas",
    type=click.Choice(["auto", "bundled"]),
    default="auto",
    show_default=True,
    help="On a Linux CPU: preload OpenBLAS, or use the BLAS of MLX. LD_PRELOAD is not overridden.",
)
@click.option(
    "--allow-host",
    multiple=True,
    metavar="NAME",
    help="Another host name that clients use for this server.",
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
