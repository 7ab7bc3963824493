"""Two charts in one: the time of each turn, and below it the memory, over the minutes. Pure."""

from __future__ import annotations

from typing import Final

from cairn_bench.long.plan import AGENT, SECOND
from cairn_bench.long.record import Session
from cairn_bench.svg import Panel, picture

_MIB: Final = 1 << 20
_MINUTE_S: Final = 60.0


def chart(session: Session) -> str:
    """
    An SVG: above, a dot for each answered turn, in milliseconds; below, KV and the process in MiB.
    """
    times = {
        name: [
            (turn.at_s / _MINUTE_S, turn.total_s * 1000)
            for turn in session.turns
            if turn.is_answered and turn.total_s is not None and turn.client == client
        ]
        for client, name in ((AGENT, "the first client"), (SECOND, "the one that interrupts"))
    }
    memory = {
        name: [
            (look.at_s / _MINUTE_S, value / _MIB)
            for look in session.looks
            if (value := getattr(look, field)) is not None
        ]
        for field, name in (
            ("slab_bytes", "KV in slabs"),
            ("block_bytes", "KV in blocks"),
            ("disk_bytes", "KV in files"),
            ("rss_bytes", "the process"),
        )
    }
    return picture(
        "A long session: time of each turn, and memory, over its minutes",
        "minutes",
        [Panel(times, "ms"), Panel(memory, "MiB", lines=True)],
        session.seconds / _MINUTE_S,
    )
