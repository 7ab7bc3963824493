"""``ops sessions``: lists the sessions of a journal."""

from __future__ import annotations

import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import click
import msgspec

from cairn.journal import events as ev
from cairn.journal.lifecycle import SessionState
from cairn.journal.replay import replay
from cairn.journal.rows.codec import shown
from cairn.journal.rows.export import require_complete
from cairn.journal.state import Session, State
from cairn.journal.summaries import Summaries
from cairn.journal.tenants import LOCAL
from cairn.ops.common.locations import Source, example, file_argument, journal_options
from cairn.ops.common.output import Shown, table

SHOWN = 20
"""How many sessions a terminal shows, unless all are asked for."""

_WORDS = 26  # a terminal of 80 columns has room for them
_AGES = ((86_400, "d"), (3600, "h"), (60, "min"), (1, "s"))


@click.command(epilog=example("ops sessions", "ops sessions --all", "ops sessions --json"))
@file_argument
@journal_options
@click.option("--all", "every", is_flag=True, help=f"Show all, and not only the last {SHOWN}.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object for each, one a line.")
def sessions(
    data_dir: Path, journal: str | None, file: Path | None, every: bool, as_json: bool
) -> None:
    """
    List the sessions of a journal, the most recently used first.

    `first words` are those of the conversation, `client` is the program that sent its last request,
    by its own word, `tokens` those of its last prompt and answer, and
    `reused` is the share of all its prompt tokens that were not computed again. `in slab` is the
    number of tokens whose KV cache the session has in memory, `blocks` the number of sealed blocks
    that these tokens fill. A session is `lost` if its server died during one of its requests; it
    continues at the next start. Closed sessions are not listed; the journal still has their events.

    A terminal shows the last 20, with ids of eight characters, and how long ago each was used.
    Times are in UTC. Elsewhere all are printed.
    """
    found = Summaries()

    def watch(recorded: ev.Recorded, _: State) -> None:
        found.see(recorded)

    source = Source.of(data_dir, journal, file)
    base = source.base()
    state = replay(
        require_complete(source.rows("fold", base=base), base), base=base, watch=watch
    ).state
    # A server that was killed could not record it; until the next one does, the journal says that
    # it is running. For an export this is unknown.
    dead = state.boot is not None and source.is_held is False
    known = sorted(state.sessions.values(), key=lambda session: session.last_used, reverse=True)
    shown = known if every or as_json or not sys.stdout.isatty() else known[:SHOWN]
    rows = [_row(found, session, dead=dead) for session in shown]
    if as_json:
        for row in rows:
            click.echo(msgspec.json.encode(_object(row)).decode())
        return
    one_tenant = all(session.tenant == LOCAL for session in known)
    table(
        tuple(rows[0]) if rows else _COLUMNS,
        [tuple(row.values()) for row in rows],
        hidden=[
            *(["tenant"] if one_tenant else []),
            *(["client"] if all(row["client"] is None for row in rows) else []),
        ],
        spare=("tenant", "blocks", "in slab", "bug id", "client", "first words"),
    )
    if len(shown) < len(known):
        click.echo(f"({len(known) - len(shown)} more: ops sessions --all)")


_COLUMNS = (
    *("id", "state", "first words", "client", "turns", "tokens", "reused", "last used"),
    *("in slab", "blocks", "tenant", "bug id"),
)


def _row(found: Summaries, session: Session, *, dead: bool) -> dict[str, object]:
    """
    What is shown of a session, by column.

    Args:
        dead: whether its server died.
    """
    summary = found.session(session.id)
    words, client, prompt, reused = "", None, 0, 0
    if summary is not None:
        words, client = summary.words, summary.client
        prompt, reused = summary.prompt, summary.reused
    values = (
        session.id,
        _state_of_lost(session) if dead else str(session.state),
        Shown(words, words if len(words) <= _WORDS else f"{words[: _WORDS - 1]}…"),
        client,
        found.turn_count(session.id) if summary is not None else 0,
        summary.context if summary is not None else 0,
        f"{100 * reused // prompt} %" if prompt else None,
        _ago(summary.used_us) if summary is not None and prompt else None,
        0 if dead else session.cached_tokens,
        0 if dead else len(session.slab_keys),
        session.tenant,
        session.bug_id,
    )
    return dict(zip(_COLUMNS, values, strict=True))


def _object(row: dict[str, object]) -> dict[str, object]:
    """A row with names and values for programs."""
    plain = {
        name.replace(" ", "_"): str(value) if isinstance(value, Shown) else value
        for name, value in row.items()
    }
    share = row["reused"]
    plain["reused"] = int(str(share).split()[0]) / 100 if share is not None else None
    return plain


def _ago(time_us: int) -> Shown:
    """When something was last used; on a terminal how long ago."""
    return Shown(time_text(time_us), age(time.time_ns() // 1000 - time_us))


def age(duration_us: int) -> str:
    """How long ago something was, in its largest unit."""
    seconds = max(0, duration_us // 1_000_000)
    for size, unit in _AGES:
        if seconds >= size:
            return f"{seconds // size} {unit} ago"
    return "now"


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
