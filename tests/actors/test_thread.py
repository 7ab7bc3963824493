"""
The threads beside trio's.
"""

from __future__ import annotations

import threading

import pytest
import trio

from cairn.actors.thread import run_thread


@pytest.mark.trio
async def test_the_thread_has_ended_before_its_task() -> None:
    """
    A process that ends while native code of a thread still runs is aborted: the thread ends first.
    """
    ended, seen, left = trio.Event(), threading.Event(), []

    def loop(token: trio.lowlevel.TrioToken) -> None:
        token.run_sync_soon(ended.set)
        seen.wait(0.2)  # what a thread does on its way out
        left.append("thread")

    await run_thread("test", loop, ended, task_status=trio.TASK_STATUS_IGNORED)
    left.append("task")
    seen.set()
    assert ["thread", "task"] == left
