"""What a number must be, for people. Pure."""

from __future__ import annotations

from typing import Any

import click


def range_words(kind: click.ParamType[Any]) -> str:
    """The range of a number; empty if it is not a number with a range."""
    if not isinstance(kind, click.IntRange | click.FloatRange):
        return ""
    if kind.min is not None and kind.max is not None:
        return f"{kind.min:g} to {kind.max:g}"
    if kind.min is not None:
        return f"more than {kind.min:g}" if kind.min_open else f"{kind.min:g} or more"
    return f"{kind.max:g} or less" if kind.max is not None else ""


def number_words(kind: click.ParamType[Any]) -> str:
    """What a value must be; empty if that is not a number with a range."""
    if isinstance(kind, click.IntRange):
        return f"a whole number: {range_words(kind)}"
    return f"a number: {range_words(kind)}" if isinstance(kind, click.FloatRange) else ""
