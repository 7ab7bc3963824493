"""
What a session does behind an answer, in its own time: it computes canonical KV for the next
request, comes to rest, has its blocks written, and can do without its slab after a while.
"""

from __future__ import annotations

import attrs
import trio

from cairn.actors.idle.idle_time import IdleTime
from cairn.actors.requests.ticket import Ticket
from cairn.actors.sessions.cache import SessionCache
from cairn.actors.sessions.context import SessionContext
from cairn.actors.sessions.inbox import Inbox
from cairn.actors.sessions.prewarm import Prewarm
from cairn.engine.prompt.template import Message
from cairn.journal import eviction


@attrs.frozen
class Settling:
    """Brings one session to rest."""

    context: SessionContext
    cache: SessionCache
    inbox: Inbox

    async def settle(self, ticket: Ticket, said: Message | None) -> None:
        """
        Compute canonical KV for the next request, a chunk at a time, until somebody wants
        something, and come to rest.

        Args:
            said: the answer, as its client will send it back; None where there is none.
        """
        cache, facts = self.cache, self.context.facts
        session = cache.session
        sealed = len(session.slab_keys)
        if session.slab is not None and not facts.reusable:
            await cache.release_slab("this model's caches cannot be cut back")
        elif session.slab is not None and session.cached_tokens > sealed * cache.chunk:
            await self._cut_back(sealed * cache.chunk)
        complete = True
        # A prompt that was cut off is not read to its end for nobody.
        if said is not None and cache.session.slab is not None:
            complete = await self._compute(ticket, said)
        await cache.rest(complete)

    async def _cut_back(self, end: int) -> None:
        """Cut off what is not canonical; all of it, where the window has moved on from what is."""
        policy, session = self.context.facts.policy, self.cache.session
        if policy is None or policy.reaches(session.window_start, end):
            await self.cache.trim(end, "decoded or partial, so not canonical")
        else:
            await self.cache.trim(0, "the window has moved on from what is canonical")

    async def write_through(self) -> None:
        """
        Have the blocks of this conversation written to files while nobody wants anything, so that a
        server that is lost loses little; then those leave memory that its window has left behind.
        """
        # Not those of the slab alone: a window that has moved on leaves none in it.
        for key in eviction.chain_of(self.cache.session):
            if not await self.context.memory.write_through(key, lambda: self.inbox.undisturbed):
                return
        await self.context.memory.release_idle(self.cache.id, lambda: self.inbox.undisturbed)

    async def has_rested_long(self) -> bool:
        """
        Let the session rest, where it holds a slab that it can do without. Whether nobody wanted
        anything for so long that it is to give the slab up.
        """
        if not self._can_spare_slab():
            return False
        with trio.CancelScope() as self.inbox.idle_time:
            await trio.sleep(self.context.slab_idle_s)
        # Its blocks may have left memory in the meantime.
        return self._can_spare_slab()

    async def give_memory_back(self) -> None:
        """
        Have what is free leave the process, when no request is under way: nobody's pass is to wait
        for it, and who asks meanwhile may fill it. A step of its own: whatever comes of it, that
        the slab is closed is on record.
        """
        engine = self.context.engine
        await IdleTime(self.context, self.cache, self.inbox).run(
            lambda wanted: engine.settle(lambda mlx: mlx.give_back_memory(), lambda _: True, wanted)
        )

    def _can_spare_slab(self) -> bool:
        state, session = self.context.sequencer.state, self.cache.held
        known = session is not None and eviction.can_spare_slab(state, session)
        return known and self.inbox.undisturbed

    async def _compute(self, ticket: Ticket, said: Message) -> bool:
        """
        Compute what the next prompt will begin with, where that can be known, else prompt and
        answer. False where somebody wanted something before all was there.
        """
        idle_time = IdleTime(self.context, self.cache, self.inbox)
        conversation = ticket.prepared.command.conversation
        if self.context.next_prompt is not None and conversation is not None:
            prewarm = Prewarm(self.context, self.cache, idle_time)
            complete = await prewarm.compute(conversation, said)
            if complete is not None:
                return complete
        return await self._what_was_said(idle_time)

    async def _what_was_said(self, idle_time: IdleTime) -> bool:
        """Compute canonical KV over prompt and answer. False where somebody wanted something."""
        cache = self.cache
        session = cache.session
        assert session.last is not None
        sequence, sealed = session.last.sequence, len(session.slab_keys)
        if sealed == len(sequence) // cache.chunk or not cache.is_indexed(len(sequence)):
            return True
        if self.context.facts.policy is not None and not sealed and session.last.prompt_keys:
            return True  # it was all cut off; the next request copies in what it needs
        keys = cache.keys(sequence, session.last.prompt_keys)
        for place in range(sealed, len(keys)):
            done = await idle_time.settle_chunk(sequence, keys[place], place)
            if done != "sealed":
                return done is not None
        return True
