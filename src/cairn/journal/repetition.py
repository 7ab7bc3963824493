"""
Where an answer that repeats itself ends, if its request asks for that. Pure: it depends on the
tokens of the answer alone, so that the same request ends in the same place again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

PERIOD_MAX = 64
"""The most tokens that are found as one repeated piece."""

TIMES = 4
"""How often a piece comes, one after the other, in an answer that repeats itself."""

TOKENS_MIN = 32
"""
How many tokens all of these have at least, so that a row of dashes or zeros is no repetition.
"""


class Repetition:
    """Looks for a repetition in tokens that come one after the other."""

    def __init__(self) -> None:
        self._last: deque[int] = deque(maxlen=PERIOD_MAX)
        # By period: how many of the last tokens are each the same as the one a period before.
        self._same = [0] * (PERIOD_MAX + 1)

    def add(self, token: int) -> bool:
        """Whether the tokens repeat themselves with this one. Changes the state."""
        found = False
        for period, before in enumerate(reversed(self._last), 1):
            same = self._same[period] + 1 if before == token else 0
            self._same[period] = same
            found = found or same + period >= max(TOKENS_MIN, TIMES * period)
        self._last.append(token)
        return found


def repeats_at(tokens: Iterable[int]) -> int | None:
    """After how many tokens they repeat themselves; None if they do not."""
    repetition = Repetition()
    return next((at for at, token in enumerate(tokens, 1) if repetition.add(token)), None)
