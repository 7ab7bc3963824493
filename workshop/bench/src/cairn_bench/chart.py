"""A chart of the time to first token by prompt length, for our server and the peer. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from cairn_bench.runs import Run
from cairn_bench.svg import Panel, picture


def chart(runs: Sequence[Run], scenario: str = "30 turns") -> str:
    """
    An SVG of one scenario's warm requests at the longest pause.

    Each request is a dot: prompt tokens on the x axis, milliseconds on the y axis. Without a run of
    that scenario, the first available one is drawn.
    """
    named = [run for run in runs if run.scenario == scenario]
    named = named or [run for run in runs if run.scenario == runs[0].scenario]
    longest = max((run.pause_s for run in named), default=0.0)
    shown = [run for run in named if run.pause_s == longest]
    dots = {
        run.server: [
            (float(sample.answer.prompt_tokens), sample.first_s * 1000)
            for sample in run.warm
            if sample.answer.prompt_tokens is not None
        ]
        for run in shown
    }
    title = "Time to first token against the tokens of the prompt"
    if shown:
        title += f": {shown[0].scenario}, {longest:g} s of pause"
    return picture(title, "tokens of the prompt", [Panel(dots, "ms")])
