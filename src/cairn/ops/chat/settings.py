"""The sampling parameters that a chat can set, as options and by /set."""

from __future__ import annotations

from typing import Any

import attrs
import click


@attrs.frozen
class Parameter:
    """A parameter of a request: its type, and what it does."""

    kind: click.ParamType[Any]
    help: str


PARAMETERS = {
    "temperature": Parameter(click.FloatRange(0, 100), "The sampling temperature; 0 is greedy."),
    "top_p": Parameter(
        click.FloatRange(0, 1, min_open=True),
        "Sample among the likeliest tokens that together have this probability.",
    ),
    "top_k": Parameter(click.IntRange(0), "Sample among this many likeliest tokens; 0 for all."),
    "min_p": Parameter(
        click.FloatRange(0, 1), "Leave out tokens below this share of the likeliest one."
    ),
    "seed": Parameter(
        click.INT, "The sampling seed. The same seed and messages give the same answers."
    ),
    "max_tokens": Parameter(click.IntRange(1), "The longest answer, in tokens."),
    "repetition_penalty": Parameter(
        click.FloatRange(0, 10, min_open=True), "Makes tokens that occurred less likely, above 1."
    ),
    "repetition_guard": Parameter(click.BOOL, "End an answer that repeats itself."),
}
"""By the names of the API."""

OPTIONS = ("temperature", "top_p", "seed", "max_tokens")
"""Those that are options of the command as well."""

_EXTRA = "parameter"  # `/set parameter NAME VALUE`, as in other chats


def parsed(text: str) -> tuple[str, Any]:
    """
    The parameter that the argument of /set names, and its value; None without one.

    Raises:
        click.UsageError: there is no such parameter, or it cannot have this value.
    """
    name, _, value = text.strip().removeprefix(f"{_EXTRA} ").strip().partition(" ")
    name = name.replace("-", "_")
    if name not in PARAMETERS:
        raise click.UsageError(
            f"There is no parameter {name!r}; /set knows {', '.join(PARAMETERS)}."
        )
    if not value.strip():
        return name, None
    try:
        return name, PARAMETERS[name].kind.convert(value.strip(), None, None)
    except click.BadParameter as error:
        raise click.UsageError(f"{name}: {error.message}") from error


def shown(settings: dict[str, Any]) -> str:
    """All parameters with their values."""
    width = max(map(len, PARAMETERS))
    return "\n".join(f"{name:<{width}}  {settings.get(name, 'default')}" for name in PARAMETERS)
