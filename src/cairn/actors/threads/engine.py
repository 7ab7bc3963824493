"""
The engine's thread: the only one that touches MLX.

Sessions ask for passes; this decides only in which order they run. Between two decode passes at
most one prefill chunk runs, sessions in fair turn, or one part of what is copied into a slab;
settling runs when nobody waits for anything. Short jobs (slabs, blocks, trims) run between passes.
A copy goes before prefill chunks, since all of it takes a fraction of the passes that it spares; a
chunk that waits has its turn behind a few parts.

A job that has begun is always finished and recorded, whatever happened to who asked: the cache has
changed, and that must come into the journal. What a job did is recorded by its ``record`` in the
order in which jobs ran, before any task hears of it: trio wakes tasks in no order, and the totals
that the engine measured must come into the journal in the order in which it measured them. There
are two exceptions: a load during which the server stops (``abandon``), since no cache is there yet,
and what ran of a copy behind a part that could not be recorded (``copy``), whose bug is on record.
"""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, Protocol, TypeVar

import attrs
import outcome
import trio

from cairn.actors.threads.thread import run_thread
from cairn.engine.reports import MemoryReport, PassReport

T = TypeVar("T")
R = TypeVar("R")


class EngineGone(Exception):
    """The engine's thread has ended; what was asked of it will not be done."""


class Urgency(IntEnum):
    """What goes first."""

    CALL = 0
    COPY = 1
    PREFILL = 2
    SETTLE = 3


PARTS_A_CHUNK = 8
"""
How many parts of copies go before a prefill chunk that waits. A part takes a fraction of a chunk:
so nobody's first token waits for the whole of another's history, and a copy hardly for chunks.
"""


class Device(Protocol):
    """What the thread needs of an engine. ``mlx_engine.MlxEngine`` has much more."""

    @property
    def decode_rows(self) -> int:
        """W."""

    @property
    def grows(self) -> bool:
        """Whether a decode pass changes what is held."""

    def memory(self) -> MemoryReport:
        """What is held now."""

    def decode(self, rows: list[Any]) -> list[Any]:
        """One decode pass."""


@attrs.define(eq=False)
class _Job:
    """
    Attributes:
        run: is given the engine, on its thread.
        record: is given what came of it, in trio's thread.
        wanted: asked on the engine's thread before it runs, and of what waits to be copied or
            settled at every turn of the loop; where it says no, the job is dropped.
    """

    run: Callable[[Any], Any]
    record: Callable[[Any], Any]
    urgency: Urgency
    wanted: Callable[[], bool]
    done: trio.Event = attrs.field(factory=trio.Event)
    result: outcome.Outcome[Any] | None = None


@attrs.define(eq=False)
class _Series:
    """
    Jobs that go on from each other.

    Attributes:
        wanted: asked again and again, until it says no.
        ended: whether no further one is to begin.
        broken: whether one could not be recorded: then those that ran meanwhile are not, either.
    """

    wanted: Callable[[], bool]
    ended: bool = False
    broken: bool = False

    def goes_on(self) -> bool:
        """Whether the next one is to run. Asked on the engine's thread."""
        # Never set back: trio's thread may end it while this one asks.
        if not self.ended and not self.wanted():
            self.ended = True
        return not self.ended

    def part(
        self, run: Callable[[Any], Any], record: Callable[[Any], object]
    ) -> tuple[Callable[[Any], Any], Callable[[Any], bool]]:
        """What one of the jobs runs and how it is recorded; that gives True."""

        def runs(device: Any) -> Any:
            try:
                return run(device)
            except BaseException:
                self.ended = True
                raise

        def records(report: Any) -> bool:
            if self.broken:
                return False
            try:
                record(report)
            except BaseException:
                self.ended = self.broken = True
                raise
            return True

        return runs, records


