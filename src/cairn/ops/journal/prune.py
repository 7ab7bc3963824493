"""
``ops journal prune``: how old rows are removed from the journal.

To prune is to cut off the first rows (``cairn.journal.retention`` says where), with a base in their
place. What would be left is read before anything is changed: it has to give the same state as the
whole. The cut and the event that tells of it are one transaction.

The journal is read more than once. With --dry-run a server may append meanwhile, so that each
reading ends where the first one did.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import click

from cairn.actors.clock import clock
from cairn.journal import events as ev
from cairn.journal.base import (
    Base,
    base_of,
    forgotten,
    forgotten_faults,
    loaded_of,
    with_ids,
)
from cairn.journal.codec import Row, decode
from cairn.journal.errors import StoreError
from cairn.journal.ledger import Ledger
from cairn.journal.lifecycle import SessionState
from cairn.journal.replay import Replay
from cairn.journal.retention import Plan, Span, Survey, compared_with
from cairn.journal.runs import Runs
from cairn.journal.state import State
from cairn.journal.tenants import LOCAL
from cairn.ops.common.locations import bytes_on_disk, example, journal_options, url_of
from cairn.ops.common.output import counted, progress, size_text
from cairn.ops.common.times import moment_of
from cairn.ops.journal.forget import forget_files
from cairn.ops.journal.sessions import time_text
from cairn.ops.serve.data_dir import hold_journal

if TYPE_CHECKING:
    from cairn.journal.store_sql import SqlStore

_REASON = "retention"
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_RECENT = timedelta(days=1)


def _date(_: click.Context, __: click.Parameter, value: str) -> int:
    """A date, a time or an age in microseconds since 1970. Without a zone it is UTC."""
    now = datetime.now(UTC)
    moment = moment_of(value, now)
    if moment is None:
        raise click.BadParameter(
            f"{value} is no date; write 2026-01-31, 2026-01-31T12:00 (UTC) or an age, 30d"
        )
    if moment > now:
        raise click.BadParameter(f"{value} is yet to come")
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
@click.option(
    "--before",
    "before_us",
    metavar="DATE",
    required=True,
    callback=_date,
    help="Remove what is older: a date or a time (UTC, if it names no zone), or an age: 30d, 36h.",
)
@click.option("--recent", is_flag=True, help="Let DATE be less than a day ago.")
@click.option("--dry-run", is_flag=True, help="Say what would go, and change nothing.")
@click.option(
    "--close-idle",
    is_flag=True,
    help="First close the sessions at rest that were last used before DATE: who comes back to one "
    "begins a new session.",
)
@click.option(
    "--close-quarantined",
    is_flag=True,
    help="Likewise those that a bug took out of service: what is on record of the bug goes too.",
)
def prune(
    data_dir: Path,
    journal: str | None,
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
    and hash, and the state that they imply, without texts. The prune is an event itself
    (`journal_pruned`), and `ops verify` checks the base against it. Token ids that a later decision
    was compared with stay in the base until the next prune. Also removes block files (`blocks` in
    the data directory) that no remaining conversation needs, unless a server uses that directory
    with another journal.

    Removed rows cannot be restored; run `ops export` first to keep a copy. Stop the server first,
    except for --dry-run. A prune needs up to twice as much free space as the journal has on its
    disk, or as much there and as much in $SQLITE_TMPDIR if that is set. If it is interrupted, run
    the same command again to finish.

    \b
    Exit code
      0  done, or nothing to do; the output says why
      2  refused: a server runs, or the journal failed verification; nothing was changed
    """
    from cairn.journal.store_sql import SqlStore

    if not (recent or dry_run):
        _refuse_recent(before_us)
    url = url_of(data_dir, journal)
    chosen = _Chosen(before_us, close_idle, close_quarantined)
    store = SqlStore.open(url, read_only=True)
    if dry_run:
        try:
            _report(_prepared(store, chosen), chosen, dry_run=True)
        finally:
            store.close()
        return
    store.close()
    other = "and prune then; or see with --dry-run what would go"
    with hold_journal(url, other, who="journal prune"):
        before = sum(bytes_on_disk(url))
        store = SqlStore.open(url)
        try:
            # An earlier prune may have ended before it gave back what it removed.
            slack = store.has_slack()
            prepared = _prepared(store, chosen)
            if not url.startswith("sqlite"):
                _refuse_running(prepared)
            if prepared.base is not None:
                store.cut(prepared.base, prepared.rows)
            else:
                store.append(prepared.rows)
            _report(prepared, chosen, dry_run=False)
            _forget(store, data_dir, prepared.runs)
            smaller = slack or prepared.base is not None
            if smaller:
                _give_back(store)
        finally:
            store.close()
        if smaller and before:
            after = sum(bytes_on_disk(url))
            click.echo(f"on disk: {size_text(after)}, before {size_text(before)}")


