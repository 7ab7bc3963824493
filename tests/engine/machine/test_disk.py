"""The default budget of block files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cairn.engine.machine.disk import BUDGET_MAX, TOKENS, disk_budget_for, other_files_bytes

MIB = 1 << 20
TOY: dict[str, Any] = {
    "token_bytes": 3840,
    "block_bytes": 0,
    "block_tokens": 64,
    "context_tokens": 4096,
    "others_bytes": 0,
}


@pytest.mark.parametrize(
    ("changed", "budget"),
    [
        ({}, TOKENS * 3840),
        ({"context_tokens": 2 * TOKENS}, 2 * TOKENS * 3840),  # a whole context fits
        ({"context_tokens": 2 * TOKENS + 1}, (2 * TOKENS + 64) * 3840),  # in whole blocks
        ({"block_bytes": 1000}, TOKENS * 3840 + TOKENS // 64 * 1000),
        ({"others_bytes": 7}, TOKENS * 3840 + 7),
        ({"token_bytes": 147_456}, BUDGET_MAX),  # as of a model of 4 billion parameters
        ({"others_bytes": BUDGET_MAX}, BUDGET_MAX),
    ],
)
def test_the_budget(changed: dict[str, Any], budget: int) -> None:
    """What the model's tokens need beside the files of others, and never more than the most."""
    assert budget == disk_budget_for(**TOY | changed)


def test_a_toy_takes_little() -> None:
    """Pebble's files take a few hundred MiB at most, and not four GiB."""
    assert 240 * MIB == disk_budget_for(**TOY | {"context_tokens": TOKENS})


def test_the_files_of_others(tmp_path: Path) -> None:
    """Those of this fingerprint do not count, wherever the name occurs again; nor do links."""
    for place, size in (("mine/ab/1", 5), ("other/ab/2", 7), ("other/mine/3", 11)):
        file = tmp_path / place
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(bytes(size))
    assert 18 == other_files_bytes(tmp_path, "mine")
    assert 23 == other_files_bytes(tmp_path, "none")
    assert 0 == other_files_bytes(tmp_path / "nowhere", "mine")
