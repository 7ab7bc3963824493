"""
Whether other users of the machine can read a journal, and with it what everybody said.

A journal that Cairn makes is its owner's alone. One that was made before that, or was copied, may
not be; it is left as it is, since the operator may want it so.
"""

from __future__ import annotations

import os
import shlex
import stat
from pathlib import Path


def readers_warning(path: Path) -> tuple[str, str] | None:
    """
    What to say of a journal at ``path``, and what to do; None where it is its owner's, and perhaps
    a group's, which somebody will have been asked about.
    """
    real = Path(os.path.realpath(path))
    beside = (real.with_name(f"{real.name}-wal"), real.with_name(f"{real.name}-shm"))
    there = [file for file in (real, *beside) if _mode(file) & stat.S_IROTH]
    # Others read nothing in a folder that they cannot enter.
    if not there or not all(_mode(folder) & stat.S_IXOTH for folder in real.parents):
        return None
    command = shlex.join(["chmod", "o-rwx", *map(str, there)])
    return f"every user of this machine can read {real}, and all that was said", f"`{command}`"


def _mode(path: Path) -> int:
    try:
        return path.stat().st_mode
    except OSError:
        return 0
