"""
The journal writer: one thread that commits rows in groups and reports when they are committed.

A receipt is a position: a reply that depends on it may be sent once ``committed`` has passed it.
Rows of tasks that run in the same step of trio share a commit, and so do those that arrive during
one: they share the cost of a sync to disk. If the writer dies, no reply may be sent any more, and
the server stops.

A full disk does not kill the writer. It keeps its rows and stalls: no reply is sent, requests that
wait for a receipt are refused, and the same rows are tried again until there is room. The length of
the stall is then recorded.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import attrs
import structlog
import trio

from cairn.actors.errors import JournalFull
from cairn.actors.threads.thread import run_thread
from cairn.journal.errors import StoreError, StoreFull
from cairn.journal.events import Recorded
from cairn.journal.rows.codec import Row
from cairn.journal.rows.store import Store

log = structlog.get_logger("cairn")

_PROBE_S = 1.0

LOG_WARNING_BYTES = 64 * 1024 * 1024
"""The size of the database's own log at which the operator is warned."""


@attrs.frozen
class _Batch:
    rows: tuple[Row, ...]
    recorded: tuple[Recorded, ...]


@attrs.define
class _Lookup:
    """
    Rows that a task waits for.

    Attributes:
        rows: that were found, or the failure; None until they were looked up.
    """

    positions: tuple[int, ...]
    rows: list[Row | None] | StoreError | None = None


class WriterDied(Exception):
    """The journal cannot be written any more. Tasks that wait for a receipt never get it."""


@attrs.frozen(kw_only=True)
class Stall:
    """
    A time in which there was no room for the journal.

    Attributes:
        error: what the database reported.
        rows_waiting: rows that were kept until there was room.
    """

    error: str
    rows_waiting: int
    duration_us: int


class StallObserver(Protocol):
    """Is notified of stalls, in trio's thread."""

    def stall_began(self) -> None:
        """There is no room for the journal any more."""

    def stall_ended(self, stall: Stall) -> None:
        """There is room again, and what waited is committed."""


