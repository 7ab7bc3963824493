"""All the plain kinds of dialogues: what the tokenizer is trained on."""

from __future__ import annotations

import random
from collections.abc import Callable

from cairn_pebble.dialogues import Dialogue, echo, recall, talk
from cairn_pebble.texts import words
from cairn_pebble.texts.plain_tools import DOES, WHAT, tool_use
from cairn_pebble.texts.words import Split


def dialogue(rng: random.Random, split: Split) -> Dialogue:
    """A dialogue of any skill."""
    skill: Callable[[random.Random, Split], Dialogue]
    skill = rng.choices((recall, talk, tool_use, echo), (5, 1, 3, 1))[0]
    return skill(rng, split)


def units() -> str:
    """
    The units that Pebble copies, each cut out as the tokenizer splits texts.

    Each becomes a token, so a value is copied in two or three steps.
    """
    return words.units() + "".join(f" {word}1{word}" for word in (*DOES, *WHAT))
