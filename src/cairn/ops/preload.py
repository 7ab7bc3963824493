"""
OpenBLAS in front of MLX's reference BLAS, on a Linux CPU.
"""

from __future__ import annotations

import os
import sys

from cairn.engine.blas import find_blas


def blas_environment() -> dict[str, str]:
    """
    The variables by which a process gets OpenBLAS; none elsewhere than on Linux, where there is no
    OpenBLAS, and where the caller set an LD_PRELOAD of their own.
    """
    if sys.platform != "linux" or "LD_PRELOAD" in os.environ:
        return {}
    library = find_blas()
    return {} if library is None else {"LD_PRELOAD": str(library)}


def preload_blas(choice: str = "auto") -> None:
    """
    Start this process anew with OpenBLAS preloaded, where there is one to preload. Which BLAS
    computes is part of the fingerprint.

    Args:
        choice: ``bundled`` to take what MLX brings.
    """
    more = blas_environment()
    if choice == "bundled" or not more:
        return
    command = [sys.executable, "-P", "-m", "cairn.ops", *sys.argv[1:]]
    os.execve(sys.executable, command, {**os.environ, **more})
