"""
The texts sent to a server: the same salt gives the same texts.

A salt is the beginning of each text, because caches match beginnings: a run finds nothing in the
cache from an earlier run.
"""

from __future__ import annotations

import random
import secrets

_BEGINNINGS = ("am", "bra", "can", "del", "fer", "gra", "har", "lin", "mar", "ol", "pe", "sil")
_ENDS = ("ber", "dle", "dow", "ken", "low", "nite", "ter", "vet")
_WORDS = [f"{beginning}{end}" for beginning in _BEGINNINGS for end in _ENDS]
_SALT_BYTES = 4

Message = dict[str, str]


def new_salt() -> str:
    """A salt that was never used before."""
    return secrets.token_hex(_SALT_BYTES)


def system(text: str) -> Message:
    """The beginning of a conversation."""
    return {"role": "system", "content": text}


def user(text: str) -> Message:
    """A user's message."""
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    """An assistant's message. Some servers refuse an empty turn, so it has some text."""
    return {"role": "assistant", "content": text or "Yes."}


def listed(salt: str, name: str, words: int) -> str:
    """A text of the given number of words that was never sent before."""
    drawn = random.Random(f"{salt}/{name}").choices(_WORDS, k=words)
    return f"{salt} {name}. Here is a list of words: {' '.join(drawn)}. Go on with the list."
