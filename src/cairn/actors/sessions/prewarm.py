"""
Anticipation, a step of settling: what the next prompt will begin with is computed before it comes.

What that is, ``ahead`` finds out; here it is put on record and computed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import attrs
import structlog

from cairn.actors.idle.idle_time import IdleTime
from cairn.actors.sessions.cache import Copy, SessionCache
from cairn.actors.sessions.context import SessionContext
from cairn.actors.sessions.next_prompt import Beginning, Unrendered
from cairn.engine.prompt.template import Conversation, Message, TemplateError
from cairn.journal import events as ev
from cairn.journal import paths
from cairn.journal.state import OpenPrewarm

log = structlog.get_logger("cairn")


@attrs.frozen
class Prewarm:
    """What is anticipated behind one answer."""

    context: SessionContext
    cache: SessionCache
    idle_time: IdleTime

    async def compute(self, conversation: Conversation, said: Message) -> bool | None:
        """
        Compute the blocks that are missing of what the next prompt will begin with.

        Args:
            conversation: what was asked.
            said: the answer.

        Returns:
            False where somebody wanted something before all was there; None where nothing is to be
            anticipated.
        """
        beginning = await self._beginning(conversation, said)
        if beginning is None:
            # Unrendered, or disturbed: only then is there something that was left out.
            return None if self.idle_time.lasts() else False
        begun = await self.idle_time.run(lambda _: self._begin(beginning))
        if not begun:
            return begun is not None
        prewarm = self._prewarm
        if (ended_by := await self._reuse(prewarm)) is not None:
            self._give_up(ended_by, 0)
            return ended_by == "doubt"
        computed = 0
        for place in range(prewarm.blocks_from_slab + prewarm.blocks_from_pool, len(prewarm.keys)):
            done = await self.idle_time.settle_chunk(
                prewarm.ids, prewarm.keys[place], place, prewarmed=True
            )
            computed = self._prewarm.computed_tokens
            if done is None:
                self._give_up(self.idle_time.ended_by, computed)
                return False
            if done == "doubt":
                self._give_up("doubt", computed)
                return True
        self.cache.append(
            ev.PrewarmFinished(
                session=self.cache.id, tokens=len(prewarm.ids), computed_tokens=computed
            )
        )
        return True

    async def _beginning(self, conversation: Conversation, said: Message) -> Beginning | None:
        """
        What the next prompt will begin with; None where that cannot be known, or there is no time.
        """
        assert self.context.next_prompt is not None
        try:
            return await self.context.next_prompt.beginning(
                conversation, said, self.cache.session.tenant, self.idle_time.run
            )
        except Unrendered as error:
            if not isinstance(error.__cause__, TemplateError):
                log.warning("the next turn was not rendered", session=self.cache.id, exc_info=error)
            self._give_up("unrendered", 0)
        return None

    async def _begin(self, beginning: Beginning) -> bool:
        """
        Put on record what is anticipated and what of it is there, with pins on that. False where
        all of it is, or where it is too short to be kept.
        """
        cache, chunk = self.cache, self.cache.chunk
        last, slab = cache.session.last, cache.session.slab
        assert last is not None and slab is not None
        full = min(len(beginning.ids), slab.capacity_tokens) // chunk
        ids = beginning.ids[: full * chunk]
        if not cache.is_indexed(len(beginning.ids)):
            return False
        base_tokens = paths.common_length(last.sequence, ids)
        base_keys = min(base_tokens, len(last.prompt_ids)) // chunk
        keys = cache.keys(ids, last.prompt_keys[:base_keys])
        async with self.context.memory.eviction_lock:
            state = self.context.sequencer.state
            kept, shared = paths.reusable_prewarm(state, cache.session, keys)
            if kept + shared == len(keys):
                return False
            cache.append(
                ev.PrewarmStarted(
                    session=cache.id,
                    next_role=beginning.next_role,
                    rules_version=paths.RULES_VERSION,
                    tokens=len(ids),
                    base_tokens=base_tokens,
                    new_ids=ids[base_tokens:],
                    base_keys=base_keys,
                    new_keys=keys[base_keys:],
                    blocks_from_slab=kept,
                    blocks_from_pool=shared,
                )
            )
        return True

    @property
    def _prewarm(self) -> OpenPrewarm:
        prewarm = self.cache.session.prewarm
        assert prewarm is not None
        return prewarm

    async def _reuse(self, prewarm: OpenPrewarm) -> ev.GivenUp | None:
        """Bring the slab to what is there of it; why not, where that ended before."""
        cache = self.cache
        held = prewarm.blocks_from_slab * cache.chunk
        if cache.session.cached_tokens > held:
            await cache.trim(held, "not in what is anticipated")
        keys = prewarm.keys[prewarm.blocks_from_slab :][: prewarm.blocks_from_pool]
        for copy in cache.copies(keys, held):
            done = await self.idle_time.run(partial(self._copied, copy))
            if not done:
                await cache.end_copy()
                return self.idle_time.ended_by if done is None else "doubt"
        return None

    async def _copied(self, copy: Copy, wanted: Callable[[], bool]) -> bool | None:
        # Not before the wait, in which others may find a block wrong.
        if self.cache.is_quarantined(copy.keys):
            return False
        return await self.cache.restore_prewarmed(copy, wanted) or None

    def _give_up(self, reason: ev.GivenUp, computed: int) -> None:
        self.cache.append(
            ev.PrewarmAbandoned(session=self.cache.id, reason=reason, computed_tokens=computed)
        )
