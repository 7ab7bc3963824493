"""Which of the openings are also messages in the training."""

from collections.abc import Sequence
from random import Random

from cairn_pebble import dialogues
from cairn_pebble.first_chat.openings import Opening, normalised
from cairn_pebble.texts.first_messages import first_messages
from cairn_pebble.texts.words import Split

DRAWS = 50_000
"""Dialogues of each kind: about as many as a round of the training reads."""


def trained_on(openings: Sequence[Opening], draws: int = DRAWS) -> frozenset[str]:
    """
    Returns the ids of the openings that a user says in dialogues of the training.

    Case, spaces and punctuation are ignored. What people say most often is in both.

    Args:
        draws: how many dialogues of each of the two kinds are drawn, from a fixed seed.
    """
    rng = Random(0)
    said = {
        normalised(message["content"])
        for _ in range(draws)
        for draw in (first_messages, dialogues.talk)
        for message in draw(rng, Split.TRAIN).messages
        if message["role"] == "user"
    }
    return frozenset(one.id for one in openings if normalised(one.text) in said)
