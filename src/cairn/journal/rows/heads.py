"""
Heads: what a chain ends with, for comparing a journal with what is known of it from elsewhere.

A head is a position and the hash of the row there. The hash alone would not say whether its row can
have been pruned.
"""

from __future__ import annotations

import re

import attrs

from cairn.journal.rows.codec import GENESIS
from cairn.journal.rows.store import Store

_FORM = re.compile(r"(0|[1-9][0-9]{0,17}):([0-9a-f]{64})")


@attrs.frozen
class Head:
    """The position and the hash of a row that was once the last one."""

    position: int
    hash: str

    @classmethod
    def parse(cls, text: str) -> Head:
        """
        The head of a text POSITION:HASH.

        Raises:
            ValueError: it is not one.
        """
        parts = _FORM.fullmatch(text.strip().lower())
        if parts is None:
            raise ValueError(f"{text!r} is not POSITION:HASH")
        return cls(int(parts[1]), parts[2])

    def __str__(self) -> str:
        return f"{self.position}:{self.hash}"


BEGINNING = Head(0, GENESIS)
"""The head of a journal without rows."""


def lost_words(known: Head, store: Store) -> str | None:
    """
    How a journal does not contain a head that was known before, in words; None if it does, or if
    the row was pruned and cannot be compared.
    """
    if known == BEGINNING:
        return None
    base, last = store.base(), Head(*store.head())
    if base is not None and known.position < base.position:
        return None
    if last.position < known.position:
        return f"it ends at row {last.position}, and had row {known.position} before"
    if base is not None and known.position == base.position:
        found = base.head
    else:
        row = store.row(known.position)
        found = row.hash if row is not None else "none"
    if found == known.hash:
        return None
    return f"row {known.position} has the hash {found}, and had {known.hash} before"
