"""
Settle: the steps around prewarming after which a session is idle. Its slab keeps canonical KV
alone, its blocks are written to files, and after a while it can do without the slab.
"""

from __future__ import annotations

import attrs
import trio

from cairn.actors.sessions.cache import SessionCache
from cairn.actors.sessions.context import SessionContext
from cairn.actors.sessions.idle_time import IdleTime
from cairn.actors.sessions.inbox import Inbox
from cairn.journal.cache import eviction
from cairn.journal.paths import canonical_end


@attrs.frozen
class Settle:
    """Makes one session idle after an answer."""

    context: SessionContext
    cache: SessionCache
    inbox: Inbox

    async def cut_back(self) -> None:
        """
        Remove what is not canonical from the slab: decoded tokens, and with the grain C a partial
        block.
        """
        session = self.cache.session
        canonical = canonical_end(self.context.sequencer.state, session)
        if session.slab is None:
            return
        if not self.context.facts.reusable:
            await self.cache.release_slab("this model's caches cannot be cut back")
        elif session.cached_tokens > canonical:
            policy = self.context.facts.policy
            if policy is None or policy.reaches(session.window_start, canonical):
                await self.cache.trim(canonical, "decoded or partial, so not canonical")
            else:
                await self.cache.trim(0, "the window has moved on from what is canonical")

    async def share_rest(self) -> None:
        """
        Seal what the slab holds after its last full block, so that other sessions can match it. Not
        if a command is waiting.
        """
        if self.inbox.is_empty and not self.cache.is_quarantined:
            await self.cache.seal_rest()

    async def write_through(self) -> None:
        """
        Write the blocks of this conversation to files while the inbox is empty, so that little is
        lost if the server crashes; then evict those that its window has passed.
        """
        held = self.cache.held
        if held is None:
            return  # closed by now
        # Not only those of the slab: a window that has moved on leaves none in it.
        for key in eviction.chain_of(held):
            if not await self.context.memory.write_through(key, lambda: self.inbox.is_empty):
                return
        await self.context.memory.release_idle(self.cache.id, lambda: self.inbox.is_empty)

    async def outlasts_idle_limit(self) -> bool:
        """
        Wait until a command comes or the idle limit is over. Whether the slab should be released,
        because the limit is over and the session can do without it.
        """
        if not self._can_spare_slab():
            return False
        with trio.CancelScope() as self.inbox.idle_time:
            await trio.sleep(self.context.slab_idle_s)
        # Its blocks may have left memory in the meantime.
        return self._can_spare_slab()

    async def give_memory_back(self) -> None:
        """
        Return free memory to the operating system while no request is in flight, so that no pass
        waits for it. A separate step: even if it fails, the closed slab is on record.
        """
        engine = self.context.engine
        await IdleTime(self.context.activity, self.inbox, self.context.patience_s).run(
            lambda still_needed: engine.settle(
                lambda mlx: mlx.give_back_memory(), lambda _: True, still_needed
            )
        )

    def _can_spare_slab(self) -> bool:
        state, session = self.context.sequencer.state, self.cache.held
        known = session is not None and eviction.can_spare_slab(state, session)
        return known and self.inbox.is_empty
