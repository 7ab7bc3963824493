"""
What the next prompt of a conversation will begin with, found out before it comes.

A client sends the answer back, its thoughts and calls apart, and says something more. The template
may render the answer, and even older turns, in another way then than what was generated: Qwen3's
drops what was thought as soon as a user speaks, and a call's JSON gets the template's spacing. So
the whole is rendered as that request would have it, with two different messages at its end; what
the token ids of the two have in common is there whatever is said, but for the last token of it
perhaps, with which a tokenizer may join what a third message begins with. It is a matter of speed
alone: a prompt's tokens, and the blocks it reuses, follow from the prompt itself.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import attrs
import trio

from cairn.engine.prompt import template as prompts
from cairn.engine.prompt.encoder import Encoder
from cairn.engine.prompt.template import Conversation, Message
from cairn.journal.events import NextRole
from cairn.journal.paths import common_length

Ids = tuple[int, ...]
Step = Callable[[Callable[[], bool]], Awaitable[Ids | None]]
"""See ``IdleTime.run``."""


class Unrendered(Exception):
    """A conversation with its answer could not be brought to tokens. The cause says why."""


@attrs.frozen
class Beginning:
    """
    What the next prompt will begin with.

    Attributes:
        next_role: who is expected to speak.
        ids: its token ids from the first one on, up to where what is said next makes a difference.
    """

    next_role: NextRole
    ids: Ids


class NextPrompt:
    """Renders conversations one turn further. Changes nothing."""

    def __init__(self, tokenizer: Any, encoder: Encoder, tokenizing: trio.CapacityLimiter) -> None:
        """
        Args:
            tokenizer: mlx-lm's wrapper.
            encoder: tokenises what is new, and remembers it for the request that will come.
            tokenizing: who tokenises holds this. It is given back between two renderings, and one
                that has waited for it looks first whether it is wanted still. So a request waits
                for the one in hand at most, however many sessions render.
        """
        self._tokenizer = tokenizer
        self._encoder = encoder
        self._tokenizing = tokenizing

    async def beginning(
        self,
        conversation: Conversation,
        said: Message,
        tenant: str,
        in_idle_time: Callable[[Step], Awaitable[Ids | None]],
    ) -> Beginning | None:
        """
        What the prompt after this answer will begin with; None where there was no time. May be
        cancelled: the rendering in hand goes on in its thread then, and nobody hears of it.

        Args:
            said: the answer, as its client will send it back.
            tenant: whose conversation it is.
            in_idle_time: runs each rendering when that disturbs nobody.

        Raises:
            Unrendered: the template cannot render it, or the tokenizer not take it.
        """
        one, other = prompts.next_turns(conversation, said)
        first = await in_idle_time(lambda wanted: self._ids(one, tenant, wanted))
        if first is None:
            return None
        second = await in_idle_time(lambda wanted: self._ids(other, tenant, wanted))
        if second is None:
            return None
        return Beginning(prompts.next_role(said), first[: common_length(first, second)])

    async def _ids(
        self, conversation: Conversation, tenant: str, wanted: Callable[[], bool]
    ) -> Ids | None:
        def render() -> Ids | None:
            if not wanted():
                return None
            text = prompts.render(self._tokenizer, conversation)
            return self._encoder.encode(text, tenant=tenant)

        try:
            return await trio.to_thread.run_sync(
                render, limiter=self._tokenizing, abandon_on_cancel=True
            )
        except Exception as error:  # template and tokenizer are the model's: anything may come out
            raise Unrendered(f"{type(error).__name__}: {error}") from error
