"""The runs of the server that a journal tells of."""

from __future__ import annotations

import attrs

from cairn.journal import events as ev


@attrs.define
class Runs:
    """The runs of the server that a journal tells of: block files say which of them wrote them."""

    boots: set[str] = attrs.field(factory=set)

    def see(self, recorded: ev.Recorded) -> None:
        """Take in the next event. A run's beginning may be pruned while its end is there."""
        match recorded.event:
            case (
                ev.ServerStarted(boot=boot) | ev.ServerStopped(boot=boot) | ev.ServerLost(boot=boot)
            ):
                self.boots.add(boot)
