"""Preloads OpenBLAS in place of MLX's reference BLAS, on a Linux CPU."""

from __future__ import annotations

import os
import sys

from cairn.engine.machine.blas import find_blas

_SLEEP_SOON = {"OPENBLAS_THREAD_TIMEOUT": "20"}
"""
Idle threads of OpenBLAS sleep after 2 ** 20 cycles, less than half a millisecond: longer than the
time between two products of a pass. By default they spin for about 25 ms, each on a core. On two
cores the journal's thread then got no time: commits took 50 to 400 ms at times, and the client
waited. Changes no bit.
"""


def blas_environment() -> dict[str, str]:
    """
    The environment variables that preload OpenBLAS. Empty on other systems than Linux, if there is
    no OpenBLAS, and if LD_PRELOAD is set. Variables that are set keep their values.
    """
    if sys.platform != "linux" or "LD_PRELOAD" in os.environ:
        return {}
    library = find_blas()
    if library is None:
        return {}
    waiting = {name: os.environ.get(name, value) for name, value in _SLEEP_SOON.items()}
    return {"LD_PRELOAD": str(library), **waiting}


def preload_blas(choice: str = "auto", called: str = "ops") -> None:
    """
    Restart this process with OpenBLAS preloaded, if there is one. The BLAS is part of the
    fingerprint.

    Args:
        choice: ``bundled`` to use the BLAS of MLX.
        called: the name of the program, which it keeps.
    """
    more = blas_environment()
    if choice == "bundled" or not more:
        return
    module = "cairn" if called == "cairn" else "cairn.ops"
    command = [sys.executable, "-P", "-m", module, *sys.argv[1:]]
    os.execve(sys.executable, command, {**os.environ, **more})
