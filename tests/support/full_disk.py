"""A store that takes no rows while a test wants that."""

from __future__ import annotations

from collections.abc import Sequence

from cairn.journal.errors import StoreFull, StoreLocked, StoreUnready
from cairn.journal.rows.codec import Row
from cairn.journal.rows.store import MemoryStore


class FullDisk(MemoryStore):
    """
    A store that takes no rows for a time.

    Attributes:
        error: with which it neither writes nor reads rows, unless it is None.
    """

    def __init__(self) -> None:
        super().__init__()
        self.error: StoreUnready | None = None

    @property
    def full(self) -> bool:
        """Whether it has no room."""
        return isinstance(self.error, StoreFull)

    @full.setter
    def full(self, full: bool) -> None:
        self.error = StoreFull("no room") if full else None

    def append(self, rows: Sequence[Row]) -> None:
        """See ``Store.append``."""
        if self.error is not None:
            raise self.error
        super().append(rows)

    def row(self, position: int) -> Row | None:
        """See ``Store.row``."""
        if isinstance(self.error, StoreLocked):
            raise self.error
        return super().row(position)
