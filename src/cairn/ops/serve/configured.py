"""
Options that are grouped in help, and that can also be set by a variable or in the configuration
file.

1. The command line counts more than a variable, a variable more than the file, the file more than
   the default.
2. A value that cannot be used is refused with the place where it was set.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

import click
from click.core import ParameterSource

from cairn.ops.cli import Unreadable
from cairn.ops.common.config_file import CONFIG_VARIABLE, ConfigFile, read_config
from cairn.ops.common.program import VARIABLE, program
from cairn.ops.common.ranges import number_words, range_words

COMMON = "Common options"
"""The group that `--help` shows in full."""

_VARIABLE = "CAIRN_"
_OTHER_VARIABLES = ("CAIRN_API_KEY", "CAIRN_API_KEYS", "CAIRN_CACHE_DIR", CONFIG_VARIABLE, VARIABLE)
_FILE = "cairn.config"
_SHOWN_MAX = 60

Place = Literal["", "path", "path or name"]


class Configured(click.Option):
    """
    An option of a ``ConfiguredCommand``.

    Attributes:
        group: the heading under which help lists it.
        not_in_file: why it may not be in the configuration file; empty if it may.
        times: whether a number in the file is a time in seconds, as in a text such as 90 or 24h.
        needs_others: whether its callback reads other options, and so has to run after them.
        place: whether it is a path, or may be one; in the file it may begin with a tilde, and is
            relative to the file's folder.
    """

    def __init__(
        self,
        *declarations: Any,
        group: str = COMMON,
        not_in_file: str = "",
        times: bool = False,
        needs_others: bool = False,
        place: Place = "",
        **attributes: Any,
    ) -> None:
        super().__init__(*declarations, **attributes)
        self.group = group
        self.not_in_file = not_in_file
        self.times = times
        self.needs_others = needs_others
        self.place: Place = "path" if isinstance(self.type, click.Path) else place
        if self.metavar is None and isinstance(self.type, click.IntRange | click.FloatRange):
            self.metavar = "N"

    @property
    def spelled(self) -> str:
        """As it is written on the command line."""
        return max(self.opts, key=len)

    def get_help_extra(self, ctx: click.Context) -> Any:
        """The default and the range, in words."""
        extra = super().get_help_extra(ctx)
        if isinstance(self.show_default, str):
            extra["default"] = self.show_default
        if words := range_words(self.type):
            extra["range"] = words
        return extra

    def get_error_hint(self, ctx: click.Context | None) -> str:
        """What an error calls this option: with the place where its value was set."""
        if ctx is None or self.name is None:
            return super().get_error_hint(ctx)
        source, file = ctx.get_parameter_source(self.name), config_of(ctx)
        if source is ParameterSource.ENVIRONMENT:
            return f"{self.spelled}, set by ${self.envvar}"
        if source is ParameterSource.DEFAULT_MAP and file is not None:
            return f"{self.name} ({file.place(self.name)})"
        return super().get_error_hint(ctx)

    def refusal_of(self, ctx: click.Context, value: Any) -> str | None:
        """What the option itself says against a value of the right kind; None if nothing."""
        if self.callback is None or self.needs_others:
            return None
        try:
            self.callback(ctx, self, self.type_cast_value(ctx, value))
        except click.BadParameter as error:
            return error.message
        return None

    def fault_of(self, value: Any) -> str | None:
        """What a value in the file must be; None if it is that."""
        fits = isinstance(value, str)
        must = "a text"
        if self.is_flag:
            fits, must = isinstance(value, bool), "true or false"
        elif self.multiple:
            fits = isinstance(value, list) and all(isinstance(one, str) for one in value)
            must = "a list of texts"
        elif isinstance(self.type, click.IntRange):
            fits = type(value) is int and _is_within(self.type, value)
            must = number_words(self.type)
        elif isinstance(self.type, click.FloatRange):
            fits = type(value) in (int, float) and _is_within(self.type, value)
            must = number_words(self.type)
        elif isinstance(self.type, click.Choice):
            fits, must = value in self.type.choices, f"one of {', '.join(self.type.choices)}"
        elif self.times:
            fits = fits or (type(value) is int and value > 0)
            must = "a number of seconds, or a text such as 5m, 1h or 7d"
        return None if fits else must


def _is_within(kind: click.ParamType[Any], value: Any) -> bool:
    try:
        kind.convert(value, None, None)
    except click.BadParameter:
        return False
    return True


class ConfiguredCommand(click.Command):
    """
    A command whose options have variables, a configuration file, and help in groups.

    Its options are ``Configured``. The variable of ``--disk-mb`` is ``$CAIRN_DISK_MB``, its name in
    the file ``disk_mb``.
    """

    def __init__(self, *args: Any, **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        for option in self.settings():
            if option.envvar is None and option.name != "api_key":
                option.envvar = variable_of(option)

    def settings(self) -> list[Configured]:
        """The options that can be set in other places than the command line."""
        return [one for one in self.params if isinstance(one, Configured)]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the common options, and the names of the others by their groups."""
        groups = self._groups()
        with formatter.section(COMMON):
            formatter.write_dl(_records(groups.pop(COMMON, ()), ctx))
        column = max(map(len, groups), default=0) + 2
        with formatter.section("More options, which --help-all explains"):
            for name, options in groups.items():
                indent = " " * formatter.current_indent
                # click would break names at their hyphens.
                lines = textwrap.wrap(
                    ", ".join(one.spelled for one in options),
                    width=formatter.width,
                    initial_indent=f"{indent}{name:<{column}}",
                    subsequent_indent=f"{indent}{'':<{column}}",
                    break_on_hyphens=False,
                )
                formatter.write("\n".join(lines) + "\n")
        with formatter.section("Help"):
            formatter.write_dl(_records(self._plain(ctx), ctx))

    def help_of_all(self, ctx: click.Context) -> str:
        """Help with all options, in groups."""
        formatter = ctx.make_formatter()
        self.format_usage(ctx, formatter)
        self.format_help_text(ctx, formatter)
        for name, options in self._groups().items():
            with formatter.section(name):
                formatter.write_dl(_records(options, ctx))
        with formatter.section("Help"):
            formatter.write_dl(_records(self._plain(ctx), ctx))
        self.format_epilog(ctx, formatter)
        return formatter.getvalue().rstrip("\n")

    def _groups(self) -> dict[str, list[Configured]]:
        found: dict[str, list[Configured]] = {COMMON: []}
        for option in self.settings():
            found.setdefault(option.group, []).append(option)
        return found

    def _plain(self, ctx: click.Context) -> list[click.Parameter]:
        return [one for one in self.get_params(ctx) if not isinstance(one, Configured)]


