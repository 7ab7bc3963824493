"""Two charts in one: the time of each turn, and below it the memory, over the hours. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final
from xml.sax.saxutils import escape

from cairn_bench.long_plan import AGENT, SECOND
from cairn_bench.long_record import Session

_WIDTH: Final = 720
_PANEL: Final = 220
_LEFT: Final = 72
_RIGHT: Final = 16
_TOP: Final = 30
_GAP: Final = 44
_TICKS: Final = 4
_NAME_WIDTH: Final = 150
_MIB: Final = 1 << 20
_MINUTE_S: Final = 60.0
_COLOURS: Final = ("#1f6f50", "#b0452c", "#4a5a8a", "#8a6d1f")

Points = Sequence[tuple[float, float]]


def chart(session: Session) -> str:
    """
    An SVG: above, a dot for each answered turn, in milliseconds; below, KV and the process in MiB.
    """
    answered = [turn for turn in session.turns if turn.is_answered and turn.total_s is not None]
    times = {
        words: [
            (turn.at_s / _MINUTE_S, (turn.total_s or 0.0) * 1000)
            for turn in answered
            if turn.client == client
        ]
        for client, words in ((AGENT, "the first client"), (SECOND, "the one that interrupts"))
    }
    memory = {
        words: [
            (look.at_s / _MINUTE_S, value / _MIB)
            for look in session.looks
            if (value := getattr(look, name)) is not None
        ]
        for name, words in (
            ("slab_bytes", "KV in slabs"),
            ("block_bytes", "KV in blocks"),
            ("disk_bytes", "KV in files"),
            ("rss_bytes", "the process"),
        )
    }
    height = 2 * (_TOP + _PANEL + _GAP)
    minutes = max(session.seconds / _MINUTE_S, 1e-9)
    head = f'viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" font-size="12" role="img"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {head}>',
        "<title>A long session: time of each turn, and memory, over its minutes</title>",
        f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>',
        *_panel(times, minutes, "ms", _TOP, dots=True),
        *_panel(memory, minutes, "MiB", 2 * _TOP + _PANEL + _GAP, dots=False),
        f'<text x="{_WIDTH - _RIGHT}" y="{height - 6}" text-anchor="end">minutes</text>',
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _panel(
    series: Mapping[str, Points], furthest: float, unit: str, top: int, *, dots: bool
) -> Iterator[str]:
    """Axes, the data between them, and the names above."""
    highest = max((y for points in series.values() for _, y in points), default=1.0) or 1.0

    def at(x: float, y: float) -> tuple[float, float]:
        across = _LEFT + x / furthest * (_WIDTH - _LEFT - _RIGHT)
        return across, top + _PANEL - y / highest * _PANEL

    for tick in range(_TICKS + 1):
        x, y = furthest * tick / _TICKS, highest * tick / _TICKS
        (left, level), (across, floor) = at(0, y), at(x, 0)
        yield (
            f'<line x1="{left:.0f}" y1="{level:.0f}" x2="{_WIDTH - _RIGHT}" y2="{level:.0f}" '
            'stroke="#dddddd"/>'
            f'<text x="{left - 6:.0f}" y="{level + 4:.0f}" text-anchor="end">{y:.0f} {unit}</text>'
            f'<text x="{across:.0f}" y="{floor + 18:.0f}" text-anchor="middle">{x:.3g}</text>'
        )
    for place, (name, points) in enumerate(series.items()):
        colour = _COLOURS[place]
        start = _LEFT + 10 + _NAME_WIDTH * place
        yield (
            f'<circle cx="{start}" cy="{top - 14}" r="4" fill="{colour}"/>'
            f'<text x="{start + 10}" y="{top - 10}">{escape(name)}</text>'
        )
        places = [at(x, y) for x, y in points]
        if dots:
            for across, level in places:
                yield f'<circle cx="{across:.1f}" cy="{level:.1f}" r="2" fill="{colour}"/>'
        else:
            path = " ".join(f"{across:.1f},{level:.1f}" for across, level in places)
            yield f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>'
