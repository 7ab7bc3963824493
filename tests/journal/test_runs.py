"""The runs of the server that a journal knows."""

from __future__ import annotations

from cairn.journal import events as ev
from cairn.journal.runs import SHARED, Runs
from tests.journal.test_turns import recorded


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
