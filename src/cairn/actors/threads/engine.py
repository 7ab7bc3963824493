"""
The engine's thread: the only one that touches MLX.

Sessions ask for jobs here; ``scheduling.py`` says which one runs next.

A job that has begun is always finished and recorded, even if its caller is cancelled: the cache has
changed, and the journal must say so. Jobs are recorded by their ``record`` in the order in which
they ran, before any task is woken: trio wakes tasks in no order, and the totals that the engine
measured must be recorded in the order of measurement. There are two exceptions: a load during which
the server stops (``abandon``), because there is no cache yet, and parts of a copy that ran after
one that could not be recorded (``copy``), whose bug is on record.
"""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import attrs
import outcome
import trio

from cairn.actors.threads.scheduling import (
    JobKind,
    Waiting,
    drafts_in_turn,
    next_job,
    prefill_in_turn,
    rows_in_turn,
    rows_needed,
)
from cairn.actors.threads.thread import run_thread
from cairn.engine.contract import Engine
from cairn.engine.drafts import Drafter
from cairn.engine.reports import DecodeRow, MemoryReport, PassReport, rows_of

T = TypeVar("T")
R = TypeVar("R")


class EngineGone(Exception):
    """The engine's thread has ended and runs no more jobs."""


@attrs.define(eq=False)
class _Job:
    """
    Attributes:
        run: called with the engine, on its thread.
        record: called with the result, in trio's thread.
        still_needed: called on the engine's thread before the job runs, and for copies, embeddings
            and work in idle time before every choice; if it returns False, the job is dropped.
        goes_first: whether it runs before the jobs of its kind that wait already.
        joined: how many requests wait for what a prefill pass computes besides its own; called on
            the engine's thread.
        passed_over: how often such a pass went before it.
    """

    run: Callable[[Engine], Any]
    record: Callable[[Any], Any]
    kind: JobKind
    still_needed: Callable[[], bool]
    goes_first: bool = False
    joined: Callable[[], int] = lambda: 0
    passed_over: int = 0
    done: trio.Event = attrs.field(factory=trio.Event)
    result: outcome.Outcome[Any] | None = None


