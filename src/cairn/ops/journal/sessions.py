"""``ops sessions``: lists the sessions of a journal."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import click

from cairn.journal import events as ev
from cairn.journal.lifecycle import SessionState
from cairn.journal.replay import replay
from cairn.journal.rows.codec import shown
from cairn.journal.rows.export import require_complete
from cairn.journal.state import Session, State
from cairn.journal.tenants import LOCAL
from cairn.ops.common.locations import Source, example, file_argument, journal_options
from cairn.ops.common.output import Shown, table


@click.command(epilog=example("ops sessions"))
@file_argument
@journal_options
def sessions(data_dir: Path, journal: str | None, file: Path | None) -> None:
    """
    List the sessions of a journal, the most recently used first.

    `in slab` is the number of tokens whose KV cache the session has in memory, `blocks` the number
    of sealed blocks that these tokens fill. A session is `lost` if its server died during one of
    its requests; it continues at the next start. Closed sessions are not listed; the journal still
    has their events.

    On a terminal, ids are cut to eight characters, and times (UTC) of today have no date.
    """
    requests: dict[str, int] = {}
    used_us: dict[str, int] = {}

    def watch(recorded: ev.Recorded, _: State) -> None:
        event = recorded.event
        if isinstance(event, ev.RequestReceived):
            requests[event.session] = requests.get(event.session, 0) + 1
            used_us[event.session] = recorded.time_us

    source = Source.of(data_dir, journal, file)
    base = source.base()
    state = replay(
        require_complete(source.rows("fold", base=base), base), base=base, watch=watch
    ).state
    # A server that was killed could not record it; until the next one does, the journal says that
    # it is running. For an export this is unknown.
    dead = state.boot is not None and source.is_held is False
    found = sorted(state.sessions.values(), key=lambda session: session.last_used, reverse=True)
    columns = ("id", "state", "tenant", "requests", "in slab", "blocks", "last request", "bug id")
    rows = [
        (
            session.id,
            _state_of_lost(session) if dead else session.state,
            session.tenant,
            requests.get(session.id, 0),
            0 if dead else session.cached_tokens,
            0 if dead else len(session.slab_keys),
            used(used_us.get(session.id)),
            session.bug_id,
        )
        for session in found
    ]
    one_tenant = all(session.tenant == LOCAL for session in found)
    table(columns, rows, hidden=("tenant",) if one_tenant else (), spare=("tenant", "blocks"))


def _state_of_lost(session: Session) -> str:
    """The state of a session whose server died."""
    if session.state in (SessionState.COLD, SessionState.QUARANTINED, SessionState.CLOSED):
        return session.state
    return "lost" if session.request is not None else SessionState.IDLE


def used(time_us: int | None) -> Shown | None:
    """When something was last used, in UTC; on a terminal without the date if that is today."""
    if time_us is None:
        return None
    full = time_text(time_us)
    day, time = full[:10], full[11:19]
    today = f"{datetime.now(UTC):%Y-%m-%d}"
    return Shown(full, time if day == today else f"{day} {time}")


def time_text(time_us: int) -> str:
    """A time in UTC, for people; one that is none in a calendar is written as it is stored."""
    try:
        moment = datetime.fromtimestamp(time_us / 1e6, UTC)
    except (TypeError, ValueError, OverflowError, OSError):  # of a row that was changed
        return shown(time_us)
    return moment.strftime("%Y-%m-%d %H:%M:%S") + f".{time_us // 1000 % 1000:03d}Z"