class JournalWriter:
    """
    Commits rows in the order in which they are submitted.

    ``submit`` and ``wait_committed`` are for trio's thread.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._inbox: queue.SimpleQueue[_Batch | _Lookup | None] = queue.SimpleQueue()
        self._submitting: list[_Batch] = []
        self._committed = store.head()[0]
        self._submitted = self._committed
        self._moved = trio.lowlevel.ParkingLot()
        self._failure: BaseException | None = None
        self._observers: list[Callable[[Recorded], None]] = []
        self._ended = trio.Event()
        self._stalled = False
        self._closing = threading.Event()
        self._stall_observers: list[StallObserver] = []
        self._log_bytes = store.log_bytes()
        self._warned = False

    @property
    def committed(self) -> int:
        """The position of the last committed row."""
        return self._committed

    @property
    def stalled(self) -> bool:
        """Whether there is no room for the journal now."""
        return self._stalled

    @property
    def log_bytes(self) -> int:
        """The size of the database's own log after the last commit, see ``Store.log_bytes``."""
        return self._log_bytes

    def observe(self, observer: Callable[[Recorded], None]) -> None:
        """Pass every event on to ``observer`` once it is committed, in order."""
        self._observers.append(observer)

    def observe_stalls(self, observer: StallObserver) -> None:
        """Notify an observer of stalls."""
        self._stall_observers.append(observer)

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
        Submit rows that are committed together. Does not wait.

        Returns:
            The receipt: the position of the last of them.

        Raises:
            WriterDied: the writer takes no more rows.
        """
        if self._failure is not None:
            raise WriterDied("the journal cannot be written") from self._failure
        if not self._submitting:
            # Runs after all tasks that can run now.
            trio.lowlevel.current_trio_token().run_sync_soon(self._hand_over)
        self._submitting.append(_Batch(tuple(rows), tuple(recorded)))
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
        Committed rows; None for one that was pruned. They are read on the thread that writes,
        because only that uses the connection.

        Raises:
            JournalFull: there is no room for the journal now; writing comes first.
            StoreError: they cannot be read.
            WriterDied: the writer has ended.
        """
        if self._closing.is_set():
            raise WriterDied("the journal is closed")
        lookup = _Lookup(tuple(positions))
        self._inbox.put(lookup)
        while lookup.rows is None:
            if self._failure is not None:
                raise WriterDied("the journal cannot be read") from self._failure
            if self._stalled:
                raise JournalFull()
            await self._moved.park()
        if isinstance(lookup.rows, StoreError):
            raise lookup.rows
        return lookup.rows

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run the thread until ``close``. Raises ``WriterDied`` if the writer died."""
        await run_thread("cairn-journal", self._loop, self._ended, task_status=task_status)
        if self._failure is not None:
            raise WriterDied(str(self._failure)) from self._failure

    def close(self) -> None:
        """
        Commit what was submitted, then end. Without room for it the writer dies.
        """
        self._closing.set()
        self._hand_over()
        self._inbox.put(None)

    def _hand_over(self) -> None:
        """Give the thread what was submitted, as one item."""
        batches, self._submitting = self._submitting, []
        if batches:
            rows = tuple(row for batch in batches for row in batch.rows)
            recorded = tuple(one for batch in batches for one in batch.recorded)
            self._inbox.put(_Batch(rows, recorded))

    def _loop(self, token: trio.lowlevel.TrioToken) -> None:
        try:
            while True:
                batches, lookups, last = self._gathered()
                rows = [row for batch in batches for row in batch.rows]
                if rows:
                    self._store_rows(rows, token)
                    token.run_sync_soon(self._announce, batches, self._store.log_bytes())
                for lookup in lookups:
                    lookup.rows = self._found(lookup.positions)
                    token.run_sync_soon(self._moved.unpark_all)
                if last:
                    break
        except StoreError as error:
            token.run_sync_soon(self._fail, error)
        except BaseException as error:  # whatever it is, no reply may be sent any more
            token.run_sync_soon(self._fail, error)
            raise
        token.run_sync_soon(self._ended.set)

    def _store_rows(self, rows: Sequence[Row], token: trio.lowlevel.TrioToken) -> None:
        """Append rows, waiting for room if there is none."""
        began = None
        while True:
            # Read before the try, so that a close during a failing try is followed by one more.
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
            stall = Stall(error=fact, rows_waiting=len(rows), duration_us=duration_us)
            token.run_sync_soon(self._room, stall)

    def _found(self, positions: Sequence[int]) -> list[Row | None] | StoreError:
        """Look rows up. A failure is for the caller: it does not concern the rows to write."""
        try:
            return [self._store.row(position) for position in positions]
        except StoreError as error:
            return error

    def _gathered(self) -> tuple[list[_Batch], list[_Lookup], bool]:
        """
        All that waits, at least one item: rows to write, rows to look up, and whether to end then.
        """
        batches: list[_Batch] = []
        lookups: list[_Lookup] = []
        item = self._inbox.get()
        while item is not None:
            if isinstance(item, _Batch):
                batches.append(item)
            else:
                lookups.append(item)
            try:
                item = self._inbox.get_nowait()
            except queue.Empty:
                return batches, lookups, False
        return batches, lookups, True

    def _announce(self, batches: list[_Batch], log_bytes: int) -> None:
        self._committed = batches[-1].rows[-1].position
        self._measured(log_bytes)
        self._moved.unpark_all()
        for batch in batches:
            for recorded in batch.recorded:
                for observer in tuple(self._observers):
                    observer(recorded)

    def _measured(self, log_bytes: int) -> None:
        """Note the size of the database's own log, and warn once each time that it is too large."""
        self._log_bytes = log_bytes
        large = log_bytes >= LOG_WARNING_BYTES
        if large and not self._warned:
            log.warning(
                "the journal's write-ahead log grows, because another program keeps reading the "
                "journal in one transaction; end that program (`lsof` with the journal's file "
                "lists those that have it open), and the log is cut back",
                mib=log_bytes // (1024 * 1024),
            )
        elif self._warned and not large:
            log.info("the journal's write-ahead log was cut back")
        self._warned = large

    def _stall(self, fact: str) -> None:
        self._stalled = True
        log.error("journal full", fact=fact)
        self._moved.unpark_all()
        for observer in self._stall_observers:
            observer.stall_began()

    def _room(self, stall: Stall) -> None:
        self._stalled = False
        log.warning(
            "journal has room again",
            seconds=round(stall.duration_us / 1e6, 1),
            rows_waiting=stall.rows_waiting,
        )
        for observer in self._stall_observers:
            observer.stall_ended(stall)

    def _fail(self, error: BaseException) -> None:
        log.error("the journal cannot be written", fact=str(error))
        self._failure = error
        self._moved.unpark_all()
        self._ended.set()
