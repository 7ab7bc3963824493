"""
From sampled tokens to the text that a client sees, a token at a time. Nothing here knows MLX.

Text is released as soon as it is certain: bytes that are part of a character wait for the rest of
it, and text that may be the beginning of a stop text waits until it is not.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import attrs


@attrs.frozen(kw_only=True)
class Piece:
    """
    What a token released.

    Attributes:
        text: may be empty.
        tokens: how many tokens go with it: those taken in since the last text was released. What
            of their text must wait still comes with a later piece.
        stopped: whether a stop text was met; the answer ends before it.
    """

    text: str
    tokens: int
    stopped: bool = False


class AnswerText:
    """
    Turns the tokens of one answer into text, in order.
    """

    def __init__(self, detokenizer: Any, stop: Sequence[str] = ()) -> None:
        """
        Args:
            detokenizer: one of mlx-lm's streaming detokenizers; it is copied, so that one that was
                made at start serves all answers.
            stop: texts that end the answer.
        """
        self._detokenizer = copy.copy(detokenizer)
        self._detokenizer.reset()
        self._stop = tuple(text for text in stop if text)
        self._taken = 0
        self._waiting = ""
        self._tokens = 0
        self._stopped = False

    def add(self, token: int) -> Piece:
        """
        Take in a token. Changes the state.
        """
        self._detokenizer.add_token(token)
        return self._released(1, last=False)

    def finish(self) -> Piece:
        """
        The answer is over: release what waits. Changes the state.
        """
        if self._stopped:
            return Piece(text="", tokens=0)
        self._detokenizer.finalize()
        return self._released(0, last=True)

    def _released(self, tokens: int, *, last: bool) -> Piece:
        text: str = self._detokenizer.text
        self._waiting += text[self._taken :]
        self._taken = len(text)
        self._tokens += tokens
        cut, stopped = self._cut(last)
        released, self._waiting = self._waiting[:cut], self._waiting[cut:]
        if stopped:
            self._stopped, self._waiting = True, ""
        if not released and not stopped and not last:
            return Piece(text="", tokens=0)
        done, self._tokens = self._tokens, 0
        return Piece(text=released, tokens=done, stopped=stopped)

    def _cut(self, last: bool) -> tuple[int, bool]:
        """
        How much of the waiting text is certain, and whether a stop text begins there.
        """
        found = [self._waiting.find(text) for text in self._stop]
        met = [place for place in found if place >= 0]
        if met:
            return min(met), True
        if last:
            return len(self._waiting), False
        held = max((_overlap(self._waiting, text) for text in self._stop), default=0)
        return len(self._waiting) - held, False


def _overlap(text: str, stop: str) -> int:
    """
    The length of the longest end of ``text`` that is a beginning of ``stop``.
    """
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
