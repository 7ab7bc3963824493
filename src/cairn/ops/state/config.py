"""``ops config``: what is set, and where; and a configuration file to begin with."""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from cairn.ops.cli import Unreadable
from cairn.ops.common.config_file import config_path
from cairn.ops.common.locations import example
from cairn.ops.common.output import printable, table
from cairn.ops.common.program import program
from cairn.ops.serve.api_keys import KEYS_VARIABLE
from cairn.ops.serve.configured import (
    COMMON,
    Configured,
    ConfiguredCommand,
    config_of,
    unknown_variables,
)

_WIDTH = 98

_PASSWORD = re.compile(r"(://[^/@\s:]*:)[^/\s]*(@)")
"""The password in an address."""


@click.group(epilog=example("ops config show", "ops config init"))
def config() -> None:
    """
    Show what is set and where, or write a configuration file.

    Options of `ops serve` are set on the command line, by variables such as $CAIRN_PORT, or in the
    file: $CAIRN_CONFIG, else $XDG_CONFIG_HOME/cairn/config.toml, else ~/.config/cairn/config.toml.
    The command line counts more than a variable, and a variable more than the file.
    """


@config.command(
    context_settings={"ignore_unknown_options": True, "help_option_names": ["-h", "--help"]},
    epilog=example("ops config show", "ops config show --config ~/other.toml --port 9000"),
)
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
def show(options: tuple[str, ...]) -> None:
    """
    Show each option of the server: its value, and where that was set.

    OPTIONS are those of `ops serve`, as they would be given to it. The source of a value is
    `default`, the variable, the line of the configuration file, or `command line`. Starts no
    server.
    """
    from cairn.ops.serve.command import serve

    assert isinstance(serve, ConfiguredCommand)
    here = click.get_current_context()
    # Errors about OPTIONS name this command, which the user called.
    context = serve.make_context(here.info_name, list(options), here.parent)
    for words in unknown_variables(serve, os.environ):
        click.echo(f"Warning: {words}", err=True)
    file = config_of(context)
    usual = config_path()
    said = "none" if usual is None else f"none; {usual} does not exist"
    click.echo(f"configuration file: {file.path if file is not None else said}", err=True)
    table(
        ("option", "value", "set by"),
        [_row(context, one) for one in serve.settings() if one.name != "config"],
    )


def _row(context: click.Context, option: Configured) -> tuple[str, str, str]:
    name = option.name or ""
    value, source = context.params[name], context.get_parameter_source(name)
    file = config_of(context)
    by = "default"
    if name == "api_key":
        return name, *_keys(value)
    if source is ParameterSource.COMMANDLINE:
        by = "command line"
    elif source is ParameterSource.ENVIRONMENT:
        by = f"${option.envvar}"
    elif source is ParameterSource.DEFAULT_MAP and file is not None:
        by = file.place(name)
    return name, _shown(value), by


def _keys(given: tuple[str, ...]) -> tuple[str, str]:
    """Where API keys were given. No key is shown."""
    by = ["command line"] if given else []
    by += [f"${KEYS_VARIABLE}"] if os.environ.get(KEYS_VARIABLE) else []
    return ("(hidden)", " and ".join(by)) if by else ("", "default")


def _shown(value: Any) -> str:
    """A value as the configuration file would have it, without quotes; empty if it is not set."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ", ".join(map(printable, value))
    return printable(_PASSWORD.sub(r"\1***\2", str(value)))


@config.command(epilog=example("ops config init"))
@click.option(
    "--config",
    "named",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Where to write it. Default: where the server looks for it.",
)
def init(named: Path | None) -> None:
    """
    Write a configuration file in which the common options are explained.

    Each is commented out, so that the file changes nothing until you edit it. An existing file is
    not changed.
    """
    from cairn.ops.serve.command import serve

    path = named or config_path()
    if path is None:
        raise Unreadable("This user has no home directory. Name the file with --config.")
    assert isinstance(serve, ConfiguredCommand)
    text = "\n".join(template(serve))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise Unreadable(f"{path} exists, and was not changed.") from error
    except OSError as error:
        raise Unreadable(f"{path} cannot be written: {error.strerror}.") from error
    click.echo(f"Wrote {path}.")


def template(command: ConfiguredCommand) -> Iterator[str]:
    """The lines of a configuration file that sets nothing, and explains the common options."""
    yield f"# Options of `{program()} serve`, one a line. They are named as on the command line,"
    yield "# with underscores: --disk-mb is disk_mb. Texts are in quotes; numbers, true and false"
    yield "# are not."
    yield f"# `{program()} config show` says which value is used, and where it was set."
    for option in command.settings():
        if option.group != COMMON or option.name == "config":
            continue
        yield ""
        help_text = (option.help or "").replace("\n", " ")
        yield from (f"# {line}" for line in textwrap.wrap(help_text, _WIDTH))
        yield f"# {option.name} = {_example_of(option)}"
    yield ""


def _example_of(option: Configured) -> str:
    if option.is_flag:
        return "true"
    if option.multiple:
        return '["..."]'
    if isinstance(option.type, click.IntRange):
        usual = option.default
        return str(usual) if isinstance(usual, int) else "512"
    usual = option.default
    return f'"{usual}"' if isinstance(usual, str) else '"..."'
