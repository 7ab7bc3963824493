"""The runs of the server that are in a journal, and the lease of the server that may write it."""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from cairn.journal import events as ev
from cairn.journal.errors import DamagedRow
from cairn.journal.rows.base import Base, state_of
from cairn.journal.rows.codec import Row, chain_fault, decode
from cairn.journal.state import EMPTY, State, apply, lengthened

SHARED = "shares_blocks"
"""The setting of a node's run that says whether its block files are where other nodes see them."""


@attrs.define
class Runs:
    """
    The runs of the server that are in a journal. A block file names the run that wrote it.

    Attributes:
        shared: whether the last run of a node kept its block files in the folder that the nodes of
            a fleet share; None if no row says so.
    """

    boots: set[str] = attrs.field(factory=set)
    shared: bool | None = None

    def see(self, recorded: ev.Recorded) -> None:
        """Take the next event. The start of a run may be pruned while its end is there."""
        match recorded.event:
            case ev.ServerStarted(boot=boot, settings=settings):
                self.boots.add(boot)
                self.shared = settings.get(SHARED)
            case ev.ServerStopped(boot=boot) | ev.ServerLost(boot=boot):
                self.boots.add(boot)
            case _:
                pass


def lost_run(state: State) -> tuple[ev.ServerLost, ...]:
    """
    The end of the run that is under way, if there is one, for a writer that has the journal's lock:
    no other process uses it, so that run was lost. The next server would append the same.
    """
    return (ev.ServerLost(boot=state.boot),) if state.boot is not None else ()


LEASE_KINDS = frozenset(
    kind.kind for kind in (ev.ServerStarted, ev.ServerStopped, ev.ServerLost, ev.NodeTakenOver)
)
"""The kinds of the rows that say which run is under way, and who may write."""


def lease_at_end(base: Base | None, rows: Iterable[Row]) -> State:
    """
    The part of a journal's state that INV-6 compares a takeover with: where the journal and the
    server's stream end, the run that is under way, and the lease. Only these may be used: all else
    is not that of the end. Reads a few rows, and so does not check the others.

    Args:
        base: of the journal.
        rows: all of ``LEASE_KINDS`` in order, then the last one of the server's stream and the last
            one of all. A row may come twice.

    Raises:
        ValueError: the base was changed.
        DamagedRow: one of these rows was.
        UnknownEvent: a newer Cairn wrote one of them, or the base.
    """
    state = EMPTY if base is None else state_of(base)
    for row in rows:
        if (fault := chain_fault(row, row.previous_hash)) is not None:
            raise DamagedRow(row.position, fault[0])
        fold = apply if row.kind in LEASE_KINDS else lengthened
        state = fold(state, decode(row))
    return state
