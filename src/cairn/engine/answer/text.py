"""
From sampled tokens to the text that a client sees, one token at a time. Knows nothing of MLX.

Text is released as soon as it is certain. The bytes of an incomplete character wait for the rest of
it, and text that may be the beginning of a stop text waits until it is not.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from cairn.engine.contract import Detokenizer

#: Stands in for the prompt whose text the answer continues.
_BEFORE = "."


@attrs.frozen(kw_only=True)
class Piece:
    """
    What a token released.

    Attributes:
        text: may be empty.
        tokens: how many tokens were taken in since text was last released. Some of their text may
            still wait.
        stop: the stop text that was found; the answer ends before it.
    """

    text: str
    tokens: int
    stop: str | None = None

    @property
    def stopped(self) -> bool:
        """Whether a stop text was met."""
        return self.stop is not None


class AnswerText:
    """Turns the tokens of one answer into text, in order."""

    def __init__(
        self, detokenizer: Detokenizer, stop: Sequence[str] = (), *, goes_on: bool = False
    ) -> None:
        """
        Args:
            detokenizer: one of mlx-lm's streaming detokenizers. It is copied, so one detokenizer
                serves all answers.
            stop: texts that end the answer.
            goes_on: whether the answer continues the prompt's text directly, so that a leading
                space belongs to it.
        """
        self._detokenizer = copy.copy(detokenizer)
        self._detokenizer.reset()
        self._stop = tuple(text for text in stop if text)
        self._taken = 0
        if goes_on and "text" in vars(self._detokenizer):
            # mlx-lm's detokenizers remove a leading space if there is no text yet.
            self._detokenizer.text, self._taken = _BEFORE, len(_BEFORE)
        self._waiting = ""
        self._tokens = 0
        self._stopped = False

    def add(self, token: int) -> Piece:
        """Take in a token. Changes the state."""
        self._detokenizer.add_token(token)
        return self._released(1, last=False)

    def finish(self) -> Piece:
        """End the answer: release what waits. Changes the state."""
        if self._stopped:
            return Piece(text="", tokens=0)
        self._detokenizer.finalize()
        return self._released(0, last=True)

    def _released(self, tokens: int, *, last: bool) -> Piece:
        text = self._detokenizer.text
        self._waiting += text[self._taken :]
        self._taken = len(text)
        self._tokens += tokens
        cut, stop = self._cut(last)
        released, self._waiting = self._waiting[:cut], self._waiting[cut:]
        if stop is not None:
            self._stopped, self._waiting = True, ""
        if not released and stop is None and not last:
            return Piece(text="", tokens=0)
        done, self._tokens = self._tokens, 0
        return Piece(text=released, tokens=done, stop=stop)

    def _cut(self, last: bool) -> tuple[int, str | None]:
        """
        How much of the waiting text is certain, and the stop text that begins there. Of several
        stop texts the shortest wins, because it is complete first.
        """
        found = [(self._waiting.find(text), len(text), text) for text in self._stop]
        met = [one for one in found if one[0] >= 0]
        if met:
            place, _, text = min(met)
            return place, text
        if last:
            return len(self._waiting), None
        return len(self._waiting) - unfinished(self._waiting, self._stop), None


def unfinished(text: str, texts: Iterable[str]) -> int:
    """The length of the longest end of ``text`` that may become one of ``texts``."""
    return max((_overlap(text, each) for each in texts), default=0)


def _overlap(text: str, texts: str) -> int:
    """The length of the longest end of ``text`` that begins ``texts`` without completing it."""
    for length in range(min(len(texts) - 1, len(text)), 0, -1):
        if text.endswith(texts[:length]):
            return length
    return 0
