"""What ``--model`` and ``cairn pull`` name: a path, a short name, or a name on the hub."""

from __future__ import annotations

import re

from cairn.engine.model.files import is_path
from cairn.ops.cli import Unreadable
from cairn.ops.common.output import printable
from cairn.ops.common.program import program
from cairn.ops.models.short_names import PEBBLE, known_model, similar_names

_ON_HUB = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)


def hub_name(name: str) -> str | None:
    """
    The name on the hub; None for a path, and for the built-in model.

    Raises:
        Unreadable: it is neither a path, nor a short name, nor one that a hub may have.
    """
    if is_path(name) or name == PEBBLE:
        return None
    known = known_model(name)
    if known is not None:
        return known.hub_name
    if _ON_HUB.fullmatch(name) is None or ".." in name:
        raise Unreadable(
            f"There is no model {printable(name)}: it is no directory, and no short name of a "
            f"model.{meant(name)} `{program()} models --all` lists the short names; names on the "
            "Hugging Face Hub look like mlx-community/Qwen3-4B-4bit."
        )
    return name


def meant(name: str) -> str:
    """Which short names may be meant, as a question that begins with a space; empty if none."""
    near = [one for one in similar_names(name) if one != name]
    return f" Did you mean {' or '.join(near)}?" if near else ""
