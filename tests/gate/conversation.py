"""
A conversation of thirty requests that takes every branch of path selection.

Each step is a function of what was said before, because the model's answers are part of the next
prompt. The expected path is part of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs

from cairn.engine.prompt.template import Conversation, Message
from tests.support.in_process_server import Said

TOOLS: tuple[Mapping[str, Any], ...] = (
    {
        "type": "function",
        "function": {
            "name": "weigh_stone",
            "description": "Weigh a stone of a cairn.",
            "parameters": {"type": "object", "properties": {"stone": {"type": "string"}}},
        },
    },
)


@attrs.frozen(kw_only=True)
class Step:
    """
    One request.

    Attributes:
        path: (path, reason) that it must take.
        warm: whether something must have been reused.
        settings: further fields of ``messages.Generate``.
    """

    conversation: Conversation
    path: tuple[str, str | None]
    warm: bool
    settings: Mapping[str, Any] = attrs.field(factory=dict)


@attrs.define
class Talk:
    """The messages so far. ``hear`` adds the answer to the last step."""

    messages: tuple[Message, ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()
    said: Said | None = None

    def hear(self, said: Said) -> None:
        """Add the answer as the next message."""
        self.said = said
        self.messages += (Message(role="assistant", content=said.text),)

    def conversation(self) -> Conversation:
        """The conversation so far."""
        return Conversation(messages=self.messages, tools=self.tools)


CONTINUES = ("continuation", None)
COLD = ("new_session", "cold_start")


def words(place: int, length: int = 14) -> str:
    """A text that no other step has."""
    stones = ("granite", "slate", "lichen", "summit", "saddle", "path", "cairn", "rain", "scree")
    return " ".join(f"{stones[(place * 7 + n * n) % 9]} {place * 31 + n}" for n in range(length))


def user(talk: Talk, text: str) -> None:
    """Add a user's message."""
    talk.messages += (Message(role="user", content=text),)


def thirty_steps() -> list[Callable[[Talk], Step]]:
    """The steps in order. Each extends the talk and returns the next request."""
    kept: dict[str, tuple[Message, ...]] = {}

    def opening(talk: Talk) -> Step:
        talk.messages = (Message(role="system", content="You know every stone. " + words(900)),)
        user(talk, words(1))
        return Step(conversation=talk.conversation(), path=COLD, warm=False)

    def going_on(place: int, length: int = 14, **settings: Any) -> Callable[[Talk], Step]:
        def step(talk: Talk) -> Step:
            user(talk, words(place, length))
            kept["last"] = talk.messages
            return Step(
                conversation=talk.conversation(), path=CONTINUES, warm=True, settings=settings
            )

        return step

    def repeated(talk: Talk) -> Step:
        talk.messages = kept["last"]
        return Step(
            conversation=talk.conversation(), path=("new_session", "shorter_history"), warm=True
        )

    def shorter(talk: Talk) -> Step:
        kept["whole"] = talk.messages
        talk.messages = talk.messages[:4]
        return Step(
            conversation=talk.conversation(), path=("new_session", "shorter_history"), warm=True
        )

    def edited(talk: Talk) -> Step:
        whole = kept["whole"]
        talk.messages = (*whole[:3], Message(role="user", content="edited: " + words(77)))
        return Step(conversation=talk.conversation(), path=("new_session", "diverged"), warm=True)

    def named(place: int, path: tuple[str, str | None], warm: bool) -> Callable[[Talk], Step]:
        def step(talk: Talk) -> Step:
            user(talk, words(place))
            return Step(
                conversation=talk.conversation(),
                path=path,
                warm=warm,
                settings={"session_name": "by-name"},
            )

        return step

    def named_opening(talk: Talk) -> Step:
        talk.messages = (Message(role="system", content="Named. " + words(901)),)
        return named(12, COLD, warm=False)(talk)

    def other_system(talk: Talk) -> Step:
        system = Message(role="system", content="Another temper. " + words(902))
        talk.messages = (system, *talk.messages[1:])
        return named(14, ("new_session", "diverged"), warm=False)(talk)

    def with_tools(talk: Talk) -> Step:
        talk.tools = TOOLS
        talk.messages = (Message(role="system", content="Use tools. " + words(903)),)
        user(talk, words(16))
        return Step(conversation=talk.conversation(), path=COLD, warm=False)

    def tool_called(place: int) -> Callable[[Talk], Step]:
        def step(talk: Talk) -> Step:
            # What a client makes of an answer: its reasoning and its call as separate fields.
            call = {
                "id": f"call_{place}",
                "type": "function",
                "function": {"name": "weigh_stone", "arguments": {"stone": f"stone {place}"}},
            }
            assert talk.said is not None
            spoken = Message(
                role="assistant",
                content="",
                reasoning=f"I should weigh it. {talk.said.text} {words(place, 12)}",
                tool_calls=(call,),
            )
            result = Message(role="tool", content=words(place, 20), tool_call_id=f"call_{place}")
            talk.messages = (*talk.messages[:-1], spoken, result)
            return Step(conversation=talk.conversation(), path=CONTINUES, warm=True)

        return step

    def no_cache(talk: Talk) -> Step:
        user(talk, words(24))
        return Step(
            conversation=talk.conversation(),
            path=("new_session", "cache_disabled"),
            warm=False,
            settings={"cache_prompt": False},
        )

    return [
        opening,
        going_on(2),
        going_on(3),
        going_on(4, 40),
        going_on(5),
        repeated,
        going_on(6),
        going_on(7, 1),
        shorter,
        edited,
        going_on(10),
        going_on(11),
        named_opening,
        named(13, CONTINUES, warm=True),
        other_system,
        named(15, CONTINUES, warm=True),
        with_tools,
        tool_called(17),
        tool_called(18),
        # The user speaks again: the template drops the thinking that it has kept so far.
        going_on(19),
        going_on(20),
        tool_called(21),
        going_on(22),
        going_on(23, max_tokens=1),
        no_cache,
        # Continues the session of the previous request, which was no continuation.
        going_on(25),
        going_on(26, 100),
        going_on(27, stop=("e",)),
        going_on(28, max_tokens=90),
        going_on(29),
    ]
