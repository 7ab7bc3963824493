"""
Whether a text has the calls that are stored of it. Pure.

A call begins after a marker and ends before one, or with the text. What stands there is read again,
see ``call_formats``: name, fields and values must be those of the stored call, and all calls of one
text between markers must be stored, in order. Text that an answer shows as words is no call.

Only where no format is recognized, texts are compared: the name, the names of the arguments and
their texts must be in one piece of the text, each as a whole and in this order.

The number of steps is at most ``READS_MAX`` for each character of the text, and a few more for each
marker: after that, texts are compared as if no format were recognized.
"""

from __future__ import annotations

import html
import json
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain, pairwise
from typing import Any

import msgspec

from cairn.journal import call_formats
from cairn.journal.call_formats import Format, ReadCalls

READS_MAX = 64
"""
How often each character of a text is read on average at most. The server reads as few: after 64
texts that began like a call and are none, it makes no more calls.
"""

READ_COSTS = 256
"""Characters that may be compared in the time that a short text takes to be read."""

_HELD = re.compile(r'\s*\{"name": ("(?:[^"\\]|\\.)*"), "arguments": (?=\{)')
"""How a call begins that is constrained by a grammar. Its arguments are stored as they are."""

_ESCAPED = re.compile(
    r"\\(?:u(d[89ab][0-9a-f]{2})\\u(d[c-f][0-9a-f]{2})|(?:u([0-9a-f]{4})|x([0-9a-f]{2}))|([0abfnrtv])"
    r"|([\"'\\/]))",
    re.IGNORECASE,
)
"""What JSON and Python write for one character."""

_OF_LETTER = {
    "0": "\0",
    "a": "\a",
    "b": "\b",
    "f": "\f",
    "n": "\n",
    "r": "\r",
    "t": "\t",
    "v": "\v",
}

_NAMES_OF_VALUES = frozenset(("true", "false", "null"))
"""Names of fields that Python writes in another way."""

_ENDS = frozenset("\"'`<>{}[]()|,:;=&")
"""Between these characters and white space stands a whole text."""


class StoredCall(msgspec.Struct, forbid_unknown_fields=True):
    """A call as a part of an answer has it."""

    index: int
    id: str
    name: str
    arguments: str
    cut: str | None = None


class Steps:
    """
    How much was compared.

    Attributes:
        count: characters that were read, and comparisons of pieces.
    """

    def __init__(self) -> None:
        self.count = 0


class Divided:
    """
    A text and the pieces between its markers.

    Attributes:
        cuts: where a piece begins or ends, in order.
    """

    def __init__(self, text: str, markers: Sequence[str]) -> None:
        self.text = text
        self.markers = sorted({marker for marker in markers if marker})
        self._places = [list(places_of(marker, text)) for marker in self.markers]
        self.after = sorted(
            {
                place + len(marker)
                for marker, places in zip(self.markers, self._places, strict=True)
                for place in places
            }
        )
        self.cuts = sorted({0, len(text), *self.after, *chain.from_iterable(self._places)})

    def pieces(self) -> Iterator[tuple[int, int]]:
        """Where each piece begins and ends, markers included."""
        return pairwise(self.cuts)

    def stripped(self) -> Iterator[str]:
        """Each piece without the white space around it."""
        return (self.text[start:end].strip() for start, end in self.pieces())

    def piece_at(self, start: int) -> str:
        """The piece that begins at a place."""
        end = bisect_left(self.cuts, start + 1)
        return self.text[start : self.cuts[end]] if end < len(self.cuts) else ""

    def ends(self, start: int) -> list[int]:
        """Where a text ends that begins at a place: before the next of each marker."""
        found = set()
        for places in self._places:
            place = bisect_left(places, start)
            if place < len(places):
                found.add(places[place])
        return sorted(found)


def places_of(part: str, text: str) -> Iterator[int]:
    """Where a text occurs in another, in order; also where the occurrences overlap."""
    place = text.find(part)
    while place >= 0:
        yield place
        place = text.find(part, place + 1)


