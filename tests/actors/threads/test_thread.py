"""The threads next to trio's."""

from __future__ import annotations

import threading

import pytest
import trio
import trio.testing

from cairn.actors.threads.engine import EngineGone, EngineThread
from cairn.actors.threads.thread import run_thread
from cairn.engine.reports import DecodeRow, DrawSpec
from cairn.engine.sampling import Sampling


@pytest.mark.trio
async def test_the_thread_has_ended_before_its_task() -> None:
    """
    A process that ends while native code of a thread still runs is aborted, so the thread ends
    first.
    """
    ended, seen, left = trio.Event(), threading.Event(), []

    def loop(token: trio.lowlevel.TrioToken) -> None:
        token.run_sync_soon(ended.set)
        seen.wait(0.2)  # what a thread does before it ends
        left.append("thread")

    await run_thread("test", loop, ended, task_status=trio.TASK_STATUS_IGNORED)
    left.append("task")
    seen.set()
    assert ["thread", "task"] == left


@pytest.mark.trio
async def test_decoding_on_a_thread_that_has_ended_fails() -> None:
    """
    As for a caller of ``call``: otherwise a session that has its first token by then would wait for
    ever, and the server with it.
    """
    engine = EngineThread()
    async with trio.open_nursery() as nursery:
        await nursery.start(engine.run)
        engine.close()
    row = DecodeRow(slab=1, token=1, draw=DrawSpec(sampling=Sampling(), seed=0))
    _, reports = engine.decode(lambda token: row, token=1, left=9, ends=frozenset())
    assert isinstance(reports.receive_nowait(), EngineGone)


def test_an_engine_that_is_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """
    Callers that wait for a job get ``EngineGone`` at once, whether it has begun or not, and so do
    later callers. The thread ends by itself after the running job, without an error, also after
    trio ended.
    """
    go_on, threads = threading.Event(), list[threading.Thread]()
    faults: list[object] = []
    monkeypatch.setattr(threading, "excepthook", faults.append)

    async def ask(engine: EngineThread, began: trio.Event) -> None:
        token = trio.lowlevel.current_trio_token()

        def work() -> str:
            threads.append(threading.current_thread())
            token.run_sync_soon(began.set)
            go_on.wait(60.0)
            return "done"

        with pytest.raises(EngineGone):
            await engine.load(work)

    async def main() -> None:
        engine, began = EngineThread(), trio.Event()
        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                await nursery.start(engine.run)
                nursery.start_soon(ask, engine, began)
                await began.wait()
                nursery.start_soon(ask, engine, trio.Event())
                await trio.testing.wait_all_tasks_blocked()
                engine.abandon()
            with pytest.raises(EngineGone):
                await engine.load(int)
            engine.close()

    try:
        trio.run(main)
        (thread,) = threads
        assert thread.is_alive()
    finally:
        go_on.set()
    thread.join(60.0)
    assert not thread.is_alive()
    assert [] == faults
