"""How an answer looks as it arrives: plain, or with lines that break between words."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Protocol

from rich.cells import cell_len

_THINKS, _THOUGHT = "<think>\n", "\n</think>\n\n"
_PIECES = re.compile(r"\n|[^\S\n]+|\S+")


class Rendering(Protocol):
    """An answer as it is shown."""

    def feed(self, text: str, *, is_thought: bool) -> None:
        """Show more of the answer, or of the thoughts before it."""

    def finish(self) -> None:
        """Show what was held back, and end the line. May be called again."""


class Plain:
    """Writes an answer as it is, with tags around thoughts."""

    def __init__(self, write: Callable[[str], object]) -> None:
        self._write = write
        self._thinks = False
        self._last = "\n"

    def feed(self, text: str, *, is_thought: bool) -> None:
        """Show more of the answer, or of the thoughts before it."""
        begins, ends = is_thought and not self._thinks, self._thinks and not is_thought
        self._thinks = is_thought
        self._put((_THINKS if begins else _THOUGHT if ends else "") + text)

    def finish(self) -> None:
        """End the line."""
        if self._last != "\n":
            self._put("\n")

    def _put(self, text: str) -> None:
        self._write(text)
        self._last = text[-1:] or self._last


class Wrapped:
    """
    Breaks lines between words as text arrives. The last word is held back until it ends.

    Args:
        width: of the terminal, in cells.
    """

    def __init__(self, width: int) -> None:
        self._width = max(1, width)
        self._column = 0
        self._gap = ""
        self._word = ""

    def feed(self, text: str) -> str:
        """More text; returns what can be written."""
        made = []
        for piece in _PIECES.findall(text):
            if piece == "\n":
                made += [self._placed(), "\n"]
                self._column, self._gap = 0, ""
            elif piece.isspace():
                made.append(self._placed())
                self._gap += piece
            else:
                for character in piece:
                    # Wide characters are words by themselves: a line may break around each.
                    if self._word and cell_len(self._word[-1]) + cell_len(character) > 2:
                        made.append(self._placed())
                    self._word += character
        return "".join(made)

    def flush(self) -> str:
        """The word that was held back."""
        return self._placed()

    def _placed(self) -> str:
        if not self._word:
            return ""
        word, gap = self._word, self._gap
        self._word = self._gap = ""
        needed = self._column + cell_len(gap) + cell_len(word)
        if self._column and needed > self._width:
            self._column = cell_len(word) % self._width
            return f"\n{word}"
        self._column = needed if needed <= self._width else needed % self._width
        return gap + word


class Breaking:
    """A plain answer on a terminal, whose lines break between words."""

    def __init__(self, write: Callable[[str], object], width: int) -> None:
        self._wrapped = Wrapped(width)
        self._plain = Plain(self._put)
        self._write = write

    def feed(self, text: str, *, is_thought: bool) -> None:
        """Show more of the answer, or of the thoughts before it."""
        self._plain.feed(text, is_thought=is_thought)

    def finish(self) -> None:
        """Show what was held back, and end the line."""
        self._plain.finish()
        self._write(self._wrapped.flush())

    def _put(self, text: str) -> None:
        self._write(self._wrapped.feed(text))
