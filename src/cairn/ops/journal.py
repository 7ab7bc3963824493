"""
``ops journal``: how large the journal is, how fast it grows, and how old rows are removed.

To prune is to cut off the first rows (``cairn.journal.retention`` says where), with a base in their
place. What would be left is read before anything is changed: it has to give the same state as the
whole. The cut and the event that tells of it are one transaction.
"""

from __future__ import annotations

import re
import time
import uuid
from array import array
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import click

import cairn
from cairn.journal import events as ev
from cairn.journal.base import Base, base_of, forgotten, forgotten_faults, loaded_of
from cairn.journal.codec import Row, decode
from cairn.journal.errors import StoreError
from cairn.journal.ledger import Ledger, Outside
from cairn.journal.lifecycle import Life
from cairn.journal.replay import Replay, Report
from cairn.journal.retention import Plan, Span, Survey, compared_with
from cairn.journal.state import State
from cairn.ops.forget import forget_files
from cairn.ops.home import hold_journal
from cairn.ops.output import facts, progress, table
from cairn.ops.sessions import time_text
from cairn.ops.where import example, journal_options, url_of

if TYPE_CHECKING:
    from cairn.journal.store_sql import SqlStore

_DAY_US = 86_400_000_000
_DAYS_SHOWN = 7
_USUAL_DAYS = 30
_REASON = "retention"
_AGE = re.compile(r"(\d{1,5})([dhm])")
_UNITS = {"d": "days", "h": "hours", "m": "minutes"}
_ROW_BYTES = 300
"""
What a row takes beside its payloads: hashes, ids, and its places in the indexes.
"""


