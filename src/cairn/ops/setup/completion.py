"""``cairn completion``: the script with which a shell completes commands."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from cairn.ops.common.locations import example
from cairn.ops.common.program import program

SHELLS = ("bash", "zsh", "fish")


@click.command(
    epilog=example(
        "ops completion bash > ~/.local/share/bash-completion/completions/ops",
        "ops completion zsh > ~/.zfunc/_ops",
        "ops completion fish > ~/.config/fish/completions/ops.fish",
    )
)
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """
    Print the script with which a shell completes commands.

    It completes commands and options, models of the Hugging Face cache, sessions of the journal,
    and chats of the running server. Write the script to the place from which your shell loads such
    scripts, and open a new shell. zsh reads ~/.zfunc if ~/.zshrc has `fpath+=~/.zfunc` before
    `compinit`.
    """
    name = program()
    made = get_completion_class(shell)
    assert made is not None
    command = context.find_root().command
    click.echo(made(command, {}, name, f"_{name.upper()}_COMPLETE").source())
