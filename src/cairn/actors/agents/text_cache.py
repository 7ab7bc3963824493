"""
A cache of texts that were read from the journal, bounded in bytes.

The key of a text is its place in the journal. A row never changes while a server runs, so a cached
text is always the journal's. Which rows to read is asked of the fold each time; the cache is looked
up only for rows that the fold names.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Final

import attrs
import cachetools

TEXT_CACHE_BYTES: Final = 64 * 2**20
"""About a hundred and fifty conversations of 100,000 tokens."""

_ENTRY_BYTES: Final = 256
"""The bytes of an entry in addition to its value: key, links, and a share of the table."""


class TextCache:
    """Values by their place in the journal; the least recently used are dropped first."""

    def __init__(self, budget_bytes: int = TEXT_CACHE_BYTES) -> None:
        self._entries: cachetools.LRUCache[Hashable, Any] = cachetools.LRUCache(
            budget_bytes, getsizeof=lambda value: held_bytes(value) + _ENTRY_BYTES
        )

    @property
    def bytes(self) -> int:
        """The bytes that the values take."""
        return int(self._entries.currsize)

    def find(self, key: Hashable) -> Any:
        """The value at a place; None if it is not cached. Does not count as a use."""
        if key not in self._entries:
            return None
        return cachetools.Cache.__getitem__(self._entries, key)

    def use(self, used: Sequence[tuple[Hashable, Any]]) -> None:
        """
        Cache values that were used together just now. The first ones are dropped last: a caller
        that reads a long sequence from its beginning every time would else never find anything.
        """
        for key, value in reversed(used):
            if key in self._entries:
                self._entries[key]  # counts as a use
                continue
            with contextlib.suppress(ValueError):  # larger than the whole cache
                self._entries[key] = value

    def forget(self, gone: Callable[[Hashable, Any], bool]) -> None:
        """Drop the values for which ``gone`` returns True."""
        for key in list(self._entries):
            if gone(key, self.find(key)):
                del self._entries[key]


def held_bytes(value: object) -> int:
    """The bytes of a plain value, with all that is in it."""
    total, rest = 0, [value]
    while rest:
        one = rest.pop()
        total += sys.getsizeof(one)
        if isinstance(one, Mapping):
            rest.extend(one.keys())
            rest.extend(one.values())
        elif isinstance(one, list | tuple):
            rest.extend(one)
        elif attrs.has(kind := type(one)):
            rest.extend(getattr(one, field.name) for field in attrs.fields(kind))
    return total
