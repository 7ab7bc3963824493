"""Which rows took cached blocks away, so that a turn can name what happened to its own. Pure."""

from __future__ import annotations

from typing import Literal

import attrs

from cairn.journal import events as ev

Cause = Literal["evicted", "lost"]
"""
What happened to blocks: they were evicted for want of room, or went with the server's memory.
"""


@attrs.frozen(kw_only=True)
class Losses:
    """
    The last rows of their kind; 0 if there is none.

    Attributes:
        evicted: in which a block left memory or the disk for want of room.
        expired: in which one did because its TTL was over.
        lost: with which the server's memory went: it ended, or its model was unloaded.
    """

    evicted: int = 0
    expired: int = 0
    lost: int = 0

    def after(self, position: int, event: ev.Event) -> Losses:
        """These after an event."""
        match event:
            case ev.BlockEvicted(reason="expired") | ev.BlockFileRemoved(reason="expired"):
                return attrs.evolve(self, expired=position)
            case ev.BlockEvicted(reason="superseded"):
                return self  # another block has its tokens
            case ev.BlockEvicted() | ev.BlockFileRemoved():
                return attrs.evolve(self, evicted=position)
            case ev.ServerStopped() | ev.ServerLost() | ev.ModelUnloaded():
                return attrs.evolve(self, lost=position)
            case _:
                return self

    def since(self, position: int) -> Losses:
        """Those after a row."""
        return Losses(
            **{name: at if at > position else 0 for name, at in attrs.asdict(self).items()}
        )

    @property
    def cause(self) -> Cause | None:
        """What happened to blocks that were evicted or lost; None if it may be either."""
        if bool(self.evicted) == bool(self.lost):
            return None
        return "evicted" if self.evicted else "lost"
