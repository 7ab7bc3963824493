"""``ops serve``: the server's command line."""

from __future__ import annotations

import errno
import math
import os
import tempfile
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from cairn.actors.settings import SHADOW_SHARE
from cairn.engine.machine.disk import BUDGET_MAX, TOKENS
from cairn.engine.ttl import seconds_of
from cairn.http.access.cors import read_origin
from cairn.ops.common.completions import complete_model
from cairn.ops.common.locations import check_node, example, usual_data_dir
from cairn.ops.common.program import program_name
from cairn.ops.serve.api_keys import KEYS_VARIABLE
from cairn.ops.serve.configured import (
    Configured,
    ConfiguredCommand,
    take_config,
    unknown_variables,
)
from cairn.ops.serve.models_option import MODELS, choose_models
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


def _of_a_node(
    context: click.Context, parameter: click.Parameter, value: Path | None
) -> Path | None:
    """
    Refuse shared blocks without a node, without the package that reads them, or in a folder that
    cannot be written.
    """
    if value is None:
        return None
    if context.params.get("node") is None:
        raise click.UsageError(
            "--blocks is a folder of the nodes of a fleet. Add --node NAME, or omit --blocks: then "
            "blocks are in the data directory.",
            context,
        )
    if find_spec("obstore") is None:
        raise click.BadParameter(
            "it needs the package obstore; install the extra `fleet`.", context, parameter
        )
    own = value / context.params["node"]
    folder = own if own.is_dir() else value
    try:
        # Tried, because permissions do not say whether a mount is read-only.
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):  # serving goes on with a full disk
            raise click.BadParameter(
                f"{folder} cannot be written: {error.strerror}. Check the mount, and who owns the "
                "folder.",
                context,
                parameter,
            ) from error
    return value.absolute()


def _origins(_: click.Context, __: click.Parameter, given: tuple[str, ...]) -> tuple[str, ...]:
    try:
        return tuple(map(read_origin, given))
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


def _help_all(context: click.Context, _: click.Parameter, asked: bool) -> None:
    if asked and not context.resilient_parsing:
        assert isinstance(context.command, ConfiguredCommand)
        click.echo(context.command.help_of_all(context), color=context.color)
        context.exit()


def _without_keys(context: click.Context, _: click.Parameter, asked: bool) -> None:
    context.meta[_NO_KEYS] = asked


_option = partial(click.option, cls=Configured, show_default=True)

_NO_KEYS = "cairn.no_api_keys"

_MODEL = "Model"
_NETWORK = "Network"
_MEMORY = "Memory"
_CACHE = "Cache"
_JOURNAL = "Journal"
_CHECKS = "Checks and debugging"


