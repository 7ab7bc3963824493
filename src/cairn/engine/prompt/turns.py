"""
Turns of a conversation as text, and back: how messages and the parts of an answer are kept. Fields
may be added to both, never renamed: text of earlier versions is read for as long as it is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from cairn.engine.answer.parts import AnswerPart, Called, Said, Thought
from cairn.engine.prompt.template import Message

_KINDS: dict[str, type[AnswerPart]] = {"said": Said, "thought": Thought, "called": Called}
_NAMES = {kind: name for name, kind in _KINDS.items()}


def messages_text(messages: Sequence[Message]) -> str:
    """Messages as text."""
    return msgspec.json.encode(list(messages)).decode()


def messages_of(text: str) -> tuple[Message, ...]:
    """The messages that a text is. Raises ``msgspec.MsgspecError`` where it is none of ours."""
    return msgspec.json.decode(text, type=tuple[Message, ...])


def parts_text(parts: Sequence[AnswerPart]) -> str:
    """The parts of an answer as text; those of one kind that follow each other as one."""
    return msgspec.json.encode([{_NAMES[type(one)]: one} for one in joined(parts)]).decode()


def parts_of(text: str) -> tuple[AnswerPart, ...]:
    """
    The parts that a text is. Raises ``msgspec.MsgspecError`` or ``KeyError`` where it is none of
    ours.
    """
    found = msgspec.json.decode(text, type=list[dict[str, dict[str, Any]]])
    return tuple(msgspec.convert(part, _KINDS[name]) for one in found for name, part in one.items())


def joined(parts: Sequence[AnswerPart]) -> tuple[AnswerPart, ...]:
    """The same parts, with words that follow each other as one, and thoughts likewise."""
    whole: list[AnswerPart] = []
    for part in parts:
        match whole[-1] if whole else None, part:
            case Said(before), Said(text):
                whole[-1] = Said(before + text)
            case Thought(before), Thought(text):
                whole[-1] = Thought(before + text)
            case _:
                whole.append(part)
    return tuple(whole)
