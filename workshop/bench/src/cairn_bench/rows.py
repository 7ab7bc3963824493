"""A figure and its goal. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import attrs


@attrs.frozen(kw_only=True)
class Row:
    """
    A measured figure.

    Attributes:
        name: as in docs/benchmarks.md.
        value: the figure.
        goal: the value to reach; None if it is only shown.
        better: which direction is better.
        shown: how the value is formatted.
        of: what it was computed from, for readers.
        checked: how many warm answers were compared with cold ones for it.
        figures: what it was computed from, for programs.
    """

    name: str
    value: float
    goal: float | None = None
    better: Literal["less", "more"] = "less"
    shown: Literal["number", "share", "count"] = "number"
    of: str = ""
    checked: int = 0
    figures: Mapping[str, Any] = attrs.field(factory=dict)

    @property
    def is_missed(self) -> bool:
        """Whether there is a goal and it is not reached."""
        if self.goal is None:
            return False
        return self.value > self.goal if self.better == "less" else self.value < self.goal

    @property
    def told(self) -> str:
        """The value for readers."""
        return shown(self.value, self.shown)

    @property
    def told_goal(self) -> str:
        """The goal for readers; empty if there is none."""
        if self.goal is None:
            return ""
        most = "at most" if self.better == "less" else "at least"
        return f"{most} {shown(self.goal, self.shown)}"

    @property
    def verdict(self) -> str:
        """Whether the goal is reached; empty if there is none."""
        if self.goal is None:
            return ""
        return "missed" if self.is_missed else "reached"


@attrs.frozen(kw_only=True)
class NoRow:
    """
    A figure without a result.

    Attributes:
        name: of the figure.
        why: why there is no result.
        ours: whether it is our server's fault, and not a peer's.
    """

    name: str
    why: str
    ours: bool = True


def shown(value: float, how: str) -> str:
    """A number for readers: a share in percent, a count, else three significant digits."""
    if how == "share":
        return f"{value:.1%}".replace(".0%", "%")
    return f"{value:.0f}" if how == "count" else f"{value:.3g}"
