"""Which rows took blocks away, and which of two ends blocks had."""

from __future__ import annotations

from typing import Any

import pytest

from cairn.journal import events as ev
from cairn.journal.losses import Losses
from cairn.journal.paths import cause_of_loss
from tests.journal.test_paths import PATHS, path_of, started

SIZES: dict[str, Any] = {"key": "k", "bytes": 1}
MEMORY: dict[str, Any] = {**SIZES, "memory_blocks": 0, "memory_bytes": 0}
DISK: dict[str, Any] = {**SIZES, "disk_blocks": 0, "disk_bytes": 0}


def test_the_last_row_of_each_kind() -> None:
    """Only rows that take blocks away count, each by why it did."""
    found = Losses()
    events: list[ev.Event] = [
        ev.BlockEvicted(**MEMORY, reason="space"),
        ev.BlockFileRemoved(**DISK, reason="window"),
        ev.BlockEvicted(**MEMORY, reason="expired"),
        ev.ModelUnloaded(fingerprint="f", reason="-", active_bytes=0),
        ev.OperatorActed(action="note", detail="-"),
        ev.BlockEvicted(**MEMORY, reason="superseded"),
    ]
    for position, event in enumerate(events, 1):
        found = found.after(position, event)
    assert Losses(evicted=2, expired=3, lost=4) == found
    assert Losses(lost=4) == found.since(3)
    assert Losses() == found.since(4)


@pytest.mark.parametrize(
    ("found", "cause"),
    [
        (Losses(), None),
        (Losses(evicted=3), "evicted"),
        (Losses(lost=3, expired=2), "lost"),
        (Losses(evicted=3, lost=4), None),
    ],
)
def test_what_happened(found: Losses, cause: str | None) -> None:
    """It is named if there is only one of the two."""
    assert cause == found.cause


@pytest.mark.parametrize(
    ("case", "cause"),
    [("nothing is left", "evicted"), ("after a restart", "lost"), ("another model", None)],
)
def test_what_the_state_knows(case: str, cause: str | None) -> None:
    """Of the blocks of the conversation itself."""
    driver = started()
    path = path_of(driver, PATHS[case][0](driver))
    assert cause == cause_of_loss(driver.state, path)