@click.command(
    cls=ConfiguredCommand,
    epilog=example(
        "ops serve",
        "ops serve --model qwen3-4b",
        "ops serve --model ~/models/Qwen3-4B-4bit --port 8080",
        "ops serve --models ~/models.toml",
    ),
)
@_option(
    "--model",
    place="path or name",
    shell_complete=complete_model,
    metavar="MODEL",
    help="A short name (`ops models --all`), an mlx-lm model directory, or a model's name on "
    "Hugging Face. One that is not here is downloaded. Default: Pebble, the built-in model.",
)
@_option("--models", **MODELS)
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
    default=usual_data_dir,
    show_default="~/.local/share/cairn",
    help="The directory of the journal, the log and the block files.",
)
@_option(
    "--config",
    metavar="FILE",
    type=click.Path(path_type=Path),
    is_eager=True,  # the other options take values from it
    callback=take_config,
    show_default="~/.config/cairn/config.toml, if it exists",
    help="A TOML file with options, such as disk_mb = 512.",
)
@_option(
    "--api-key-file",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="A file of API keys, with a NAME=KEY on each line. Each name is a tenant; tenants share "
    "nothing.",
)
@_option(
    "--max-tokens",
    default=1024,
    type=click.IntRange(1),
    help="The longest answer in tokens, unless the client sets a limit.",
)
@_option(
    "--disk-mb",
    type=click.IntRange(0),
    help="MiB of disk for sealed blocks, which survive a restart; 0 writes none. Default: what "
    f"{TOKENS} tokens of the model need, or its whole context if that is longer, but at most "
    f"{BUDGET_MAX >> 20}.",
)
@_option("-v", "--verbose", is_flag=True, help="Print all settings when the server is ready.")
@_option(
    "--adapter",
    place="path",
    group=_MODEL,
    metavar="DIR",
    help="An mlx-lm adapter (LoRA) for the model.",
)
@_option(
    "--dtype",
    group=_MODEL,
    type=click.Choice(["auto", "float32", "model"]),
    default="auto",
    help="Load the weights as float32, or in the model's own type. auto: float32 on a CPU, if they "
    "fit in memory.",
)
@_option(
    "--model-name",
    group=_MODEL,
    metavar="NAME",
    help="The name that clients see. Default: the directory's name.",
)
@_option(
    "--strict-model-names",
    group=_MODEL,
    is_flag=True,
    help="Refuse requests for unknown models with 404, instead of using the default model.",
)
@_option(
    "--special-tokens",
    group=_MODEL,
    type=click.Choice(["text", "control"]),
    default="text",
    show_default=True,
    help="What special tokens such as <|im_end|> are in a client's messages: text, or the control "
    "tokens that the model reads in their place.",
)
@_option(
    "--block-tokens",
    group=_MODEL,
    type=click.IntRange(8, 4096),
    help="C, the tokens per block and per prefill pass. Default: 64 on a CPU, 256 on a GPU.",
)
@_option(
    "--kv-policy",
    group=_MODEL,
    type=click.Choice(["full", "sink_window"]),
    default="full",
    is_eager=True,  # parsed before the options that depend on it
    help="What a token attends to: all tokens before it, or the first ones and a window of the "
    "last ones. The window limits the memory of an idle session, and changes answers beyond it.",
)
@_option(
    "--sink-tokens",
    group=_MODEL,
    type=click.IntRange(0, 4096),
    default=4,
    callback=_of_window,
    needs_others=True,
    help="How many first tokens --kv-policy sink_window keeps.",
)
@_option(
    "--window-tokens",
    group=_MODEL,
    type=click.IntRange(32),
    default=4096,
    callback=_of_window,
    needs_others=True,
    help="The size of the window for --kv-policy sink_window; at least four blocks.",
)
@_option(
    "--blas",
    group=_MODEL,
    type=click.Choice(["auto", "bundled"]),
    default="auto",
    help="On a Linux CPU: preload OpenBLAS, or use the BLAS of MLX. LD_PRELOAD is kept if set.",
)
@_option(
    "--allow-host",
    group=_NETWORK,
    multiple=True,
    metavar="NAME",
    help="Another host name that clients use for this server. May be repeated.",
)
@_option(
    "--api-key",
    group=_NETWORK,
    not_in_file="is secret: write keys into a file that you alone can read, and name it with "
    "api_key_file.",
    multiple=True,
    metavar="[NAME=]KEY",
    help="An API key; may be repeated. Prefer a file, or keys separated by spaces in "
    f"${KEYS_VARIABLE}: other users can see options in the list of processes.",
)
@_option(
    "--cors",
    group=_NETWORK,
    multiple=True,
    metavar="ORIGIN",
    callback=_origins,
    help="The origin of a web page that may read answers, such as http://localhost:3000; * for "
    "any. May be repeated.",
)
@_option(
    "--queue",
    group=_NETWORK,
    default=64,
    type=click.IntRange(0),
    help="How many requests may wait; further ones get 429.",
)
@_option(
    "--request-timeout",
    group=_NETWORK,
    default=3600.0,
    type=click.FloatRange(0.0, min_open=True),
    callback=_is_number,
    metavar="SECONDS",
    help="How long a request may take, including its time in the queue; then it ends with 504.",
)
@_option(
    "--heartbeat",
    group=_NETWORK,
    default=10.0,
    # Clients and proxies close a connection that is silent for longer.
    type=click.FloatRange(0.05, 15),
    callback=_is_number,
    metavar="SECONDS",
    help="How often a waiting client gets a keep-alive comment.",
)
@_option(
    "--drain",
    group=_NETWORK,
    default=30.0,
    type=click.FloatRange(0.0),
    callback=_is_number,
    metavar="SECONDS",
    help="How long running requests may continue after SIGTERM or Ctrl-C.",
)
@_option(
    "--pool-slabs",
    group=_MEMORY,
    type=click.IntRange(1),
    default=16,
    help="How many sessions can have their KV cache in a slab at the same time.",
)
@_option(
    "--pool-mb",
    group=_MEMORY,
    type=click.IntRange(1),
    help="MiB of memory for slabs. Default: a quarter of the memory, or less with a large model.",
)
@_option(
    "--blocks-mb",
    group=_MEMORY,
    type=click.IntRange(1),
    help="MiB of memory for sealed blocks. Default: as for slabs.",
)
@_option(
    "--blocks-max",
    group=_MEMORY,
    type=click.IntRange(1),
    help="The most sealed blocks in memory, beside --blocks-mb. Default: as many as fit.",
)
@_option(
    "--decode-rows",
    group=_MEMORY,
    type=click.IntRange(1, 64),
    help="W, the most rows of a decode pass: how many requests decode at the same time. "
    "A pass over fewer requests has fewer rows where that gives the same bits. Default: 4.",
)
@_option(
    "--slab-idle",
    group=_MEMORY,
    default=60,
    type=click.IntRange(0, 86_400),
    metavar="SECONDS",
    help="How long an idle session keeps its slab if sealed blocks in memory have the same "
    "contents. 0: not at all.",
)
@_option(
    "--accept-tight-memory",
    group=_MEMORY,
    is_flag=True,
    help="Load a model that may not fit in memory. This is journaled.",
)
@_option(
    "--ttl",
    times=True,
    group=_CACHE,
    default="24h",
    callback=_lifetime,
    metavar="TIME",
    help="The TTL of a conversation and its blocks after their last use, in memory and in files, "
    "unless the client sets one. They are evicted earlier if space is needed. Seconds, or 5m, 1h, "
    "7d.",
)
@_option(
    "--min-cache-tokens",
    group=_CACHE,
    default=0,
    type=click.IntRange(0),
    metavar="TOKENS",
    help="Do not cache shorter prompts for other requests.",
)
@_option(
    "--no-prewarm",
    group=_CACHE,
    is_flag=True,
    help="Do not compute the beginning of a session's next prompt while the server is idle.",
)
@_option(
    "--no-speculation",
    group=_CACHE,
    is_flag=True,
    help="Do not check drafts of an answer's next tokens, taken from its prompt. They change no "
    "bit, and save time where an answer quotes.",
)
@_option(
    "--journal",
    place="path",
    group=_JOURNAL,
    metavar="URL",
    help="A database URL for the journal. Default: SQLite in the data directory.",
)
@_option(
    "--node",
    group=_JOURNAL,
    metavar="NAME",
    callback=check_node,
    is_eager=True,  # --blocks depends on it
    help="The name of this server in a fleet, such as n1: its journal is in the schema node_n1 of "
    "the PostgreSQL database that --journal names, and ids of responses and agents begin with n1.",
)
@_option(
    "--blocks",
    group=_JOURNAL,
    metavar="DIR",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    callback=_of_a_node,
    needs_others=True,
    help="With --node: write sealed blocks to a folder that all nodes of the fleet see, and use "
    "those that other nodes have written there. Default: a folder in the data directory.",
)
@_option(
    "--see-heads",
    group=_JOURNAL,
    default=60.0,
    type=click.FloatRange(0.0),
    callback=_is_number,
    metavar="SECONDS",
    help="How often a node appends the heads of the other nodes' journals to its own, if they have "
    "grown, so that rows which are removed from the end of one of them show. 0: never.",
)
@_option(
    "--checkpoints",
    group=_JOURNAL,
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Also append the signed checkpoints of the journal to this file, which may be on another "
    "disk. `ops verify --checkpoint FILE` compares the journal with it.",
)
@_option(
    "--accept-lost-rows",
    group=_JOURNAL,
    is_flag=True,
    help="Serve although rows of the journal were lost or replaced since the last start. This is "
    "journaled.",
)
@_option(
    "--journal-key",
    group=_JOURNAL,
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="The key that wraps the keys of the journal's texts; may be on another disk. Made at the "
    "first start; all nodes of a fleet have the same. Default: where it was last, else journal-key "
    "in the data directory.",
)
@_option(
    "--journal-sync",
    group=_JOURNAL,
    type=click.Choice(["full", "normal"]),
    default="full",
    help="When a token may be sent: once its rows are on the disk, or once the operating system "
    "has them; then the last of them are lost if that crashes or the power fails.",
)
@_option(
    "--keep",
    times=True,
    group=_JOURNAL,
    default=None,
    callback=_whole_days,
    metavar="TIME",
    help="Remove older rows of the journal, at the start and once a day while the server is idle, "
    "as `ops journal prune` does: whole closed sessions only. At least 1d; by default all rows are "
    "kept.",
)
@_option(
    "--fold-all",
    group=_JOURNAL,
    is_flag=True,
    help="Read and check the whole journal at the start, even if the last run left a snapshot of "
    "what it implies.",
)
@_option(
    "--shadow-check",
    group=_CHECKS,
    type=click.FloatRange(0.0, 1.0),
    callback=_is_number,
    metavar="SHARE",
    help="The share of answers that are computed again while the server is idle, and compared. By "
    f"default {SHADOW_SHARE}, one in a hundred, which costs 1 to 5 % more computing; 0 switches it "
    "off.",
)
@_option(
    "--kv-cache",
    group=_CHECKS,
    type=click.Choice(["slab", "mlx-lm"]),
    default="slab",
    help="Use Cairn's cache classes, or those of mlx-lm.",
)
@_option(
    "--test-again",
    group=_CHECKS,
    is_flag=True,
    help="Run the self-test even if this model has passed it on this machine before. Its result "
    "replaces the earlier one.",
)
@_option(
    "--accept-unstable",
    group=_CHECKS,
    is_flag=True,
    help="Serve even if the self-test fails. This is journaled.",
)
@_option(
    "--log-format",
    group=_CHECKS,
    type=click.Choice(["text", "json"]),
    default="text",
    help="The lines on stderr: for people, or JSON, for services. The log file is JSON either way.",
)
@click.option(
    "--no-api-keys",
    is_flag=True,
    hidden=True,  # for the server of a chat, which the chat alone uses
    expose_value=False,
    callback=_without_keys,
)
@click.option(
    "--help-all",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_help_all,
    help="Explain all options, in groups.",
)
def serve(**options: Any) -> None:
    """
    Run the server. SIGTERM or Ctrl-C drains it; a second one stops it at once.

    Every option can also be set by a variable and in the configuration file: --disk-mb is
    $CAIRN_DISK_MB and disk_mb. `ops config show` says which value is used, and where it was set.
    OpenTelemetry's variables, such as $OTEL_EXPORTER_OTLP_ENDPOINT, switch traces on.
    """
    preload_blas(options["blas"], program_name())
    for words in unknown_variables(serve, os.environ):
        click.echo(f"Warning: {words}", err=True)
    # After the restart that preloads a BLAS, so that nothing is imported twice.
    from cairn.ops.serve.run import run

    context = click.get_current_context()
    choose_models(context)
    if context.meta[_NO_KEYS]:
        context.params.update(api_key=(), api_key_file=None)
    run(context.params)
