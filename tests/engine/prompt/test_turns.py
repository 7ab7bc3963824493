"""Messages and answers as they are stored."""

from __future__ import annotations

import pytest

from cairn.engine.answer.parts import AnswerPart, Called, Said, Thought
from cairn.engine.prompt.template import Message
from cairn.engine.prompt.turns import joined, messages_of, messages_text, parts_of, parts_text

CALL = Called(index=0, id="call_1", name="look", arguments="{}")
PARTS: tuple[AnswerPart, ...] = (
    *(Thought("I "), Thought("see."), Said("It"), Said(" is "), Said("slate."), CALL, Said("Bye.")),
)


def test_messages_come_back() -> None:
    """All fields of all messages, in order."""
    messages = (
        Message(role="user", content="Hello"),
        Message(role="assistant", content="", reasoning="hm", tool_calls=({"id": "call_1"},)),
        Message(role="tool", content="1 kg", tool_call_id="call_1", name="weigh"),
    )
    assert messages == messages_of(messages_text(messages))


def test_parts_come_back_joined() -> None:
    """Consecutive words are one part, and so are consecutive thoughts; calls stay apart."""
    expected = (Thought("I see."), Said("It is slate."), CALL, Said("Bye."))
    assert expected == joined(PARTS) == parts_of(parts_text(PARTS))
    assert () == parts_of(parts_text(()))


def test_a_part_of_an_unknown_kind() -> None:
    """It is not taken for another one."""
    with pytest.raises(KeyError):
        parts_of('[{"sung": {"text": "la"}}]')
