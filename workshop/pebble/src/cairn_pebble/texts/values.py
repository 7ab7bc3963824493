"""Values of facts and arguments, apart from made-up names, places, numbers and words."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Final, TypeAlias

from cairn_pebble.texts import words
from cairn_pebble.texts.words import Split, pick

Value: TypeAlias = Callable[[random.Random, Split], str]
"""Draws a value for a split."""

_BEGINS: Final = (
    *("b", "c", "d", "f", "g", "h", "j", "k", "l", "m", "n", "p", "r", "s", "t", "v", "w", "z"),
    *("bl", "br", "ch", "cl", "cr", "dw", "fl", "fr", "gh", "gl", "gr", "kn", "kr", "ph", "pr"),
    *("rh", "sch", "sc", "sk", "sl", "sm", "sn", "sp", "sw", "ts", "tw", "wr", "y", "", "", ""),
)
_SOUNDS: Final = (
    *("a", "e", "i", "o", "u", "a", "e", "i", "o", "u", "au", "ei", "eo", "ia", "ie", "io", "oa"),
    *("oe", "oo", "ee", "ua", "ue", "ui", "y", "ay", "aw", "ow", "ew", "eu"),
)
_ENDS: Final = (
    *("", "", "", "", "b", "ck", "d", "f", "g", "l", "ll", "m", "n", "nn", "ng", "p", "r", "rr"),
    *("s", "ss", "t", "tt", "v", "z", "ld", "lm", "nc", "ns", "pp", "rd", "rl", "rn", "rt", "sk"),
)


def person(rng: random.Random, split: Split) -> str:
    """
    A name of arbitrary letters as often as one of syllables, so that copying needs no word list.
    """
    if rng.random() < 0.5:
        return words.name(rng, split)

    def draw(rng: random.Random) -> str:
        syllables = rng.choices((1, 2, 3, 4), (2, 5, 3, 1))[0]
        parts = (_BEGINS, _SOUNDS, _ENDS) * syllables
        return "".join(pick(rng, part) for part in parts).capitalize()

    name = words.of_split(rng, split, draw)
    while len(name) < 2:
        name = words.of_split(rng, split, draw)
    return name


_LETTERS: Final = "ABCDEFGHJKLMNPRSTUVWXYZ"


def code(rng: random.Random, split: Split) -> str:
    """Letters and digits, as on tickets."""

    def draw(rng: random.Random) -> str:
        letters = "".join(pick(rng, _LETTERS) for _ in range(rng.randint(1, 3)))
        digits = str(rng.randrange(10, 10 ** rng.randint(2, 4)))
        return letters + rng.choice(("", "-", " ")) + digits

    return words.of_split(rng, split, draw)


def time(rng: random.Random, split: Split) -> str:
    """A time of day."""
    return words.of_split(rng, split, lambda rng: f"{rng.randrange(24)}:{rng.randrange(60):02}")


def day(rng: random.Random, split: Split) -> str:
    """A day of the year, or of the week."""

    def draw(rng: random.Random) -> str:
        return f"{rng.randint(1, 28)} {pick(rng, words.MONTHS)}"

    date = words.of_split(rng, split, draw)
    return f"{pick(rng, _WEEKDAYS)}, {date}" if rng.random() < 0.3 else date


_WEEKDAYS: Final = (
    *("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"),
)


def spot(rng: random.Random, split: Split) -> str:
    """A place where a thing is, in several words."""

    def draw(rng: random.Random) -> str:
        return f"{pick(rng, _BEFORE_SPOTS)} the {pick(rng, _LOOKS)} {pick(rng, _FURNITURE)}"

    return words.of_split(rng, split, draw)


_BEFORE_SPOTS: Final = ("under", "behind", "next to", "on top of", "inside", "below", "near")
_LOOKS: Final = (
    *("old", "big", "small", "wooden", "broken", "new", "round", "heavy", "dusty", "narrow"),
    *("tall", "wide", "iron", "glass", "painted"),
)
_FURNITURE: Final = (
    *("shelf", "table", "bed", "sofa", "chest", "stove", "desk", "bench", "wardrobe", "piano"),
    *("staircase", "fence", "chair", "box", "crate", "washing machine", "bookcase", "cabinet"),
)


def amount(rng: random.Random, split: Split) -> str:
    """An amount of money."""
    return f"{words.number(rng, split)} {pick(rng, ('euros', 'dollars', 'pounds', 'crowns'))}"


def dish(rng: random.Random, split: Split) -> str:
    """Food or a drink, in several words."""

    def draw(rng: random.Random) -> str:
        return f"{pick(rng, _MADE)} {pick(rng, words.FOODS)}"

    return words.of_split(rng, split, draw) + pick(rng, _WITH)


_MADE: Final = ("cold", "fried", "sweet", "baked", "plain", "spicy", "fresh", "roasted", "sour")
_WITH: Final = ("", "", " with salt", " with cream", " with herbs", " with lemon", " with ginger")


def of(*items: str) -> Value:
    """One of a few. They are too few to hold any out."""
    return lambda rng, split: pick(rng, items)
