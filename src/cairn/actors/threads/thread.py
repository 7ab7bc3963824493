"""Worker threads that run jobs for trio's thread: the engine's and the journal writer's."""

from __future__ import annotations

import threading
from collections.abc import Callable

import trio


async def run_thread(
    name: str,
    loop: Callable[[trio.lowlevel.TrioToken], None],
    ended: trio.Event,
    *,
    abandoned: Callable[[], bool] = lambda: False,
    task_status: trio.TaskStatus[None],
) -> None:
    """
    Run ``loop`` on a new thread, and wait for its end, even when cancelled: what has begun is
    finished and recorded.

    Args:
        loop: called with the token by which it calls into trio's thread.
        ended: set in trio's thread at the end of the loop.
        abandoned: called then. If it returns True, another task has set ``ended``, and the thread
            is not waited for.
    """
    token = trio.lowlevel.current_trio_token()
    # If trio itself fails, the thread is never ended, and the process must not wait for it.
    thread = threading.Thread(target=loop, args=(token,), name=name, daemon=True)
    thread.start()
    task_status.started()
    with trio.CancelScope(shield=True):
        await ended.wait()
    if abandoned():
        return
    # The thread is about to end. If the interpreter ends first it kills the thread in native code,
    # which aborts the process.
    thread.join()
