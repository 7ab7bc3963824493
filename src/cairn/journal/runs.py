"""The runs of the server that are in a journal."""

from __future__ import annotations

import attrs

from cairn.journal import events as ev


@attrs.define
class Runs:
    """The runs of the server that are in a journal. A block file names the run that wrote it."""

    boots: set[str] = attrs.field(factory=set)

    def see(self, recorded: ev.Recorded) -> None:
        """Take the next event. The start of a run may be pruned while its end is there."""
        match recorded.event:
            case (
                ev.ServerStarted(boot=boot) | ev.ServerStopped(boot=boot) | ev.ServerLost(boot=boot)
            ):
                self.boots.add(boot)
            case _:
                pass