class _SizeFirst(click.Group):
    """
    A group that without a command tells the size.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """
        Options that are not the group's own belong to ``size``.
        """
        own = ctx.help_option_names
        if not args or (args[0].startswith("-") and args[0] not in own):
            args = ["size", *args]
        return super().parse_args(ctx, args)


@click.group(
    cls=_SizeFirst,
    epilog=example("ops journal", "ops journal prune --before 30d --close-idle --dry-run"),
)
def journal() -> None:
    """
    Show the journal's size and growth, and prune it.

    Without a command: `ops journal size`.
    """


# --- size ----------------------------------------------------------------------------------------


@attrs.define
class Sizes:
    """
    What rows take, counted row by row.

    Attributes:
        kinds: kind of event to (rows, bytes that may be shown, private bytes).
        days: day (UTC) to (rows, bytes).
        up_to: bytes of all rows up to each, the first one's first.
    """

    kinds: dict[str, tuple[int, int, int]] = attrs.field(factory=dict)
    days: dict[str, tuple[int, int]] = attrs.field(factory=dict)
    up_to: array[int] = attrs.field(factory=lambda: array("Q"))
    first_us: int | None = None
    last_us: int | None = None

    @property
    def all(self) -> int:
        """
        Bytes of all rows.
        """
        return self.up_to[-1] if self.up_to else 0

    def add(self, row: Row) -> None:
        """
        Take in the next row.
        """
        public, private = len(row.public), len(row.private or b"")
        size = public + private + _ROW_BYTES
        rows, shown, hidden = self.kinds.get(row.kind, (0, 0, 0))
        self.kinds[row.kind] = rows + 1, shown + public, hidden + private
        day = time_text(row.time_us)[:10]
        rows, taken = self.days.get(day, (0, 0))
        self.days[day] = rows + 1, taken + size
        self.up_to.append(self.all + size)
        self.first_us = row.time_us if self.first_us is None else self.first_us
        self.last_us = row.time_us


@journal.command(epilog=example("ops journal size", "ops journal size --data-dir /srv/cairn"))
@journal_options
def size(data_dir: Path, journal: str | None) -> None:
    """
    Show how large the journal is, and how fast it grows.

    Bytes by kind of event are those of the contents, texts and token ids apart (private); on disk a
    row takes more. Growth is that of the last seven days (UTC). What pruning would free is reckoned
    from the contents' share of the disk. Reads beside a running server.
    """
    from cairn.journal.store_sql import SqlStore

    url = url_of(data_dir, journal)
    store = SqlStore.open(url, read_only=True)
    try:
        base = store.base()
        before_us = _now_us() - _USUAL_DAYS * _DAY_US
        sizes = Sizes()
        fold, survey = Replay(base), Survey(before_us, after=base.position if base else 0)
        for row in progress(store.read(), "read", _rows_of(store, base)):
            sizes.add(row)
            recorded = fold.feed(row)
            if recorded is not None:
                survey.feed(recorded, fold.state)
    finally:
        store.close()
    on_disk = bytes_on_disk(url)
    open_sessions, closed = survey.sessions
    facts(
        (
            ("journal", journal or data_dir / "journal.db"),
            ("on disk", _on_disk_words(on_disk)),
            ("rows", len(sizes.up_to)),
            ("pruned", f"the rows up to {base.position}" if base is not None else None),
            ("first row", time_text(sizes.first_us) if sizes.first_us is not None else None),
            ("last row", time_text(sizes.last_us) if sizes.last_us is not None else None),
            ("sessions", f"{open_sessions} open, {closed} closed"),
        )
    )
    click.echo()
    kinds = sorted(sizes.kinds.items(), key=lambda kind: sum(kind[1][1:]), reverse=True)
    table(("kind", "rows", "bytes", "private bytes"), ((kind, *of) for kind, of in kinds))
    click.echo()
    today = datetime.fromtimestamp(_now_us() / 1e6, UTC)
    shown = [f"{today - timedelta(days=ago):%Y-%m-%d}" for ago in range(_DAYS_SHOWN)]
    table(("day", "rows", "bytes"), ((day, *sizes.days.get(day, (0, 0))) for day in shown))
    click.echo()
    scale = sum(on_disk) / sizes.all if on_disk and sizes.all else 1.0
    week = sum(sizes.days.get(day, (0, 0))[1] for day in shown) / _DAYS_SHOWN
    click.echo(f"growth: {size_text(week * scale)} a day over the last {_DAYS_SHOWN} days")
    _tell_freed(sizes, survey, fold.state, scale)


def _tell_freed(sizes: Sizes, survey: Survey, state: State, scale: float) -> None:
    """
    What pruning would free, as things are and with idle sessions closed.
    """
    first = state.position - len(sizes.up_to)

    def freed(plan: Plan) -> str:
        count = max(0, plan.cut - first)
        taken = sizes.up_to[count - 1] * scale if count else 0
        return f"{count} rows, about {size_text(taken)}"

    idle = survey.closable(state, idle=True, quarantined=False)
    words = f"`ops journal prune --before {_USUAL_DAYS}d` would free"
    click.echo(f"{words} {freed(survey.plan())}; with --close-idle {freed(survey.plan(idle))}")


def bytes_on_disk(url: str) -> tuple[int, ...]:
    """
    The bytes of the journal's file and of the log beside it; nothing for a database server's.
    """
    from cairn.journal.store_sql import sqlite_path

    if not url.startswith("sqlite"):
        return ()
    path = sqlite_path(url)
    log = path.with_name(f"{path.name}-wal")
    return tuple(file.stat().st_size if file.exists() else 0 for file in (path, log))


def _on_disk_words(sizes: Sequence[int]) -> str | None:
    if not sizes:
        return None
    return f"{size_text(sum(sizes))} ({sizes[0]} bytes, and {sizes[1]} in the log beside it)"


def size_text(size: float) -> str:
    """
    A number of bytes, for people.
    """
    for unit in ("bytes", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def _rows_of(store: SqlStore, base: Base | None) -> int:
    return store.head()[0] - (base.position if base is not None else 0)


# --- prune ---------------------------------------------------------------------------------------


def _now_us() -> int:
    return time.time_ns() // 1000


def _date(_: click.Context, __: click.Parameter, value: str) -> int:
    """
    A date, a time or an age in microseconds since 1970. Without a zone it is UTC.
    """
    if age := _AGE.fullmatch(value):
        moment = datetime.now(UTC) - timedelta(**{_UNITS[age[2]]: int(age[1])})
    else:
        try:
            moment = datetime.fromisoformat(value)
        except ValueError as error:
            raise click.BadParameter(
                f"{value} is no date; write 2026-01-31, 2026-01-31T12:00 (UTC) or an age, 30d"
            ) from error
        moment = moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
    if moment > datetime.now(UTC):
        raise click.BadParameter(f"{value} is yet to come")
    return int((moment - datetime(1970, 1, 1, tzinfo=UTC)) / timedelta(microseconds=1))


@journal.command(
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
    help="Remove what is older: a date or a time (UTC, if it names no zone), or an age: 30d, 12h.",
)
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
    dry_run: bool,
    close_idle: bool,
    close_quarantined: bool,
) -> None:
    """
    Remove old rows from the journal: its beginning, and whole closed sessions only.

    Rows go from the first one on, up to the last at which all are older than DATE and no session
    would be cut in two. What stays is as it was; in the place of the rest stands a base: their last
    position and hash, and what follows from them, without texts. The prune is an event itself
    (`journal_pruned`), and `ops verify` checks the base against it. Token ids that a later decision
    was compared with stay in the base until the next prune. Block files (`blocks` in the data
    directory) that no conversation that is left needs are removed too.

    What was removed cannot be had back: `ops export` first keeps it. The server has to be stopped,
    but for --dry-run.

    \b
    Exit code
      0  done, or there is nothing to do, and why
      2  refused: a server runs, or the journal does not hold; nothing was changed
    """
    from cairn.journal.store_sql import SqlStore

    url = url_of(data_dir, journal)
    chosen = _Chosen(before_us, close_idle, close_quarantined)
    store = SqlStore.open(url, read_only=True)
    if dry_run:
        try:
            _told(_prepared(store, chosen), chosen, dry_run=True)
        finally:
            store.close()
        return
    store.close()
    other = "and prune then; or see with --dry-run what would go"
    with hold_journal(url, other, who="journal prune"):
        before = sum(bytes_on_disk(url))
        store = SqlStore.open(url)
        try:
            prepared = _prepared(store, chosen)
            if not url.startswith("sqlite"):
                _refuse_running(prepared)
            if prepared.base is not None:
                store.cut(prepared.base, prepared.rows)
            else:
                store.append(prepared.rows)
            _told(prepared, chosen, dry_run=False)
            forget_files(store, data_dir / "blocks")
            if prepared.base is not None:
                _give_back(store)
        finally:
            store.close()
        if prepared.base is not None and before:
            after = sum(bytes_on_disk(url))
            click.echo(f"on disk: {size_text(after)}, before {size_text(before)}")


@attrs.frozen
class _Chosen:
    """
    What the operator chose.
    """

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
    """

    state: State
    plan: Plan
    closed: tuple[Span, ...]
    base: Base | None
    rows: tuple[Row, ...]
    removed: int
    left: int


