"""What a process that a test starts gets from it, and what it does before it runs its program."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Mapping

_PDEATHSIG = 1
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


def server_environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment, with one BLAS thread: many servers share few cores."""
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    return {**environment, "OPENBLAS_NUM_THREADS": "1", **(more or {})}


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent dies. Linux alone can do that."""
    if _libc is not None:
        _libc.prctl(_PDEATHSIG, signal.SIGKILL)
