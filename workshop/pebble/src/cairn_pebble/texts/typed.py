"""Messages as people type them: any case, any punctuation, and slips of the fingers."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping
from typing import Final

_SLOT: Final = re.compile(r"(\{\w+\})")
_WORD: Final = re.compile(r"[a-z]{4,}")
_NEIGHBOURS: Final = {
    key: row[max(0, place - 1) : place] + row[place + 1 : place + 2]
    for row in ("qwertyuiop", "asdfghjkl", "zxcvbnm")
    for place, key in enumerate(row)
}
_SHORT: Final = (
    *(("what's", "whats"), ("I'm", "im"), ("don't", "dont"), ("can't", "cant"), ("who's", "whos")),
    *((" you ", " u "), ("are you", "r u"), ("your", "ur"), ("please", "pls"), ("thanks", "thx")),
    *(("how's", "hows"), ("it's", "its"), ("let's", "lets"), ("because", "cuz"), (" to ", " 2 ")),
)
_ENDS: Final = ("", "", "", "", ".", "!", "?", "!!", "??", "...", " :)", "?!", " ", "!!!", ";)")
_TYPO_SHARE: Final = 0.15
_CASES: Final[tuple[tuple[Callable[[str], str], float], ...]] = (
    (str, 4.0),
    (str.lower, 3.0),
    (lambda text: text[:1].upper() + text[1:], 3.0),
    (str.upper, 0.6),
    (str.title, 0.3),
)


def typed(rng: random.Random, form: str, slots: Mapping[str, str], *, slips: bool = True) -> str:
    """
    A wording with its slots filled, as a user may type it. The values in the slots stay as they
    are, because answers repeat them.

    Args:
        slips: whether some have a slip of the fingers.
    """
    case = rng.choices([one for one, _ in _CASES], [share for _, share in _CASES])[0]
    if rng.random() < 0.15:
        for whole, short in _SHORT:
            form = form.replace(whole, short)
    asks = form.endswith("?")
    if not form.endswith("}") or asks:
        kind = rng.random()
        if kind < 0.3:
            form = form.rstrip("?.!")
        elif kind < 0.6:
            form = form.rstrip("?.!") + rng.choice(_ENDS)
    parts = _SLOT.split(form)
    slip = slips and rng.random() < _TYPO_SHARE
    text = ""
    for part in parts:
        if _SLOT.fullmatch(part):
            text += slots[part[1:-1]]
        else:
            first = case is str.lower or text == ""
            part = _slipped(rng, part) if slip else part
            # Only the first part of a sentence may begin with a capital.
            text += case(part) if first or case in (str.upper, str.title) else part
    return text


def _slipped(rng: random.Random, text: str) -> str:
    """One long word with a slip of the fingers."""
    found = list(_WORD.finditer(text))
    if not found:
        return text
    word = rng.choice(found)
    place = rng.randrange(word.start() + 1, word.end() - 1)
    kind = rng.randrange(4)
    if kind == 0:  # two letters change places
        middle = text[place + 1] + text[place]
    elif kind == 1:  # one is missing
        middle = text[place + 1]
    elif kind == 2:  # one is typed twice
        middle = text[place] * 2 + text[place + 1]
    else:  # the key beside it
        middle = rng.choice(_NEIGHBOURS[text[place]]) + text[place + 1]
    return text[:place] + middle + text[place + 2 :]