@attrs.define(eq=False)
class Decoding:
    """
    A session that decodes: its row, until it ends by itself or is stopped.

    Attributes:
        row: makes the next row of a token; called once for each, in order.
        token: the token that goes in next.
        left: how many tokens may still be drawn.
        ends: tokens that end the answer.
        reports: each pass, then None at the end, or what failed.
    """

    row: Callable[[int], Any]
    token: int
    left: int
    ends: frozenset[int]
    reports: trio.MemorySendChannel[PassReport | BaseException | None]
    stopped: bool = False


class EngineThread:
    """
    Runs jobs on the engine's thread. Its methods are for trio's thread.

    Attributes:
        memory: what the engine held after the last job. A decode pass is none, where it puts rows
            into arrays that are there.
        abandoned: whether nobody waits for the thread any more.
    """

    def __init__(self) -> None:
        self.memory = MemoryReport()
        self._inbox: queue.SimpleQueue[_Job | Decoding | None] = queue.SimpleQueue()
        self._device: Any = None
        self._failure: BaseException | None = None
        self._ended = trio.Event()
        self._asked: set[_Job] = set()  # jobs that somebody waits for
        self.abandoned = False

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run the thread until ``close`` or ``abandon``."""
        await run_thread(
            "cairn-engine",
            self._loop,
            self._ended,
            abandoned=lambda: self.abandoned,
            task_status=task_status,
        )
        if self._failure is not None:
            raise self._failure

    async def load(self, make: Callable[[], T]) -> T:
        """Run something on the thread that needs no engine yet: loading one."""
        return await self._do(lambda _: make(), _as_it_is, Urgency.CALL)

    def install(self, device: Device) -> None:
        """Give the thread the engine that it serves."""
        self._device = device

    async def unload(self, measure: Callable[[], T]) -> T:
        """
        Let go of the engine, on the thread, and then measure what is left. Nothing else may be
        asked of the thread meanwhile.
        """

        def let_go(_: Any) -> None:
            self._device = None

        # A step of its own: who runs a job holds the engine that it gives to it.
        await self._do(let_go, _as_it_is, Urgency.CALL)
        return await self.load(measure)

    async def call(self, run: Callable[[Any], T], record: Callable[[T], R]) -> R:
        """
        A short job between two passes.

        Raises:
            EngineGone: the thread has ended.
            Exception: what ``run`` or ``record`` raised.
        """
        return await self._do(run, record, Urgency.CALL)

    async def copy(
        self,
        parts: Sequence[tuple[Callable[[Any], T], Callable[[T], object]]],
        wanted: Callable[[], bool],
    ) -> bool:
        """
        Short jobs that take long together, in order: decode passes go between them, and a prefill
        chunk behind each ``PARTS_A_CHUNK``. Behind one that failed no further one begins, nor once
        they are not wanted any more. Where it was the record that failed, others may have run
        before that was known; these are not recorded.

        Args:
            parts: what to run, and what records it, of each.
            wanted: asked on the engine's thread, often.

        Returns:
            Whether all were done.

        Raises:
            EngineGone: the thread has ended.
            Exception: what the first one raised that failed.
        """
        series = _Series(wanted)
        jobs = [_Job(*series.part(*part), Urgency.COPY, series.goes_on) for part in parts]
        if self._ended.is_set():
            raise EngineGone("the engine has ended")
        # All at once: whoever waits for a chunk's pass would else come between two parts.
        for job in jobs:
            self._inbox.put(job)
        self._asked.update(jobs)
        try:
            for job in jobs:
                await job.done.wait()
        finally:
            series.ended = True
            with trio.CancelScope(shield=True):
                for job in jobs:
                    await job.done.wait()
            self._asked.difference_update(jobs)
        if self.abandoned:
            raise EngineGone("the engine was abandoned")
        done = []
        for job in jobs:
            assert job.result is not None
            done.append(job.result.unwrap())
        return all(done)

    async def prefill(self, run: Callable[[Any], T], record: Callable[[T], R]) -> R:
        """One prefill chunk. Raises as ``call`` does."""
        return await self._do(run, record, Urgency.PREFILL)

    async def settle(
        self, run: Callable[[Any], T], record: Callable[[T], R], wanted: Callable[[], bool]
    ) -> R | None:
        """
        One settling chunk, when nothing else is to be done; None where it was not wanted any more
        before its turn came. Raises as ``call`` does.

        Args:
            wanted: asked on the engine's thread.
        """
        return await self._do(run, record, Urgency.SETTLE, wanted)

    def decode(
        self, row: Callable[[int], Any], *, token: int, left: int, ends: frozenset[int]
    ) -> tuple[Decoding, trio.MemoryReceiveChannel[PassReport | BaseException | None]]:
        """
        Let a session decode until it draws one of ``ends`` or has drawn ``left`` tokens.

        Returns:
            The handle to stop it by, and its passes as they are done, then None; or what failed,
            and ``EngineGone`` where the thread has ended.
        """
        send, receive = trio.open_memory_channel[PassReport | BaseException | None](float("inf"))
        decoding = Decoding(row=row, token=token, left=left, ends=ends, reports=send)
        if self._ended.is_set():
            send.send_nowait(EngineGone("the engine has ended"))
        else:
            self._inbox.put(decoding)
        return decoding, receive

    def stop(self, decoding: Decoding) -> None:
        """Have a session stop after the pass that runs now. Its reports end with None as always."""
        decoding.stopped = True

    def close(self) -> None:
        """End the thread when the job in hand is done."""
        self._inbox.put(None)

    def abandon(self) -> None:
        """
        Wait for the thread no more, whatever it is at: all that was asked of it ends with
        ``EngineGone``, and so does what is asked from here on. For when a model is loaded that
        nobody wants any more: MLX cannot be interrupted, and the thread goes on to the end of the
        job in hand, or to that of the process. No cache may be there that a job could change.
        """
        self.abandoned = True
        self._gone(list(self._asked), None)

    async def _do(
        self,
        run: Callable[[Any], T],
        record: Callable[[T], R],
        urgency: Urgency,
        wanted: Callable[[], bool] = lambda: True,
    ) -> R:
        job = _Job(run, record, urgency, wanted)
        if self._ended.is_set():
            raise EngineGone("the engine has ended")
        self._inbox.put(job)
        self._asked.add(job)
        # Once begun it changes caches, so it is waited for, and what it did is told.
        with trio.CancelScope(shield=True):
            await job.done.wait()
        self._asked.discard(job)
        if self.abandoned:
            raise EngineGone("the engine was abandoned")
        assert job.result is not None
        done: R = job.result.unwrap()
        return done

    def _finish(self, job: _Job) -> None:
        """In trio's thread, in the order in which jobs ran."""
        if self.abandoned:
            return  # who asked has heard that nothing comes of it
        if isinstance(job.result, outcome.Value):
            job.result = outcome.capture(job.record, job.result.value)
        job.done.set()

    def _gone(self, jobs: list[_Job], failure: BaseException | None) -> None:
        """In trio's thread: nobody waits for ever."""
        if self._ended.is_set():
            return  # the thread was abandoned
        self._failure = failure
        self._ended.set()
        while not self._inbox.empty():
            item = self._inbox.get_nowait()
            if isinstance(item, _Job):
                jobs.append(item)
            elif item is not None:
                item.reports.send_nowait(EngineGone("the engine has ended"))
        for job in jobs:
            job.result = outcome.Error(EngineGone("the engine has ended"))
            job.done.set()

    # --- on the engine's thread ---------------------------------------------------------------

    def _loop(self, token: trio.lowlevel.TrioToken) -> None:
        try:
            self._work(token)
        except trio.RunFinishedError:
            if not self.abandoned:
                raise

    def _work(self, token: trio.lowlevel.TrioToken) -> None:
        waiting: dict[Urgency, deque[_Job]] = {urgency: deque() for urgency in Urgency}
        decoding: list[Decoding] = []
        failure: BaseException | None = None
        copied = 0  # parts since the last prefill chunk
        try:
            while not self.abandoned and self._take_in(waiting, decoding):
                for urgency in (Urgency.COPY, Urgency.SETTLE):
                    self._drop_unwanted(waiting[urgency], token)
                while waiting[Urgency.CALL]:
                    self._run(waiting[Urgency.CALL].popleft(), token)
                if decoding:
                    self._pass(decoding, token)
                in_turn = not waiting[Urgency.PREFILL] or copied < PARTS_A_CHUNK
                if waiting[Urgency.COPY] and in_turn:
                    self._run(waiting[Urgency.COPY].popleft(), token)
                    copied += 1
                elif waiting[Urgency.PREFILL]:
                    self._run(waiting[Urgency.PREFILL].popleft(), token)
                    copied = 0
                elif waiting[Urgency.SETTLE] and not decoding:
                    self._run(waiting[Urgency.SETTLE].popleft(), token)
        except BaseException as error:
            failure = error
        for one in decoding:
            token.run_sync_soon(one.reports.send_nowait, EngineGone("the engine has ended"))
        left = [job for jobs in waiting.values() for job in jobs]
        token.run_sync_soon(self._gone, left, failure)

    def _drop_unwanted(self, jobs: deque[_Job], token: trio.lowlevel.TrioToken) -> None:
        for job in [job for job in jobs if not job.wanted()]:
            jobs.remove(job)
            job.record = _as_it_is
            job.result = outcome.Value(None)
            token.run_sync_soon(self._finish, job)

    def _take_in(self, waiting: dict[Urgency, deque[_Job]], decoding: list[Decoding]) -> bool:
        """
        Take in what has arrived; wait for something where there is nothing to do. False at the end.
        """
        while True:
            busy = bool(decoding) or any(waiting.values())
            try:
                item = self._inbox.get(block=not busy)
            except queue.Empty:
                return True
            if item is None:
                return False
            if isinstance(item, Decoding):
                decoding.append(item)
            else:
                waiting[item.urgency].append(item)

    def _run(self, job: _Job, token: trio.lowlevel.TrioToken) -> None:
        if not job.wanted():
            job.record = _as_it_is
            job.result = outcome.Value(None)
        else:
            job.result = outcome.capture(job.run, self._device)
            held = self._device is not None
            self.memory = self._device.memory() if held else MemoryReport()
        token.run_sync_soon(self._finish, job)

    def _pass(self, decoding: list[Decoding], token: trio.lowlevel.TrioToken) -> None:
        """One decode pass for all that decode, and the end of those that are done."""
        for one in [one for one in decoding if one.stopped or one.left <= 0]:
            decoding.remove(one)
            token.run_sync_soon(one.reports.send_nowait, None)
        width = self._device.decode_rows
        admitted = decoding[:width]
        if not admitted:
            return
        rows = [one.row(one.token) for one in admitted] + [None] * (width - len(admitted))
        try:
            reports = self._device.decode(rows)
        except Exception as error:
            # Which of the rows it was cannot be told, so none of them can go on.
            for one in admitted:
                decoding.remove(one)
                token.run_sync_soon(one.reports.send_nowait, error)
            return
        if self._device.grows:
            self.memory = self._device.memory()
        for one, report in zip(admitted, reports, strict=False):
            token.run_sync_soon(one.reports.send_nowait, report)
            if isinstance(report, Exception):  # this row's fault, and nobody else's
                decoding.remove(one)
                continue
            drawn = report.drawn.token
            one.token = drawn
            one.left -= 1
            if one.left <= 0 or drawn in one.ends or one.stopped:
                decoding.remove(one)
                token.run_sync_soon(one.reports.send_nowait, None)
        # Whoever waited for a row comes before who had one.
        decoding.sort(key=lambda one: one in admitted)


def _as_it_is(value: T) -> T:
    return value
