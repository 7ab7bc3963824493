"""
Runs the server's worker threads one at a time, in turn with trio's, so that a seed decides what
runs when.

A worker thread runs only while trio's thread waits for it. It gives its turn back each time that it
looks at its queue, and whenever it waits. Time is virtual, and a turn takes none of it.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest import mock

import trio
import trio.testing

from cairn.actors.threads import engine as engine_module
from cairn.actors.threads import writer as writer_module

_current = threading.local()


class Turn:
    """One worker thread. ``waits`` is what it waits for; None if it can go on."""

    def __init__(self, loop: Callable[[Any], None], token: trio.lowlevel.TrioToken) -> None:
        # Held until it is the other's turn. Plain locks cost a third of semaphores.
        self._go, self._back = threading.Lock(), threading.Lock()
        self._go.acquire()
        self._back.acquire()
        self.ended = False
        self.waits: Callable[[], Awaitable[object]] | None = None
        self._thread = threading.Thread(target=self._run, args=(loop, token), daemon=True)
        self._thread.start()

    def _run(self, loop: Callable[[Any], None], token: trio.lowlevel.TrioToken) -> None:
        _current.turn = self
        self._go.acquire()
        try:
            loop(token)
        finally:
            self.ended = True
            self._back.release()

    def step(self) -> None:
        """In trio's thread: let the thread run until it gives its turn back."""
        self._go.release()
        self._back.acquire()

    def pause(self, until: Callable[[], Awaitable[object]] | None = None) -> None:
        """On the thread: give the turn back, until something has happened."""
        self.waits = until
        self._back.release()
        self._go.acquire()


class TurnQueue:
    """A ``queue.SimpleQueue`` between trio's thread and a worker thread."""

    def __init__(self) -> None:
        self._items: deque[Any] = deque()
        self._arrived: trio.Event | None = None

    def put(self, item: Any) -> None:
        """Add an item. Does not wait."""
        self._items.append(item)
        if self._arrived is not None:
            self._arrived.set()

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """Take the first item. Each look gives the turn back."""
        turn: Turn | None = getattr(_current, "turn", None)
        if turn is not None:
            turn.pause()
            if block and not self._items:
                turn.pause(lambda: self._arrival(_within(timeout)))
        if not self._items:
            raise queue.Empty
        return self._items.popleft()

    def get_nowait(self) -> Any:
        """Take the first item, if there is one."""
        return self.get(block=False)

    def empty(self) -> bool:
        """Whether it has no item."""
        return not self._items

    async def _arrival(self, within: trio.CancelScope) -> None:
        self._arrived = trio.Event()
        with within:
            if not self._items:
                await self._arrived.wait()
        self._arrived = None


class TurnEvent:
    """A ``threading.Event`` that trio's thread sets and a worker thread waits for."""

    def __init__(self) -> None:
        self._is_set = False
        self._changed: trio.Event | None = None

    def set(self) -> None:
        """Set it."""
        self._is_set = True
        if self._changed is not None:
            self._changed.set()

    def is_set(self) -> bool:
        """Whether it is set."""
        return self._is_set

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set, for ``timeout`` seconds at most. Whether it is set."""
        if not self._is_set:
            _current.turn.pause(lambda: self._change(_within(timeout)))
        return self._is_set

    async def _change(self, within: trio.CancelScope) -> None:
        self._changed = trio.Event()
        with within:
            if not self._is_set:
                await self._changed.wait()
        self._changed = None


def sleep_in_turn(seconds: float) -> None:
    """On a worker thread: let virtual time pass."""

    async def sleep() -> None:
        await trio.sleep(seconds)

    _current.turn.pause(sleep)


def _within(seconds: float | None) -> trio.CancelScope:
    return trio.move_on_after(float("inf") if seconds is None else seconds)


class Turns:
    """Gives the worker threads their turns. Each is preceded by a pause that a seed draws."""

    def __init__(self, random: Random) -> None:
        self._random = random

    async def run_thread(
        self,
        name: str,
        loop: Callable[[trio.lowlevel.TrioToken], None],
        ended: trio.Event,
        *,
        abandoned: Callable[[], bool] = lambda: False,
        task_status: trio.TaskStatus[None],
    ) -> None:
        """In place of ``actors.threads.thread.run_thread``."""
        turn = Turn(loop, trio.lowlevel.current_trio_token())
        task_status.started()
        with trio.CancelScope(shield=True):
            while not turn.ended:
                await trio.sleep(self.short())
                waits, turn.waits = turn.waits, None
                if waits is not None:
                    await waits()
                turn.step()
            await ended.wait()

    async def run_sync(self, run: Callable[..., Any], *given: Any, **options: Any) -> Any:
        """In place of ``trio.to_thread.run_sync``: the call takes virtual time, and no thread."""
        borrower, limiter = object(), options.get("limiter") or trio.CapacityLimiter(1)
        await limiter.acquire_on_behalf_of(borrower)
        try:
            with trio.CancelScope(shield=not options.get("abandon_on_cancel", False)):
                await trio.sleep(self.short())
            return run(*given)
        finally:
            limiter.release_on_behalf_of(borrower)

    def short(self) -> float:
        """How long a step takes, in seconds: mostly short, seldom long."""
        return self._random.choice((0.0, 0.001, 0.01)) * self._random.random() ** 3 * 10


@contextlib.contextmanager
def in_turn(random: Random, clock: trio.testing.MockClock) -> Iterator[Turns]:
    """Have servers in this context run their threads in turn, and trio its tasks by the seed."""
    turns = Turns(random)
    queues = SimpleNamespace(SimpleQueue=TurnQueue, Empty=queue.Empty)
    virtual = SimpleNamespace(
        monotonic_ns=lambda: round(clock.current_time() * 1e9),
        monotonic=clock.current_time,
    )
    with contextlib.ExitStack() as patches:

        def patch(target: Any, name: str, value: Any) -> None:
            patches.enter_context(mock.patch.object(target, name, value))

        for module in (engine_module, writer_module):
            patch(module, "run_thread", turns.run_thread)
            patch(module, "queue", queues)
        patch(writer_module, "threading", SimpleNamespace(Event=TurnEvent))
        patch(writer_module, "time", virtual)
        patch(trio.to_thread, "run_sync", turns.run_sync)
        scheduler = trio._core._run
        patch(scheduler, "_ALLOW_DETERMINISTIC_SCHEDULING", True)
        patch(scheduler, "_r", random)
        yield turns