def false_call(
    calls: Sequence[StoredCall],
    divided: Divided,
    shown: Sequence[str],
    steps: Steps,
) -> int | None:
    """
    The index of the first stored call that a text does not have; None if it has all.

    Args:
        shown: the texts of the words and thoughts of the answer.
        steps: what this took is added.
    """
    reader = _Reader(divided, shown, steps)
    taken = 0
    while taken < len(calls):
        more = reader.take(calls[taken:])
        if not more:
            return taken
        taken += more
    return None


class _Reader:
    """Reads the calls of one text in order."""

    def __init__(self, divided: Divided, shown: Sequence[str], steps: Steps) -> None:
        self._divided = divided
        self._steps = steps
        self._steps_max = steps.count + READS_MAX * len(divided.text)
        # How often each piece is in the text and not in the words.
        self._hidden = Counter(divided.stripped())
        for words in shown:
            self._hidden.subtract(Divided(words, divided.markers).stripped())
        # Where the next call begins at the earliest: that of a format, and that of none.
        self._place = self._loose_place = 0

    def take(self, calls: Sequence[StoredCall]) -> int:
        """
        How many of some calls come next, all in one text; none if the text does not have them.
        Changes the state.
        """
        call = calls[0]
        if call.cut is not None:
            return int(self._take_cut(call))
        arguments = _object(call.arguments)
        loosely: tuple[int, int] | None = None
        for start in self._starts():
            piece = self._divided.piece_at(start)
            self._steps.count += len(piece) + 1
            if self._hidden[piece.strip()] <= 0:
                continue
            if (end := self._end_of_held(start, call)) is not None:
                self._place = self._loose_place = end
                return 1
            if arguments is None:
                continue
            is_read, taken = _HELD.match(self._divided.text, start) is not None, 0
            if self._steps.count < self._steps_max:
                is_of_format, taken = self._take_read(start, piece, calls)
                is_read = is_read or is_of_format
            if taken:
                return taken
            if not is_read and loosely is None:
                end = self._end_loosely(start, call.name, arguments)
                loosely = None if end is None else (start, end)
            if loosely is not None and self._steps.count >= self._steps_max:
                break
        if loosely is None:
            return 0
        self._place, self._loose_place = loosely
        return 1

    def _starts(self) -> Sequence[int]:
        after = self._divided.after
        return after[bisect_left(after, self._place) :]

    def _take_read(self, start: int, piece: str, calls: Sequence[StoredCall]) -> tuple[bool, int]:
        """Whether a text is of some format, and how many of the calls it is. Changes the state."""
        text = self._divided.text
        is_read = False
        for form in _formats(text, start, piece, calls[0].name):
            ends = self._divided.ends(start)
            for end in dict.fromkeys((*ends, len(text)) if form.ends_answer else ends):
                self._steps.count += READ_COSTS + end - start
                for reading in form.read(text[start:end]):
                    is_read = is_read or form is not call_formats.WITH_ANY_WORDS
                    if _are(reading, calls):
                        self._place = self._loose_place = end
                        return True, len(reading)
                if self._steps.count >= self._steps_max:
                    return is_read, 0
        return is_read, 0

    def _end_of_held(self, start: int, call: StoredCall) -> int | None:
        """Where a constrained call ends that begins at a place, if it is this one."""
        text = self._divided.text
        head = _HELD.match(text, start)
        if head is None or _name_in(head) != call.name:
            return None
        self._steps.count += len(call.arguments)
        if not text.startswith(call.arguments, head.end()) or not _is_whole(call.arguments):
            return None
        return head.end() + len(call.arguments)

    def _take_cut(self, call: StoredCall) -> bool:
        """Whether the answer ends in a constrained call. Changes the state."""
        text, cut = self._divided.text, call.cut or ""
        place = len(text) - len(cut)
        if place < self._place or not text.endswith(cut):
            return False
        self._place = self._loose_place = len(text)
        for marker in self._divided.markers:
            head = _HELD.match(cut, len(marker)) if cut.startswith(marker) else None
            if head is not None and _name_in(head) == call.name:
                words = cut[head.end() :]
                if words == call.arguments:
                    return True
                return words.startswith(call.arguments) and _is_whole(call.arguments)
        return False

    def _end_loosely(self, start: int, name: str, arguments: dict[str, Any]) -> int | None:
        """Where the texts of a call end that are in a piece in their order."""
        text, wanted = self._divided.text, [name, *_texts(arguments)]
        stop = start + len(self._divided.piece_at(start))
        if any(marker in one for marker in self._divided.markers for one in wanted):
            stop = len(text)
        begin = max(start, self._loose_place)
        words = text[begin:stop]
        self._steps.count += len(words)
        if (end := _end_in_order(wanted, words)) is not None:
            return begin + end
        once = _ESCAPED.sub(_unescaped, words)
        for other in (once, _ESCAPED.sub(_unescaped, once), html.unescape(words)):
            if other != words and _end_in_order(wanted, other) is not None:
                return begin
        return None


