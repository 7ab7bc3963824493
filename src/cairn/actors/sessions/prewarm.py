"""
Prewarm, the last step of a request: compute canonical KV for the next one before it comes.

What the next prompt begins with is predicted (``next_prompt.py``), recorded and computed, a block
at a time in idle time. Where it cannot be predicted, prompt and answer are computed instead. With
the grain C only full blocks are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

import attrs
import structlog

from cairn.actors.requests.ticket import Ticket
from cairn.actors.sessions.cache import Copy, SessionCache
from cairn.actors.sessions.context import SessionContext
from cairn.actors.sessions.idle_time import IdleTime
from cairn.actors.sessions.inbox import Inbox
from cairn.actors.sessions.next_prompt import Beginning, Unrendered
from cairn.engine.prompt.template import Conversation, Message, TemplateError
from cairn.engine.schedule import passes
from cairn.journal import events as ev
from cairn.journal import paths
from cairn.journal.state import OpenPrewarm

log = structlog.get_logger("cairn")


@attrs.frozen
class Prewarm:
    """Computes ahead for one session."""

    context: SessionContext
    cache: SessionCache
    inbox: Inbox

    async def next_turn(self, ticket: Ticket, message: Message | None) -> bool:
        """
        Compute what the next request will reuse.

        Args:
            ticket: the request that was answered.
            message: the answer, as its client will send it back; None if it was cut off.

        Returns:
            False if a command came before all of it was there.
        """
        if message is None or self.cache.session.slab is None:
            return True
        idle_time = IdleTime(self.context.activity, self.inbox, self.context.patience_s)
        conversation = ticket.prepared.command.conversation
        if self.context.next_prompt is not None and conversation is not None:
            complete = await self._predicted(conversation, message, idle_time)
            if complete is not None:
                return complete
        return await self._prompt_and_answer(idle_time)

    async def _prompt_and_answer(self, idle_time: IdleTime) -> bool:
        """
        Compute what is missing of the KV of prompt and answer. False if a command came before that.
        """
        cache = self.cache
        session = cache.session
        assert session.last is not None
        sequence = session.last.sequence
        end = cache.whole(len(sequence))
        if end == session.cached_tokens or not cache.is_indexed(len(sequence)):
            return True
        if (
            self.context.facts.policy is not None
            and not session.slab_keys
            and session.last.prompt_keys
        ):
            return True  # it was all cut off; the next request copies in what it needs
        keys = cache.keys(sequence, session.last.prompt_keys)
        return await compute(cache, idle_time, sequence[:end], keys) is not None

    async def _predicted(
        self, conversation: Conversation, message: Message, idle_time: IdleTime
    ) -> bool | None:
        """
        Compute what is missing of the KV of what the next prompt begins with.

        Returns:
            False if a command came before all of it was there; None if nothing can be predicted.
        """
        beginning = await self._beginning(conversation, message, idle_time)
        if beginning is None:
            # Not rendered, or interrupted: only then is something left out.
            return None if idle_time.lasts() else False
        begun = await idle_time.run(lambda _: self._begin(beginning))
        if not begun:
            return begun is not None
        prewarm = self._open
        if (ended_by := await self._reuse(prewarm, idle_time)) is not None:
            self._abandon(ended_by, 0)
            return ended_by == "quarantined"
        done = await compute(self.cache, idle_time, prewarm.ids, prewarm.keys, prewarmed=True)
        computed = self._open.computed_tokens
        if done is None:
            self._abandon(idle_time.ended_by, computed)
            return False
        if done == "quarantined":
            self._abandon("quarantined", computed)
            return True
        self.cache.append(
            ev.PrewarmFinished(
                session=self.cache.id, tokens=len(prewarm.ids), computed_tokens=computed
            )
        )
        return True

    async def _beginning(
        self, conversation: Conversation, message: Message, idle_time: IdleTime
    ) -> Beginning | None:
        """What the next prompt begins with; None if it is unknown or a command came."""
        assert self.context.next_prompt is not None
        try:
            return await self.context.next_prompt.beginning(
                conversation, message, self.cache.session.tenant, idle_time.run
            )
        except Unrendered as error:
            if not isinstance(error.__cause__, TemplateError):
                log.warning("the next turn was not rendered", session=self.cache.id, exc_info=error)
            self._abandon("render_failed", 0)
        return None

    async def _begin(self, beginning: Beginning) -> bool:
        """
        Record what is to be computed and what of it exists, and pin its blocks. False if all of it
        exists, or if it is too short to be cached.
        """
        cache, block_tokens = self.cache, self.cache.block_tokens
        last, slab = cache.session.last, cache.session.slab
        assert last is not None and slab is not None
        ids = beginning.ids[: cache.whole(min(len(beginning.ids), slab.capacity_tokens))]
        if not cache.is_indexed(len(beginning.ids)):
            return False
        base_tokens = paths.common_length(last.sequence, ids)
        base_keys = min(base_tokens, len(last.prompt_ids)) // block_tokens
        keys = cache.keys(ids, last.prompt_keys[:base_keys])
        async with self.context.memory.eviction_lock:
            state = self.context.sequencer.state
            reuse = paths.reusable_prewarm(state, cache.session, ids, keys)
            if reuse.total(block_tokens) == len(ids):
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
                    tokens_from_slab=reuse.tokens,
                    blocks_from_slab=reuse.blocks,
                    blocks_from_pool=reuse.shared,
                    partial_key=reuse.partial,
                    tokens_from_partial=reuse.rows,
                )
            )
        return True

    @property
    def _open(self) -> OpenPrewarm:
        prewarm = self.cache.session.prewarm
        assert prewarm is not None
        return prewarm

    async def _reuse(self, prewarm: OpenPrewarm, idle_time: IdleTime) -> ev.AbandonReason | None:
        """Bring the slab to what exists. The reason, if it ended before that."""
        cache = self.cache
        held = prewarm.tokens_from_slab
        if cache.session.cached_tokens > held:
            await cache.trim(held, "not part of the next prompt")
        keys = prewarm.keys[prewarm.blocks_from_slab :][: prewarm.blocks_from_pool]
        part = prewarm.partial_key, prewarm.tokens_from_partial
        for copy in cache.copies(keys, held, *part):
            done = await idle_time.run(partial(self._copied, copy))
            if not done:
                await cache.end_copy()
                return idle_time.ended_by if done is None else "quarantined"
        return None

    async def _copied(self, copy: Copy, still_needed: Callable[[], bool]) -> bool | None:
        # Checked after the wait, in which another session may quarantine a block.
        if self.cache.has_quarantined(copy.keys):
            return False
        return await self.cache.restore_prewarmed(copy, still_needed) or None

    def _abandon(self, reason: ev.AbandonReason, computed: int) -> None:
        self.cache.append(
            ev.PrewarmAbandoned(session=self.cache.id, reason=reason, computed_tokens=computed)
        )


async def compute(
    cache: SessionCache,
    idle_time: IdleTime,
    ids: Sequence[int],
    keys: Sequence[str],
    *,
    prewarmed: bool = False,
) -> Literal["done", "quarantined"] | None:
    """
    Compute the rest of a sequence after what the slab holds, and seal its full blocks.

    Args:
        ids: of the whole sequence.
        keys: of its full blocks.
        prewarmed: whether no request needs it yet, see ``Memory.seal``.

    Returns:
        None if the idle time ended before; ``quarantined`` if a block or one that it is built on
        is: nothing of it stays in the slab.
    """
    for start, end in passes(cache.session.cached_tokens, len(ids), cache.block_tokens):
        begin = start - start % cache.block_tokens
        full = end == begin + cache.block_tokens
        key = keys[begin // cache.block_tokens] if full else None
        ran = await idle_time.run(partial(_pass, cache, ids[start:end], key, begin))
        if ran is None:
            return None
        if not cache.can_seal(key, begin):
            if cache.session.cached_tokens > begin:
                await cache.trim(begin, "a quarantined block, or built on one")
            return "quarantined"
        if key is not None:
            await cache.seal(key, begin, end, prewarmed=prewarmed)
    return "done"


async def _pass(
    cache: SessionCache,
    ids: Sequence[int],
    key: str | None,
    begin: int,
    still_needed: Callable[[], bool],
) -> bool | None:
    # Checked after the wait, in which another session may quarantine a block.
    if not cache.can_seal(key, begin):
        return False
    return await cache.settle(ids, still_needed) or None
