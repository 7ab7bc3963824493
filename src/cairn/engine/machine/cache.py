"""Where a user's files are that can be made again, and how they are written."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path


def cache_folder() -> Path | None:
    """
    ``$CAIRN_CACHE_DIR``, else ``$XDG_CACHE_HOME/cairn``, else ``~/.cache/cairn``, on macOS too.
    None if this user has no home directory.
    """
    if named := os.environ.get("CAIRN_CACHE_DIR"):
        return Path(named).absolute()
    home = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(home) if home else Path.home() / ".cache") / "cairn"
    except RuntimeError:
        return None


def replace_file(path: Path, content: bytes) -> None:
    """Write a file that its owner alone can read. Other processes see all of it, or the old one."""
    handle, draft = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".new")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        Path(draft).replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            Path(draft).unlink()
        raise
