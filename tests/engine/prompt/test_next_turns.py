"""
The beginning of the next prompt, predicted from the template and not from the generated tokens.
What a client sends back is taken from the parts of an answer here; ``tests/http/test_sent_back.py``
goes the whole way.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from mlx_lm.tokenizer_utils import load as load_tokenizer

from cairn.actors.sessions.next_prompt import Beginning, Ids, NextPrompt, Step, Unrendered
from cairn.actors.threads.prompts import PromptThreads
from cairn.engine.answer.parts import Called, Said, Thought
from cairn.engine.prompt.encoder import Encoder
from cairn.engine.prompt.template import Conversation, Message, message_of, next_role, prompt_ids

TOOLS = ({"type": "function", "function": {"name": "weigh_stone", "parameters": {}}},)
ASKED = Conversation(
    messages=(
        Message(role="system", content="You weigh stones."),
        Message(role="user", content="How heavy is slate?"),
    )
)
THOUGHT = message_of([Thought("Slate is "), Thought("a stone."), Said("It is "), Said("heavy.")])
CALL = message_of(
    [
        Thought("I weigh it."),
        Called(index=0, id="a1", name="weigh_stone", arguments='{"stone":"slate"}'),
        Called(index=1, id="b2", name="weigh_stone", arguments="{}"),
    ]
)


@pytest.fixture(scope="module", name="tokenizer")
def tokenizer_(model_directory: Path) -> Any:
    """The random model's, with Pebble's template."""
    return load_tokenizer(model_directory)


def beginning(tokenizer: Any, conversation: Conversation, said: Message) -> Beginning:
    """What the next prompt will begin with."""

    async def at_once(step: Step) -> Ids | None:
        return await step(lambda: True)

    next_prompt = NextPrompt(Encoder(tokenizer), PromptThreads())
    found = trio.run(next_prompt.beginning, conversation, said, "local", at_once)
    assert found is not None
    return found


def after(conversation: Conversation, *more: Message) -> Conversation:
    """A conversation with a further turn."""
    return attrs.evolve(conversation, messages=(*conversation.messages, *more))


@pytest.mark.parametrize(
    "text", ["And then?", "7", "", "\n\nYes", " no", "<think>", "Ünd", "🪨 stone"]
)
def test_it_is_sure_whatever_the_user_says(tokenizer: Any, text: str) -> None:
    """Every next prompt begins with it, and it ends where the user begins to speak."""
    found = beginning(tokenizer, ASKED, THOUGHT)
    prompt = prompt_ids(tokenizer, after(ASKED, THOUGHT, Message(role="user", content=text)))
    assert "user" == found.next_role
    assert found.ids == prompt[: len(found.ids)]
    rendered = tokenizer.decode(list(found.ids))
    assert rendered.rstrip("\n").endswith("It is heavy.<|im_end|>\n<|im_start|>user")
    assert "Slate is a stone" not in rendered


def test_it_keeps_the_thought_where_a_tool_is_called(tokenizer: Any) -> None:
    """
    The next to speak is the tool then, and the template keeps what was thought before the call. It
    ends where the first result begins, and calls stand as the template spaces them.
    """
    conversation = attrs.evolve(ASKED, tools=TOOLS)
    found = beginning(tokenizer, conversation, CALL)
    results = [Message(role="tool", content="3 kg", tool_call_id=one) for one in ("a1", "b2")]
    prompt = prompt_ids(tokenizer, after(conversation, CALL, *results))
    assert "tool" == found.next_role
    assert found.ids == prompt[: len(found.ids)]
    rendered = tokenizer.decode(list(found.ids))
    assert "I weigh it." in rendered
    assert '"arguments": {"stone": "slate"}}' in rendered
    assert rendered.rstrip("\n").endswith(
        "</tool_call><|im_end|>\n<|im_start|>user\n<tool_response>"
    )


def test_the_next_role() -> None:
    """A tool, where the answer calls one."""
    assert "tool" == next_role(CALL)
    assert "user" == next_role(THOUGHT)


def test_arguments_that_are_no_object_stay_as_they_are() -> None:
    """Arguments that are not an object are rendered as text, as when a client sends them."""
    deep = '{"a":' * 70 + "1" + "}" * 70
    for text in ("[1]", "{", '{"a": 36893488147419103232}', deep):
        (call,) = message_of([Called(index=0, id="a1", name="look", arguments=text)]).tool_calls
        assert text == call["function"]["arguments"]


def test_every_call_has_its_result(tokenizer: Any) -> None:
    """A template that refuses a call without its result does not prevent prewarming."""

    class Strict:
        def apply_chat_template(self, messages: list[dict[str, Any]], **settings: Any) -> str:
            called = [call["id"] for one in messages for call in one.get("tool_calls", ())]
            assert called == [one["tool_call_id"] for one in messages if one["role"] == "tool"]
            text: str = tokenizer.apply_chat_template(messages, **settings)
            return text

        def encode(self, text: str, *, add_special_tokens: bool) -> Any:
            return tokenizer.encode(text, add_special_tokens=add_special_tokens)

    conversation = attrs.evolve(ASKED, tools=TOOLS)
    assert beginning(tokenizer, conversation, CALL) == beginning(Strict(), conversation, CALL)


def test_a_prompt_that_is_no_longer_needed_is_not_rendered(tokenizer: Any) -> None:
    """A rendering that has waited for the tokenizer looks before it begins."""

    async def main() -> None:
        asked: list[str] = []

        async def never(step: Step) -> Ids | None:
            asked.append("once")
            return await step(lambda: False)

        next_prompt = NextPrompt(Encoder(tokenizer), PromptThreads())
        assert await next_prompt.beginning(ASKED, THOUGHT, "local", never) is None
        assert ["once"] == asked

    trio.run(main)


def test_a_tokenizer_that_fails_is_reported_like_a_template() -> None:
    """
    Whatever comes out of the model's code, nothing is known of the next prompt, and nothing else
    follows.
    """

    class Borrowed:
        def apply_chat_template(self, messages: Any, **settings: Any) -> str:
            return "text"

        def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
            raise RuntimeError("Already borrowed")

    with pytest.raises(Unrendered, match="Already borrowed"):
        beginning(Borrowed(), ASKED, THOUGHT)
