"""
Texts that were read from the journal and will be asked for again: as many as fit.

They are remembered by where they stand. A row never changes while a server runs, so what is held
here is never another text than the journal's; which rows are to be read is asked of the fold each
time, and nobody comes here without its answer.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Final

import attrs

TEXT_CACHE_BYTES: Final = 64 * 2**20
"""About a hundred and fifty conversations of 100,000 tokens."""

_ENTRY_BYTES: Final = 256
"""What an entry takes beside its value: key, links, and a part of the table."""


@attrs.frozen
class _Entry:
    value: Any
    bytes: int


class TextCache:
    """
    Values by where they stand. For trio's thread.

    Attributes:
        bytes: what they take.
    """

    def __init__(self, budget_bytes: int = TEXT_CACHE_BYTES) -> None:
        """
        Args:
            budget_bytes: what they may take.
        """
        self._budget_bytes = budget_bytes
        self._entries: OrderedDict[Hashable, _Entry] = OrderedDict()
        self.bytes = 0

    def find(self, key: Hashable) -> Any:
        """The value that stands there; None where it is not remembered. Changes nothing."""
        entry = self._entries.get(key)
        return entry.value if entry is not None else None

    def use(self, used: Sequence[tuple[Hashable, Any]]) -> None:
        """
        Remember what was used just now, and forget what was not used for the longest time. Of what
        was used together the front stays longest: one that goes through all of it, and always from
        the front, would otherwise find nothing where not all of it fits.
        """
        for key, value in reversed(used):
            if key in self._entries:
                self._entries.move_to_end(key)
                continue
            size = held_bytes(value) + _ENTRY_BYTES
            if size <= self._budget_bytes:
                self._entries[key] = _Entry(value, size)
                self.bytes += size
        while self.bytes > self._budget_bytes:
            self.bytes -= self._entries.popitem(last=False)[1].bytes

    def forget(self, gone: Callable[[Hashable, Any], bool]) -> None:
        """Forget the values of which ``gone`` says so."""
        for key, entry in list(self._entries.items()):
            if gone(key, entry.value):
                del self._entries[key]
                self.bytes -= entry.bytes


def held_bytes(value: object) -> int:
    """The bytes that a plain value takes, with all that is in it."""
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
