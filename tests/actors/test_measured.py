"""Events are made of what the engine reports."""

from __future__ import annotations

import pytest

from cairn.actors.measured import measured
from cairn.engine.reports import SlabReport
from cairn.journal import events as ev

REPORT = SlabReport(slab=3, capacity_tokens=64, bytes=512, pool_slabs=2, pool_bytes=1024)


def test_fields_of_the_same_name_are_taken_over() -> None:
    """Those that the event does not have are left out."""
    event = measured(ev.SlabReleased, REPORT, session="s", reason="room")
    assert event == ev.SlabReleased(
        session="s", slab=3, bytes=512, pool_slabs=2, pool_bytes=1024, reason="room"
    )


def test_given_fields_go_before_those_of_the_report() -> None:
    """So a caller may say what it knows better."""
    event = measured(ev.SlabReleased, REPORT, session="s", reason="room", bytes=0)
    assert 0 == event.bytes


def test_a_field_that_neither_has_is_missed() -> None:
    """As by the event itself."""
    with pytest.raises(TypeError, match="reason"):
        measured(ev.SlabReleased, REPORT, session="s")
