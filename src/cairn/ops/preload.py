"""
OpenBLAS in front of MLX's reference BLAS, on a Linux CPU.
"""

from __future__ import annotations

import os
import sys

from cairn.engine.blas import find_blas


def preload_blas(choice: str = "auto") -> None:
    """
    On Linux, start this process anew with OpenBLAS preloaded, where there is one and the caller set
    no LD_PRELOAD of their own. Which BLAS computes is part of the fingerprint.

    Args:
        choice: ``bundled`` to take what MLX brings.
    """
    if sys.platform != "linux" or choice == "bundled" or "LD_PRELOAD" in os.environ:
        return
    library = find_blas()
    if library is None:
        return
    environment = {**os.environ, "LD_PRELOAD": str(library)}
    os.execve(sys.executable, [sys.executable, "-P", "-m", "cairn.ops", *sys.argv[1:]], environment)
