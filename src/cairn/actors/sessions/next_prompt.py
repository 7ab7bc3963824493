"""
Predicts what the next prompt of a conversation begins with.

``prewarm.py`` computes its KV, block by block in idle time.

A client sends the answer back, with reasoning and calls as separate fields, and adds a message. The
template may then render the answer, and even older turns, differently from what was generated:
Qwen3's drops the reasoning as soon as a user speaks, and a call's JSON gets the template's spacing.
So the conversation is rendered as that request would have it, twice, with two different messages at
its end. What the two have in common at their beginning is the prediction. Its last token may be
wrong, because a tokenizer may join it with the first text of a third message. Only speed depends on
it: a prompt's tokens, and the blocks it reuses, follow from the prompt itself.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import attrs

from cairn.actors.threads.prompts import PromptThreads, kind_of
from cairn.engine.prompt import template as prompts
from cairn.engine.prompt.encoder import Encoder
from cairn.engine.prompt.template import Conversation, Message
from cairn.journal.events import NextRole
from cairn.journal.paths import common_length

Ids = tuple[int, ...]
Step = Callable[[Callable[[], bool]], Awaitable[Ids | None]]
"""See ``IdleTime.run``."""


class Unrendered(Exception):
    """A conversation with its answer could not be rendered or tokenised; see the cause."""


@attrs.frozen
class Beginning:
    """
    What the next prompt begins with.

    Attributes:
        next_role: the role of the message that is expected next.
        ids: its token ids from the first one on, up to where that message makes a difference.
    """

    next_role: NextRole
    ids: Ids


class NextPrompt:
    """Renders conversations one turn ahead. Changes nothing."""

    def __init__(self, encoder: Encoder, threads: PromptThreads) -> None:
        """
        Args:
            encoder: renders, tokenises what is new, and caches it for the next request.
            threads: in which it renders. A rendering that has waited for one first checks whether
                it is still needed, so a request waits for one rendering of its tenant at most,
                however many sessions render.
        """
        self._encoder = encoder
        self._threads = threads

    async def beginning(
        self,
        conversation: Conversation,
        message: Message,
        tenant: str,
        in_idle_time: Callable[[Step], Awaitable[Ids | None]],
    ) -> Beginning | None:
        """
        What the prompt after this answer begins with; None if the idle time ended before. May be
        cancelled: a rendering that runs then ends in its thread, and its result is dropped.

        Args:
            message: the answer, as its client will send it back.
            tenant: that the conversation belongs to.
            in_idle_time: runs each rendering in idle time.

        Raises:
            Unrendered: the template cannot render it, or the tokenizer cannot encode it.
        """
        one, other = prompts.next_turns(conversation, message)
        first = await in_idle_time(lambda still_needed: self._ids(one, tenant, still_needed))
        if first is None:
            return None
        second = await in_idle_time(lambda still_needed: self._ids(other, tenant, still_needed))
        if second is None:
            return None
        return Beginning(prompts.next_role(message), first[: common_length(first, second)])

    async def _ids(
        self, conversation: Conversation, tenant: str, still_needed: Callable[[], bool]
    ) -> Ids | None:
        def render() -> Ids | None:
            if not still_needed():
                return None
            return self._encoder.encode(self._encoder.render(conversation), tenant=tenant)

        try:
            kind = kind_of(prompts.characters_of(conversation))
            return await self._threads.run(kind, tenant, render)
        except (
            Exception
        ) as error:  # template and tokenizer come with the model and may raise anything
            raise Unrendered(f"{type(error).__name__}: {error}") from error
