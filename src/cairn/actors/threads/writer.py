"""
The journal writer: one thread that commits rows in groups and reports when they are committed.

A receipt is a position: a reply that depends on it may be sent once ``committed`` has passed it.
Rows of tasks that run in the same step of trio share a commit, and so do those that arrive during
one: they share the cost of a sync to disk. If the writer dies, no reply may be sent any more, and
the server stops once clients have got the error.

A full disk, a lock of another program, or a lost connection to a database does not kill the writer,
but the last if it lasts. It keeps its rows and stalls: no reply is sent, requests that wait for a
receipt are refused, and the same rows are tried again until they are stored. The length of the
stall is then recorded.

Rows that a base has replaced are removed while nothing else waits, a few at a time, so that a
commit waits for no more than one such step.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import attrs
import structlog
import trio

from cairn.actors.errors import CannotRecord
from cairn.actors.threads.heads import HeadKeeper
from cairn.actors.threads.thread import run_thread
from cairn.journal.errors import LeaseLost, StoreError, StoreUnready
from cairn.journal.events import Recorded, SessionForgotten, StallReason
from cairn.journal.rows.base import Base, histories_of
from cairn.journal.rows.codec import Row
from cairn.journal.rows.heads import Head
from cairn.journal.rows.store import Store

log = structlog.get_logger("cairn")

_PROBE_S = 1.0
_LAST_WORDS_S = 2.0
"""How long clients have to get the error of their requests, once the writer has died."""

REMOVAL_PROBE_S = 60.0
"""How long the removal of pruned rows rests after it failed."""
RECENT_ROWS = 256
"""How many of the last rows are held while they are followed."""

LOG_WARNING_BYTES = 64 * 1024 * 1024
"""The size of the database's own log at which the operator is warned."""


@attrs.frozen
class _Batch:
    """
    Rows that are committed together.

    Attributes:
        base: what takes the place of the first rows of the journal with them, if anything does.
    """

    rows: tuple[Row, ...]
    recorded: tuple[Recorded, ...]
    base: Base | None = None


@attrs.define
class _Lookup:
    """
    Rows that a task waits for.

    Attributes:
        rows: that were found, or the failure; None until they were looked up.
    """

    positions: tuple[int, ...]
    rows: list[Row | None] | StoreError | None = None


def _apart(batches: Sequence[_Batch]) -> Iterator[list[_Batch]]:
    """The batches in order: each with a base by itself, and the others in as few as possible."""
    together: list[_Batch] = []
    for batch in batches:
        if batch.base is None:
            together.append(batch)
            continue
        if together:
            yield together
        yield [batch]
        together = []
    if together:
        yield together


class WriterDied(Exception):
    """The journal cannot be written any more. Tasks that wait for a receipt never get it."""


@attrs.frozen(kw_only=True)
class Stall:
    """
    A time in which the journal could not be written.

    Attributes:
        reason: why, when it began.
        error: what the database reported then.
        rows_waiting: rows that were kept until they could be stored.
    """

    reason: StallReason
    error: str
    rows_waiting: int
    duration_us: int


class StallObserver(Protocol):
    """Is notified of stalls, in trio's thread."""

    def stall_began(self) -> None:
        """The journal cannot be written, for a time or, if the writer has died, any more."""

    def stall_ended(self, stall: Stall) -> None:
        """It can be written again, and what waited is committed."""