def _prepared(store: SqlStore, chosen: _Chosen) -> _Prepared:
    """
    Where to cut, the base that would stand there, and the proof that nothing else changes.

    Raises:
        StoreError: the journal does not hold.
    """
    old = store.base()
    begins = old.position if old is not None else 0
    survey = Survey(chosen.before_us, after=begins)
    report = _read(store.read(), old, survey, "read", _rows_of(store, old))
    news = [found for found in report.findings if not found.recorded]
    if news:
        raise StoreError(
            f"The journal does not hold: {news[0].invariant} at row {news[0].position} "
            f"({news[0].message}). Nothing was pruned; what is broken should be looked at first. "
            "See it with `ops verify`."
        )
    ledger = Ledger(_outside(), state=report.state, head=report.head)
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
        )
    base, first_us, last_us = _base_at(store, old, plan.cut)
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
    _prove(store, base, rows, ledger, left)
    return _Prepared(
        state=report.state,
        plan=plan,
        closed=closed,
        base=base,
        rows=rows,
        removed=base.position - begins,
        left=left,
    )


def _outside() -> Outside:
    return Outside(new_id=lambda: str(uuid.uuid4()), now_us=_now_us, version=cairn.__version__)


def _read(
    rows: Iterable[Row], base: Base | None, survey: Survey | None, label: str, total: int
) -> Report:
    fold = Replay(base)
    for row in progress(rows, label, total):
        recorded = fold.feed(row)
        if recorded is not None and survey is not None:
            survey.feed(recorded, fold.state)
    return fold.report()


def _closings(
    ledger: Ledger, survey: Survey, chosen: _Chosen
) -> tuple[tuple[Row, ...], tuple[Span, ...]]:
    """
    The rows by which sessions are closed that were asked for, and these sessions.
    """
    wanted = {"idle": chosen.close_idle, "quarantined": chosen.close_quarantined}
    if not any(wanted.values()):
        return (), ()
    rows: list[Row] = []
    state = ledger.state
    if state.boot is not None:
        # Nobody holds the journal, so that run was lost; the next server would find the same.
        trial = Ledger(_outside(), state=state, head=ledger.head)
        trial.propose([ev.ServerLost(boot=state.boot)])
        state = trial.state
    spans = survey.closable(state, **wanted)
    if spans and ledger.state.boot is not None:
        rows.extend(ledger.propose([ev.ServerLost(boot=ledger.state.boot)]).rows)
    for span in spans:
        closing = ev.SessionClosed(session=span.session, reason=_REASON)
        outcome = ledger.propose([closing])
        if outcome.bug is not None:
            raise StoreError(f"Session {span.session} cannot be closed: {outcome.bug}.")
        rows.extend(outcome.rows)
    return tuple(rows), spans


