"""
However a sequence is cut into prefill passes, its KV and its next token have the same bits.

Each of OpenBLAS's kernels is tried in a process of its own, with one thread and with two. The
controls cut the same sequence in the same ways without a row class, with a class that asks for a
little less than the one that was found, and with keys that end where the pass ends.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cairn.engine.machine.blas import loaded_blas
from cairn.engine.row_class import RowClass

pytestmark = pytest.mark.gate

# With two threads on a busy machine OpenBLAS waits for itself.
_LIMIT_S = 600


def tried(core: str, threads: int, model: Path) -> dict[str, Any]:
    """What a process with these kernels finds about a model."""
    controls = ["controls"] if threads == 1 else []
    done = subprocess.run(
        [sys.executable, "-P", "-m", "tests.gate.any_cut", str(model), *controls],
        env={
            **os.environ,
            "OPENBLAS_CORETYPE": core,
            "OPENBLAS_NUM_THREADS": str(threads),
            "PYTHONPATH": str(Path(__file__).parents[2]),
        },
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="the kernels are those of OpenBLAS")
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("core", ["Haswell", "Zen", "SkylakeX"])
def test_every_cut_gives_the_same_bits(core: str, threads: int, model_directory: Path) -> None:
    """
    Block by block, in small and in odd sizes, all at once, and with single rows at the end, in
    slabs of different sizes. Each control differs.
    """
    assert loaded_blas() is not None
    if core == "SkylakeX" and not _has_avx512():
        pytest.skip("this processor has no AVX-512")
    found = tried(core, threads, model_directory)
    row_class = RowClass.of(found["found"])
    assert row_class is not None
    assert found["same"]
    assert not found["without a class"]
    if threads == 1:
        assert not found["narrower"]
        # With AVX-512 kernels a sum over masked keys may have the bits of one without them.
        assert core == "SkylakeX" or not found["keys of the pass"]
    if core == "SkylakeX":
        assert row_class.quantum == 1
    if core == "Haswell" and threads == 1:
        assert row_class.quantum == 12


def _has_avx512() -> bool:
    return "avx512f" in Path("/proc/cpuinfo").read_text("utf-8")
