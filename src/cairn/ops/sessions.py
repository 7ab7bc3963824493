"""
``ops sessions``: who is there, by the journal.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import click

from cairn.journal import events as ev
from cairn.journal.replay import replay
from cairn.journal.state import State
from cairn.ops.output import table
from cairn.ops.where import Source, example, file_argument, journal_options


@click.command(epilog=example("ops sessions"))
@file_argument
@journal_options
def sessions(data_dir: Path, journal: str | None, file: Path | None) -> None:
    """
    List the sessions of a journal, the last used one first.

    Closed sessions are forgotten by the server and not listed; the journal still has their events.
    """
    requests: dict[str, int] = {}
    used_us: dict[str, int] = {}

    def watch(recorded: ev.Recorded, _: State) -> None:
        event = recorded.event
        if isinstance(event, ev.RequestReceived):
            requests[event.session] = requests.get(event.session, 0) + 1
            used_us[event.session] = recorded.time_us

    state = replay(Source.of(data_dir, journal, file).rows("fold"), watch=watch).state
    found = sorted(state.sessions.values(), key=lambda session: session.last_used, reverse=True)
    table(
        ("id", "life", "tenant", "requests", "cached tokens", "blocks", "last request", "bug id"),
        (
            (
                session.id,
                session.life,
                session.tenant,
                requests.get(session.id, 0),
                session.cached_tokens,
                len(session.slab_keys),
                time_text(used_us[session.id]) if session.id in used_us else "",
                session.bug_id,
            )
            for session in found
        ),
    )


def time_text(time_us: int) -> str:
    """
    A time in UTC, for people.
    """
    moment = datetime.fromtimestamp(time_us / 1e6, UTC)
    return moment.strftime("%Y-%m-%d %H:%M:%S") + f".{time_us // 1000 % 1000:03d}Z"
