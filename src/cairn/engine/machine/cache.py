"""Where a user's files are that can be made again."""

from __future__ import annotations

import os
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
