"""
Token ids as shared objects.

A Python integer takes 32 bytes, and every reference to it 8 more. Almost all ids of long
conversations occur many times, in other turns and other conversations, so each id is one object for
the whole process. This only saves memory; the values are the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

MOST: Final = 1 << 20
"""Ids from here on are not shared; no vocabulary is that large."""

_objects: list[tuple[int, ...]] = [()]


def shared(ids: Iterable[int]) -> tuple[int, ...]:
    """The same ids as shared objects. May be called on any thread."""
    found = tuple(ids)
    if not found or min(found) < 0:
        return found
    most = max(found)
    if most >= MOST:
        return found
    objects = _objects[0]
    if most >= len(objects):
        # Two threads may do this at once: each makes a complete table, and one of these stays.
        objects += tuple(range(len(objects), _room_for(most)))
        _objects[0] = objects
    return tuple(map(objects.__getitem__, found))


def _room_for(most: int) -> int:
    """The size of the table: powers of two, so that it is not rebuilt for each larger id."""
    return min(MOST, 1 << max(10, most.bit_length()))
