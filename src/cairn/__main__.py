"""``python -m cairn``: what the launcher ``cairn`` at the root of the repository runs."""

from cairn.ops.cli import main

main("cairn")
