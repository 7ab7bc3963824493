"""``ops completion``: what a shell needs to complete commands and options."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from cairn.ops.common.locations import example

_SHELLS = ("bash", "zsh", "fish")

_INSTALL = """\b
Put it where the shell looks, and open a new terminal:
  bash   ~/.local/share/bash-completion/completions/cairn
  zsh    ~/.zfunc/_cairn, with `fpath+=~/.zfunc; autoload -Uz compinit; compinit` in ~/.zshrc
  fish   ~/.config/fish/completions/cairn.fish"""
_TO = "~/.local/share/bash-completion/completions/cairn"


@click.command(epilog=f"{_INSTALL}\n\n{example(f'ops completion bash > {_TO}')}")
@click.argument("shell", type=click.Choice(_SHELLS))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the completion of commands and options for a shell."""
    root = context.find_root()
    name = root.info_name or "ops"
    kind = get_completion_class(shell)
    assert kind is not None  # click has all three
    variable = f"_{name.upper()}_COMPLETE"
    click.echo(kind(root.command, {}, name, variable).source())
