"""
First messages of a chat as people type them, and what Pebble says to them.

Each opening has wordings and one answer; the texts are data, in `first_messages.toml`. Where a
model of this size knows nothing, the answer says so, and what it can do instead. Slots in braces
are filled from lists, from invented values, or with a sum. Some facts are asked for later in the
chat. People put words before and after a wording, and type it carelessly: `typed.py`.
"""

from __future__ import annotations

import operator
import random
import re
import string
import tomllib
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from typing import Any, Final

import attrs

from cairn_pebble import dialogues
from cairn_pebble.dialogues import THINKING_SHARE, Dialogue
from cairn_pebble.texts import words
from cairn_pebble.texts.small_talk import TOPICS
from cairn_pebble.texts.typed import typed
from cairn_pebble.texts.words import Split, phrase, pick


@attrs.frozen
class Later:
    """
    What a user may ask about an opening, later in the chat.

    Attributes:
        asked: wordings, with slots of the opening.
        answer: what Pebble says then, with the same slots.
    """

    asked: tuple[str, ...]
    answer: str


@attrs.frozen
class Opening:
    """
    What a user may say, and one answer to it.

    Attributes:
        answer: what Pebble says; it may repeat the slots of the wording.
        wordings: of the user, with slots.
        share: how often it is drawn.
        framed: whether words may come before and after it.
        first: whether it is only drawn as the first message, as a question about what was not told.
        then: what may be asked about it.
    """

    answer: str
    wordings: tuple[str, ...]
    share: float = 1.0
    framed: bool = True
    first: bool = False
    then: tuple[Later, ...] = ()


def _read(item: dict[str, Any]) -> Opening:
    if (beginning := item.pop("topic", None)) is not None:
        (item["answer"],) = (one.answer for one in TOPICS if one.answer.startswith(beginning))
    then = tuple(Later(tuple(one["asked"]), one["answer"]) for one in item.get("then", ()))
    return Opening(**item | {"wordings": tuple(item["wordings"]), "then": then})


_TEXTS: Final = tomllib.loads(
    files("cairn_pebble.texts").joinpath("first_messages.toml").read_text(encoding="utf-8")
)
OPENINGS: Final = tuple(map(_read, _TEXTS["opening"]))
_ASKED_SHARE: Final = 0.4
"""Of the messages after a fact that may be asked for."""
_FRAMED_SHARE: Final = 0.35
_COMMON: Final = 6
"""How many wordings of an opening people use most: the first ones of its list."""
_COMMON_SHARE: Final = 0.45
"""
Of the messages, those in such words and without frames and slips. Without them "hi" is one message
in 700.
"""
_BEFORE: Final = (
    *("", "", "", "", "", "", "", "", "", "hi, ", "hey, ", "hello, ", "hello! ", "hi! ", "so, "),
    *("ok, ", "pebble, ", "hey pebble, ", "well, ", "umm ", "quick question: ", "hey there, "),
    *("um, ", "hello pebble, ", "good morning, ", "please, ", "ok so ", "and ", "oh, ", "yo, "),
    *([""] * 39),
)
_AFTER: Final = (
    *("", "", "", "", "", "", "", "", "", "", " pebble", ", please", " please", " now", " then"),
    *(" thanks", " my friend", " today", " for me", ", ok?", " 🙂", " 👋", " lol", " haha", " ?"),
    *([""] * 40),
)
_CHOICES: Final[Mapping[str, tuple[str, ...]]] = {
    name: tuple(some) for name, some in _TEXTS["slots"].items()
} | {
    "colour": words.COLOURS,
    "food": words.FOODS,
    "job": words.JOBS,
    "month": words.MONTHS,
    "thing": words.THINGS,
    "spot": words.SPOTS,
}
_SLOT: Final = re.compile(r"\{(\w+)\}")
_KEYS: Final = ("qwertyuiop", "asdfghjkl", "zxcvbnm", string.ascii_lowercase)


def _mash(rng: random.Random) -> str:
    """What falls out of a keyboard."""
    row = pick(rng, _KEYS)
    start, length = rng.randrange(len(row) - 3), rng.randint(3, 10)
    if rng.random() < 0.5:
        return row[start : start + length]
    return "".join(pick(rng, row) for _ in range(length))


def _marks(rng: random.Random) -> str:
    return pick(rng, "?!.,;-*#~") * rng.randint(1, 5)


def _mail(rng: random.Random) -> str:
    body = words.prose(rng, rng.randint(1, 3))
    return (
        f"{pick(rng, ('Dear', 'Hello', 'Hi'))} {words.name(rng, Split.TRAIN)},\n\n{body}\n\n"
        f"{pick(rng, ('Best regards', 'Kind regards', 'Yours', 'Thanks'))}, "
        f"{words.name(rng, Split.TRAIN)}"
    )


def _trace(rng: random.Random) -> str:
    file = pick(rng, ("main.py", "run.py", "server.py", "test.py"))
    line = words.number(rng, Split.TRAIN)
    error = pick(
        rng,
        (
            *("KeyError: 'name'", "IndexError: list index out of range", "NameError: name 'x'"),
            *("TypeError: unsupported operand", "ValueError: invalid literal", "SyntaxError"),
            *("FileNotFoundError: no such file", "ModuleNotFoundError: No module named 'x'"),
        ),
    )
    return (
        f'Traceback (most recent call last):\n  File "{file}", line {line}, in <module>\n'
        f"    {pick(rng, ('run()', 'main()', 'x = y', 'load(path)'))}\n{error}"
    )


