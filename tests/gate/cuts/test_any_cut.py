"""
However a sequence is cut into prefill passes, its KV and its next token have the same bits.

Each of OpenBLAS's kernels is tried in a process of its own, with one thread and with two. The
controls cut the same sequence in the same ways without a row class and with classes that are a
little wrong: with the quantum 8 in place of 12, with one row less than agrees, with keys that end
where the pass ends, and over an adapter with the class of its base. Which of them differs depends
on the kernels, so each is tried under kernels on which it does.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from cairn.engine.machine.blas import loaded_blas
from cairn.engine.row_class import RowClass
from tests.gate.kernels import has_avx512, on_kernels
from tests.support.models.lora_adapters import make_adapter

pytestmark = pytest.mark.gate

RANK = 8
"""
Of the adapter. With AVX-512 kernels its products have another class than those of its base, which
is measured: with rank 4 they have the same.
"""


@pytest.mark.long_but("Haswell-1", "SkylakeX-1")
@pytest.mark.skipif(sys.platform != "linux", reason="the kernels are those of OpenBLAS")
@pytest.mark.parametrize(
    ("core", "threads"),
    [
        *(("Haswell", 1), ("Zen", 1), ("SkylakeX", 1)),
        # On a machine whose cores are busy, two threads wait for each other most of the time.
        *(("Haswell", 2), ("Zen", 2), ("SkylakeX", 2)),
    ],
)
def test_every_cut_gives_the_same_bits(
    core: str, threads: int, model_directory: Path, tmp_path: Path
) -> None:
    """
    Block by block, in small and in odd sizes, all at once, and with single rows at the end, in
    slabs of different sizes. Each control differs.
    """
    assert loaded_blas() is not None
    if core == "SkylakeX" and not has_avx512():
        pytest.skip("this processor has no AVX-512")
    arguments = ["controls"] if threads == 1 else []
    if core == "SkylakeX" and threads == 1:
        arguments.append(str(make_adapter(model_directory, tmp_path / "a", seed=1, rank=RANK)))
    found = on_kernels(core, threads, "tests.gate.cuts.any_cut", str(model_directory), *arguments)
    row_class = RowClass.of(found["found"])
    assert row_class is not None
    assert found["same"]
    assert not found["without a class"]
    if threads == 1:
        _controls_differ(core, row_class, found)
    if core == "SkylakeX":
        assert row_class.quantum == 1
    if core == "Haswell" and threads == 1:
        assert row_class.quantum == 12


def _controls_differ(core: str, row_class: RowClass, found: dict[str, Any]) -> None:
    # With AVX-512 kernels a sum over masked keys may have the bits of one without them.
    assert core == "SkylakeX" or not found["keys of the pass"]
    if row_class.quantum > 1:
        assert not found["another quantum"]
    else:
        assert 1 < found["fewest rows"] <= row_class.least
    if core == "SkylakeX":
        own = RowClass.of(found["adapter"])
        # Its low-rank layers alone are padded, and the passes have any number of rows.
        assert own is not None
        assert (1, row_class.most, row_class.most) == (own.quantum, own.most, own.low_rank)
        assert found["adapter under its own class"]
        assert not found["adapter under its base's class"]
