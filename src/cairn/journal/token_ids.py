"""
Token ids as objects that are there once.

A Python integer takes 32 bytes, and every place that names it 8 more. Of the ids of long
conversations almost all occur again and again, in other turns and in other conversations, so each
id is one object for the whole process. That is a matter of memory alone: the values are what they
were.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

MOST: Final = 1 << 20
"""Ids from here on are left as they are; no vocabulary is that large."""

_objects: list[tuple[int, ...]] = [()]


def shared(ids: Iterable[int]) -> tuple[int, ...]:
    """The same ids, each the one object that stands for it. May be called on any thread."""
    found = tuple(ids)
    if not found or min(found) < 0:
        return found
    most = max(found)
    if most >= MOST:
        return found
    objects = _objects[0]
    if most >= len(objects):
        # Two threads may do this at once: each has a whole table, and one of them is kept.
        objects += tuple(range(len(objects), _room_for(most)))
        _objects[0] = objects
    return tuple(map(objects.__getitem__, found))


def _room_for(most: int) -> int:
    """How large the table gets: powers of two, so that it is not made anew for each larger id."""
    return min(MOST, 1 << max(10, most.bit_length()))
