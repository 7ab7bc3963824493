"""The name by which the program was called."""

from __future__ import annotations

import click

NAMES = ("ops", "cairn")
"""The names of the program; the first one is used if it has none of them."""


def program() -> str:
    """``cairn`` or ``ops``, for messages that name a command of the program."""
    context = click.get_current_context(silent=True)
    name = context.find_root().info_name if context is not None else None
    return name if name in NAMES else NAMES[0]