def _base_at(store: SqlStore, old: Base | None, cut: int) -> tuple[Base, int, int]:
    """
    The base for a cut; when the first and the last row below it were written.
    """
    fold = Replay(old)
    times: list[int] = []
    loaded: ev.ModelLoaded | None = loaded_of(old) if old is not None else None
    kept: set[str] = set()
    state, head = fold.state, ""
    for row in progress(store.read(), "fold", _rows_of(store, old)):
        if row.position <= cut:
            recorded = fold.feed(row)
            times = [*times[:1], row.time_us]
            state, head = fold.state, row.hash
            if recorded is not None and isinstance(recorded.event, ev.ModelLoaded):
                loaded = recorded.event
        elif row.kind == ev.PathSelected.kind:
            kept.update(compared_with([decode(row).event]))
    return base_of(forgotten(state, kept), head, loaded), times[0], times[-1]


def _prove(store: SqlStore, base: Base, rows: Sequence[Row], ledger: Ledger, left: int) -> None:
    """
    Read what would be left, and compare.

    Raises:
        StoreError: it is not the same; this is a fault of ours, and nothing was changed.
    """
    fold = Replay(base)
    for row in progress(store.read(base.position), "check", left):
        fold.feed(row)
    for row in rows:
        fold.feed(row)
    report = fold.report()
    faults = forgotten_faults(ledger.state.faults, base.position)
    due = attrs.evolve(ledger.state, faults=faults)
    news = [found for found in report.findings if not found.recorded]
    if news or report.state != due or report.head != ledger.head:
        what = news[0].message if news else "another state"
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


def _give_back(store: SqlStore) -> None:
    click.echo("giving the space back to the disk ...", err=True)
    try:
        store.give_back()
    except StoreError as error:
        # What was asked for is done; only the file is as large as before.
        click.echo(f"The rows are gone, but their space is still the file's: {error}", err=True)


# --- what is told --------------------------------------------------------------------------------


def _told(prepared: _Prepared, chosen: _Chosen, *, dry_run: bool) -> None:
    """
    What was done, or would be; and what holds back the rest.
    """
    plan = prepared.plan
    would = "would be " if dry_run else ""
    if prepared.closed:
        click.echo(f"{_sessions(len(prepared.closed))} {would}closed")
    if prepared.base is None:
        click.echo("nothing to prune" if not prepared.closed else "no row can go yet")
    else:
        click.echo(
            f"{prepared.removed} rows, {_sessions(plan.sessions)} {would}removed, up to row "
            f"{prepared.base.position}; {prepared.left} rows {'would stay' if dry_run else 'stay'}"
        )
        click.echo(f"base: {prepared.base.digest}")
    if plan.held_by is not None:
        click.echo(_held_words(plan.held_by, plan, prepared.state, chosen))
    elif prepared.base is None:
        click.echo(f"No session is older than {time_text(chosen.before_us)} (UTC).")


def _sessions(count: int) -> str:
    return f"{count} session" if count == 1 else f"{count} sessions"


def _held_words(span: Span, plan: Plan, state: State, chosen: _Chosen) -> str:
    """
    Which session keeps rows that are old enough, and how to go on.
    """
    first = (
        f"The rows up to {plan.limit} are old enough; session {span.session}, opened at row "
        f"{span.first} and last used {time_text(span.used_us)}, holds those from there on back: "
    )
    held = next((one for one in state.sessions.values() if one.id == span.session), None)
    if span.closed is not None or held is None:
        return f"{first}it goes when its last row ({time_text(span.last_us)}) is older than DATE."
    if span.used_us >= chosen.before_us:
        return f"{first}it was used since then. Choose a later DATE, or wait."
    if held.life is Life.QUARANTINED:
        if not chosen.close_quarantined:
            how = f"See `ops replay {held.bug_id}`; --close-quarantined closes it."
            return f"{first}it is quarantined. {how}"
    elif not chosen.close_idle:
        return f"{first}it is not closed. --close-idle closes it."
    return f"{first}it goes when its last row ({time_text(span.last_us)}) is older than DATE."
