"""
Whether the stored parts of an answer are what the text that its request released says. Pure.

The text is divided by the model's markers. If the form of the model's calls is on record, all of
the text is accounted for, in order: what is between two markers is words, or thoughts, or the text
of stored calls (see ``calls``), and each marker is shown or not. White space around a marker may be
lost or added.

If the form is not on record, each piece of the text between two markers is shown as a whole or not
at all, and the texts of a call are anywhere in the text.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

import msgspec

from cairn.journal.calls import CallReader, StoredCall, in_order, says

PIECES_MAX = 512
"""
Of an answer with more pieces, if the form of calls is not on record, only the order of characters
is compared, because the number of steps grows with the square of the number of pieces.
"""

STATES_MAX = 64
"""
In how many ways the beginning of a text may be what is stored. More are possible where a text
repeats its markers; the answer is then read as if the form of calls were not on record.
"""


class _TooMany(Exception):
    """See ``STATES_MAX``."""


class _Part(msgspec.Struct, forbid_unknown_fields=True):
    """A part of an answer as ``engine.prompt.turns`` stores it: one of its fields is set."""

    said: _Words | None = None
    thought: _Words | None = None
    called: StoredCall | None = None


class _Words(msgspec.Struct, forbid_unknown_fields=True):
    text: str


def shown_fault(
    answer: str, text: str, markers: Sequence[str], form: tuple[str, ...] | None = None
) -> str | None:
    """
    What of a stored answer its text does not say; None if it says all of it.

    Args:
        answer: the parts, as ``turn_stored`` has them.
        text: all that was released of the answer.
        markers: the texts that divide the model's answers.
        form: how its answers have calls, see ``calls.form_of``.
    """
    try:
        parts = msgspec.json.decode(answer, type=list[_Part])
    except (msgspec.MsgspecError, RecursionError):
        return "parts of an unknown form"
    stored = _Stored()
    for part in parts:
        if [part.said, part.thought, part.called].count(None) != 2:
            return "a part that is not of one kind"
        if (words := part.said or part.thought) is not None:
            stored.words += words.text
        if (call := part.called) is not None:
            if call.index != len(stored.calls):
                return "calls in another order"
            stored.calls.append(call)
            stored.places.append(len(stored.words))
    divided = _Divided(text, markers)
    if form is not None:
        try:
            return _fault(stored, divided, form)
        except (_TooMany, RecursionError):
            pass
    for call in stored.calls:
        if not says(text, call):
            return f"call {call.index}"
    return None if _shows(divided, stored.words) else "words"


class _Stored:
    """
    A stored answer.

    Attributes:
        words: all words and thoughts.
        calls: the calls in order.
        places: how many of the characters were before each call.
    """

    def __init__(self) -> None:
        self.words = ""
        self.calls: list[StoredCall] = []
        self.places: list[int] = []


class _Divided:
    """
    A text and the pieces between its markers.

    Attributes:
        texts: the markers.
        cuts: where a piece begins or ends, in order.
        markers: where the markers end that begin at a place.
    """

    def __init__(self, text: str, markers: Sequence[str]) -> None:
        self.text = text
        self.texts = {*markers} - {""}
        self.markers: defaultdict[int, set[int]] = defaultdict(set)
        for marker in self.texts:
            place = text.find(marker)
            while place >= 0:
                self.markers[place].add(place + len(marker))
                place = text.find(marker, place + 1)
        ends = (end for found in self.markers.values() for end in found)
        self.cuts = sorted({0, len(text), *self.markers, *ends})


def _fault(stored: _Stored, divided: _Divided, form: tuple[str, ...]) -> str | None:
    """
    The same, with all of the text accounted for.

    Raises:
        _TooMany
    """
    text, words = divided.text, stored.words
    calls = CallReader(text, form, stored.calls)
    # Text that another marker may take is no certain call.
    is_plain = sum(calls.marker in one for one in divided.texts) == 1
    due = [_past_space(words, place) for place in stored.places]
    # How many characters and calls the text up to a place may be.
    reached: defaultdict[int, set[tuple[int, int]]] = defaultdict(set)
    reached[0].add((_past_space(words, 0), 0))
    last = 0
    for start, stop in pairwise(divided.cuts):
        if not (states := reached[start]):
            continue
        if len(states) > STATES_MAX:
            raise _TooMany
        last = start
        piece = text[start:stop].strip()
        after = start + len(calls.marker) if calls.begins_at(start) else None
        is_certain = is_plain and after == stop and calls.is_certain(stop)
        for at, count in states:
            if words.startswith(piece, at) and not is_certain:
                reached[stop].add((_past_space(words, at + len(piece)), count))
            for end in divided.markers[start]:
                if end != after:
                    reached[end].add((at, count))
            if after is not None and due[count : count + 1] == [at]:
                for end, more in calls.ends(after, count):
                    reached[end].add((at, count + more))
    if (len(words), len(stored.calls)) in reached[len(text)]:
        return None
    last = len(text) if reached[len(text)] else last
    count = max(count for _, count in reached[last])
    is_call = calls.begins_at(last) or (last == len(text) and count < len(stored.calls))
    return f"call {count}" if is_call else "words"


def _shows(divided: _Divided, words: str) -> bool:
    """Whether words are the pieces of a text, some of them left out."""
    text, cuts = divided.text, divided.cuts
    if len(cuts) <= 2:
        return words.strip() == text.strip()
    if len(cuts) > PIECES_MAX:
        return in_order(words, text)
    end = len(words.rstrip())
    reached = {_past_space(words, 0)}
    for start, stop in pairwise(cuts):
        if piece := text[start:stop].strip():
            ends = [at + len(piece) for at in reached if words.startswith(piece, at)]
            reached.update(_past_space(words, at) for at in ends)
    return end in {min(at, end) for at in reached}


def _past_space(words: str, at: int) -> int:
    while at < len(words) and words[at].isspace():
        at += 1
    return at