@attrs.define(eq=False)
class _Series:
    """
    Jobs that build on each other.

    Attributes:
        still_needed: called until it returns False.
        ended: whether no further job may begin.
        broken: whether a job could not be recorded: then those that ran after it are not, either.
    """

    still_needed: Callable[[], bool]
    ended: bool = False
    broken: bool = False

    def continues(self) -> bool:
        """Whether the next job is to run. Called on the engine's thread."""
        # Never set back: trio's thread may end the series meanwhile.
        if not self.ended and not self.still_needed():
            self.ended = True
        return not self.ended

    def part(
        self, run: Callable[[Engine], T], record: Callable[[T], object]
    ) -> tuple[Callable[[Engine], T], Callable[[T], bool]]:
        """One of the jobs: what it runs, and what records it and returns True."""

        def runs(engine: Engine) -> T:
            try:
                return run(engine)
            except BaseException:
                self.ended = True
                raise

        def records(report: T) -> bool:
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
    An answer that decodes, until it ends by itself or is stopped.

    Attributes:
        row: makes the row for the last of the tokens that were drawn since the row before.
        drawn: those tokens.
        drafter: drafts the next tokens; None for an answer without drafts.
        left: how many tokens may still be drawn.
        ends: tokens that end the answer.
        reports: takes the report of each pass, then None at the end, or the failure.
    """

    row: Callable[[Sequence[int]], DecodeRow]
    drawn: Sequence[int]
    left: int
    ends: frozenset[int]
    reports: trio.MemorySendChannel[PassReport | BaseException | None]
    drafter: Drafter | None = None
    stopped: bool = False

    def draft(self, most: int) -> tuple[int, ...]:
        """What may come next, if drafts may have this many rows; never more than is left."""
        if self.drafter is None:
            return ()
        return self.drafter.draft(min(most, self.left - 1))

    def take(self, report: PassReport) -> bool:
        """Take in a pass. True if the answer has ended."""
        self.drawn = [one.token for one in report.all_drawn]
        self.left -= len(self.drawn)
        if self.drafter is not None:
            self.drafter.take(self.drawn, drafted=report.drafted, accepted=len(report.accepted))
        return self.left <= 0 or self.stopped or self.drawn[-1] in self.ends


class EngineThread:
    """
    Runs jobs on the engine's thread. Its methods are for trio's thread.

    Attributes:
        memory: what the engine held after the last job. Not measured after decode passes that write
            into existing arrays.
        device: the engine, for jobs on the thread; None while no model is loaded.
        abandoned: whether ``abandon`` was called.
    """

    def __init__(self) -> None:
        self.memory = MemoryReport()
        self._inbox: queue.SimpleQueue[_Job | Decoding | None] = queue.SimpleQueue()
        self.device: Engine | None = None
        self._failure: BaseException | None = None
        self._ended = trio.Event()
        self._open: set[_Job] = set()  # jobs that a task waits for
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
        """Run a job that needs no engine: loading one."""
        return await self._do(lambda _: make(), _identity, JobKind.CALL)

    def install(self, device: Engine) -> None:
        """Set the engine that the thread runs."""
        self.device = device

    async def unload(self, measure: Callable[[], T]) -> T:
        """
        Drop the engine, on the thread, and then measure what memory is left. No other job may be
        asked for meanwhile.
        """

        def drop(_: object) -> None:
            self.device = None

        # A job of its own, because the thread holds the engine while it runs a job.
        await self._do(drop, _identity, JobKind.CALL)
        return await self.load(measure)

    async def call(self, run: Callable[[Engine], T], record: Callable[[T], R]) -> R:
        """
        Run a short job between two passes.

        Raises:
            EngineGone: the thread has ended.
            Exception: what ``run`` or ``record`` raised.
        """
        return await self._do(run, record, JobKind.CALL)

    async def copy(
        self,
        parts: Sequence[tuple[Callable[[Engine], T], Callable[[T], object]]],
        still_needed: Callable[[], bool],
    ) -> bool:
        """
        Run short jobs in order, between passes. None begins after one that failed, or once they
        are no longer needed. If it was ``record`` that failed, further parts may have run by then;
        these are not recorded.

        Args:
            parts: for each, what to run and what records it.
            still_needed: called on the engine's thread, often.

        Returns:
            Whether all of them ran.

        Raises:
            EngineGone: the thread has ended.
            Exception: what the first part that failed raised.
        """
        series = _Series(still_needed)
        jobs = [_Job(*series.part(*part), JobKind.COPY, series.continues) for part in parts]
        if self._ended.is_set():
            raise EngineGone("the engine has ended")
        # All at once, so that no prefill pass that waits comes between two parts.
        for job in jobs:
            self._inbox.put(job)
        self._open.update(jobs)
        try:
            for job in jobs:
                await job.done.wait()
        finally:
            series.ended = True
            with trio.CancelScope(shield=True):
                for job in jobs:
                    await job.done.wait()
            self._open.difference_update(jobs)
        if self.abandoned:
            raise EngineGone("the engine was abandoned")
        done = []
        for job in jobs:
            assert job.result is not None
            done.append(job.result.unwrap())
        return all(done)

    async def copy_one(self, run: Callable[[Engine], T], record: Callable[[T], R]) -> R:
        """
        Run one job as the next part of all copies: answers decode before it, and no caller that
        holds a lock waits for the whole copy of another session. Raises as ``call`` does.
        """
        return await self._do(run, record, JobKind.COPY, goes_first=True)

    async def prefill(
        self,
        run: Callable[[Engine], T],
        record: Callable[[T], R],
        joined: Callable[[], int] = lambda: 0,
    ) -> R:
        """
        One prefill pass. Raises as ``call`` does.

        Args:
            joined: how many requests wait for what it computes besides its own; called on the
                engine's thread.
        """
        return await self._do(run, record, JobKind.PREFILL, joined=joined)

    async def settle(
        self, run: Callable[[Engine], T], record: Callable[[T], R], still_needed: Callable[[], bool]
    ) -> R | None:
        """
        A job for idle time, when nothing else waits; None if it was no longer needed when its turn
        came. Raises as ``call`` does.

        Args:
            still_needed: called on the engine's thread.
        """
        return await self._do(run, record, JobKind.IDLE, still_needed)

    async def embed(self, run: Callable[[], T]) -> T:
        """
        One pass over a text to embed, when no answer's job waits. It uses no cache of a session, so
        a caller that is cancelled waits for no pass but its own. Raises as ``call`` does.
        """
        needed, begun = True, False

        def run_it(_: object) -> T:
            nonlocal begun
            begun = True
            return run()

        job = _Job(run_it, _identity, JobKind.EMBED, lambda: needed)
        self._submit(job)
        try:
            await job.done.wait()
        finally:
            needed = False
            if begun:
                with trio.CancelScope(shield=True):
                    await job.done.wait()
            self._open.discard(job)
        done: T = self._result(job)
        return done

    def decode(
        self,
        row: Callable[[Sequence[int]], DecodeRow],
        *,
        token: int,
        left: int,
        ends: frozenset[int],
        drafter: Drafter | None = None,
    ) -> tuple[Decoding, trio.MemoryReceiveChannel[PassReport | BaseException | None]]:
        """
        Decode an answer until one of ``ends`` or ``left`` tokens are drawn.

        Args:
            token: the first input token.
            drafter: has taken it in; None to draft nothing.

        Returns:
            A handle to stop it, and the channel of its reports: each pass, then None or the
            failure, which is ``EngineGone`` if the thread has ended.
        """
        send, receive = trio.open_memory_channel[PassReport | BaseException | None](float("inf"))
        decoding = Decoding(
            row=row, drawn=(token,), left=left, ends=ends, reports=send, drafter=drafter
        )
        if self._ended.is_set():
            send.send_nowait(EngineGone("the engine has ended"))
        else:
            self._inbox.put(decoding)
        return decoding, receive

    def stop(self, decoding: Decoding) -> None:
        """Stop an answer after the pass that runs now. Its reports end with None as always."""
        decoding.stopped = True

    def close(self) -> None:
        """End the thread after the running job."""
        self._inbox.put(None)

    def abandon(self) -> None:
        """
        Wait for the thread no longer: all jobs, present and future, end with ``EngineGone``. For a
        load whose model is no longer needed: MLX cannot be interrupted, so the thread runs on to
        the end of its job, or of the process. There must be no cache yet that a job could change.
        """
        self.abandoned = True
        self._gone(list(self._open), None)

    async def _do(
        self,
        run: Callable[[Engine], T],
        record: Callable[[T], R],
        kind: JobKind,
        still_needed: Callable[[], bool] = lambda: True,
        *,
        goes_first: bool = False,
        joined: Callable[[], int] = lambda: 0,
    ) -> R:
        job = _Job(run, record, kind, still_needed, goes_first, joined)
        self._submit(job)
        # A job that has begun changes caches, so it is waited for and recorded.
        with trio.CancelScope(shield=True):
            await job.done.wait()
        self._open.discard(job)
        done: R = self._result(job)
        return done

    def _submit(self, job: _Job) -> None:
        if self._ended.is_set():
            raise EngineGone("the engine has ended")
        self._inbox.put(job)
        self._open.add(job)

    def _result(self, job: _Job) -> Any:
        """What a job that is done has returned. Raises what it raised."""
        if self.abandoned:
            raise EngineGone("the engine was abandoned")
        assert job.result is not None
        return job.result.unwrap()

    def _finish(self, job: _Job) -> None:
        """In trio's thread, in the order in which jobs ran."""
        if self.abandoned:
            return  # its caller got EngineGone
        if isinstance(job.result, outcome.Value):
            job.result = outcome.capture(job.record, job.result.value)
        job.done.set()

    def _gone(self, jobs: list[_Job], failure: BaseException | None) -> None:
        """In trio's thread: end all waits."""
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
        jobs: dict[JobKind, deque[_Job]] = {kind: deque() for kind in JobKind}
        decoding: list[Decoding] = []
        failure: BaseException | None = None
        decoded_last, copies_since_prefill = False, 0
        try:
            while not self.abandoned and self._take_in(jobs, decoding):
                for kind in (JobKind.COPY, JobKind.EMBED, JobKind.IDLE):
                    self._drop_unneeded(jobs[kind], token)
                waiting = Waiting(
                    calls=len(jobs[JobKind.CALL]),
                    copies=len(jobs[JobKind.COPY]),
                    prefills=len(jobs[JobKind.PREFILL]),
                    embeds=len(jobs[JobKind.EMBED]),
                    idle=len(jobs[JobKind.IDLE]),
                    decoding=len(decoding),
                    decoded_last=decoded_last,
                    copies_since_prefill=copies_since_prefill,
                )
                chosen = next_job(waiting)
                if chosen is None:
                    continue  # all that waited was dropped
                if chosen is JobKind.DECODE:
                    self._decode_pass(decoding, token)
                else:
                    self._run(_next_of(jobs[chosen], chosen), token)
                decoded_last = chosen is JobKind.DECODE or (chosen is JobKind.CALL and decoded_last)
                if chosen is JobKind.COPY:
                    copies_since_prefill += 1
                elif chosen is JobKind.PREFILL:
                    copies_since_prefill = 0
        except BaseException as error:
            failure = error
        for one in decoding:
            token.run_sync_soon(one.reports.send_nowait, EngineGone("the engine has ended"))
        left = [job for waiting_jobs in jobs.values() for job in waiting_jobs]
        token.run_sync_soon(self._gone, left, failure)

    def _drop_unneeded(self, jobs: deque[_Job], token: trio.lowlevel.TrioToken) -> None:
        for job in [job for job in jobs if not job.still_needed()]:
            jobs.remove(job)
            job.record = _identity
            job.result = outcome.Value(None)
            token.run_sync_soon(self._finish, job)

    def _take_in(self, jobs: dict[JobKind, deque[_Job]], decoding: list[Decoding]) -> bool:
        """
        Take in what has arrived, or wait for something if there is nothing to do. False at the end.
        """
        while True:
            busy = bool(decoding) or any(jobs.values())
            try:
                item = self._inbox.get(block=not busy)
            except queue.Empty:
                return True
            if item is None:
                return False
            if isinstance(item, Decoding):
                decoding.append(item)
            elif item.goes_first:
                jobs[item.kind].appendleft(item)
            else:
                jobs[item.kind].append(item)

    def _run(self, job: _Job, token: trio.lowlevel.TrioToken) -> None:
        if not job.still_needed():
            job.record = _identity
            job.result = outcome.Value(None)
        else:
            # The engine is missing only for jobs of ``load``, which ignore it.
            job.result = outcome.capture(job.run, cast("Engine", self.device))
            engine = self.device  # the job may have loaded or dropped it
            self.memory = engine.memory() if engine is not None else MemoryReport()
        token.run_sync_soon(self._finish, job)

    def _decode_pass(self, decoding: list[Decoding], token: trio.lowlevel.TrioToken) -> None:
        """One decode pass, and the end of the answers that are complete or stopped."""
        for one in [one for one in decoding if one.stopped or one.left <= 0]:
            decoding.remove(one)
            token.run_sync_soon(one.reports.send_nowait, None)
        engine = self.device
        assert engine is not None
        in_pass, left = rows_in_turn(decoding, engine.decode_rows)
        if not in_pass:
            return
        drafts = drafts_in_turn(
            [one.draft(engine.decode_rows - len(in_pass)) for one in in_pass], engine.decode_rows
        )
        rows: list[DecodeRow | None] = [
            attrs.evolve(one.row(one.drawn), draft=draft)
            for one, draft in zip(in_pass, drafts, strict=True)
        ]
        count = rows_of(rows)
        rows += [None] * (rows_needed(count, engine.decode_shapes) - count)
        try:
            reports = engine.decode(rows)
        except Exception as error:
            # Any of the rows may be at fault, so none of them can go on.
            for one in in_pass:
                decoding.remove(one)
                token.run_sync_soon(one.reports.send_nowait, error)
            return
        if engine.grows:
            self.memory = engine.memory()
        for one, report in zip(in_pass, reports, strict=False):
            token.run_sync_soon(one.reports.send_nowait, report)
            if isinstance(report, Exception):  # of this row alone
                decoding.remove(one)
                continue
            assert report is not None and report.drawn is not None
            if one.take(report):
                decoding.remove(one)
                token.run_sync_soon(one.reports.send_nowait, None)
        decoding[:] = [*left, *(one for one in in_pass if one in decoding)]


def _next_of(jobs: deque[_Job], kind: JobKind) -> _Job:
    """Take the job of a kind that is to run next."""
    if kind is not JobKind.PREFILL or len(jobs) == 1:
        return jobs.popleft()
    place = prefill_in_turn([(job.joined(), job.passed_over) for job in jobs])
    chosen = jobs[place]
    for job in list(jobs)[:place]:
        job.passed_over += 1
    del jobs[place]
    return chosen


def _identity(value: T) -> T:
    return value
