"""
The errors of the journal, by whose fault they are::

    JournalError
      |- DamagedRow        the world's: a stored row cannot be decoded, or the hash chain is cut
      |- UnknownEvent      the operator's: the journal was written by a newer Cairn
      |- StoreError        the world's: the database cannot be opened, read or written
      |    |- StoreHeld    the operator's: another server or command uses the journal
      |    |- HeadMoved    another writer's: it appended, so this one must stop
      |    |- LeaseLost    the operator's: the journal was taken over, so this writer must stop
      |    |- StoreUnready  the world's: not now; the same append may be tried again
      |         |- StoreFull    there is no room
      |         |- StoreLocked  another program has locked it
      |         |- StoreStarved the process may open no more files
      |         |- StoreLost    the connection to the database is lost
      |- BugError          ours: an invariant is broken; carries the bug id that replay takes

``http/wire/errors.py`` says how a ``BugError`` becomes an HTTP error.
"""

from __future__ import annotations

from typing import ClassVar

from cairn.journal.events import StallReason


class JournalError(Exception):
    """Anything that the journal reports."""


class DamagedRow(JournalError):
    """A stored row cannot be decoded or does not belong to the chain. Nothing was changed."""

    def __init__(self, position: int, fact: str) -> None:
        super().__init__(f"row {position}: {fact}")
        self.position = position
        self.fact = fact


class UnknownEvent(JournalError):
    """
    A row, or the base in the place of the first ones, has a kind or a version that this Cairn does
    not know. Nothing was changed.
    """


class StoreError(JournalError):
    """The store failed; the rows of the failed append are not in it."""


class StoreHeld(StoreError):
    """
    Another server or command has the journal's lock. Nothing was changed.

    Attributes:
        what: the journal, and who has it.
        advice: what the operator can do.
    """

    def __init__(self, what: str, advice: str) -> None:
        super().__init__(f"Another server or command uses {what}. {advice}")
        self.what = what
        self.advice = advice


class HeadMoved(StoreError):
    """The store's last row is not the one that this writer wrote. The rows were not appended."""


class LeaseLost(StoreError):
    """An operator had the journal taken over from this writer. The rows were not appended."""


class StoreUnready(StoreError):
    """
    The store takes no rows now. The same rows can be appended later.

    Attributes:
        reason: why.
        patience_s: how long it may last until the server gives up; None if for ever.
    """

    reason: ClassVar[StallReason]
    patience_s: ClassVar[float | None] = None


class StoreFull(StoreUnready):
    """There is no space for the rows."""

    reason = "disk_full"


class StoreLocked(StoreUnready):
    """Another program has locked the store."""

    reason = "locked"


class StoreStarved(StoreUnready):
    """The process may open no more files, which the store needs for these rows."""

    reason = "no_descriptors"


class StoreLost(StoreUnready):
    """
    The connection to the database is lost. Whether the rows are stored is not known: the same
    append, over a new connection, skips those that are.
    """

    reason = "connection_lost"
    patience_s = 300.0


class BugError(JournalError):
    """
    An invariant is broken. The event that broke it and the violation are in the journal; the
    state after it has the broken scope quarantined.

    Attributes:
        bug_id: what ``ops replay`` takes.
        invariant: its name, ``INV-1`` to ``INV-9``, or ``CRASH``.
    """

    def __init__(self, bug_id: str, invariant: str, message: str) -> None:
        super().__init__(f"{invariant} broken, bug id {bug_id}: {message}")
        self.bug_id = bug_id
        self.invariant = invariant
        self.message = message
