"""
What becomes of conversations and blocks whose lives are over: they are removed when nobody wants
anything.

When that is follows from the journal: each request gives what it uses and leaves a life, from its
last use on. The clock is looked at here alone, and what comes of it is on record.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable

import structlog
import trio

from cairn.actors.clock import wall_clock_us
from cairn.actors.idle.activity import Activity
from cairn.actors.memory import Memory
from cairn.actors.sequencer import Sequencer
from cairn.actors.threads.engine import EngineGone
from cairn.actors.threads.writer import WriterDied
from cairn.journal import eviction

log = structlog.get_logger("cairn")

_LEAST_S = 0.05
"""A clock that says the time has not quite come is asked again after so long."""


class Expiry:
    """Waits until a life is over and nobody wants anything, and ends it."""

    def __init__(
        self,
        *,
        sequencer: Sequencer,
        memory: Memory,
        activity: Activity,
        close: Callable[[str], Awaitable[None]],
        now_us: Callable[[], int] = wall_clock_us,
    ) -> None:
        """
        Args:
            close: closes a session at rest, unless somebody wants something meanwhile.
            now_us: microseconds since 1970.
        """
        self._sequencer = sequencer
        self._memory = memory
        self._activity = activity
        self._close = close
        self._now_us = now_us
        self._closed = False

    def close(self) -> None:
        """End ``run`` when what it has in hand is done."""
        self._closed = True
        self._activity.changed()

    async def run(self) -> None:
        """
        End lives until ``close``. What fails here ends this alone: a bug is on record by then, and
        says itself what may go on.
        """
        try:
            while not self._closed:
                seen = self._activity.changes
                if await self._end_what_is_over():
                    continue
                with trio.move_on_after(self._left_s()):
                    await self._activity.wait_change(seen)
        except (EngineGone, WriterDied):
            pass  # the server stops, and says why
        except Exception:
            log.exception("no more lives are ended; what nobody uses stays until the next start")

    async def _end_what_is_over(self) -> bool:
        """Close the sessions and remove the blocks whose lives are over. Whether there were any."""
        before = self._sequencer.state.position
        state = self._sequencer.state
        for session in eviction.sessions_over(state, eviction.moment_us(state, self._now_us())):
            if not self._is_time():
                return False
            await self._close(session.id)
        if self._is_time():
            await self._memory.remove_over(self._is_time)
        return self._is_time() and self._sequencer.state.position > before

    def _is_time(self) -> bool:
        return not self._closed and self._activity.upkeep_may_begin

    def _left_s(self) -> float:
        """
        How long to wait where nothing stirs: for ever where something that is over waits for that.
        """
        state = self._sequencer.state
        expires_us = eviction.next_expiry(state, self._sequencer.order)
        if expires_us is None or expires_us <= eviction.moment_us(state, self._now_us()):
            return math.inf
        return max(_LEAST_S, (expires_us - self._now_us()) / 1_000_000)