def _refuse_recent(before_us: int) -> None:
    """Refuse a date that may be a slip of the pen: what went cannot be had back."""
    if before_us > _us(datetime.now(UTC) - _RECENT):
        raise click.BadParameter(
            f"{time_text(before_us)} (UTC) is less than a day ago (m are minutes, h "
            "hours, d days); if that is meant, add --recent",
            param_hint="--before",
        )


@attrs.frozen
class _Chosen:
    """What the operator chose."""

    before_us: int
    close_idle: bool
    close_quarantined: bool


@attrs.frozen(kw_only=True)
class _Prepared:
    """
    A prune that was thought through and not done yet.

    Attributes:
        base: None where nothing can go.
        rows: to be appended: sessions closed, and the event of the prune.
        removed: how many rows go.
        left: how many stay, the new ones not counted.
        runs: the server's runs that all rows tell of, those that go and those that stay.
    """

    state: State
    plan: Plan
    closed: tuple[Span, ...]
    base: Base | None
    rows: tuple[Row, ...]
    removed: int
    left: int
    runs: frozenset[str]


def _prepared(store: SqlStore, chosen: _Chosen) -> _Prepared:
    """
    Where to cut, the base that would stand there, and the proof that nothing else changes.

    Raises:
        StoreError: the journal does not hold.
    """
    old = store.base()
    begins = old.position if old is not None else 0
    fold, seen = Replay(old), Runs()
    if fold.state.boot is not None:
        seen.boots.add(fold.state.boot)
    survey = Survey(chosen.before_us, fold.state)
    end = store.head()[0]
    for row in _rows(store, old, "read", begins, end):
        recorded = fold.feed(row)
        if recorded is not None:
            survey.feed(recorded, fold.state)
            seen.see(recorded)
    report = fold.report()
    news = [found for found in report.findings if not found.recorded]
    if news:
        raise StoreError(
            f"The journal does not hold: {news[0].invariant} at row {news[0].position} "
            f"({news[0].message}). Nothing was pruned; what is broken should be looked at first. "
            "See it with `ops verify`."
        )
    ledger = Ledger(clock(), state=report.state, head=report.head)
    rows, closed = _closings(ledger, survey, chosen)
    plan = survey.plan(closed)
    left = report.state.position - max(plan.cut, begins)
    if plan.cut <= begins:
        return _Prepared(
            state=report.state,
            plan=plan,
            closed=closed,
            base=None,
            rows=rows,
            removed=0,
            left=left,
            runs=frozenset(seen.boots),
        )
    base, kept, first_us, last_us = _base_at(store, old, plan.cut, end)
    pruned = ev.JournalPruned(
        cut=base.position,
        head=base.head,
        rows=base.position - begins,
        sessions=plan.sessions,
        first_us=first_us,
        last_us=last_us,
        before_us=chosen.before_us,
        base_digest=base.digest,
    )
    outcome = ledger.propose([pruned])
    rows = (*rows, *outcome.rows)
    _prove(_rows(store, old, "check", base.position, end), base, kept, rows, ledger)
    return _Prepared(
        state=report.state,
        plan=plan,
        closed=closed,
        base=base,
        rows=rows,
        removed=base.position - begins,
        left=left,
        runs=frozenset(seen.boots),
    )