class JournalWriter:
    """
    Commits rows in the order in which they are submitted.

    ``submit`` and ``wait_committed`` are for trio's thread.
    """

    def __init__(self, store: Store, heads: HeadKeeper | None = None) -> None:
        """
        Args:
            heads: keeps the head outside of the journal, too.
        """
        self._store = store
        self._heads = heads
        self._head = Head(*store.head())
        self._inbox: queue.SimpleQueue[_Batch | _Lookup | None] = queue.SimpleQueue()
        self._submitting: list[_Batch] = []
        self._committed = self._head.position
        self._submitted = self._committed
        self._moved = trio.lowlevel.ParkingLot()
        self._failure: BaseException | None = None
        self._observers: list[Callable[[Recorded], None]] = []
        self._ended = trio.Event()
        self._stall: StallReason | None = None
        self._over = False  # once the writer has died, and clients know
        self._closing = threading.Event()
        self._early_observers: list[Callable[[Row, Recorded], None]] = []
        self._stall_observers: list[StallObserver] = []
        self._log_bytes = store.log_bytes()
        self._warned = False
        self._removal: Iterator[int] | None = store.removal()
        self._removed = 0
        self._base_rows: Mapping[int, Row] | None = None
        self._removal_rests_until = 0.0
        self._followers = 0
        self._recent: dict[int, Row] = {}  # the last rows, while there are followers

    @property
    def committed(self) -> int:
        """The position of the last committed row."""
        return self._committed

    @property
    def head(self) -> Head:
        """The last committed row's position and hash."""
        return self._head

    @property
    def signed_head(self) -> Head | None:
        """The head of the last checkpoint of this run; None before the first."""
        return self._heads.signed if self._heads is not None else None

    @property
    def stalled(self) -> bool:
        """Whether the journal cannot be written now."""
        return self._stall is not None

    @property
    def dead(self) -> bool:
        """Whether the journal cannot be written any more, so that the server stops."""
        return self._failure is not None

    @property
    def stall(self) -> StallReason | None:
        """Why the journal cannot be written now; None if it can."""
        return self._stall

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

    @contextlib.contextmanager
    def submitted_to(self, observer: Callable[[Row, Recorded], None]) -> Iterator[None]:
        """
        Pass every row on to ``observer`` as soon as it is submitted, in order, while the context
        lasts. It may append nothing.
        """
        self._early_observers.append(observer)
        try:
            yield
        finally:
            self._early_observers.remove(observer)

    @contextlib.contextmanager
    def followed(self) -> Iterator[None]:
        """
        While the context lasts, the last rows are held in memory, so that several who look each
        new row up do not each read it from the store.
        """
        self._followers += 1
        try:
            yield
        finally:
            self._followers -= 1
            if not self._followers:
                self._recent.clear()

    def submit(
        self, rows: Sequence[Row], recorded: Sequence[Recorded], base: Base | None = None
    ) -> int:
        """
        Submit rows that are committed together. Does not wait.

        Rows that come after the writer has died are not stored: waiting for their receipt reports
        that. Until the server has ended its requests, their last rows come.

        Args:
            base: replaces the rows up to its position, in the same transaction.

        Returns:
            The receipt: the position of the last of them.

        Raises:
            WriterDied: the server ends.
        """
        if self._over:
            raise WriterDied("the journal cannot be written") from self._failure
        if not self._submitting:
            # Runs after all tasks that can run now.
            trio.lowlevel.current_trio_token().run_sync_soon(self._hand_over)
        self._submitting.append(_Batch(tuple(rows), tuple(recorded), base))
        self._submitted = rows[-1].position
        for observer in self._early_observers:
            for row, one in zip(rows, recorded, strict=True):
                observer(row, one)
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
            CannotRecord: they cannot be stored now.
            WriterDied: they never will be.
        """
        while self._committed < position:
            if self._failure is not None:
                raise WriterDied("the journal cannot be written") from self._failure
            if self._stall is not None:
                raise CannotRecord(self._stall)
            await self._moved.park()

    async def rows(self, positions: Sequence[int], *, stored: bool = False) -> list[Row | None]:
        """
        Committed rows; None for one that was pruned, unless the base keeps it. They are read on the
        thread that writes, because only that uses the connection.

        Args:
            stored: whether to read those from the store, too, that are still in memory.

        Raises:
            CannotRecord: the journal cannot be written now; writing comes first.
            StoreError: they cannot be read.
            WriterDied: the writer has ended.
        """
        if self._closing.is_set():
            raise WriterDied("the journal is closed")
        if not stored and all(position in self._recent for position in positions):
            return [self._recent[position] for position in positions]
        lookup = _Lookup(tuple(positions))
        self._inbox.put(lookup)
        while lookup.rows is None:
            if self._failure is not None:
                raise WriterDied("the journal cannot be read") from self._failure
            if self._stall is not None:
                raise CannotRecord(self._stall)
            await self._moved.park()
        if isinstance(lookup.rows, StoreUnready):
            raise CannotRecord(lookup.rows.reason) from lookup.rows
        if isinstance(lookup.rows, StoreError):
            raise lookup.rows
        return lookup.rows

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run the thread until ``close``. Raises ``WriterDied`` if the writer died."""
        await run_thread("cairn-journal", self._loop, self._ended, task_status=task_status)
        if self._failure is not None:
            if not self._closing.is_set():
                with trio.CancelScope(shield=True):
                    await trio.sleep(_LAST_WORDS_S)
            self._over = True
            raise WriterDied(str(self._failure)) from self._failure

    def close(self) -> None:
        """
        Commit what was submitted, then end. If it cannot be stored now, the writer dies.
        """
        self._closing.set()
        self._hand_over()
        self._inbox.put(None)

    def _hand_over(self) -> None:
        """Give the thread what was submitted: as one item, except that each base has its own."""
        batches, self._submitting = self._submitting, []
        for together in _apart(batches):
            rows = tuple(row for batch in together for row in batch.rows)
            recorded = tuple(one for batch in together for one in batch.recorded)
            self._inbox.put(_Batch(rows, recorded, together[0].base))

    def _loop(self, token: trio.lowlevel.TrioToken) -> None:
        try:
            while True:
                batches, lookups, last = self._gathered()
                for together in _apart(batches):
                    rows = [row for batch in together for row in batch.rows]
                    self._store_rows(rows, together[0].base, token)
                    if together[0].base is not None:
                        self._removal, self._base_rows = self._store.removal(), None
                    if self._heads is not None:
                        self._heads.committed(Head(rows[-1].position, rows[-1].hash))
                    token.run_sync_soon(self._announce, together, self._store.log_bytes())
                for lookup in lookups:
                    lookup.rows = self._found(lookup.positions)
                    token.run_sync_soon(self._moved.unpark_all)
                if last:
                    if self._heads is not None:
                        self._heads.end()
                    break
        except StoreError as error:
            token.run_sync_soon(self._fail, error)
        except BaseException as error:  # whatever it is, no reply may be sent any more
            token.run_sync_soon(self._fail, error)
            raise
        token.run_sync_soon(self._ended.set)

    def _store_rows(
        self, rows: Sequence[Row], base: Base | None, token: trio.lowlevel.TrioToken
    ) -> None:
        """Append rows, or cut the journal with them, waiting as long as the store takes none."""
        first: StoreUnready | None = None
        reason, began_ns = None, time.monotonic_ns()
        while True:
            # Read before the try, so that a close during a failing try is followed by one more.
            closing = self._closing.is_set()
            try:
                if base is None:
                    self._store.append(rows)
                else:
                    self._store.cut(base, rows)
                break
            except StoreUnready as error:
                if error.reason != reason:
                    first, reason = first or error, error.reason
                    token.run_sync_soon(self._begin_stall, error)
                waited_s = (time.monotonic_ns() - began_ns) / 1e9
                if closing or (error.patience_s is not None and waited_s > error.patience_s):
                    raise
                self._closing.wait(_PROBE_S)
        if first is not None:
            stall = Stall(
                reason=first.reason,
                error=str(first),
                rows_waiting=len(rows),
                duration_us=(time.monotonic_ns() - began_ns) // 1000,
            )
            token.run_sync_soon(self._end_stall, stall)

    def _found(self, positions: Sequence[int]) -> list[Row | None] | StoreError:
        """Look rows up. A failure is for the caller: it does not concern the rows to write."""
        try:
            return [self._store.row(at) or self._in_base(at) for at in positions]
        except LeaseLost:
            raise  # nothing can be written any more
        except StoreError as error:
            return error

    def _in_base(self, position: int) -> Row | None:
        """A row that the base keeps, which is decoded when one is first needed."""
        if self._base_rows is None:
            self._base_rows = histories_of(self._store.base()).by_position()
        row = self._base_rows.get(position)
        return None if row is None else self._store.opened(row)

    def _gathered(self) -> tuple[list[_Batch], list[_Lookup], bool]:
        """
        All that waits, at least one item: rows to write, rows to look up, and whether to end then.
        """
        batches: list[_Batch] = []
        lookups: list[_Lookup] = []
        item = self._next()
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

    def _next(self) -> _Batch | _Lookup | None:
        """The next item. Pruned rows are removed until one comes."""
        while self._removal is not None:
            try:
                return self._inbox.get(
                    timeout=max(0.0, self._removal_rests_until - time.monotonic())
                )
            except queue.Empty:
                self._remove_some()
        return self._inbox.get()

    def _remove_some(self) -> None:
        assert self._removal is not None
        try:
            removed = next(self._removal, None)
        except StoreUnready as error:
            log.warning("pruned rows cannot be removed now; it is tried again", fact=str(error))
            self._removal = self._store.removal()
            self._removal_rests_until = time.monotonic() + REMOVAL_PROBE_S
            return
        if removed is not None:
            self._removed += removed
            return
        self._removal = None
        if self._removed:
            log.info("pruned rows are removed", rows=self._removed)
        self._removed = 0

    def _announce(self, batches: list[_Batch], log_bytes: int) -> None:
        last = batches[-1].rows[-1]
        self._head, self._committed = Head(last.position, last.hash), last.position
        self._hold(batches)
        self._measured(log_bytes)
        self._moved.unpark_all()
        for batch in batches:
            for recorded in batch.recorded:
                for observer in tuple(self._observers):
                    observer(recorded)

    def _hold(self, batches: Sequence[_Batch]) -> None:
        """
        Hold the last rows for those who follow; none that a prune may have removed, and none with
        texts of a session that was forgotten.
        """
        if not self._followers:
            return
        for batch in batches:
            forgot = any(isinstance(one.event, SessionForgotten) for one in batch.recorded)
            if batch.base is not None or forgot:
                self._recent.clear()
            self._recent.update((row.position, row) for row in batch.rows)
        for position in tuple(self._recent)[:-RECENT_ROWS]:
            del self._recent[position]

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

    def _begin_stall(self, error: StoreUnready) -> None:
        """Note why the journal cannot be written now; it may have been another reason before."""
        self._stall = error.reason
        log.error("the journal cannot be written now", reason=error.reason, fact=str(error))
        self._moved.unpark_all()
        for observer in self._stall_observers:
            observer.stall_began()

    def _end_stall(self, stall: Stall) -> None:
        self._stall = None
        log.warning(
            "the journal can be written again",
            reason=stall.reason,
            seconds=round(stall.duration_us / 1e6, 1),
            rows_waiting=stall.rows_waiting,
        )
        for observer in self._stall_observers:
            observer.stall_ended(stall)

    def _fail(self, error: BaseException) -> None:
        log.error("the journal cannot be written", fact=str(error))
        self._failure = error
        self._moved.unpark_all()
        for observer in self._stall_observers:
            observer.stall_began()
        self._ended.set()
