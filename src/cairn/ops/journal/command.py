"""``ops journal``: shows how large the journal is and how fast it grows. ``prune`` shrinks it."""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import attrs
import click

from cairn.journal.replay import Replay
from cairn.journal.retention import Plan, Survey
from cairn.journal.rows.base import histories_of
from cairn.journal.rows.codec import Row
from cairn.journal.state import State
from cairn.ops.common.heads import HeadFiles
from cairn.ops.common.locations import (
    bytes_on_disk,
    example,
    journal_options,
    keys_in,
    url_of,
)
from cairn.ops.common.output import facts, progress, size_text, table
from cairn.ops.common.program import as_called
from cairn.ops.journal.growth import GROWTH_DAYS, growth
from cairn.ops.journal.prune import prune
from cairn.ops.journal.sessions import time_text

_DAY_US = 86_400_000_000
_USUAL_DAYS = 30
_OF_DAYS = f" over the last {GROWTH_DAYS} days"
_SHORT = "; too short to give a daily rate"
_ROW_BYTES = 300
"""Bytes of a row besides its payloads: hashes, ids, and its entries in the indexes."""


class _SizeFirst(click.Group):
    """A group whose default command is ``size``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Options that are not the group's own belong to ``size``."""
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


journal.add_command(prune)


@attrs.define
class Sizes:
    """
    The sizes of rows.

    Attributes:
        kinds: kind of event to (rows, public bytes, private bytes).
        days: day (UTC) to (rows, bytes).
        up_to: for each row, the bytes of all rows up to it.
    """

    kinds: dict[str, tuple[int, int, int]] = attrs.field(factory=dict)
    days: dict[str, tuple[int, int]] = attrs.field(factory=dict)
    up_to: array[int] = attrs.field(factory=lambda: array("Q"))
    first_us: int | None = None
    last_us: int | None = None

    @property
    def all(self) -> int:
        """Bytes of all rows."""
        return self.up_to[-1] if self.up_to else 0

    def add(self, row: Row) -> None:
        """Add the next row."""
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

    Bytes by kind of event are those of the contents, with texts and token ids in a column of their
    own (private). On disk a row takes more. Growth is that of the last seven days, or since the
    first row if the journal is younger, as in `ops doctor`. It is an estimate from the share of
    rows of these days, and so is the space that pruning would free. The server may be running.
    """
    from cairn.journal.rows.store_sql import SqlStore

    url = url_of(data_dir, journal)
    keys = keys_in(HeadFiles.of(data_dir, journal).keys, url)
    store = SqlStore.open(url, read_only=True, keys=keys)
    try:
        size = store.size_bytes() if url.startswith("sqlite") else None
        base = store.base()
        before_us = time.time_ns() // 1000 - _USUAL_DAYS * _DAY_US
        sizes = Sizes()
        fold = Replay(base)
        survey = Survey(before_us, fold.state, histories_of(base).fold())
        total = store.head()[0] - fold.state.position
        for row in progress(store.read(), "read", total):
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
    today = datetime.now(UTC)
    shown = [f"{today - timedelta(days=ago):%Y-%m-%d}" for ago in range(GROWTH_DAYS)]
    table(("day", "rows", "bytes"), ((day, *sizes.days.get(day, (0, 0))) for day in shown))
    click.echo()
    scale = size / sizes.all if size and sizes.all else 1.0
    grown = growth(url)
    click.echo(f"growth: {grown}{_SHORT if grown.is_short else _OF_DAYS}")
    _show_freed(sizes, survey, fold.state, scale)


def _show_freed(sizes: Sizes, survey: Survey, state: State, scale: float) -> None:
    """Print what pruning would free, without closing sessions and with idle ones closed."""
    first = state.position - len(sizes.up_to)

    def freed(plan: Plan) -> str:
        count = max(0, plan.cut - first)
        taken = sizes.up_to[count - 1] * scale if count else 0
        return f"{count} rows, about {size_text(taken)}"

    idle = survey.closable(state, idle=True, quarantined=False)
    words = f"`ops journal prune --before {_USUAL_DAYS}d` would free"
    click.echo(
        f"{as_called(words)} {freed(survey.plan())}; with --close-idle {freed(survey.plan(idle))}"
    )


def _on_disk_words(sizes: Sequence[int]) -> str | None:
    if not sizes:
        return None
    return f"{size_text(sum(sizes))} ({sizes[0]} bytes, and {sizes[1]} in its write-ahead log)"
