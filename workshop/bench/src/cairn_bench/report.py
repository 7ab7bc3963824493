"""The results for readers and for programs. Pure, except for facts about the machine."""

from __future__ import annotations

import importlib.metadata
import platform
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import attrs

from cairn import __version__
from cairn_bench.rows import NoRow, Row
from cairn_bench.runs import Run
from cairn_bench.scenarios import SCENARIOS

GOALS: Final[Mapping[float, float]] = {0.0: 1.05, 0.5: 0.9, 5.0: 0.9}
"""By seconds of pause: the highest allowed mean ratio of our time to first token to the peer's."""

WORST_GOAL: Final = 1.1
"""The highest allowed ratio of a single scenario."""

COUNTED: Final = frozenset(one.name for one in SCENARIOS if one.in_mean)
"""The scenarios of the mean."""


@attrs.frozen(kw_only=True)
class Lost:
    """A run of a peer without a result."""

    scenario: str
    server: str
    pause_s: float
    why: str


@attrs.frozen(kw_only=True)
class Ratio:
    """
    Our time to first token compared with a peer's, in one scenario.

    Attributes:
        ours_s, theirs_s: the medians.
        ours_reused, theirs_reused: the reused share of the prompts; None if it is not reported.
    """

    scenario: str
    peer: str
    pause_s: float
    ours_s: float
    theirs_s: float
    ours_reused: float | None
    theirs_reused: float | None

    @property
    def value(self) -> float:
        """Below 1 if ours is faster."""
        return self.ours_s / self.theirs_s


@attrs.frozen(kw_only=True)
class Mean:
    """
    The geometric mean of ratios to one peer at one pause.

    Attributes:
        scenarios: how many of the counting ones it covers.
        worst: the highest of the ratios.
        worst_scenario: the scenario that has it.
    """

    peer: str
    pause_s: float
    value: float
    scenarios: int
    worst: float
    worst_scenario: str

    @property
    def is_whole(self) -> bool:
        """Whether it covers all that count: only then can a goal be reached or missed."""
        return self.scenarios == len(COUNTED)

    @property
    def verdict(self) -> str:
        """The result for the goal."""
        return self._verdict(self.value, GOALS[self.pause_s])

    @property
    def worst_verdict(self) -> str:
        """The result of the worst scenario for its goal."""
        return self._verdict(self.worst, WORST_GOAL)

    @property
    def is_missed(self) -> bool:
        """Whether goals apply and one of them is not reached, of the mean or of a scenario."""
        return self.is_whole and (self.value > GOALS[self.pause_s] or self.worst > WORST_GOAL)

    def _verdict(self, value: float, goal: float) -> str:
        if not self.is_whole:
            return f"over {self.scenarios} of {len(COUNTED)} scenarios, so no goal applies"
        return f"the goal is at most {goal:g}: {'missed' if value > goal else 'reached'}"


def ratios(runs: Sequence[Run], ours: str) -> list[Ratio]:
    """Each run of a peer with ours of the same scenario and pause."""
    mine = {(run.scenario, run.pause_s): run for run in runs if run.server == ours}
    found = []
    for run in runs:
        own = mine.get((run.scenario, run.pause_s))
        if run.server == ours or own is None:
            continue
        found.append(
            Ratio(
                scenario=run.scenario,
                peer=run.server,
                pause_s=run.pause_s,
                ours_s=own.first_s,
                theirs_s=run.first_s,
                ours_reused=own.hit_rate,
                theirs_reused=run.hit_rate,
            )
        )
    return found


def means(found: Sequence[Ratio]) -> list[Mean]:
    """The means over the scenarios that count, for each peer and pause."""
    groups: dict[tuple[str, float], list[Ratio]] = {}
    for ratio in found:
        if ratio.scenario in COUNTED:
            groups.setdefault((ratio.peer, ratio.pause_s), []).append(ratio)
    made = []
    for (peer, pause_s), group in groups.items():
        worst = max(group, key=lambda ratio: ratio.value)
        made.append(
            Mean(
                peer=peer,
                pause_s=pause_s,
                value=statistics.geometric_mean([ratio.value for ratio in group]),
                scenarios=len(group),
                worst=worst.value,
                worst_scenario=worst.scenario,
            )
        )
    return made


def machine(blas: str | None) -> dict[str, Any]:
    """
    The machine and the versions that were measured.

    Args:
        blas: the preloaded library; None if there was none.
    """
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "blas": None if blas is None else Path(blas).name,
        "python": platform.python_version(),
        "cairn": __version__,
        **{name: importlib.metadata.version(name) for name in ("mlx", "mlx-lm")},
    }


def as_json(
    about: Mapping[str, Any],
    runs: Sequence[Run],
    lost: Sequence[Lost],
    ours: str,
    rows: Sequence[Row] = (),
    none: Sequence[NoRow] = (),
) -> dict[str, Any]:
    """
    All of it, for programs.

    Args:
        about: what was measured, and on which machine.
        rows: the results of the other parts.
        none: the other parts without results.
    """
    found = ratios(runs, ours)
    return {
        **about,
        "rows": [
            {
                **attrs.asdict(row),
                "told": row.told,
                "told_goal": row.told_goal,
                "verdict": row.verdict,
            }
            for row in rows
        ],
        "no_rows": [attrs.asdict(one) for one in none],
        "runs": [_run(run) for run in runs],
        "lost": [attrs.asdict(one) for one in lost],
        "ratios": [{**attrs.asdict(ratio), "ratio": ratio.value} for ratio in found],
        "means": [
            {
                **attrs.asdict(mean),
                "goal": GOALS[mean.pause_s],
                "worst_goal": WORST_GOAL,
                "applies": mean.is_whole,
            }
            for mean in means(found)
        ],
    }


def _run(run: Run) -> dict[str, Any]:
    return {
        "scenario": run.scenario,
        "server": run.server,
        "pause_s": run.pause_s,
        "first_s": run.first_s,
        "hit_rate": run.hit_rate,
        "cold_equal": run.cold_equal,
        "settled": None if run.settled is None else attrs.asdict(run.settled),
        "requests": [
            {
                "warm": sample.request.warm,
                "first_s": sample.first_s,
                "total_s": sample.total_s,
                "completion_tokens": sample.answer.completion_tokens,
                "prompt_tokens": sample.answer.prompt_tokens,
                "cached_tokens": sample.answer.cached_tokens,
            }
            for sample in run.samples
        ],
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:  # not Linux
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]}, {len(names)} cores" if names else platform.processor()
