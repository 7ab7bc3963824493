"""
The location of Pebble, the small model that comes with Cairn. Its model card is README.md in the
same directory.
"""

from __future__ import annotations

from pathlib import Path

from cairn.engine.model.files import directory_fault


def builtin_directory() -> Path:
    """Pebble's directory, in the form that mlx-lm loads."""
    return Path(__file__).parents[2] / "pebble"


def builtin_fault() -> str | None:
    """Why Pebble cannot be served, in a sentence; None if nothing is wrong."""
    fault = directory_fault(str(builtin_directory()))
    return None if fault is None else f"The built-in model is damaged; install Cairn again. {fault}"


def still_at(directory: str) -> str:
    """
    The current directory of a model that the journal names. Pebble moves with the installation of
    Cairn; its fingerprint shows whether it is the same model.
    """
    here = builtin_directory()
    moved = Path(directory).parts[-2:] == here.parts[-2:] and not Path(directory).is_dir()
    return str(here) if moved else directory
