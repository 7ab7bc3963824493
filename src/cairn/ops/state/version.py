"""``ops version``: the versions that answers depend on."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of

import click

from cairn import __version__
from cairn.ops.common.locations import example

_PACKAGES = ("mlx", "mlx-lm", "tokenizers", "llguidance")


@click.command(epilog=example("ops version", "ops version --all"))
@click.option("--all", "of_all", is_flag=True, help="Also show those of Python, MLX and the like.")
def version(of_all: bool) -> None:
    """Show the version of Cairn."""
    click.echo(f"cairn {__version__}")
    if not of_all:
        return
    click.echo(f"python {platform.python_version()}")
    for name in _PACKAGES:
        try:
            click.echo(f"{name} {version_of(name)}")
        except PackageNotFoundError:
            click.echo(f"{name} is not installed")
    click.echo(f"{platform.system()} {platform.release()} {platform.machine()}")
