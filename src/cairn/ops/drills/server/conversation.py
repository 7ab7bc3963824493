"""Who talks to the private server: a victim, and a bystander who must not notice anything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from cairn.ops.drills.server.client import Answer
from cairn.ops.drills.server.private_server import private_server

Body = Mapping[str, Any]
Message = Mapping[str, str]

VICTIM = "the-victim"
AGAIN = "the-victim-again"
BYSTANDER = "the-bystander"
NEWCOMER = "a-newcomer"

_PATH = "Tell me the way from the lower cairn to the upper one, and what the wind does there."
# Pebble has several sentences to say to this one.
_LONG = "What can you do?"


def user(text: str) -> Message:
    """What a user says."""
    return {"role": "user", "content": text}


def body(session: str, messages: Sequence[Message], **more: Any) -> Body:
    """A request: greedy, with log-probabilities, for a short answer."""
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
    """The conversation after an answer, with what the user says next."""
    return [*messages, {"role": "assistant", "content": answer.text}, user(text)]


# --- the victim ----------------------------------------------------------------------------------

_VICTIMS = [user(f"Victim speaking. {_PATH}")]


def victim_first() -> Body:
    """The victim's first request, before anything is damaged."""
    return body(VICTIM, _VICTIMS)


def goes_on(first: Answer) -> list[Body]:
    """The victim goes on with its conversation."""
    return [body(VICTIM, onward(_VICTIMS, first, "And from there?"))]


def needs_a_larger_slab(first: Answer) -> list[Body]:
    """The victim goes on and asks for so long an answer that its slab has to be exchanged."""
    long = onward(_VICTIMS, first, "Leave nothing out.")
    return [body(VICTIM, long, max_tokens=600, stop=["e"])]


def then_a_newcomer(first: Answer) -> list[Body]:
    """The same, and then somebody who is not known yet."""
    newcomer = body(NEWCOMER, [user("A newcomer asks for the way.")])
    return [*needs_a_larger_slab(first), newcomer]


def asks_the_same(first: Answer) -> list[Body]:
    """The victim's words under another name, so that its blocks are taken over."""
    return [body(AGAIN, _VICTIMS)]


def asks_the_same_cold(first: Answer) -> list[Body]:
    """
    The victim's words under another name and without the cache, so that all is computed again.
    """
    return [body(AGAIN, _VICTIMS, cache_prompt=False)]


def streams(first: Answer) -> list[Body]:
    """The victim goes on, and reads the answer as it comes."""
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
        """Beside: long enough that the damage falls into it."""
        return self.next(first, _LONG, max_tokens=20)

    def after(self, second: Answer) -> Body:
        """After."""
        return self.next(second, "Thank you. And home?")


@attrs.frozen
class Reference:
    """
    What is answered where nothing is damaged. By P1 it does not matter what else was served.

    Attributes:
        victim: to the victim's first request.
        bystander: to the bystander's three turns.
    """

    victim: Answer
    bystander: tuple[Answer, Answer, Answer]


async def reference(directory: Path, model: Path) -> Reference:
    """Hold the conversations on a server that is let alone. One serves for all drills."""
    async with private_server(directory, model) as house:
        ask, talk = house.client.ask, Bystander()
        victim = await ask(victim_first())
        first = await ask(talk.first())
        second = await ask(talk.beside(first))
        third = await ask(talk.after(second))
    return Reference(victim, (first, second, third))
