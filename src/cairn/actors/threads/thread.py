"""Threads that take commands from trio's: the engine's and the journal's."""

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
    Run ``loop`` on a thread of its own, and wait for its end, also while cancelled: what it has
    begun is finished and recorded.

    Args:
        loop: given the token by which it calls into trio's thread.
        ended: what the loop has set there, last of all.
        abandoned: asked then; where it says so, somebody else has set it, and the thread is left to
            itself.
    """
    token = trio.lowlevel.current_trio_token()
    # Where trio itself fails nobody ends the thread, and the process is not to wait for it.
    thread = threading.Thread(target=loop, args=(token,), name=name, daemon=True)
    thread.start()
    task_status.started()
    with trio.CancelScope(shield=True):
        await ended.wait()
    if abandoned():
        return
    # It has nothing left to do but to end. An interpreter that ends first kills the thread inside
    # of native code, and that aborts the process.
    thread.join()
