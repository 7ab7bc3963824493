"""Events are made from the engine's reports."""

from __future__ import annotations

import pytest

from cairn.actors.measured import measured
from cairn.engine.reports import SlabReport
from cairn.journal import events as ev

REPORT = SlabReport(slab=3, capacity_tokens=64, bytes=512, pool_slabs=2, pool_bytes=1024)


def test_fields_of_the_same_name_are_copied() -> None:
    """Fields that the event does not have are ignored."""
    event = measured(ev.SlabReleased, REPORT, session="s", reason="room")
    assert event == ev.SlabReleased(
        session="s", slab=3, bytes=512, pool_slabs=2, pool_bytes=1024, reason="room"
    )


def test_given_fields_override_those_of_the_report() -> None:
    """A caller may override a field of the report."""
    event = measured(ev.SlabReleased, REPORT, session="s", reason="room", bytes=0)
    assert 0 == event.bytes


def test_a_missing_field_is_an_error() -> None:
    """The error is the event's own."""
    with pytest.raises(TypeError, match="reason"):
        measured(ev.SlabReleased, REPORT, session="s")
