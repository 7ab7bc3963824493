"""``ops serve``: the server's command line."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from cairn.actors.settings import SHADOW_SHARE
from cairn.engine.ttl import seconds_of
from cairn.http.access.cors import read_origin
from cairn.ops.common.locations import default_data_dir, example
from cairn.ops.serve.api_keys import KEYS_VARIABLE
from cairn.ops.serve.models_option import models_option
from cairn.ops.serve.preload import preload_blas

_DAY_S = 86_400


def _is_number(
    context: click.Context, parameter: click.Parameter, value: float | None
) -> float | None:
    """Refuse NaN, which every range accepts."""
    if value is not None and math.isnan(value):
        raise click.BadParameter("nan is not a number.", context, parameter)
    return value


def _lifetime(context: click.Context, parameter: click.Parameter, value: str) -> int:
    try:
        return seconds_of(value)
    except ValueError as error:
        raise click.BadParameter(f"{value!r} {error}.", context, parameter) from error


def _whole_days(
    context: click.Context, parameter: click.Parameter, value: str | None
) -> int | None:
    if value is None:
        return None
    seconds = _lifetime(context, parameter, value)
    if seconds < _DAY_S:
        raise click.BadParameter(f"{value!r} is less than a day.", context, parameter)
    return seconds


def _of_window(context: click.Context, parameter: click.Parameter, value: int) -> int:
    """Refuse an option of the policy ``sink_window`` with another policy."""
    name = parameter.name or ""
    if (
        context.get_parameter_source(name) is not ParameterSource.DEFAULT
        and context.params["kv_policy"] != "sink_window"
    ):
        raise click.UsageError(
            f"{parameter.opts[0]} has no effect with --kv-policy {context.params['kv_policy']}. "
            f"Add --kv-policy sink_window, or omit {parameter.opts[0]}.",
            context,
        )
    return value


def _origins(_: click.Context, __: click.Parameter, given: tuple[str, ...]) -> tuple[str, ...]:
    try:
        return tuple(map(read_origin, given))
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


_option = partial(click.option, show_default=True)


@click.command(
    epilog=example(
        "ops serve",
        "ops serve --model ~/models/Qwen3-4B-4bit --port 8080",
        "ops serve --models ~/models.toml",
    )
)
@_option(
    "--model",
    metavar="DIR",
    help="An mlx-lm model directory, or a model's name on Hugging Face. Default: Pebble, the "
    "built-in model.",
)
@models_option
@_option("--adapter", metavar="DIR", help="An mlx-lm adapter (LoRA) for the model.")
@_option(
    "--dtype",
    type=click.Choice(["auto", "float32", "model"]),
    default="auto",
    help="Load the weights as float32, or in the model's own type. auto: float32 on a CPU, if they "
    "fit in memory.",
)
@_option(
    "--model-name", metavar="NAME", help="The name that clients see. Default: the directory's name."
)
@_option(
    "--strict-model-names",
    is_flag=True,
    help="Refuse requests for unknown models with 404, instead of using the default model.",
)
@_option(
    "--host",
    default="127.0.0.1",
    help="The address to listen on. One that other machines can reach requires API keys.",
)
@_option(
    "--port",
    default=8000,
    type=click.IntRange(0, 65535),
    help="The port to listen on; 0 picks a free one.",
)
@_option(
    "--data-dir",
    type=click.Path(file_okay=False, path_type=Path),
    default=default_data_dir,
    show_default="$CAIRN_DATA_DIR, else ~/.local/share/cairn",
    help="The directory of the journal, the log and the block files.",
)
@_option(
    "--journal",
    metavar="URL",
    help="A database URL for the journal. Default: SQLite in the data directory.",
)
@_option(
    "--checkpoints",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Also append the signed checkpoints of the journal to this file, which may be on another "
    "disk. `ops verify --checkpoint FILE` compares the journal with it.",
)
@_option(
    "--accept-lost-rows",
    is_flag=True,
    help="Serve although rows of the journal were lost or replaced since the last start. This is "
    "journaled.",
)
@_option(
    "--journal-key",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="The key that wraps the keys of the journal's texts; may be on another disk. Made at the "
    "first start. Default: where it was last, else journal-key in the data directory.",
)
@_option(
    "--journal-sync",
    type=click.Choice(["full", "normal"]),
    default="full",
    help="When a token may be sent: once its rows are on the disk, or once the operating system "
    "has them; then the last of them are lost if that crashes or the power fails.",
)
@_option(
    "--block-tokens",
    type=click.IntRange(8, 4096),
    help="C, the tokens per block and per prefill pass. Default: 64 on a CPU, 256 on a GPU.",
)
@_option(
    "--decode-rows",
    type=click.IntRange(1, 64),
    help="W, the most rows of a decode pass: how many requests decode at the same time. "
    "A pass over fewer requests has fewer rows where that gives the same bits. Default: 4.",
)
@_option(
    "--kv-cache",
    type=click.Choice(["slab", "mlx-lm"]),
    default="slab",
    help="Use Cairn's cache classes, or those of mlx-lm.",
)
@_option(
    "--kv-policy",
    type=click.Choice(["full", "sink_window"]),
    default="full",
    is_eager=True,  # parsed before the options that depend on it
    help="What a token attends to: all tokens before it, or the first ones and a window of the "
    "last ones. The window limits the memory of an idle session, and changes answers beyond it.",
)
@_option(
    "--sink-tokens",
    type=click.IntRange(0, 4096),
    default=4,
    callback=_of_window,
    help="How many first tokens --kv-policy sink_window keeps.",
)
@_option(
    "--window-tokens",
    type=click.IntRange(32),
    default=4096,
    callback=_of_window,
    help="The size of the window for --kv-policy sink_window; at least four blocks.",
)
@_option(
    "--pool-slabs",
    type=click.IntRange(1),
    default=16,
    help="How many sessions can have their KV cache in a slab at the same time.",
)
@_option(
    "--slab-idle",
    default=60,
    type=click.IntRange(0, 86_400),
    metavar="SECONDS",
    help="How long an idle session keeps its slab if sealed blocks in memory have the same "
    "contents. 0: not at all.",
)
@_option(
    "--pool-mb",
    type=click.IntRange(1),
    help="MiB of memory for slabs. Default: a quarter of the memory, or less with a large model.",
)
@_option(
    "--blocks-mb",
    type=click.IntRange(1),
    help="MiB of memory for sealed blocks. Default: as for slabs.",
)
@_option(
    "--blocks-max",
    type=click.IntRange(1),
    help="The most sealed blocks in memory, beside --blocks-mb. Default: as many as fit.",
)
@_option(
    "--disk-mb",
    default=4096,
    type=click.IntRange(0),
    help="MiB of disk for sealed blocks, which survive a restart; 0 writes none.",
)
@_option(
    "--ttl",
    default="24h",
    callback=_lifetime,
    metavar="TIME",
    help="The TTL of a conversation and its blocks after their last use, in memory and in files, "
    "unless the client sets one. They are evicted earlier if space is needed. Seconds, or 5m, 1h, "
    "7d.",
)
@_option(
    "--min-cache-tokens",
    default=0,
    type=click.IntRange(0),
    metavar="TOKENS",
    help="Do not cache shorter prompts for other requests.",
)
@_option(
    "--keep",
    default=None,
    callback=_whole_days,
    metavar="TIME",
    help="Remove older rows of the journal, at the start and once a day while the server is idle, "
    "as `ops journal prune` does: whole closed sessions only. At least 1d; by default all rows are "
    "kept.",
)
@_option(
    "--fold-all",
    is_flag=True,
    help="Read and check the whole journal at the start, even if the last run left a snapshot of "
    "what it implies.",
)
@_option(
    "--special-tokens",
    type=click.Choice(["text", "control"]),
    default="text",
    show_default=True,
    help="What special tokens such as <|im_end|> are in a client's messages: text, or the control "
    "tokens that the model reads in their place.",
)
@_option(
    "--no-prewarm",
    is_flag=True,
    help="Do not compute the beginning of a session's next prompt while the server is idle.",
)
@_option(
    "--no-speculation",
    is_flag=True,
    help="Do not check drafts of an answer's next tokens, taken from its prompt. They change no "
    "bit, and save time where an answer quotes.",
)
@_option(
    "--max-tokens",
    default=1024,
    type=click.IntRange(1),
    help="The longest answer in tokens, unless the client sets a limit.",
)
@_option(
    "--queue",
    default=64,
    type=click.IntRange(0),
    help="How many requests may wait; further ones get 429.",
)
@_option(
    "--log-format",
    type=click.Choice(["text", "json"]),
    default="text",
    help="The lines on stderr: for people, or JSON, for services. The log file is JSON either way.",
)
@_option(
    "--heartbeat",
    default=10.0,
    # Clients and proxies close a connection that is silent for longer.
    type=click.FloatRange(0.05, 15),
    callback=_is_number,
    metavar="SECONDS",
    help="How often a waiting client gets a keep-alive comment.",
)
@_option(
    "--drain",
    default=30.0,
    type=click.FloatRange(0.0),
    callback=_is_number,
    metavar="SECONDS",
    help="How long running requests may continue after SIGTERM or Ctrl-C.",
)
@_option(
    "--shadow-check",
    type=click.FloatRange(0.0, 1.0),
    callback=_is_number,
    metavar="SHARE",
    help="The share of answers that are computed again while the server is idle, and compared. By "
    f"default {SHADOW_SHARE}, one in a hundred, which costs 1 to 5 % more computing; 0 switches it "
    "off.",
)
@_option(
    "--blas",
    type=click.Choice(["auto", "bundled"]),
    default="auto",
    help="On a Linux CPU: preload OpenBLAS, or use the BLAS of MLX. LD_PRELOAD is kept if set.",
)
@_option(
    "--allow-host",
    multiple=True,
    metavar="NAME",
    help="Another host name that clients use for this server. May be repeated.",
)
@_option(
    "--api-key-file",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="A file of API keys, with a NAME=KEY on each line. Each name is a tenant; tenants share "
    "nothing.",
)
@_option(
    "--api-key",
    multiple=True,
    metavar="[NAME=]KEY",
    help="An API key; may be repeated. Prefer a file, or keys separated by spaces in "
    f"${KEYS_VARIABLE}: other users can see options in the list of processes.",
)
@_option(
    "--cors",
    multiple=True,
    metavar="ORIGIN",
    callback=_origins,
    help="The origin of a web page that may read answers, such as http://localhost:3000; * for "
    "any. May be repeated.",
)
@_option(
    "--request-timeout",
    default=3600.0,
    type=click.FloatRange(0.0, min_open=True),
    callback=_is_number,
    metavar="SECONDS",
    help="How long a request may take, including its time in the queue; then it ends with 504.",
)
@_option(
    "--test-again",
    is_flag=True,
    help="Run the self-test even if this model has passed it on this machine before. Its result "
    "replaces the earlier one.",
)
@_option(
    "--accept-unstable", is_flag=True, help="Serve even if the self-test fails. This is journaled."
)
@_option(
    "--accept-tight-memory",
    is_flag=True,
    help="Load a model that may not fit in memory. This is journaled.",
)
def serve(**options: Any) -> None:
    """
    Run the server. SIGTERM or Ctrl-C drains it; a second one stops it at once.

    OpenTelemetry's variables, such as $OTEL_EXPORTER_OTLP_ENDPOINT, switch traces on.
    """
    preload_blas(options["blas"])
    # After the restart that preloads a BLAS, so that nothing is imported twice.
    from cairn.ops.serve.run import run

    run(options)
