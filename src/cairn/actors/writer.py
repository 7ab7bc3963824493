"""
The journal writer: one thread that commits rows in groups and tells when they are committed.

A receipt is a position: what depends on it may leave once ``committed`` has passed it. Rows that
arrive while a commit is under way share the next one, so that the cost of a sync to disk is shared
by all that wait for it. When the writer dies, nothing may leave any more, and the server stops.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence

import attrs
import trio

from cairn.journal.codec import Row
from cairn.journal.errors import StoreError
from cairn.journal.events import Recorded
from cairn.journal.store import Store


@attrs.frozen
class _Batch:
    rows: tuple[Row, ...]
    recorded: tuple[Recorded, ...]


class WriterDied(Exception):
    """
    The journal cannot be written any more. Whatever waited for a receipt never gets it.
    """


class JournalWriter:
    """
    Commits rows in the order in which they are submitted.

    ``submit`` and ``wait_committed`` are for trio's thread.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._inbox: queue.SimpleQueue[_Batch | None] = queue.SimpleQueue()
        self._committed = store.head()[0]
        self._moved = trio.lowlevel.ParkingLot()
        self._failure: BaseException | None = None
        self._observers: list[Callable[[Recorded], None]] = []
        self._ended = trio.Event()

    @property
    def committed(self) -> int:
        """
        The position of the last row that is known to be committed.
        """
        return self._committed

    def observe(self, observer: Callable[[Recorded], None]) -> None:
        """
        Have every event passed on once it is committed, in order.
        """
        self._observers.append(observer)

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
        return rows[-1].position

    async def wait_committed(self, position: int) -> None:
        """
        Wait until all rows up to ``position`` are committed.

        Raises:
            WriterDied: they never will be.
        """
        while self._committed < position:
            if self._failure is not None:
                raise WriterDied("the journal cannot be written") from self._failure
            await self._moved.park()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """
        Run the thread until ``close``. Raises what killed the writer, if something did.
        """
        token = trio.lowlevel.current_trio_token()
        thread = threading.Thread(target=self._loop, args=(token,), name="cairn-journal")
        thread.daemon = True  # a second signal ends the process at once
        thread.start()
        task_status.started()
        with trio.CancelScope(shield=True):
            await self._ended.wait()
        if self._failure is not None:
            raise WriterDied(str(self._failure)) from self._failure

    def close(self) -> None:
        """
        Commit what was submitted, then end.
        """
        self._inbox.put(None)

    def _loop(self, token: trio.lowlevel.TrioToken) -> None:
        try:
            while True:
                batches, last = self._gathered()
                rows = [row for batch in batches for row in batch.rows]
                if rows:
                    self._store.append(rows)
                    token.run_sync_soon(self._announce, batches)
                if last:
                    break
        except StoreError as error:
            token.run_sync_soon(self._fail, error)
        except BaseException as error:  # whatever it is, nothing may leave any more
            token.run_sync_soon(self._fail, error)
            raise
        token.run_sync_soon(self._ended.set)

    def _gathered(self) -> tuple[list[_Batch], bool]:
        """
        All batches that wait, at least one; and whether the end was among them.
        """
        batches: list[_Batch] = []
        item = self._inbox.get()
        while item is not None:
            batches.append(item)
            try:
                item = self._inbox.get_nowait()
            except queue.Empty:
                return batches, False
        return batches, True

    def _announce(self, batches: list[_Batch]) -> None:
        self._committed = batches[-1].rows[-1].position
        self._moved.unpark_all()
        for batch in batches:
            for recorded in batch.recorded:
                for observer in self._observers:
                    observer(recorded)

    def _fail(self, error: BaseException) -> None:
        self._failure = error
        self._moved.unpark_all()
        self._ended.set()