def _records(options: Sequence[click.Parameter], ctx: click.Context) -> list[tuple[str, str]]:
    return [record for one in options if (record := one.get_help_record(ctx)) is not None]


def variable_of(option: Configured) -> str:
    """The variable that sets an option."""
    return f"{_VARIABLE}{(option.name or '').upper()}"


def unknown_variables(command: ConfiguredCommand, environ: Mapping[str, str]) -> Iterator[str]:
    """A warning for each variable that looks like a misspelt one of an option."""
    known = {*map(variable_of, command.settings()), *_OTHER_VARIABLES}
    for name in environ:
        if name.startswith(_VARIABLE) and name not in known:
            near = get_close_matches(name, known, n=1, cutoff=0.85)
            if near:
                yield f"${name} sets nothing. Did you mean ${near[0]}?"


def take_config(ctx: click.Context, _: click.Parameter, named: Path | None) -> Path | None:
    """
    Read the configuration file into the context. The callback of the option ``--config``, which is
    eager and comes first.

    Returns:
        The path of the file; None if there is none.

    Raises:
        Unreadable: it cannot be used.
    """
    if ctx.resilient_parsing:
        return named
    file = read_config(named)
    if file is None:
        return None
    assert isinstance(ctx.command, ConfiguredCommand)
    ctx.meta[_FILE] = file
    ctx.default_map = checked(file, ctx.command.settings(), ctx)
    return file.path


def config_of(ctx: click.Context) -> ConfigFile | None:
    """The configuration file that was read for a command; None if there is none."""
    found: ConfigFile | None = ctx.meta.get(_FILE)
    return found


def checked(file: ConfigFile, options: Sequence[Configured], ctx: click.Context) -> dict[str, Any]:
    """
    The values of a configuration file as click takes them.

    Args:
        ctx: of the command that has these options.

    Raises:
        Unreadable: some cannot be used; the message has a line for each.
    """
    known = {one.name: one for one in options if one.name != "config"}
    faults: list[str] = []
    values: dict[str, Any] = {}
    for name, value in file.values.items():
        option = known.get(name)
        if option is None or isinstance(value, dict):
            faults.append(f"{file.place(name)}: {_unknown(name, value, list(known))}")
        elif option.not_in_file:
            faults.append(f"{file.place(name)}: {name} {option.not_in_file}")
        elif (must := option.fault_of(value)) is not None:
            faults.append(f"{file.place(name)}: {name} is {_shown(value)}; it must be {must}.")
        else:
            # A number of seconds is a text on the command line.
            text = str(value) if option.times else value
            if (refusal := option.refusal_of(ctx, text)) is not None:
                faults.append(f"{file.place(name)}: {name}: {refusal}")
            values[name] = located(text, file.path, option.place) if option.place else text
    if faults:
        raise Unreadable("\n".join(faults))
    return values


def _unknown(name: str, value: Any, known: Sequence[str]) -> str:
    if isinstance(value, dict):
        return (
            f"[{name}] is a table. Write options on lines of their own before any table, such as "
            "port = 8000."
        )
    near = get_close_matches(name, known, n=1)
    more = f"Did you mean {near[0]}?" if near else f"`{program()} config show` lists the options."
    return f"{name!r} is not an option. {more}"


def _shown(value: Any) -> str:
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= _SHOWN_MAX else f"{text[: _SHOWN_MAX - 3]}..."


def located(text: str, file: Path, place: Place) -> str:
    """
    A path in a configuration file, in full: relative ones are relative to the file's folder. Names
    of a hub and database URLs stay as they are.

    Args:
        place: ``path or name`` for a text that is a path if it begins with a dot or exists there.

    Raises:
        Unreadable: the home directory that it names is not known.
    """
    if text.startswith("~"):
        try:
            return str(Path(text).expanduser())
        except RuntimeError as error:
            raise Unreadable(
                f"{file}: the home directory in {text!r} is not known. Write the path in full."
            ) from error
    full = file.absolute().parent / text
    is_path = place == "path" or text.startswith(".") or full.exists()
    return text if not text or "://" in text or not is_path else str(full)
