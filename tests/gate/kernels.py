"""Runs a module in a process of its own, under some of OpenBLAS's kernels."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
# With two threads on a busy machine OpenBLAS waits for itself.
_LIMIT_S = 600


def on_kernels(
    core: str, threads: int, module: str, *arguments: str, limit_s: float = _LIMIT_S
) -> dict[str, Any]:
    """
    What a module prints as JSON in its last line.

    Args:
        core: the kernels, chosen before the process starts.
        threads: those of OpenBLAS.

    Raises:
        AssertionError: it failed.
    """
    paths = filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))
    done = subprocess.run(
        [sys.executable, "-P", "-m", module, *arguments],
        env={
            **os.environ,
            "OPENBLAS_CORETYPE": core,
            "OPENBLAS_NUM_THREADS": str(threads),
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": os.pathsep.join(paths),
        },
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def has_avx512() -> bool:
    """Whether this processor can run the kernels SkylakeX."""
    return "avx512f" in Path("/proc/cpuinfo").read_text("utf-8")