def _rows(store: SqlStore, old: Base | None, label: str, after: int, end: int) -> Iterator[Row]:
    """
    The rows above ``after`` up to ``end``.

    Args:
        old: the base that was there when all this began.

    Raises:
        StoreError: another one is there now.
    """
    rows = takewhile(lambda row: row.position <= end, store.read(after))
    yield from progress(rows, label, end - after)
    if store.base() != old:
        raise StoreError("The journal was pruned while it was read. Run this again.")


def _closings(
    ledger: Ledger, survey: Survey, chosen: _Chosen
) -> tuple[tuple[Row, ...], tuple[Span, ...]]:
    """
    The rows by which sessions are closed that were asked for, and these sessions. Changes ledger
    and survey.
    """
    wanted = {"idle": chosen.close_idle, "quarantined": chosen.close_quarantined}
    if not any(wanted.values()):
        return (), ()
    rows: list[Row] = []
    lost = None
    if ledger.state.boot is not None:
        # Nobody holds the journal, so that run was lost; the next server would find the same.
        lost = ev.ServerLost(boot=ledger.state.boot)
    trial = Ledger(clock(), state=ledger.state, head=ledger.head)
    trial.propose([lost] if lost is not None else [])
    spans = survey.closable(trial.state, **wanted)
    if spans and lost is not None:
        outcome = ledger.propose([lost])
        rows.extend(outcome.rows)
        for recorded in outcome.recorded:
            # A request that was open then ends here, and its session cannot be cut before.
            survey.feed(recorded, ledger.state)
    for span in spans:
        closing = ev.SessionClosed(session=span.session, reason=_REASON)
        outcome = ledger.propose([closing])
        if outcome.bug is not None:
            raise StoreError(f"Session {span.session} cannot be closed: {outcome.bug}.")
        rows.extend(outcome.rows)
    return tuple(rows), spans


def _base_at(
    store: SqlStore, old: Base | None, cut: int, end: int
) -> tuple[Base, set[str], int, int]:
    """
    The base for a cut; the sessions whose token ids it keeps; when the first and the last row below
    it were written.
    """
    fold = Replay(old)
    times: list[int] = []
    loaded: ev.ModelLoaded | None = loaded_of(old) if old is not None else None
    kept: set[str] = set()
    state, head = fold.state, ""
    for row in _rows(store, old, "fold", fold.state.position, end):
        if row.position <= cut:
            recorded = fold.feed(row)
            times = [*times[:1], row.time_us]
            state, head = fold.state, row.hash
            if recorded is not None and isinstance(recorded.event, ev.ModelLoaded):
                loaded = recorded.event
        elif row.kind == ev.PathSelected.kind:
            kept.update(compared_with([decode(row).event]))
    return base_of(forgotten(state, kept), head, loaded), kept, times[0], times[-1]


def _prove(
    left: Iterable[Row], base: Base, kept: set[str], rows: Sequence[Row], ledger: Ledger
) -> None:
    """
    Read what would be left, and compare.

    Args:
        left: the rows behind the cut.
        kept: the sessions whose token ids the base may have.
        rows: what would be appended.

    Raises:
        StoreError: it is not the same; this is a fault of ours, and nothing was changed.
    """
    fold = Replay(base)
    begins = fold.state
    for row in left:
        fold.feed(row)
    for row in rows:
        fold.feed(row)
    report = fold.report()
    faults = forgotten_faults(ledger.state.faults, base.position)
    due = attrs.evolve(ledger.state, faults=faults)
    news = [found for found in report.findings if not found.recorded]
    what = news[0].message if news else None
    if what is None and (report.state != due or report.head != ledger.head):
        what = "another state"
    if what is None and (begins.requests or not with_ids(begins) <= kept):
        what = "texts would be left in the base"
    if what is not None:
        raise StoreError(
            f"What would be left behind row {base.position} does not read as the whole does "
            f"({what}). This is a fault of Cairn's; nothing was pruned. Please report it."
        )


