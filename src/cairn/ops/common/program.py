"""The name by which the program was called."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from pathlib import Path

import click

NAMES = ("ops", "cairn")
"""The names of the program; the first one is used if it has none of them."""

VARIABLE = "CAIRN_PROGRAM"
"""How a person calls the program, with its path if it is not found without; set by launchers."""


_COMMAND = re.compile(r"`ops (?=\S)")


def program_name() -> str:
    """``cairn`` or ``ops``: the name without a path."""
    context = click.get_current_context(silent=True)
    name = context.find_root().info_name if context is not None else None
    return name if name in NAMES else NAMES[0]


def program(name: str | None = None) -> str:
    """
    The program as a person can call it here, for messages that name a command of it: ``./cairn`` in
    a checkout, ``cairn`` if it is installed.

    Args:
        name: ``cairn`` or ``ops``; None for the one by which it was called.
    """
    called = Path(os.environ.get(VARIABLE, ""))
    if called.name not in NAMES:
        return name or program_name()
    name = name or called.name
    folder = os.environ[VARIABLE].removesuffix(called.name)
    return shlex.quote(f"{folder}{name}")


def as_called(words: str) -> str:
    """A message with each of its commands, such as `ops verify`, as a person can call it here."""
    return _COMMAND.sub(lambda _: f"`{program()} ", words)


def note_call(path: str) -> None:
    """
    Remember how this process was called, for ``program``, also after it restarts itself. Does
    nothing if a launcher has said it.

    Args:
        path: of the program, as the system has it.
    """
    called = Path(path)
    if called.name not in NAMES or os.environ.get(VARIABLE):
        return
    found = shutil.which(called.name)
    is_found = found is not None and called.exists() and called.samefile(found)
    os.environ[VARIABLE] = called.name if is_found else path
