"""
Pebble, the small model that comes with Cairn: where it lies. README.md beside its weights is its
card.
"""

from __future__ import annotations

from pathlib import Path

from cairn.engine.model.files import directory_fault


def builtin_directory() -> Path:
    """Pebble, as mlx-lm loads it."""
    return Path(__file__).parents[2] / "pebble"


def builtin_fault() -> str | None:
    """Why Pebble cannot be served, in a sentence; None where it is there."""
    fault = directory_fault(str(builtin_directory()))
    return None if fault is None else f"The built-in model is damaged; install Cairn again. {fault}"


def still_at(directory: str) -> str:
    """
    Where a model on record lies now: Pebble is wherever Cairn is installed; whether it is the one
    that was used, its fingerprint tells.
    """
    here = builtin_directory()
    moved = Path(directory).parts[-2:] == here.parts[-2:] and not Path(directory).is_dir()
    return str(here) if moved else directory
