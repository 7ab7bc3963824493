"""
Whether the stored parts of an answer are what the text that its request released says. Pure.

The text is divided by the model's markers. Each piece of it between two markers, and each marker,
is shown as a whole or not at all: words and thoughts are the pieces that are shown, in order. White
space around a marker may be lost or added. A text without markers is shown as a whole.

What a call says is written in the text, too, in the model's own format: see ``calls``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from cairn.journal.calls import Divided, Steps, StoredCall, false_call, places_of

FEW = 64
"""
Places that are compared one by one. If more places are possible, which takes a text that repeats
itself between its markers, they are the bits of a number, and a piece takes a few operations on it.
"""


class _Part(msgspec.Struct, forbid_unknown_fields=True):
    """A part of an answer as ``engine.prompt.turns`` stores it: one of its fields is set."""

    said: _Words | None = None
    thought: _Words | None = None
    called: StoredCall | None = None


class _Words(msgspec.Struct, forbid_unknown_fields=True):
    text: str


def shown_fault(
    answer: str, text: str, markers: Sequence[str], steps: Steps | None = None
) -> str | None:
    """
    What of a stored answer its text does not say; None if it says all of it.

    Args:
        answer: the parts, as ``turn_stored`` has them.
        text: all that was released of the answer.
        markers: the texts that divide the model's answers.
        steps: what this took is added, if given.
    """
    try:
        parts = msgspec.json.decode(answer, type=list[_Part])
    except (msgspec.MsgspecError, RecursionError):
        return "parts of an unknown form"
    shown: list[str] = []
    calls: list[StoredCall] = []
    for part in parts:
        if [part.said, part.thought, part.called].count(None) != 2:
            return "a part that is not of one kind"
        if (words := part.said or part.thought) is not None:
            shown.append(words.text)
        if (call := part.called) is not None:
            if call.index != len(calls):
                return "calls in another order"
            calls.append(call)
    steps = Steps() if steps is None else steps
    divided = Divided(text, markers)
    if calls and (index := false_call(calls, divided, shown, steps)) is not None:
        return f"call {index}"
    return None if _shows(divided, "".join(shown), steps) else "words"


def _shows(divided: Divided, words: str, steps: Steps) -> bool:
    """Whether words are the pieces of a text, some of them left out."""
    if len(divided.cuts) <= 2:
        return words.strip() == divided.text.strip()
    end = len(words.rstrip())
    # After how many characters of the words a piece may begin.
    reached = {_past_space(words, 0)}
    pieces = iter([piece for piece in divided.stripped() if piece])
    for piece in pieces:
        steps.count += len(reached)
        ends = [at + len(piece) for at in reached if words.startswith(piece, at)]
        reached.update(_past_space(words, at) for at in ends)
        if len(reached) > FEW:
            return _reaches(end, reached, [*pieces], words, steps)
    return max(reached) >= end


def _past_space(words: str, at: int) -> int:
    while at < len(words) and words[at].isspace():
        at += 1
    return at


def _reaches(end: int, places: set[int], pieces: Sequence[str], words: str, steps: Steps) -> bool:
    """The same, from many places on. Bit n of a number is the place n."""
    reached = _bits(places, len(words))
    spaces = _bits([at for at, one in enumerate(words) if one.isspace()], len(words))
    known: dict[str, int] = {}
    for piece in pieces:
        steps.count += 1 + len(words) // 64
        if piece not in known:
            known[piece] = _bits(places_of(piece, words), len(words))
        after = (reached & known[piece]) << len(piece)
        # Added to the bits of white space, a bit within it is carried to its end.
        reached |= (after | ((after & spaces) + spaces)) & ~spaces
    return reached >> end != 0


def _bits(places: Iterable[int], length: int) -> int:
    bits = bytearray(length + 1)
    for place in places:
        bits[place] = 1
    return int(bits[::-1].translate(_DIGITS) or b"0", 2)


_DIGITS = bytes.maketrans(b"\0\1", b"01")
