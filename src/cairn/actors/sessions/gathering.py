"""
Decode passes gather before they are appended, so that several are one row and one commit.

A pass opens a window of ``GATHER_S``, or joins the one that is open: at its end all answers append
what they have, in one commit. An answer appends at once if no further pass is to be expected before
that, and at its end. So a token that comes ``GATHER_S`` or more after the one before does not wait.
Neither does the first one, because it has no decode pass.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence

from cairn.actors.requests.messages import DELAYS_S, Delays
from cairn.engine.reports import PassReport

GATHER_S = 0.025
"""The longest time for which a token waits to be appended."""


class Gathering:
    """What the answers of a server that gather at the same time have in common."""

    def __init__(self) -> None:
        self._end = -math.inf
        self._tokens = [0] * (len(DELAYS_S) + 1)
        self._sum_s = 0.0

    @property
    def delays(self) -> Delays:
        """How long tokens have waited so far."""
        return Delays(tokens=tuple(self._tokens), sum_s=self._sum_s)

    def window_end(self, now: float) -> float:
        """The end of the window that is open, or of one that opens now."""
        if self._end <= now:
            self._end = now + GATHER_S
        return self._end

    def close_window(self) -> None:
        """Have the next pass open another window, with all its time."""
        self._end = -math.inf

    def waited(self, tokens: int, delay_s: float) -> None:
        """Count the delay of tokens that are appended."""
        self._tokens[bisect.bisect_left(DELAYS_S, delay_s)] += tokens
        self._sum_s += tokens * delay_s


class GatheredPasses:
    """The passes of one answer that are not appended yet. Times are those of trio's clock."""

    def __init__(self, gathering: Gathering, now: float) -> None:
        """
        Args:
            now: when its first token was appended.
        """
        self._gathering = gathering
        self._passes: list[tuple[float, PassReport]] = []
        self._came = now
        self.append_at = math.inf

    @property
    def any(self) -> bool:
        """Whether there are any."""
        return bool(self._passes)

    def add(self, reports: Sequence[PassReport], now: float) -> None:
        """Add passes that came together. ``append_at`` is when all are to be appended."""
        if not self._passes:
            self.append_at = self._gathering.window_end(now)
        next_at, self._came = now + (now - self._came), now
        if next_at >= self.append_at:
            self.append_at = now
        self._passes.extend((now, report) for report in reports)

    def take(self, now: float) -> list[PassReport]:
        """Remove all of them, in order, to append them now."""
        for came, report in self._passes:
            self._gathering.waited(len(report.all_drawn), now - came)
        self._gathering.close_window()
        taken = [report for _, report in self._passes]
        self._passes.clear()
        self.append_at = math.inf
        return taken