def _formats(text: str, start: int, piece: str, name: str) -> Iterator[Format]:
    """The formats that a text may have that begins at a place with a piece."""
    bare = piece.strip()
    if bare[:1] in ("{", "["):
        yield call_formats.BEGINS_AS_JSON
    for form in call_formats.WITH_HINT:
        if form.hint in piece and text.endswith(form.opened_by, 0, start):
            yield form
    if bare.startswith(name) and not bare[len(name) : len(name) + 1].strip():
        yield call_formats.BEGINS_WITH_NAME
        yield call_formats.WITH_ANY_WORDS


def _are(reading: ReadCalls, calls: Sequence[StoredCall]) -> bool:
    """Whether the next stored calls are those of a reading."""
    if len(reading) > len(calls):
        return False
    for read, call in zip(reading, calls, strict=False):
        arguments = None if call.cut is not None else _object(call.arguments)
        if arguments is None or not read.is_stored_as(call.name, arguments):
            return False
    return True


def _name_in(head: re.Match[str]) -> str | None:
    try:
        return str(json.loads(head[1]))
    except ValueError:
        return None


# --- texts ---------------------------------------------------------------------------------------


def _object(arguments: str) -> dict[str, Any] | None:
    """Stored arguments; None if they are no object, or have a field twice."""
    try:
        found = json.loads(arguments, object_pairs_hook=_distinct)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise ValueError("a field twice")
    return fields


_BRACKETS = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\]]', re.DOTALL)


def _is_whole(arguments: str) -> bool:
    """Whether the brackets of a text close at its end, and not before."""
    depth = 0
    for found in _BRACKETS.finditer(arguments):
        if found[0][0] != '"':
            depth += 1 if found[0] in "{[" else -1
            if depth <= 0:
                return depth == 0 and found.end() == len(arguments)
    return False


def _texts(value: Any) -> Iterator[str]:
    """All texts in a JSON value in order, the names of fields included."""
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


def _end_in_order(wanted: Sequence[str], words: str) -> int | None:
    """Where the last of some texts ends, each a whole one after the one before it."""
    place = 0
    for each in wanted:
        one = each.strip()
        place = words.find(one, place)
        while place >= 0 and not _is_whole_text(words, place, place + len(one)):
            place = words.find(one, place + 1)
        if place < 0:
            return None
        place += len(one)
    return place


def _is_whole_text(words: str, start: int, end: int) -> bool:
    return start == end or all(
        not each or each.isspace() or each in _ENDS
        for each in (words[start - 1 : start] if start else "", words[end : end + 1])
    )


def _unescaped(found: re.Match[str]) -> str:
    high, low, four, two, letter, itself = found.groups()
    if high is not None:
        return chr(0x10000 + ((int(high, 16) & 0x3FF) << 10) + (int(low, 16) & 0x3FF))
    if letter is not None:
        return _OF_LETTER[letter.lower()]
    return itself or chr(int(four or two, 16))
