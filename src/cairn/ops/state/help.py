"""``ops help``: the help of a command, as its option ``--help`` shows it."""

from __future__ import annotations

import click

from cairn.ops.common.locations import example


@click.command(name="help", epilog=example("ops help", "ops help serve", "ops help journal prune"))
@click.argument("command", nargs=-1)
@click.pass_context
def help_command(context: click.Context, command: tuple[str, ...]) -> None:
    """Show the commands, or the help of one COMMAND."""
    inner = context.parent
    assert inner is not None
    for name in command:
        if not isinstance(inner.command, click.Group):
            raise click.UsageError(f"`{inner.command_path}` has no commands of its own.", inner)
        # Raises if there is none, and suggests similar names.
        _, found, _ = inner.command.resolve_command(inner, [name])
        assert found is not None
        inner = click.Context(found, inner, name)
    click.echo(inner.get_help(), color=inner.color)
