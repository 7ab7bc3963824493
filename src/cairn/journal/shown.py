"""
Whether the stored parts of an answer are what the text that its request released says. Pure.

The text is divided by the model's markers. Each piece of it between two markers, and each marker,
is shown as a whole or not at all: words and thoughts are the pieces that are shown, in order. White
space around a marker may be lost or added. A text without markers is shown as a whole.

What a call says is written in the text, too, in the model's own format. Parsers of these formats
are code of a library, so only texts are compared: the name, the names of the arguments, and their
texts. Numbers are compared if the arguments are the model's own JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import msgspec

PIECES_MAX = 512
"""
Of an answer with more pieces, only the order of characters is compared, because the number of steps
grows with the square of the number of pieces.
"""

_ESCAPES = ("\\", "&", "'")
"""Where one of these is in the text, a parser may have read something that is not in it as such."""

_ESCAPED = re.compile(
    r"\\(?:u(d[89ab][0-9a-f]{2})\\u(d[c-f][0-9a-f]{2})|(?:u([0-9a-f]{4})|x([0-9a-f]{2}))|([bfnrt]))",
    re.IGNORECASE,
)
"""What JSON and Python write for one character."""

_OF_LETTER = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}

_NAMES_OF_VALUES = frozenset(("true", "false", "null"))
"""Names of fields that Python writes in another way."""


class _Part(msgspec.Struct, forbid_unknown_fields=True):
    """A part of an answer as ``engine.prompt.turns`` stores it: one of its fields is set."""

    said: _Words | None = None
    thought: _Words | None = None
    called: _Called | None = None


class _Words(msgspec.Struct, forbid_unknown_fields=True):
    text: str


class _Called(msgspec.Struct, forbid_unknown_fields=True):
    index: int
    id: str
    name: str
    arguments: str
    cut: str | None = None


def shown_fault(answer: str, text: str, markers: Sequence[str]) -> str | None:
    """
    What of a stored answer its text does not say; None if it says all of it.

    Args:
        answer: the parts, as ``turn_stored`` has them.
        text: all that was released of the answer.
        markers: the texts that divide the model's answers.
    """
    try:
        parts = msgspec.json.decode(answer, type=list[_Part])
    except (msgspec.MsgspecError, RecursionError):
        return "parts of an unknown form"
    words = ""
    calls = 0
    for part in parts:
        if [part.said, part.thought, part.called].count(None) != 2:
            return "a part that is not of one kind"
        if (shown := part.said or part.thought) is not None:
            words += shown.text
        if (call := part.called) is not None:
            if call.index != calls:
                return "calls in another order"
            calls += 1
            if not _says(text, call):
                return f"call {call.index}"
    return None if _shows(text, words, markers) else "words"


# --- words ---------------------------------------------------------------------------------------


def _shows(text: str, words: str, markers: Sequence[str]) -> bool:
    """Whether words are the pieces of a text, some of them left out."""
    cuts = sorted({0, len(text), *_borders(text, markers)})
    if len(cuts) == 2:
        return words.strip() == text.strip()
    if len(cuts) > PIECES_MAX:
        return _in_order(words, text)
    end = len(words.rstrip())
    reached = {_past_space(words, 0)}
    for start, stop in pairwise(cuts):
        if piece := text[start:stop].strip():
            ends = [at + len(piece) for at in reached if words.startswith(piece, at)]
            reached.update(_past_space(words, at) for at in ends)
    return end in {min(at, end) for at in reached}


def _borders(text: str, markers: Sequence[str]) -> Iterator[int]:
    """Where each marker begins and ends, wherever it occurs."""
    for marker in filter(None, markers):
        place = text.find(marker)
        while place >= 0:
            yield place
            yield place + len(marker)
            place = text.find(marker, place + 1)


def _past_space(words: str, at: int) -> int:
    while at < len(words) and words[at].isspace():
        at += 1
    return at


def _in_order(some: str, text: str) -> bool:
    """Whether the characters of some text, white space left out, are in a text in their order."""
    rest = iter(text)
    return all(character in rest for character in some if not character.isspace())


# --- calls ---------------------------------------------------------------------------------------


def _says(text: str, call: _Called) -> bool:
    """Whether a text has a call."""
    texts = (text, _ESCAPED.sub(_unescaped, text))
    if not _written(texts, call.name):
        return False
    if call.cut is not None:
        return call.cut in text and call.arguments in text
    if call.arguments in text:
        return True
    try:
        arguments = json.loads(call.arguments)
    except (ValueError, RecursionError):
        return False
    return all(_written(texts, one) for one in _texts(arguments))


def _texts(value: Any) -> Iterator[str]:
    """All texts in a JSON value, the names of fields included."""
    if isinstance(value, dict):
        for name, each in value.items():
            if name not in _NAMES_OF_VALUES:
                yield name
            yield from _texts(each)
    elif isinstance(value, list):
        for each in value:
            yield from _texts(each)
    elif isinstance(value, str):
        yield value


def _unescaped(found: re.Match[str]) -> str:
    high, low, four, two, letter = found.groups()
    if high is not None:
        return chr(0x10000 + ((int(high, 16) & 0x3FF) << 10) + (int(low, 16) & 0x3FF))
    return chr(int(four or two, 16)) if letter is None else _OF_LETTER[letter.lower()]


def _written(texts: Sequence[str], one: str) -> bool:
    """Whether some text is in one of two: as the model wrote it, and without escapes."""
    return any(
        one in text or (any(each in text for each in _ESCAPES) and _in_order(one, text))
        for text in texts
    )
