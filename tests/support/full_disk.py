"""A store whose disk is full while a test wants that."""

from __future__ import annotations

from collections.abc import Sequence

from cairn.journal.errors import StoreFull
from cairn.journal.rows.codec import Row
from cairn.journal.rows.store import MemoryStore


class FullDisk(MemoryStore):
    """A store that has no room while ``full`` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.full = False

    def append(self, rows: Sequence[Row]) -> None:
        """See ``Store.append``."""
        if self.full:
            raise StoreFull("no room")
        super().append(rows)
