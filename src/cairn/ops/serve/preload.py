"""OpenBLAS in front of MLX's reference BLAS, on a Linux CPU."""

from __future__ import annotations

import os
import sys

from cairn.engine.machine.blas import find_blas

_SLEEP_SOON = {"OPENBLAS_THREAD_TIMEOUT": "20"}
"""
OpenBLAS's threads go to sleep when they have had nothing to do for 2 ** 20 cycles, under half a
millisecond: longer than between two products of a pass. By itself they look out for work for some
25 ms, on a core each. On two cores the journal's thread got none meanwhile: what it had written lay
there for 50 to 400 ms at times, and the client waited. Changes no bit.
"""


def blas_environment() -> dict[str, str]:
    """
    The variables by which a process gets OpenBLAS, and gets on with it; none elsewhere than on
    Linux, where there is no OpenBLAS, and where the caller set an LD_PRELOAD of their own. What the
    caller set stays as it is.
    """
    if sys.platform != "linux" or "LD_PRELOAD" in os.environ:
        return {}
    library = find_blas()
    if library is None:
        return {}
    waiting = {name: os.environ.get(name, value) for name, value in _SLEEP_SOON.items()}
    return {"LD_PRELOAD": str(library), **waiting}


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
