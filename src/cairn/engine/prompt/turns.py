"""
Converts messages and the parts of answers to JSON text for storage, and back. Fields of either may
be added but never renamed, because text that earlier versions stored must stay readable.
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
    """Messages as JSON text."""
    return msgspec.json.encode(list(messages)).decode()


def messages_of(text: str) -> tuple[Message, ...]:
    """
    The messages of a stored text.

    Raises:
        msgspec.MsgspecError: the text has a different form.
    """
    return msgspec.json.decode(text, type=tuple[Message, ...])


def parts_text(parts: Sequence[AnswerPart]) -> str:
    """The parts of an answer as JSON text. Consecutive parts of the same kind are joined."""
    return msgspec.json.encode([{_NAMES[type(one)]: one} for one in joined(parts)]).decode()


def parts_of(text: str) -> tuple[AnswerPart, ...]:
    """
    The parts of a stored answer.

    Raises:
        msgspec.MsgspecError: the text has a different form.
        KeyError: it has a part of an unknown kind.
    """
    found = msgspec.json.decode(text, type=list[dict[str, dict[str, Any]]])
    return tuple(msgspec.convert(part, _KINDS[name]) for one in found for name, part in one.items())


def joined(parts: Sequence[AnswerPart]) -> tuple[AnswerPart, ...]:
    """The same parts, with consecutive words joined into one part, and consecutive thoughts too."""
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
