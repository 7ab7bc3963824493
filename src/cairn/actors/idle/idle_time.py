"""
The time that a session has for itself, behind an answer: nobody wants anything of it, and no
request is under way in the whole server.

The engine alone cannot tell: between two chunks of another session's prompt there is a moment in
which it has nothing to do. So each step waits until all is calm, and is asked again, on whatever
thread runs it, when its turn comes. The waiting has a bound, as blocks stay pinned and unwritten
meanwhile: under a load that never pauses a session comes to rest with what it has.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Literal, TypeVar

import trio

from cairn.actors.sessions.cache import SessionCache
from cairn.actors.sessions.context import SessionContext
from cairn.actors.sessions.inbox import Inbox
from cairn.journal import events as ev

T = TypeVar("T")


class IdleTime:
    """What one session may do for itself behind one answer."""

    def __init__(self, context: SessionContext, cache: SessionCache, inbox: Inbox) -> None:
        self._context = context
        self._cache = cache
        self._inbox = inbox
        self._left_s = context.patience_s
        self._out_of_patience = False

    def lasts(self) -> bool:
        """Whether there is any more of it."""
        return self._inbox.undisturbed and not self._out_of_patience

    @property
    def ended_by(self) -> ev.GivenUp:
        """Who or what ended it."""
        return "busy" if self._inbox.undisturbed else self._inbox.wanted_by

    async def run(self, step: Callable[[Callable[[], bool]], Awaitable[T | None]]) -> T | None:
        """
        Do something when no request is under way. None where this time ends before.

        Args:
            step: is given what tells whether it is its time still, to be asked on any thread. Gives
                None where it was not, and is then done later. May be cancelled.
        """
        while self.lasts():
            with trio.CancelScope() as self._inbox.idle_time:
                await self._calm()
                done = await step(self._is_now) if self.lasts() else None
                if done is not None:
                    return done
        return None

    async def settle_chunk(
        self, ids: Sequence[int], key: str, place: int, *, prewarmed: bool = False
    ) -> Literal["sealed", "doubt"] | None:
        """
        Compute canonical KV over a chunk behind what the slab holds, and make a block of it.

        Args:
            ids: of the whole sequence.
            key: of the chunk.
            place: of the chunk in the sequence.
            foreseen: no request asks for it, see ``Memory.seal``.

        Returns:
            None where this time ended before; ``doubt`` where the chunk, or what it is built on, is
            quarantined: nothing of it stays in the slab.
        """
        cache, chunk = self._cache, self._cache.chunk
        start, end = place * chunk, (place + 1) * chunk

        async def step(wanted: Callable[[], bool]) -> bool | None:
            # Not before the wait, in which others may find a block wrong.
            if not cache.can_seal(key, start):
                return False
            return await cache.settle(ids[start:end], wanted) or None

        ran = await self.run(step)
        if ran is None:
            return None
        if not cache.can_seal(key, start):
            if ran:
                await cache.trim(start, "built on a block in doubt, or one itself")
            return "doubt"
        await cache.seal(key, start, end, prewarmed=prewarmed)
        return "sealed"

    def _is_now(self) -> bool:
        return self._inbox.undisturbed and self._context.activity.is_idle

    async def _calm(self) -> None:
        began_s = trio.current_time()
        with trio.move_on_after(self._left_s) as limit:
            await self._context.activity.wait_idle()
        self._left_s = max(0.0, self._left_s - (trio.current_time() - began_s))
        self._out_of_patience = limit.cancelled_caught
