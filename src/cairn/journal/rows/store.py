"""Stores for rows: ``MemoryStore`` here, ``store_sql.SqlStore`` on disk. One suite tests both."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from cairn.journal.errors import HeadMoved
from cairn.journal.rows.base import Base
from cairn.journal.rows.codec import GENESIS, Row
from cairn.journal.rows.removal import REMOVED_ROWS, Replaced


class Store(Protocol):
    """
    A sequence of rows. Rows are appended at its end, and removed from its beginning when an
    operator prunes it. One thread uses it at a time.
    """

    def append(self, rows: Sequence[Row]) -> None:
        """
        Commit rows after the head, all or none. Rows that are already stored unchanged are skipped,
        so appending the same rows again changes nothing.

        Raises:
            HeadMoved: another writer appended, or the stored head is not what it was.
            StoreUnready: there is no room for them now, or another program has locked the store.
            StoreError: the store could not write (database gone).
        """

    def head(self) -> tuple[int, str]:
        """Position and hash of the last row; ``(0, GENESIS)`` if there is none."""

    def base(self) -> Base | None:
        """The base that replaces the first rows, or None if they were not pruned."""

    def cut(self, base: Base, rows: Sequence[Row]) -> None:
        """
        Put a base in the place of the rows up to its position, and commit ``rows`` after the head:
        both or neither. From then on no reader sees the former; ``removal`` removes them. A cut
        that was made already, with the same rows, changes nothing.

        Raises:
            HeadMoved: the rows do not follow the head, or the base does not belong to this store.
            StoreError: the store could not write.
        """

    def removal(self, most: int = REMOVED_ROWS) -> Iterator[int]:
        """
        Remove the rows that the base has replaced, at most ``most`` of them in a step. First looks
        which ones these are, in steps too. Gives after each step how many rows it removed. If it is
        not finished, another one goes on where it ended.

        Raises:
            StoreUnready: the store cannot be written now; the rows of earlier steps are gone.
            StoreError: the store could not read or write.
        """

    def read(self, after: int | None = None, *, stream: str | None = None) -> Iterator[Row]:
        """
        Rows with a position above ``after`` in order, of one stream if one is named; without
        ``after`` all that is there, also at positions where a journal has no row, but for those
        that ``removal`` would remove.
        """

    def row(self, position: int) -> Row | None:
        """The row at a position; None if it was pruned or does not exist yet."""

    def opened(self, row: Row) -> Row:
        """A row that a base keeps, opened with the keys with which this store opens its own."""

    def log_bytes(self) -> int:
        """
        The bytes of rows that are not where they will stay, because they are in a log of the
        database first. It grows while another program keeps reading in one transaction.
        """

    def close(self) -> None:
        """Close the store. Rows that were appended stay."""


class MemoryStore:
    """Rows in a list, for tests and for reading an export."""

    def __init__(self, rows: Sequence[Row] = (), base: Base | None = None) -> None:
        self.rows = list(rows)
        self._base = base

    def append(self, rows: Sequence[Row]) -> None:
        """See ``Store.append``."""
        new = [row for row in rows if self._at(row.position) != row]
        if not new:
            return
        if (new[0].position - 1, new[0].previous_hash) != self.head():
            raise HeadMoved(f"row {new[0].position} does not follow row {self.head()[0]}")
        self.rows.extend(new)

    def head(self) -> tuple[int, str]:
        """See ``Store.head``."""
        if self.rows:
            return self.rows[-1].position, self.rows[-1].hash
        return (self._base.position, self._base.head) if self._base else (0, GENESIS)

    def base(self) -> Base | None:
        """See ``Store.base``."""
        return self._base

    def cut(self, base: Base, rows: Sequence[Row]) -> None:
        """See ``Store.cut``."""
        if base == self._base and all(row in self.rows for row in rows):
            return
        if (base.position, base.head) not in {(row.position, row.hash) for row in self.rows}:
            raise HeadMoved(f"row {base.position} is not the one that the base ends with")
        self.append(rows)
        self._base = base

    def removal(self, most: int = REMOVED_ROWS) -> Iterator[int]:
        """See ``Store.removal``."""
        replaced = self._replaced()
        yield 0
        while replaced is not None and replaced.first <= replaced.last:
            end = min(replaced.first + most - 1, replaced.last)
            gone = range(replaced.first, end + 1)
            self.rows = [row for row in self.rows if row.position not in gone]
            replaced.first = end + 1
            yield len(gone)

    def _replaced(self) -> Replaced | None:
        if self._base is None:
            return None
        replaced = Replaced(self._base.position, self._base.head)
        replaced.feed(
            (row.position, row.hash, row.previous_hash)
            for row in reversed(self.rows)
            if row.position <= replaced.last
        )
        return replaced

    def read(self, after: int | None = None, *, stream: str | None = None) -> Iterator[Row]:
        """See ``Store.read``."""
        replaced = self._replaced() if after is None else None
        for row in self.rows:
            if after is not None and row.position <= after:
                continue
            if stream in (None, row.stream) and (replaced is None or row.position not in replaced):
                yield row

    def row(self, position: int) -> Row | None:
        """See ``Store.row``."""
        if self._base is not None and position <= self._base.position:
            return None
        return self._at(position)

    def _at(self, position: int) -> Row | None:
        place = position - self.rows[0].position if self.rows else -1
        return self.rows[place] if 0 <= place < len(self.rows) else None

    def opened(self, row: Row) -> Row:
        """See ``Store.opened``. It has no keys."""
        return row

    def log_bytes(self) -> int:
        """See ``Store.log_bytes``."""
        return 0

    def close(self) -> None:
        """Does nothing."""
