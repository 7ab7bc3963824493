"""Preloads OpenBLAS in place of MLX's reference BLAS, on a Linux CPU."""

from __future__ import annotations

import os
import sys

import click

from cairn.engine.machine.blas import BlasError, build_blas, copy_path, find_blas
from cairn.engine.machine.cuda import has_cuda

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


def prepare_blas() -> None:
    """
    Build the copy of OpenBLAS of this environment, unless it exists, another BLAS is preloaded, or
    MLX computes on a GPU. If it cannot be built, prints a warning.
    """
    if sys.platform != "linux" or "LD_PRELOAD" in os.environ or has_cuda():
        return
    path = copy_path()
    if path is None or path.is_file():
        return
    click.echo("Preparing OpenBLAS for this environment, once ...", err=True)
    try:
        build_blas(path)
    except (BlasError, OSError) as error:
        click.echo(
            f"Warning: OpenBLAS cannot be prepared: {error}. Answers are correct, but may be slow.",
            err=True,
        )


def preload_blas(choice: str = "auto", called: str = "ops") -> None:
    """
    Restart this process with OpenBLAS preloaded, if there is one. The BLAS is part of the
    fingerprint.

    Args:
        choice: ``bundled`` to use the BLAS of MLX.
        called: the name of the program, which it keeps.
    """
    if choice == "bundled":
        return
    prepare_blas()
    more = blas_environment()
    if not more:
        return
    module = "cairn" if called == "cairn" else "cairn.ops"
    command = [sys.executable, "-P", "-m", module, *sys.argv[1:]]
    os.execve(sys.executable, command, {**os.environ, **more})
