"""
The journal writer: one thread that commits rows in groups and tells when they are committed.

A receipt is a position: what depends on it may leave once ``committed`` has passed it. Rows that
arrive while a commit is under way share the next one, so that the cost of a sync to disk is shared
by all that wait for it. When the writer dies, nothing may leave any more, and the server stops.

A full disk is no death. The writer holds on to its rows and stalls: nothing leaves, who waits for a
receipt is refused, and the same rows are tried again until there is room. How long that was goes on
record then.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import attrs
import structlog
import trio

from cairn.actors.errors import JournalFull
from cairn.actors.threads.thread import run_thread
from cairn.journal.codec import Row
from cairn.journal.errors import StoreError, StoreFull
from cairn.journal.events import Recorded
from cairn.journal.store import Store

log = structlog.get_logger("cairn")

_PROBE_S = 1.0


@attrs.frozen
class _Batch:
    rows: tuple[Row, ...]
    recorded: tuple[Recorded, ...]


@attrs.define
class _Look:
    """
    Rows that somebody waits for.

    Attributes:
        rows: that were found; None as long as it was not looked, and what failed where it did.
    """

    positions: tuple[int, ...]
    rows: list[Row | None] | StoreError | None = None


class WriterDied(Exception):
    """The journal cannot be written any more. Whatever waited for a receipt never gets it."""


@attrs.frozen(kw_only=True)
class Stall:
    """
    A time in which there was no room for the journal.

    Attributes:
        fact: what the database said.
        rows_waiting: rows that were held until there was room.
    """

    fact: str
    rows_waiting: int
    duration_us: int


class JournalWriter:
    """
    Commits rows in the order in which they are submitted.

    ``submit`` and ``wait_committed`` are for trio's thread.

    Attributes:
        on_stall: is called when there is no room any more.
        on_room: is called when there is again.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._inbox: queue.SimpleQueue[_Batch | _Look | None] = queue.SimpleQueue()
        self._committed = store.head()[0]
        self._submitted = self._committed
        self._moved = trio.lowlevel.ParkingLot()
        self._failure: BaseException | None = None
        self._observers: list[Callable[[Recorded], None]] = []
        self._ended = trio.Event()
        self._stalled = False
        self._closing = threading.Event()
        self.on_stall: Callable[[], None] = _nobody_minds
        self.on_room: Callable[[Stall], None] = _nobody_asks

    @property
    def committed(self) -> int:
        """The position of the last row that is known to be committed."""
        return self._committed

    @property
    def stalled(self) -> bool:
        """Whether there is no room for the journal at the moment."""
        return self._stalled

    def observe(self, observer: Callable[[Recorded], None]) -> None:
        """Have every event passed on once it is committed, in order."""
        self._observers.append(observer)

    @contextlib.contextmanager
    def observed_by(self, observer: Callable[[Recorded], None]) -> Iterator[None]:
        """As ``observe``, while the context lasts."""
        self._observers.append(observer)
        try:
            yield
        finally:
            self._observers.remove(observer)

    def submit(self, rows: Sequence[Row], recorded: Sequence[Recorded]) -> int:
        """
        Hand rows over to be committed together. Does not wait.

        Returns:
            The receipt: the position of the last of them.

        Raises:
            WriterDied: it cannot take any more.
        """
        if self._failure is not None:
            raise WriterDied("the journal cannot be written") from self._failure
        self._inbox.put(_Batch(tuple(rows), tuple(recorded)))
        self._submitted = rows[-1].position
        return self._submitted

    async def wait_all_committed(self) -> None:
        """
        Wait until everything that was submitted so far is committed. Raises as ``wait_committed``.
        """
        await self.wait_committed(self._submitted)

    async def wait_committed(self, position: int) -> None:
        """
        Wait until all rows up to ``position`` are committed.

        Raises:
            JournalFull: there is no room for them now.
            WriterDied: they never will be.
        """
        while self._committed < position:
            if self._failure is not None:
                raise WriterDied("the journal cannot be written") from self._failure
            if self._stalled:
                raise JournalFull()
            await self._moved.park()

    async def rows(self, positions: Sequence[int]) -> list[Row | None]:
        """
        Rows that are committed; None for one that was cut off. They are read on the thread that
        writes, since nothing else uses its connection.

        Raises:
            JournalFull: there is no room for the journal now, which comes first.
            StoreError: they cannot be read.
            WriterDied: it reads nothing any more.
        """
        if self._closing.is_set():
            raise WriterDied("the journal is closed")
        look = _Look(tuple(positions))
        self._inbox.put(look)
        while look.rows is None:
            if self._failure is not None:
                raise WriterDied("the journal cannot be read") from self._failure
            if self._stalled:
                raise JournalFull()
            await self._moved.park()
        if isinstance(look.rows, StoreError):
            raise look.rows
        return look.rows

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run the thread until ``close``. Raises what killed the writer, if something did."""
        await run_thread("cairn-journal", self._loop, self._ended, task_status=task_status)
        if self._failure is not None:
            raise WriterDied(str(self._failure)) from self._failure

    def close(self) -> None:
        """
        Commit what was submitted, then end. Without room for it the end is that of a writer that
        died.
        """
        self._closing.set()
        self._inbox.put(None)

    def _loop(self, token: trio.lowlevel.TrioToken) -> None:
        try:
            while True:
                batches, looks, last = self._gathered()
                rows = [row for batch in batches for row in batch.rows]
                if rows:
                    self._store_rows(rows, token)
                    token.run_sync_soon(self._announce, batches)
                for look in looks:
                    look.rows = self._found(look.positions)
                    token.run_sync_soon(self._moved.unpark_all)
                if last:
                    break
        except StoreError as error:
            token.run_sync_soon(self._fail, error)
        except BaseException as error:  # whatever it is, nothing may leave any more
            token.run_sync_soon(self._fail, error)
            raise
        token.run_sync_soon(self._ended.set)

    def _store_rows(self, rows: Sequence[Row], token: trio.lowlevel.TrioToken) -> None:
        """Append rows, waiting for room where there is none."""
        began = None
        while True:
            # Asked first: whoever closes while a try fails is owed one more.
            closing = self._closing.is_set()
            try:
                self._store.append(rows)
                break
            except StoreFull as error:
                if began is None:
                    began, fact = time.monotonic_ns(), str(error)
                    token.run_sync_soon(self._stall, fact)
                if closing:
                    raise
                self._closing.wait(_PROBE_S)
        if began is not None:
            duration_us = (time.monotonic_ns() - began) // 1000
            stall = Stall(fact=fact, rows_waiting=len(rows), duration_us=duration_us)
            token.run_sync_soon(self._room, stall)

    def _found(self, positions: Sequence[int]) -> list[Row | None] | StoreError:
        """Look rows up. That it fails is for who asked: what is written is not worse for it."""
        try:
            return [self._store.row(position) for position in positions]
        except StoreError as error:
            return error

    def _gathered(self) -> tuple[list[_Batch], list[_Look], bool]:
        """
        All that waits, at least one: what to write, what to look up, and whether that is the end.
        """
        batches: list[_Batch] = []
        looks: list[_Look] = []
        item = self._inbox.get()
        while item is not None:
            if isinstance(item, _Batch):
                batches.append(item)
            else:
                looks.append(item)
            try:
                item = self._inbox.get_nowait()
            except queue.Empty:
                return batches, looks, False
        return batches, looks, True

    def _announce(self, batches: list[_Batch]) -> None:
        self._committed = batches[-1].rows[-1].position
        self._moved.unpark_all()
        for batch in batches:
            for recorded in batch.recorded:
                for observer in tuple(self._observers):
                    observer(recorded)

    def _stall(self, fact: str) -> None:
        self._stalled = True
        log.error("journal full", fact=fact)
        self._moved.unpark_all()
        self.on_stall()

    def _room(self, stall: Stall) -> None:
        self._stalled = False
        log.warning(
            "journal has room again",
            seconds=round(stall.duration_us / 1e6, 1),
            rows_waiting=stall.rows_waiting,
        )
        self.on_room(stall)

    def _fail(self, error: BaseException) -> None:
        log.error("the journal cannot be written", fact=str(error))
        self._failure = error
        self._moved.unpark_all()
        self._ended.set()


def _nobody_minds() -> None:
    """Nobody takes requests yet."""


def _nobody_asks(stall: Stall) -> None:
    """Likewise."""
