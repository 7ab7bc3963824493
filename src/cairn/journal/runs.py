"""The runs of the server that are in a journal."""

from __future__ import annotations

import attrs

from cairn.journal import events as ev

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
