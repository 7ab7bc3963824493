"""
Whether stored tool calls are those that a text has. Pure.

A call is what is between two markers, and is read again, see ``call_formats``. In a format that
is not read, only texts are compared: the name, the names of the arguments and their texts must be
between the markers.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from cairn.journal.call_formats import READ_VERSIONS, READERS, ReadCalls, json_value

REJECTED_MAX = 64
"""
After this many rejected calls in one answer, text that looks like a call is words, because each
rejected call is read again and recorded.
"""


class StoredCall(msgspec.Struct, forbid_unknown_fields=True):
    """A call as a part of an answer has it."""

    index: int
    id: str
    name: str
    arguments: str
    cut: str | None = None


def form_of(fields: Mapping[str, Any]) -> tuple[str, ...] | None:
    """
    How the answers of a model have calls: the format, and the markers before and after a call; the
    format is empty if it is not read again. Empty for a model without calls. None if it is not on
    record, or if answers have other states than words, thoughts and calls.

    Args:
        fields: those of its fingerprint.
    """
    found = fields.get("calls")
    if not isinstance(found, list | tuple) or len(found) not in (0, 3):
        return None
    form = tuple(map(str, found))
    is_read = form[:1] == ("json_tools",) or fields.get("mlx_lm") in READ_VERSIONS
    return form if is_read or not form else ("", *form[1:])


class CallReader:
    """Reads the calls of one text."""

    def __init__(self, text: str, form: tuple[str, ...], calls: Sequence[StoredCall]) -> None:
        """
        Args:
            form: see ``form_of``.
            calls: all that are stored, in order.
        """
        self._text = text
        self._format, self.marker, self._end = form or ("", "", "")
        self._calls = calls
        self._begins = text.count(self.marker)
        self._known: dict[int, tuple[int, str, ReadCalls | None] | None] = {}

    def begins_at(self, place: int) -> bool:
        """Whether the marker before a call is at a place."""
        return bool(self.marker) and self._text.startswith(self.marker, place)

    def ends(self, start: int, index: int) -> Iterator[tuple[int, int]]:
        """
        Where a text after a marker may end that is some of the stored calls, and how many calls.

        Args:
            index: of the first of these calls.
        """
        calls = self._calls[index:]
        if calls and (end := self._end_of_held(start, calls[0])) is not None:
            yield end, 1
        if not calls or calls[0].cut is not None or (found := self._read(start)) is None:
            return
        end, words, reading = found
        if reading is None:
            place = 0
            for count, call in enumerate(calls, 1):
                # A name that is not in the text as such was written with escapes.
                place = words.find(call.name, place) + 1 if call.name in words else place + 1
                if not place or not says(words, call):
                    return
                yield end, count
        elif 0 < len(reading) <= len(calls) and all(
            call.cut is None and call.name == name and fits(call.arguments)
            for (name, fits), call in zip(reading, calls, strict=False)
        ):
            yield end, len(reading)

    def is_certain(self, start: int) -> bool:
        """
        Whether a text after a marker is a call in every answer that has some. This is said of JSON
        alone: in other formats a schema may reject a call.
        """
        if self._format != "json_tools" or not self._calls or self._begins > REJECTED_MAX:
            return False
        found = self._read(start)
        # What has only an argument "raw" is a call only if a tool has it.
        return (
            found is not None
            and bool(found[2])
            and re.search(r"raw|\\u", found[1]) is None
            and self._text.endswith(self._end, start, found[0])
        )

    def _read(self, start: int) -> tuple[int, str, ReadCalls | None] | None:
        """
        Where a text after a marker ends, marker included, what it is, and what it is read as; None
        if it does not end.
        """
        if start not in self._known:
            end = self._text.find(self._end, start) if self._end else len(self._text)
            words = self._text[start : end if end >= 0 else None]
            self._known[start] = None
            if end >= 0 or json_value(words) is not None:
                after = start + len(words) + (len(self._end) if end >= 0 else 0)
                read = READERS.get(self._format)
                self._known[start] = after, words, None if read is None else read(words)
        return self._known[start]

    def _end_of_held(self, start: int, call: StoredCall) -> int | None:
        """Where a constrained call ends that is this one. It is stored as it is written."""
        began = start - len(self.marker)
        name = json.dumps(call.name, ensure_ascii=False)
        head = f'\n{{"name": {name}, "arguments": '
        place = start + len(head)
        if not self._text.startswith(head + call.arguments, start):
            return None
        place += len(call.arguments)
        end = _object_end(call.arguments)
        is_whole = end == len(call.arguments)
        if call.cut is not None:
            is_due = is_whole or (end is None and place == len(self._text))
            return len(self._text) if is_due and call.cut == self._text[began:] else None
        rest = f"}}\n{self._end}"
        if not is_whole or not rest.startswith(self._text[place : place + len(rest)]):
            return None
        return min(place + len(rest), len(self._text))


def _object_end(text: str) -> int | None:
    """Where the JSON value ends that a text begins with."""
    try:
        # Numbers may have any length.
        return json.JSONDecoder(parse_int=str).raw_decode(text)[1]
    except ValueError:
        return None


# --- texts ---------------------------------------------------------------------------------------

_ESCAPES = ("\\", "&", "'")
"""Where one of these is in the text, a parser may have read something that is not in it as such."""

_ESCAPED = re.compile(
    r"\\(?:u(d[89ab][0-9a-f]{2})\\u(d[c-f][0-9a-f]{2})|(?:u([0-9a-f]{4})|x([0-9a-f]{2}))|([bfnrt]))",
    re.IGNORECASE,
)
"""What JSON and Python write for one character."""

_IN_JSON = re.compile(rf"\\\\|{_ESCAPED.pattern}", re.IGNORECASE)
"""The same where a backslash is written as two. Not every format does that."""

_OF_LETTER = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}

_NAMES_OF_VALUES = frozenset(("true", "false", "null"))
"""Names of fields that Python writes in another way."""


def says(text: str, call: StoredCall) -> bool:
    """Whether a text has a call."""
    texts = (text, _ESCAPED.sub(_unescaped, text), _IN_JSON.sub(_unescaped, text))
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
    return all(_written(texts, one) or _restated(texts, one) for one in _texts(arguments))


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
    if found[0] == "\\\\":
        return "\\"
    if high is not None:
        return chr(0x10000 + ((int(high, 16) & 0x3FF) << 10) + (int(low, 16) & 0x3FF))
    return chr(int(four or two, 16)) if letter is None else _OF_LETTER[letter.lower()]


def _restated(texts: Sequence[str], one: str) -> bool:
    """Whether a parser made some text of another value: GLM's does, if the schema has a string."""
    try:
        value = ast.literal_eval(one)
    except (ValueError, SyntaxError, TypeError, MemoryError):
        return False
    is_as_written = isinstance(value, str | int) and not isinstance(value, bool)
    return not is_as_written and all(_written(texts, each) for each in _texts(value))


def _written(texts: Sequence[str], one: str) -> bool:
    """Whether some text is in one of several: as the model wrote it, and without escapes."""
    return any(
        one in text or (any(each in text for each in _ESCAPES) and in_order(one, text))
        for text in texts
    )


def in_order(some: str, text: str) -> bool:
    """Whether the characters of some text, white space left out, are in a text in their order."""
    rest = iter(text)
    return all(character in rest for character in some if not character.isspace())
