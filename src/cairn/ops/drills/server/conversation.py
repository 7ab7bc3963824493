"""The requests of a victim, and of a bystander, whom the damage must not affect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from cairn.ops.drills.server.client import Answer

Body = Mapping[str, Any]
Message = Mapping[str, str]

VICTIM = "the-victim"
AGAIN = "the-victim-again"
BYSTANDER = "the-bystander"
NEWCOMER = "a-newcomer"

_PATH = "Tell me the way from the lower cairn to the upper one, and what the wind does there."
# Pebble answers this one in several sentences.
_LONG = "What can you do?"


def user(text: str) -> Message:
    """A message of a user."""
    return {"role": "user", "content": text}


def body(session: str, messages: Sequence[Message], **more: Any) -> Body:
    """A greedy request for a short answer with log-probabilities."""
    return {
        "messages": list(messages),
        "session_id": session,
        "temperature": 0,
        "seed": 1,
        "max_tokens": 8,
        "logprobs": True,
        **more,
    }


def onward(messages: Sequence[Message], answer: Answer, text: str) -> list[Message]:
    """The conversation with an answer and the user's next message."""
    return [*messages, {"role": "assistant", "content": answer.text}, user(text)]


# --- the victim ----------------------------------------------------------------------------------

_VICTIMS = [user(f"Victim speaking. {_PATH}")]


def victim_first() -> Body:
    """The victim's first request, before anything is damaged."""
    return body(VICTIM, _VICTIMS)


def goes_on(first: Answer) -> list[Body]:
    """The victim continues its conversation."""
    return [body(VICTIM, onward(_VICTIMS, first, "And from there?"))]


def needs_a_larger_slab(first: Answer) -> list[Body]:
    """The victim asks for an answer so long that its slab has to be exchanged."""
    long = onward(_VICTIMS, first, "Leave nothing out.")
    return [body(VICTIM, long, max_tokens=600, stop=["e"])]


def then_a_newcomer(first: Answer) -> list[Body]:
    """The same, and then a client without a session."""
    newcomer = body(NEWCOMER, [user("A newcomer asks for the way.")])
    return [*needs_a_larger_slab(first), newcomer]


def asks_the_same(first: Answer) -> list[Body]:
    """The victim's messages in another session, which reuses its blocks."""
    return [body(AGAIN, _VICTIMS)]


def asks_the_same_cold(first: Answer) -> list[Body]:
    """The victim's messages in another session and without the cache, so all is computed again."""
    return [body(AGAIN, _VICTIMS, cache_prompt=False)]


def streams(first: Answer) -> list[Body]:
    """The victim continues, and streams the answer."""
    return [body(VICTIM, onward(_VICTIMS, first, _LONG), max_tokens=40, stream=True)]


# --- the bystander -------------------------------------------------------------------------------

_BYSTANDERS = [user(f"Bystander speaking. {_PATH}")]


@attrs.define
class Bystander:
    """A conversation of three turns: before the damage, beside it, and after it."""

    messages: list[Message] = attrs.field(factory=lambda: list(_BYSTANDERS))

    def first(self) -> Body:
        """Before."""
        return body(BYSTANDER, self.messages)

    def next(self, answer: Answer, text: str, **more: Any) -> Body:
        """The next turn after an answer."""
        self.messages = onward(self.messages, answer, text)
        return body(BYSTANDER, self.messages, **more)

    def beside(self, first: Answer) -> Body:
        """Beside: long enough that the damage happens during the answer."""
        return self.next(first, _LONG, max_tokens=20)

    def after(self, second: Answer) -> Body:
        """After."""
        return self.next(second, "Thank you. And home?")
