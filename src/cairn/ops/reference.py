"""Writes ``docs/reference/cli.md``, the help of all commands: ``python -m cairn.ops.reference``."""

from __future__ import annotations

import click

from cairn.ops.cli import ops
from cairn.ops.serve.configured import ConfiguredCommand

_WIDTH = 88


def page() -> str:
    """The page in Markdown. Commands whose package is not installed are left out."""
    root = click.Context(
        ops, info_name="ops", terminal_width=_WIDTH, help_option_names=["-h", "--help"]
    )
    parts = [
        "# Command line",
        "<!-- Made by `python -m cairn.ops.reference`. -->",
        _block(ops.get_help(root)),
    ]
    for name in ops.list_commands(root):
        command = ops.get_command(root, name)
        assert command is not None
        context = click.Context(command, root, name, terminal_width=_WIDTH)
        text = command.get_help(context)
        if isinstance(command, ConfiguredCommand):
            text = command.help_of_all(context)
        parts += [f"## ops {name}", _block(text)]
        if isinstance(command, click.Group):
            for part in command.list_commands(context):
                below = command.get_command(context, part)
                assert below is not None
                inner = click.Context(below, context, part, terminal_width=_WIDTH)
                parts += [f"### ops {name} {part}", _block(below.get_help(inner))]
    return "\n\n".join(parts) + "\n"


def _block(text: str) -> str:
    return f"```text\n{text.rstrip()}\n```"


if __name__ == "__main__":
    click.echo(page(), nl=False)
