"""A chart of the time to first token by prompt length, for our server and the peer. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final
from xml.sax.saxutils import escape

from cairn_bench.runs import Run

_WIDTH: Final = 720
_HEIGHT: Final = 360
_LEFT: Final = 64
_BOTTOM: Final = 44
_TOP: Final = 28
_RIGHT: Final = 16
_COLOURS: Final = ("#1f6f50", "#b0452c", "#4a5a8a", "#8a6d1f")
_TICKS: Final = 4
_NAME_WIDTH: Final = 150


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
    dots = [
        (place, sample.answer.prompt_tokens, sample.first_s * 1000)
        for place, run in enumerate(shown)
        for sample in run.warm
        if sample.answer.prompt_tokens is not None
    ]
    furthest = max((x for _, x, _ in dots), default=1) or 1
    highest = max((y for _, _, y in dots), default=1.0) or 1.0

    def at(x: float, y: float) -> tuple[float, float]:
        across = _LEFT + x / furthest * (_WIDTH - _LEFT - _RIGHT)
        return across, _HEIGHT - _BOTTOM - y / highest * (_HEIGHT - _BOTTOM - _TOP)

    title = "Time to first token against the tokens of the prompt"
    if shown:
        title += f": {shown[0].scenario}, {longest:g} s of pause"
    head = f'viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" font-size="12" role="img"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {head}>',
        f"<title>{escape(title)}</title>",
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#ffffff"/>',
    ]
    for tick in range(_TICKS + 1):
        x, y = furthest * tick / _TICKS, highest * tick / _TICKS
        (left, level), (across, floor) = at(0, y), at(x, 0)
        parts.append(
            f'<line x1="{left:.0f}" y1="{level:.0f}" x2="{_WIDTH - _RIGHT}" y2="{level:.0f}" '
            'stroke="#dddddd"/>'
            f'<text x="{left - 6:.0f}" y="{level + 4:.0f}" text-anchor="end">{y:.0f} ms</text>'
            f'<text x="{across:.0f}" y="{floor + 18:.0f}" text-anchor="middle">{x:.0f}</text>'
        )
    parts.append(
        f'<text x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 8}" text-anchor="end">tokens of the prompt'
        "</text>"
    )
    for place, x, y in dots:
        across, level = at(x, y)
        colour = _COLOURS[place % len(_COLOURS)]
        parts.append(f'<circle cx="{across:.1f}" cy="{level:.1f}" r="3" fill="{colour}"/>')
    for place, run in enumerate(shown):
        colour = _COLOURS[place % len(_COLOURS)]
        start = _LEFT + 10 + _NAME_WIDTH * place
        parts.append(
            f'<circle cx="{start}" cy="14" r="4" fill="{colour}"/>'
            f'<text x="{start + 10}" y="18">{escape(run.server)}</text>'
        )
    parts.append("</svg>")
    return "\n".join(parts) + "\n"
