"""
Removes expired conversations and blocks while the server is idle.

Each request gives a TTL to the conversation and the blocks that it uses, counted from their last
use. ``journal/state.py`` derives when they expire, ``journal/cache/eviction.py`` selects those that
have, and ``engine/ttl.py`` lists every step of a TTL. What is removed is recorded.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Awaitable, Callable

import structlog
import trio

from cairn.actors.idle.activity import Activity
from cairn.actors.memory import Memory
from cairn.actors.sequencer import Sequencer
from cairn.actors.threads.engine import EngineGone
from cairn.actors.threads.writer import WriterDied
from cairn.journal.cache import eviction

log = structlog.get_logger("cairn")

_LEAST_S = 0.05
"""The shortest wait, for a clock that is not quite there yet."""


class Expiry:
    """
    Waits until something expires and the server is idle, and removes it.

    Attributes:
        bug_id: of the bug that ended it; None while it runs.
    """

    def __init__(
        self,
        *,
        sequencer: Sequencer,
        memory: Memory,
        activity: Activity,
        close: Callable[[str], Awaitable[None]],
    ) -> None:
        """
        Args:
            close: closes an idle session, unless a request comes before that.
        """
        self._sequencer = sequencer
        self._memory = memory
        self._activity = activity
        self._close = close
        self._closed = False
        self.bug_id: str | None = None

    def close(self) -> None:
        """End ``run`` after the current step."""
        self._closed = True
        self._activity.changed()

    async def run(self) -> None:
        """
        Remove what expires, until ``close``. A failure ends this task only, and is a bug on record.
        """
        try:
            await self._run()
        except (EngineGone, WriterDied):
            pass  # what ended them stops the server and is logged
        except Exception as error:
            with contextlib.suppress(WriterDied):  # as above
                self.bug_id = self._sequencer.bug_that_ended(error)
                log.exception(
                    "expiry failed; what expires stays until the next start", bug_id=self.bug_id
                )

    async def _run(self) -> None:
        while not self._closed:
            seen = self._activity.changes
            if await self._remove_expired():
                continue
            with trio.move_on_after(self._left_s()):
                await self._activity.wait_change(seen)

    async def _remove_expired(self) -> bool:
        """Close expired sessions and remove expired blocks. Whether there were any."""
        before = self._sequencer.state.position
        state = self._sequencer.state
        now_us = eviction.moment_us(state, self._sequencer.now_us())
        for session in eviction.sessions_over(self._sequencer.order, now_us):
            if not self._may_go_on():
                return False
            await self._close(session.id)
        if self._may_go_on():
            await self._memory.remove_expired(self._may_go_on)
        return self._may_go_on() and self._sequencer.state.position > before

    def _may_go_on(self) -> bool:
        return not self._closed and self._activity.upkeep_may_begin

    def _left_s(self) -> float:
        """
        How long to wait for a change: for ever if something expired could not be removed.
        """
        state, now_us = self._sequencer.state, self._sequencer.now_us()
        expires_us = eviction.next_expiry(self._sequencer.order)
        if expires_us is None or expires_us <= eviction.moment_us(state, now_us):
            return math.inf
        return max(_LEAST_S, (expires_us - now_us) / 1_000_000)
