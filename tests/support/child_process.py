"""What a process that a test starts does before it runs its program."""

from __future__ import annotations

import ctypes
import signal
import sys

_PDEATHSIG = 1
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent dies. Linux alone can do that."""
    if _libc is not None:
        _libc.prctl(_PDEATHSIG, signal.SIGKILL)
