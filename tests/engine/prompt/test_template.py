"""Conversations as templates take them, and the chain of parts by which they are compared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import pytest

from cairn.engine.prompt.template import (
    Conversation,
    Message,
    TemplateError,
    chain_of,
    conversation_parts,
    next_turns,
    render,
)

TOOL = {"type": "function", "function": {"name": "look", "parameters": {}}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": {}}}
WHOLE = Conversation(
    messages=(
        Message(role="user", content="Look.", name="ada"),
        Message(role="assistant", content="", reasoning="hm", tool_calls=(CALL,)),
        Message(role="tool", content="slate", tool_call_id="call_1"),
    ),
    tools=(TOOL,),
    template={"enable_thinking": False},
)


@attrs.define
class Recording:
    """A tokenizer whose template records its arguments."""

    messages: list[dict[str, Any]] = attrs.field(factory=list)
    arguments: dict[str, Any] = attrs.field(factory=dict)
    error: Exception | None = None
    before_last: str | None = None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Text to token ids."""
        return [ord(character) for character in text]

    def decode(self, ids: Sequence[int]) -> str:
        """Token ids to text."""
        return "".join(map(chr, ids))

    def apply_chat_template(self, messages: list[dict[str, Any]], **kwargs: Any) -> str:
        """A conversation to text."""
        if self.error is not None:
            raise self.error
        self.messages, self.arguments = messages, kwargs
        if self.before_last is not None:
            return f"{self.before_last}{messages[-1]['content'].lstrip()}<end>\n"
        return "rendered"


def test_what_a_template_gets() -> None:
    """The fields that a message has, the tools, and the settings."""
    tokenizer = Recording()
    assert "rendered" == render(tokenizer, WHOLE)
    assert [
        {"role": "user", "content": "Look.", "name": "ada"},
        {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [CALL]},
        {"role": "tool", "content": "slate", "tool_call_id": "call_1"},
    ] == tokenizer.messages
    expected = {"add_generation_prompt": True, "tokenize": False, "enable_thinking": False}
    assert {**expected, "tools": [TOOL]} == tokenizer.arguments
    render(tokenizer, attrs.evolve(WHOLE, tools=()))
    assert None is tokenizer.arguments["tools"]


def test_a_template_that_raises() -> None:
    """Whatever it raises, the client gets one kind of error."""
    with pytest.raises(TemplateError, match="cannot render this conversation: no such role"):
        render(Recording(error=ValueError("no such role")), WHOLE)


BEGUN = Conversation(
    messages=(
        Message(role="user", content="Say."),
        Message(role="assistant", content=" The stone is ", reasoning="hm"),
    ),
    continued=True,
)


def test_a_message_that_is_continued() -> None:
    """The prompt ends with it, to the last space, and nothing that ends a message follows."""
    tokenizer = Recording(before_last="<user>Say.<assistant>")
    assert "<user>Say.<assistant>The stone is " == render(tokenizer, BEGUN)
    assert not tokenizer.arguments["add_generation_prompt"]
    assert " The stone is " == BEGUN.messages[-1].content
    with pytest.raises(TemplateError, match="so it cannot be continued"):
        render(Recording(), BEGUN)


def test_the_chain_of_a_message_that_is_continued() -> None:
    """Its last part has a name of its own, because it is no whole message."""
    whole = attrs.evolve(BEGUN, continued=False)
    assert ["user", "continued"] == [label for label, _, _ in chain(BEGUN)]
    assert chain(whole)[0] == chain(BEGUN)[0]
    assert chain(whole)[1][1] != chain(BEGUN)[1][1]


def test_the_turns_after_a_message_that_was_continued() -> None:
    """They have it as one message: what the client sent of it, and the rest."""
    said = Message(role="assistant", content="grey.", reasoning=" so")
    for turn in next_turns(BEGUN, said):
        assert not turn.continued
        (asked, whole, after) = turn.messages
        assert (BEGUN.messages[0], "user") == (asked, after.role)
        assert Message(role="assistant", content=" The stone is grey.", reasoning="hm so") == whole
    (_, whole, _) = next_turns(
        attrs.evolve(BEGUN, messages=(asked, Message(role="assistant", content="a"))),
        Message(role="assistant", content="b"),
    )[0].messages
    assert Message(role="assistant", content="ab") == whole


def chain(conversation: Conversation, tenant: str = "local") -> list[tuple[str, str, str]]:
    """The chain of a conversation."""
    return list(chain_of(conversation_parts(conversation), secret=b"s", tenant=tenant))


def test_the_chain_of_a_conversation() -> None:
    """Tools first; a change changes all parts after it, and another tenant shares none."""
    expected = chain(WHOLE)
    assert ["tools", "user", "assistant", "tool"] == [label for label, *_ in expected]
    assert expected[:2] == chain(attrs.evolve(WHOLE, messages=WHOLE.messages[:1]))
    for other in (chain(attrs.evolve(WHOLE, tools=(TOOL, TOOL))), chain(WHOLE, "neighbour")):
        assert not {key for _, key, _ in expected} & {key for _, key, _ in other}
    assert 3 == len(chain(attrs.evolve(WHOLE, tools=())))


def test_what_clients_change_is_not_compared() -> None:
    """Thoughts that are dropped, ids of calls, and settings of the template."""
    user, answer, result = WHOLE.messages
    later = attrs.evolve(
        WHOLE,
        messages=(
            user,
            attrs.evolve(answer, reasoning=None, tool_calls=({**CALL, "id": "call_9"},)),
            attrs.evolve(result, tool_call_id="call_9"),
        ),
        template={},
    )
    assert chain(WHOLE) == chain(later)
