"""
What is said to a server: the same salt gives the same texts.

A salt stands at the beginning of each text, since caches match beginnings: a run finds nothing
cached that an earlier run asked.
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
    """A salt that nobody had before."""
    return secrets.token_hex(_SALT_BYTES)


def system(text: str) -> Message:
    """What stands before a conversation."""
    return {"role": "system", "content": text}


def user(text: str) -> Message:
    """What a user says."""
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    """
    What an assistant has said. An empty turn is refused by some servers, so it says something.
    """
    return {"role": "assistant", "content": text or "Yes."}


def listed(salt: str, name: str, words: int) -> str:
    """A text of so many words that nobody has asked before."""
    drawn = random.Random(f"{salt}/{name}").choices(_WORDS, k=words)
    return f"{salt} {name}. Here is a list of words: {' '.join(drawn)}. Go on with the list."
