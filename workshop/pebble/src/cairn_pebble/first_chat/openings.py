"""Reads the 200 openings by which Pebble is judged, and finds loops in answers.

The openings and the rubric are data, in `openings.toml`, and were written before the training's
first messages.
"""

import re
import tomllib
from collections import Counter
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

LONGEST_REPEATED_RUN = 12
"""Words; a longer run that is repeated is found by its sentences."""

_WORD = re.compile(r"[^\W_]+(?:['’][^\W_]+)*")
_SENTENCE_END = re.compile(r"[.!?\n]+")
_SAME_CHARACTER = re.compile(r"([^\s\d])\1{5,}")
_SAME_MARK_APART = re.compile(r"([^\w\s])(?:\s*\1){5,}")


@dataclass(frozen=True, slots=True)
class Opening:
    """One first message, with what an answer to it is judged by."""

    id: str
    """`KIND-NUMBER`, counted from 1 within the kind."""
    text: str
    kind: str
    fits: str
    """What a fitting answer does, for a judge."""
    honest_passes: bool
    """Whether an answer that truly says what the model cannot do passes."""
    answer: str | None = None
    """A regular expression without which no answer is fitting, in any case."""


def read_openings() -> tuple[Opening, ...]:
    """Returns the openings in their order."""
    kinds = _document()["kind"]
    return tuple(
        _opening(kind, number, item)
        for kind in kinds
        for number, item in enumerate(kind["openings"], 1)
    )


def read_rubric() -> dict[str, str]:
    """Returns the rules of each verdict, by its name."""
    return {name: " ".join(text.split()) for name, text in _document()["rubric"].items()}


def asked_in_one_chat(openings: tuple[Opening, ...]) -> tuple[Opening, ...]:
    """Returns every fifth opening: those that are also asked in one long chat."""
    return openings[4::5]


def normalised(text: str) -> str:
    """Returns the words of a text in lower case, or the text without spaces if it has no words."""
    return " ".join(_WORD.findall(text.casefold())) or "".join(text.split())


def find_loop(text: str, opening: str = "") -> str | None:
    """Returns what repeats in an answer, by the rubric's rules 1 to 3, or None."""
    words = _WORD.findall(text.casefold())
    for length in range(1, LONGEST_REPEATED_RUN + 1):
        times = 4 if length == 1 else 3
        for start in range(len(words) - times * length + 1):
            run = words[start : start + length]
            if words[start : start + times * length] == run * times:
                return " ".join(run * times)
    sentences = Counter(normalised(sentence) for sentence in _SENTENCE_END.split(text))
    for sentence, times in sentences.items():
        if times >= 3 and len(sentence.split()) >= 3:
            return sentence
    for pattern in (_SAME_CHARACTER, _SAME_MARK_APART):
        for found in pattern.finditer(text):
            if found.group() not in opening:
                return found.group()
    return None


def _opening(kind: dict[str, Any], number: int, item: str | dict[str, str]) -> Opening:
    fields = {"text": item} if isinstance(item, str) else item
    return Opening(
        id=f"{kind['name']}-{number}",
        kind=kind["name"],
        fits=kind["fits"],
        honest_passes=kind["honest"],
        **fields,
    )


def _document() -> dict[str, Any]:
    return tomllib.loads(
        files("cairn_pebble.first_chat").joinpath("openings.toml").read_text(encoding="utf-8")
    )
