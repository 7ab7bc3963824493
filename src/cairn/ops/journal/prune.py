"""
``ops journal prune``: removes old rows from the journal.

``cairn.journal.pruning`` prepares a prune; this module asks for it, reports it, removes block files
and gives the space back.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import click

from cairn.actors.clock import clock
from cairn.journal.errors import StoreError
from cairn.journal.lifecycle import SessionState
from cairn.journal.pruning import PreparedPrune, PruneOptions, prepare_prune
from cairn.journal.retention import Span
from cairn.ops.common.locations import (
    blocks_option,
    bytes_on_disk,
    example,
    journal_options,
    keys_in,
    snapshot_path,
    url_of,
)
from cairn.ops.common.output import counted, progress, size_text
from cairn.ops.common.program import as_called
from cairn.ops.common.times import moment_of
from cairn.ops.journal.forget import forget_files, require_place
from cairn.ops.journal.sessions import time_text
from cairn.ops.serve.data_dir import hold_journal

if TYPE_CHECKING:
    from cairn.journal.rows.store_sql import SqlStore

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_RECENT = timedelta(days=1)


def _date(_: click.Context, __: click.Parameter, value: str) -> int:
    """Microseconds since 1970 of a date, a time or an age. Without a zone it is UTC."""
    now = datetime.now(UTC)
    moment = moment_of(value, now)
    if moment is None:
        raise click.BadParameter(
            f"{value} is not a date; write 2026-01-31, 2026-01-31T12:00 (UTC), or an age: 30d"
        )
    if moment > now:
        raise click.BadParameter(f"{value} is in the future")
    return _us(moment)


def _us(moment: datetime) -> int:
    return (moment - _EPOCH) // timedelta(microseconds=1)


@click.command(
    epilog=example(
        "ops journal prune --before 30d --dry-run",
        "ops journal prune --before 2026-01-31 --close-idle",
    )
)
@journal_options
@blocks_option
@click.option(
    "--before",
    "before_us",
    metavar="DATE",
    required=True,
    callback=_date,
    help="Remove rows that are older: a date or time (UTC if it has no zone), or an age: 30d, 36h.",
)
@click.option("--recent", is_flag=True, help="Allow a DATE that is less than a day ago.")
@click.option("--dry-run", is_flag=True, help="Show what would be removed, and change nothing.")
@click.option(
    "--close-idle",
    is_flag=True,
    help="First close idle sessions that were last used before DATE. A client that continues one "
    "gets a new session.",
)
@click.option(
    "--close-quarantined",
    is_flag=True,
    help="First close quarantined sessions that were last used before DATE. The record of the bug "
    "is removed too.",
)
def prune(
    data_dir: Path,
    journal: str | None,
    blocks: Path | None,
    before_us: int,
    recent: bool,
    dry_run: bool,
    close_idle: bool,
    close_quarantined: bool,
) -> None:
    """
    Remove the oldest rows of the journal. Only whole, closed sessions are removed.

    Removes rows from the first one up to the last row where all are older than DATE and no session
    is split. The other rows are unchanged. A base replaces the removed rows: their last position
    and hash, and the state that they imply, without texts but those of existing agents, whose
    sessions may be split. The prune is an event itself (`journal_pruned`), and `ops verify` checks
    the base against it. Token ids that a later decision was compared with stay in the base until
    the next prune. Also removes block files (`blocks` in the data directory) that no remaining
    conversation needs, unless a server uses that directory with another journal.

    Removed rows cannot be restored; run `ops export` first to keep a copy. Stop the server first,
    except for --dry-run. A prune needs up to twice as much free space as the journal has on its
    disk, or as much there and as much in $SQLITE_TMPDIR if that is set. If it is interrupted, run
    the same command again to finish.

    \b
    Exit code
      0  done, or nothing to do; the output says why
      2  refused: a server runs, the journal failed verification, or rows were lost since the last
         stop; nothing was changed
    """
    from cairn.journal.rows.database.urls import node_of
    from cairn.journal.rows.store_sql import SqlStore
    from cairn.ops.common.heads import HeadFiles
    from cairn.ops.serve.recorded_heads import require_known_head

    if not (recent or dry_run):
        _refuse_recent(before_us)
    url = url_of(data_dir, journal)
    options = PruneOptions(
        before_us=before_us, close_idle=close_idle, close_quarantined=close_quarantined
    )
    keys = keys_in(HeadFiles.of(data_dir, journal).keys, url)
    store = SqlStore.open(url, read_only=True, keys=keys)
    if dry_run:
        try:
            _report(_prepared(store, options), options, dry_run=True)
        finally:
            store.close()
        return
    store.close()
    other = (
        "and prune then, start it with --keep TIME, which prunes while it runs, or use --dry-run "
        "to see what would be removed"
    )
    with hold_journal(url, other, who="journal prune"):
        # A prune could hide that rows were lost since the last stop.
        require_known_head(HeadFiles.of(data_dir, journal), url, accept=False)
        before = sum(bytes_on_disk(url))
        store = SqlStore.open(url, keys=keys)
        try:
            # An earlier prune may have ended before it gave back what it removed.
            slack = store.has_slack()
            prepared = _prepared(store, options)
            require_place(node_of(url), prepared.shared, blocks)
            prepared.commit(store)
            _report(prepared, options, dry_run=False)
            # Also what an earlier prune, of a server perhaps, has not removed to its end.
            smaller = _remove(store) or slack
            _remove_snapshot(data_dir)
            _forget(store, data_dir, prepared.runs, blocks)
            if smaller:
                _give_back(store)
        finally:
            store.close()
        if smaller and before:
            after = sum(bytes_on_disk(url))
            click.echo(f"on disk: {size_text(after)}, before {size_text(before)}")


def _refuse_recent(before_us: int) -> None:
    """Refuse a date that may be a typing error, because removed rows cannot be restored."""
    if before_us > _us(datetime.now(UTC) - _RECENT):
        raise click.BadParameter(
            f"{time_text(before_us)} (UTC) is less than a day ago (m means minutes, h hours, d "
            "days); if you mean it, add --recent",
            param_hint="--before",
        )


def _prepared(store: SqlStore, options: PruneOptions) -> PreparedPrune:
    return prepare_prune(store, options, clock(), watched=progress)


def _remove(store: SqlStore) -> bool:
    """Remove the rows that the base has replaced. Returns whether there were any."""
    removed = 0
    try:
        for count in store.removal():
            removed += count
    except StoreError as error:
        click.echo(
            f"The rows are pruned, and no command reads them, but not all of them could be "
            f"removed: {error} Run the same command again to finish.",
            err=True,
        )
    return removed > 0


def _forget(store: SqlStore, data_dir: Path, runs: Collection[str], blocks: Path | None) -> None:
    try:
        forget_files(store, data_dir, runs, blocks)
    except StoreError as error:
        # The rows are removed; only the files are not.
        click.echo(
            f"The rows are removed, but not all their block files could be removed and recorded: "
            f"{error} Run the same command again to finish.",
            err=True,
        )


def _remove_snapshot(data_dir: Path) -> None:
    """Remove the snapshot of the journal before the prune: it has texts of what was removed."""
    path = snapshot_path(data_dir)
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        click.echo(
            f"The rows are removed, but {path}, which has texts of them, is not: {error.strerror}. "
            "Remove it; no server needs it.",
            err=True,
        )


def _give_back(store: SqlStore) -> None:
    click.echo("giving the space back to the disk ...", err=True)
    try:
        store.give_back()
    except StoreError as error:
        click.echo(
            f"The rows are removed, but the file has not shrunk, and their contents may still be "
            f"readable in it: {error} Run the same command again to finish.",
            err=True,
        )


def _report(prepared: PreparedPrune, options: PruneOptions, *, dry_run: bool) -> None:
    """Print what was done, or would be, and what keeps the other rows."""
    plan = prepared.plan
    would = "would be " if dry_run else ""
    click.echo(f"before: {time_text(options.before_us)} (UTC)")
    if prepared.closed:
        click.echo(f"{counted(len(prepared.closed), 'session')} {would}closed")
    if prepared.base is None:
        click.echo("nothing to prune" if not prepared.closed else "no row can be removed yet")
    else:
        click.echo(
            f"{prepared.removed} rows, {counted(plan.sessions, 'session')} {would}removed, up to "
            f"row {prepared.base.position}; {prepared.left} rows "
            f"{'would stay' if dry_run else 'stay'}"
        )
        click.echo(f"base: {prepared.base.digest}")
    if plan.held_by is not None:
        click.echo(_why_held(plan.held_by, prepared, options))
    elif plan.violation is not None:
        broke, reported = plan.violation
        click.echo(
            f"The rows up to {plan.limit} are old enough, but row {broke} broke an invariant, and "
            f"row {reported} records that. They are removed together, when row {reported} is older "
            "than DATE."
        )
    elif prepared.base is None:
        click.echo(f"No session is older than {time_text(options.before_us)} (UTC).")


def _why_held(span: Span, prepared: PreparedPrune, options: PruneOptions) -> str:
    """Which session keeps rows that are old enough, and what to do."""
    first = (
        f"The rows up to {prepared.plan.limit} are old enough, but session {span.session} (opened "
        f"at row {span.first}, last used {time_text(span.used_us)}) keeps those from row "
        f"{span.first} on: "
    )
    sessions = prepared.state.sessions.values()
    session = next((one for one in sessions if one.id == span.session), None)
    last = time_text(span.last_us)
    later = f"{first}it can be removed when its last row ({last}) is older than DATE."
    if span.closed is not None or session is None:
        return later
    if span.used_us >= options.before_us:
        return f"{first}it was used after DATE. Choose a later DATE, or wait."
    if session.state is SessionState.QUARANTINED:
        if not options.close_quarantined:
            how = as_called(f"See `ops replay {session.bug_id}`; --close-quarantined closes it.")
            return f"{first}it is quarantined. {how}"
    elif not options.close_idle:
        return f"{first}it is not closed. --close-idle closes it."
    return later
