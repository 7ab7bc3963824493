"""
The idle time of one session after an answer: no command is in its inbox, and no request is in
flight anywhere in the server.

The engine alone cannot tell when that is: between two passes of another session's prompt it has
nothing to do for a moment. So each step waits until the server is idle, and checks again, on
whatever thread it runs, when its turn comes. The wait is bounded, because blocks stay pinned and
unwritten in the meantime: under a load that never pauses a session settles with what it has.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import trio

from cairn.actors.idle.activity import Activity
from cairn.actors.sessions.inbox import Inbox
from cairn.journal import events as ev

T = TypeVar("T")


class IdleTime:
    """When one session may do idle-time work after one answer."""

    def __init__(self, activity: Activity, inbox: Inbox, patience_s: float) -> None:
        """
        Args:
            patience_s: how long its steps may wait for an idle server, in total.
        """
        self._activity = activity
        self._inbox = inbox
        self._left_s = patience_s
        self._out_of_patience = False

    def lasts(self) -> bool:
        """Whether another step may wait for its turn."""
        return self._inbox.is_empty and not self._out_of_patience

    @property
    def ended_by(self) -> ev.AbandonReason:
        """What ended it."""
        return "busy" if self._inbox.is_empty else self._inbox.waiting_for

    async def run(self, step: Callable[[Callable[[], bool]], Awaitable[T | None]]) -> T | None:
        """
        Run a step while the server is idle. None if the idle time ends before that.

        Args:
            step: takes a function that returns whether to continue, for any thread. Returns None
                if it was not to continue, and is then run again later. May be cancelled.
        """
        while self.lasts():
            with trio.CancelScope() as self._inbox.idle_time:
                await self._wait_idle()
                done = await step(self._is_now) if self.lasts() else None
                if done is not None:
                    return done
        return None

    def _is_now(self) -> bool:
        return self._inbox.is_empty and self._activity.is_idle

    async def _wait_idle(self) -> None:
        began_s = trio.current_time()
        with trio.move_on_after(self._left_s) as limit:
            await self._activity.wait_idle()
        self._left_s = max(0.0, self._left_s - (trio.current_time() - began_s))
        self._out_of_patience = limit.cancelled_caught
