"""The runs of the server that a journal knows."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import pytest

from cairn.journal import events as ev
from cairn.journal.errors import DamagedRow
from cairn.journal.replay import replay
from cairn.journal.rows.base import Base, base_of
from cairn.journal.rows.codec import Row
from cairn.journal.runs import LEASE_KINDS, SHARED, Runs, lease_at_end
from cairn.journal.state import State
from tests.journal.test_turns import recorded
from tests.support.journals import Builder, healthy, in_mid_request


def test_a_run_is_known_by_its_start_and_by_its_end():
    """The start of a run may have been pruned while its end is still there."""
    runs = Runs()
    for position, event in enumerate(
        (
            ev.ServerStarted(boot="b1", cairn_version="0", settings={}),
            ev.ServerStopped(boot="b2", reason="-"),
            ev.ServerLost(boot="b3"),
            ev.SessionSettled(session="s1", canonical_tokens=0, complete=True),
        ),
        1,
    ):
        runs.see(recorded(position, event))
    assert {"b1", "b2", "b3"} == runs.boots


def test_where_the_last_run_kept_its_block_files():
    """By the row of its start; that of a server that is alone does not say it."""
    runs, found = Runs(), []
    for position, settings in enumerate(({}, {SHARED: True}, {SHARED: False}, {}), 1):
        event = ev.ServerStarted(boot=f"b{position}", cairn_version="0", settings=settings)
        runs.see(recorded(position, event))
        found.append(runs.shared)
    assert [None, True, False, None] == found


def taken_over() -> list[Row]:
    """Two runs of which the first was lost, in mid-request, and a takeover between them."""
    made: Builder = in_mid_request()
    made.propose(ev.ServerLost(boot="boot-1"), ev.NodeTakenOver(token=5, by="jo"))
    made.start()
    made.turn("s2", "r3", ["Hello"], range(40, 50), (51, 52))
    return made.rows


def needed(rows: Sequence[Row]) -> list[Row]:
    """What ``lease_at_end`` reads of a journal."""
    own = [row for row in rows if row.stream == "server"]
    return [*(row for row in rows if row.kind in LEASE_KINDS), *own[-1:], *rows[-1:]]


def compared(state: State) -> tuple[object, ...]:
    """What INV-6 compares a takeover with."""
    return state.position, state.streams.get("server"), state.boot, state.lease


@pytest.mark.parametrize("rows", [healthy(), in_mid_request().rows, taken_over()])
def test_the_lease_at_the_end_is_that_of_the_whole_fold(rows: list[Row]):
    """At each row of a journal, by a few of the rows before it; also after a prune."""
    whole = [replay(rows[:end]) for end in range(len(rows) + 1)]
    bases: list[Base | None] = [base_of(report.state, report.head) for report in whole]
    for start in range(len(rows)):
        base = bases[start] if start else None
        for end in range(start, len(rows) + 1):
            found = lease_at_end(base, needed(rows[start:end]))
            assert compared(whole[end].state) == compared(found), (start, end)


def test_a_lease_is_not_read_from_what_was_changed():
    """A row or a base that was changed is reported; rows that are not read are not looked at."""
    rows = taken_over()
    for place in (0, len(rows) - 1):
        changed = [attrs.evolve(row) for row in rows]
        changed[place] = attrs.evolve(rows[place], time_us=1)
        with pytest.raises(DamagedRow, match=f"row {place + 1}: the row was changed"):
            lease_at_end(None, needed(changed))
    report = replay(rows)
    base = attrs.evolve(base_of(report.state, report.head), state_digest="0" * 64)
    with pytest.raises(ValueError, match="the state was changed"):
        lease_at_end(base, [])