_DIGITS: Final = range(10)
_HARD: Final[list[str]] = [
    *(f"{a} + {b}" for a in _DIGITS for b in _DIGITS if a + b > 9),
    *(f"{a} * {b}" for a in _DIGITS for b in _DIGITS if a * b > 9),
    *(f"{a}{sign}{b}" for a in _DIGITS for b in _DIGITS if a * b > 9 for sign in "*x"),
    *(f"{a} times {b}" for a in _DIGITS for b in _DIGITS if a * b > 9),
    *(f"{a} plus {b}" for a in _DIGITS for b in _DIGITS if a + b > 9),
]

_DRAWN: Final[Mapping[str, Callable[[random.Random], str]]] = {
    "mash": _mash,
    "marks": _marks,
    "mail": _mail,
    "trace": _trace,
    "letter": lambda rng: pick(rng, string.ascii_letters),
    "prose": lambda rng: words.prose(rng, rng.randint(1, 4)),
    "hard": lambda rng: pick(rng, _HARD),
}
_VALUES: Final = {
    "name": words.name,
    "place": words.place,
    "number": words.number,
    "age": words.age,
    "word": words.word,
    "big": words.number,
    "big2": words.number,
}
# Larger numbers are values to copy, of which some are held out; results of one digit are not.
_SUMS: Final = [(a, b) for a in _DIGITS for b in _DIGITS if a + b < 10]
_DIFFERENCES: Final = [(a, b) for a in _DIGITS for b in _DIGITS if a >= b]
_PRODUCTS: Final = [(a, b) for a in _DIGITS for b in _DIGITS if a * b < 10]


def _slots(rng: random.Random, split: Split, form: str) -> dict[str, str]:
    """A value for each slot of a wording, and the results of its numbers."""
    found: dict[str, str] = {}
    for name in _SLOT.findall(form):
        if name in _VALUES:
            found[name] = _VALUES[name](rng, split)
        elif name in _DRAWN:
            found[name] = _DRAWN[name](rng)
        elif name in "abcdef":
            found[name] = ""  # drawn in pairs, below
        else:
            found[name] = pick(rng, _CHOICES[name.rstrip(string.digits)])
    for first, second, sign, pairs, result in (
        ("a", "b", "+", _SUMS, operator.add),
        ("c", "d", "-", _DIFFERENCES, operator.sub),
        ("e", "f", "*", _PRODUCTS, operator.mul),
    ):
        if first in found:
            one, other = pick(rng, pairs)
            found |= {first: str(one), second: str(other)}
            found["sum"] = f"{one} {sign} {other} = {result(one, other)}"
    return found


def _typed(
    rng: random.Random,
    split: Split,
    wordings: tuple[str, ...],
    slots: Mapping[str, str] | None = None,
    *,
    framed: bool = True,
) -> tuple[str, Mapping[str, str]]:
    """
    One of the wordings as a user may type it, and its slots.

    Args:
        slots: None to draw them.
    """
    # Without a frame there are too few combinations to hold some of them out; values are. A wording
    # without a frame is a part, which the training sees.
    common = split is Split.TRAIN and rng.random() < _COMMON_SHARE
    form = pick(rng, wordings[:_COMMON] if common else wordings)
    if framed and not common and (split is Split.HELD_OUT or rng.random() < _FRAMED_SHARE):
        bare = form
        while form == bare:
            form = phrase(rng, split, _BEFORE, (bare,), _AFTER)
    # A mark inside a sentence, as in "joke? please", is rarely typed.
    form = form.replace("? ", " ").replace("?,", ",")
    filled = _slots(rng, split, form) if slots is None else slots
    return typed(rng, form, filled, slips=not common), filled


def first_messages(
    rng: random.Random, split: Split, *, most: int = 6, openings: Sequence[Opening] = OPENINGS
) -> Dialogue:
    """
    A chat of openings, in which each is answered by itself, and of questions about earlier ones.

    Args:
        most: how many rounds it has at most. One in two has a single round.
        openings: what is said in it.
    """
    dialogue = Dialogue("opening")
    if rng.random() < 0.1:
        dialogue.instruct(rng, split)
    told: dict[str, tuple[Later, Mapping[str, str]]] = {}
    for place in range(1 if rng.random() < 0.5 else rng.randint(2, most)):
        if told and rng.random() < _ASKED_SHARE:
            later, slots = told[pick(rng, tuple(told))]
            text, _ = _typed(rng, split, later.asked, slots)
            dialogue.say(text, later.answer.format_map(slots), dialogues.SMALL_TALK)
            continue
        shares = [0.0 if one.first and place else one.share for one in openings]
        (opening,) = rng.choices(openings, shares)
        text, slots = _typed(rng, split, opening.wordings, framed=opening.framed)
        dialogue.say(text, opening.answer.format_map(slots), dialogues.SMALL_TALK)
        for later in opening.then:
            # A fact that the user states again replaces the earlier one.
            told[later.asked[0].format_map(slots)] = later, slots
    dialogue.needed = (dialogue.messages[-1]["content"],)
    if rng.random() < THINKING_SHARE / 4:
        dialogue.thinking = True
        thought = dialogue.thoughts.pop(len(dialogue.messages) - 1)
        dialogue.messages[-1]["content"] = f"<think>\n{thought}\n</think>\n\n{dialogue.needed[0]}"
    return dialogue
