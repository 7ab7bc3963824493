"""
The shadow check and ``ops replay --engine`` compute with other cuts than the recorded ones, and so
find a row class that is a little wrong.

Each case runs in a process of its own, under kernels on which that class is wrong.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from cairn.ops.journal.replay_engine import OTHER_CUTS, SAME
from tests.gate.kernels import has_avx512, on_kernels

pytestmark = [
    pytest.mark.gate,
    pytest.mark.skipif(sys.platform != "linux", reason="the kernels are those of OpenBLAS"),
]


@pytest.mark.long_but("quantum")
@pytest.mark.parametrize("wrong", ["quantum", ""])
def test_a_wrong_class_is_found_in_service(wrong: str, model_directory: Path) -> None:
    """
    Under a class with the quantum 8 in place of 12 a check differs (INV-3), and a session of the
    journal comes out the same with its own passes and differently with others. With the class that
    was found, both are the same.
    """
    found = on_kernels("Haswell", 1, "tests.gate.cuts.other_cuts", str(model_directory), wrong)
    assert ("differs" if wrong else "same") in found["checks"]
    assert ("INV-3" in found["findings"]) == bool(wrong)
    assert (OTHER_CUTS if wrong else SAME) == found["replay"]
    assert not found["cuts as recorded"]


def test_too_few_rows_are_found_by_the_next_turn(model_directory: Path) -> None:
    """
    Under a class of fewer rows than agree, the row that a continuation computes again has other
    bits (INV-3). A check finds that too if one of its passes is small enough, which depends on the
    id of the request.
    """
    if not has_avx512():
        pytest.skip("this processor has no AVX-512")
    found = on_kernels("SkylakeX", 1, "tests.gate.cuts.other_cuts", str(model_directory), "least")
    assert {"INV-3"} == set(found["findings"])
