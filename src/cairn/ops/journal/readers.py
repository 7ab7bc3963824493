"""
Warns if other users of the machine can read a journal, and with it all conversations, or a secret.

Only its owner can read a journal that Cairn creates. A copy may have another mode; it is not
changed, because the operator may have chosen it.
"""

from __future__ import annotations

import os
import shlex
import stat
from pathlib import Path


def readers_warning(path: Path) -> tuple[str, str] | None:
    """
    What is wrong with the journal at ``path``, and the command that fixes it; None if only its
    owner and group can read it.
    """
    real = Path(os.path.realpath(path))
    beside = (real.with_name(f"{real.name}-wal"), real.with_name(f"{real.name}-shm"))
    there = [file for file in (real, *beside) if _mode(file) & stat.S_IROTH]
    # Others read nothing in a folder that they cannot enter.
    if not there or not all(_mode(folder) & stat.S_IXOTH for folder in real.parents):
        return None
    command = shlex.join(["chmod", "o-rwx", *map(str, there)])
    return f"every user of this machine can read {real}, with all conversations", f"`{command}`"


def secret_warning(data_dir: Path) -> tuple[str, str] | None:
    """
    What is wrong with the mode of the secret in a data directory, and the command that fixes it;
    None if only its owner can use it, or there is none yet.
    """
    secret = data_dir / "secret"
    if not _mode(secret) & (stat.S_IRWXG | stat.S_IRWXO):
        return None
    command = shlex.join(["chmod", "600", str(secret)])
    return f"other users of this machine can read {secret}, which names all blocks", f"`{command}`"


def blocks_warning(folder: Path) -> tuple[str, str] | None:
    """
    What is wrong with the mode of the folder of blocks that nodes share, and the command that fixes
    it; None if only its owner can use it.
    """
    if not _mode(folder) & (stat.S_IRWXG | stat.S_IRWXO):
        return None
    command = shlex.join(["chmod", "700", str(folder)])
    return f"other users can enter {folder}, which has the KV of all conversations", f"`{command}`"


def _mode(path: Path) -> int:
    try:
        return path.stat().st_mode
    except OSError:
        return 0