def _refuse_running(prepared: _Prepared) -> None:
    if prepared.state.boot is not None:
        raise StoreError(
            "The journal says that a server uses it, and for a database server nobody can tell "
            "whether it still runs. Stop it; if it was lost, start and stop one in its place."
        )


def _forget(store: SqlStore, data_dir: Path, runs: Collection[str]) -> None:
    try:
        forget_files(store, data_dir, runs)
    except StoreError as error:
        # The rows are gone, so that what was asked for is done, but for the files.
        click.echo(
            f"Not all block files of what was removed could be removed and put on record: {error} "
            "The same command tries again.",
            err=True,
        )


def _give_back(store: SqlStore) -> None:
    click.echo("giving the space back to the disk ...", err=True)
    try:
        store.give_back()
    except StoreError as error:
        # What was asked for is done, but for the file.
        click.echo(
            f"The rows are gone, but their space is still the file's, and what was in them may "
            f"still be read there: {error} The same command tries again.",
            err=True,
        )


# --- what is told --------------------------------------------------------------------------------


def _report(prepared: _Prepared, chosen: _Chosen, *, dry_run: bool) -> None:
    """What was done, or would be; and what holds back the rest."""
    plan = prepared.plan
    would = "would be " if dry_run else ""
    click.echo(f"before: {time_text(chosen.before_us)} (UTC)")
    if prepared.closed:
        click.echo(f"{counted(len(prepared.closed), 'session')} {would}closed")
    if prepared.base is None:
        click.echo("nothing to prune" if not prepared.closed else "no row can go yet")
    else:
        click.echo(
            f"{prepared.removed} rows, {counted(plan.sessions, 'session')} {would}removed, up to "
            f"row {prepared.base.position}; {prepared.left} rows "
            f"{'would stay' if dry_run else 'stay'}"
        )
        click.echo(f"base: {prepared.base.digest}")
    if plan.agent is not None:
        whose = "" if plan.agent.tenant == LOCAL else f" of {plan.agent.tenant}"
        click.echo(
            f"The rows up to {plan.limit} are old enough; the history of agent {plan.agent.name}"
            f"{whose} is in some of them, and holds those from its first one on back: they go when "
            "it is deleted."
        )
    elif plan.held_by is not None:
        click.echo(_held_words(plan.held_by, plan, prepared.state, chosen))
    elif plan.violation is not None:
        broke, told = plan.violation
        click.echo(
            f"The rows up to {plan.limit} are old enough; row {broke} is the one that a bug on "
            f"record at row {told} is about, and goes with it, when that is older than DATE."
        )
    elif prepared.base is None:
        click.echo(f"No session is older than {time_text(chosen.before_us)} (UTC).")


def _held_words(span: Span, plan: Plan, state: State, chosen: _Chosen) -> str:
    """Which session keeps rows that are old enough, and how to go on."""
    first = (
        f"The rows up to {plan.limit} are old enough; session {span.session}, opened at row "
        f"{span.first} and last used {time_text(span.used_us)}, holds those from there on back: "
    )
    held = next((one for one in state.sessions.values() if one.id == span.session), None)
    if span.closed is not None or held is None:
        return f"{first}it goes when its last row ({time_text(span.last_us)}) is older than DATE."
    if span.used_us >= chosen.before_us:
        return f"{first}it was used since then. Choose a later DATE, or wait."
    if held.state is SessionState.QUARANTINED:
        if not chosen.close_quarantined:
            how = f"See `ops replay {held.bug_id}`; --close-quarantined closes it."
            return f"{first}it is quarantined. {how}"
    elif not chosen.close_idle:
        return f"{first}it is not closed. --close-idle closes it."
    return f"{first}it goes when its last row ({time_text(span.last_us)}) is older than DATE."
