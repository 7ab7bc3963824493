"""
What can be said of a model's directory before anything heavy is imported.
"""

from __future__ import annotations

import json
from pathlib import Path


def is_path(where: str) -> bool:
    """
    Whether ``--model`` names a place on this machine, and not a hub's model.
    """
    return Path(where).expanduser().exists() or where.startswith(("/", ".", "~")) or not where


def directory_fault(where: str) -> str | None:
    """
    Why a place on this machine is no model directory, in a sentence; None where it may be one.
    """
    path = Path(where).expanduser()
    if not where or not path.exists():
        return f"There is no model directory at {where!r}."
    if path.is_file():
        return f"{where} is a file; --model takes a directory in mlx-lm's format."
    config = path / "config.json"
    if not config.is_file():
        return f"{where} is no model directory: there is no config.json in it."
    try:
        found = json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return f"{config} cannot be read: {error}."
    if not isinstance(found, dict) or "model_type" not in found:
        return f"{config} names no model_type, so it is no model of mlx-lm's."
    if not any(path.glob("*.safetensors")):
        return f"{where} holds no weights (*.safetensors). Was its download complete?"
    return None
