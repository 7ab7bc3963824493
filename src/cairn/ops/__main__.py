"""``python -m cairn.ops``: what the launcher at the root of the repository runs."""

from cairn.ops.cli import main

main("ops")
