"""Charts as SVG: panels of dots or lines, one below the other, over the same x axis. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final
from xml.sax.saxutils import escape

import attrs

_WIDTH: Final = 720
_PANEL: Final = 280
_LEFT: Final = 72
_RIGHT: Final = 16
_TOP: Final = 30
_GAP: Final = 44
_TICKS: Final = 4
_NAME_WIDTH: Final = 150
_COLOURS: Final = ("#1f6f50", "#b0452c", "#4a5a8a", "#8a6d1f")

Points = Sequence[tuple[float, float]]


@attrs.frozen
class Panel:
    """
    One chart.

    Attributes:
        series: (x, y) of each point, by the name of its series.
        unit: of the y axis.
        lines: whether the points of a series are joined.
    """

    series: Mapping[str, Points]
    unit: str
    lines: bool = False


def picture(title: str, x_name: str, panels: Sequence[Panel], furthest: float = 0.0) -> str:
    """
    An SVG of the panels.

    Args:
        furthest: the end of the x axis, if no point is further right.
    """
    points = [x for panel in panels for series in panel.series.values() for x, _ in series]
    furthest = max([*points, furthest]) if points else furthest
    height = len(panels) * (_TOP + _PANEL + _GAP)
    head = f'viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" font-size="12" role="img"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {head}>',
        f"<title>{escape(title)}</title>",
        f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>',
    ]
    for place, panel in enumerate(panels):
        parts += _drawn(panel, furthest or 1.0, _TOP + place * (_TOP + _PANEL + _GAP))
    parts += [
        f'<text x="{_WIDTH - _RIGHT}" y="{height - 6}" text-anchor="end">{escape(x_name)}</text>',
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _drawn(panel: Panel, furthest: float, top: int) -> Iterator[str]:
    """The axes, the points between them, and the names above."""
    highest = max((y for points in panel.series.values() for _, y in points), default=1.0) or 1.0

    def at(x: float, y: float) -> tuple[float, float]:
        across = _LEFT + x / furthest * (_WIDTH - _LEFT - _RIGHT)
        return across, top + _PANEL - y / highest * _PANEL

    for tick in range(_TICKS + 1):
        x, y = furthest * tick / _TICKS, highest * tick / _TICKS
        (left, level), (across, floor) = at(0, y), at(x, 0)
        yield (
            f'<line x1="{left:.0f}" y1="{level:.0f}" x2="{_WIDTH - _RIGHT}" y2="{level:.0f}" '
            'stroke="#dddddd"/>'
            f'<text x="{left - 6:.0f}" y="{level + 4:.0f}" text-anchor="end">{y:.0f} {panel.unit}'
            f'</text><text x="{across:.0f}" y="{floor + 18:.0f}" text-anchor="middle">{_short(x)}'
            "</text>"
        )
    for place, (name, points) in enumerate(panel.series.items()):
        colour = _COLOURS[place % len(_COLOURS)]
        start = _LEFT + 10 + _NAME_WIDTH * place
        yield (
            f'<circle cx="{start}" cy="{top - 14}" r="4" fill="{colour}"/>'
            f'<text x="{start + 10}" y="{top - 10}">{escape(name)}</text>'
        )
        places = [at(x, y) for x, y in points]
        if panel.lines:
            path = " ".join(f"{across:.1f},{level:.1f}" for across, level in places)
            yield f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>'
        else:
            for across, level in places:
                yield f'<circle cx="{across:.1f}" cy="{level:.1f}" r="2" fill="{colour}"/>'


def _short(x: float) -> str:
    return f"{x:.0f}" if x >= 100 else f"{x:.3g}"
