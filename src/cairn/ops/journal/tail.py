"""
``ops tail``: the log of the server, or the events of the journal, now and as they come.

Both are sequences of JSON objects with a cursor: a byte offset in the log, a position in the
journal. What is behind the readers treats them alike.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Protocol

import attrs
import click
import msgspec

from cairn.journal.codec import Row
from cairn.journal.errors import StoreError
from cairn.journal.events import ALL_EVENTS
from cairn.journal.export import LINE_FIELDS, to_line
from cairn.journal.tenants import session_name
from cairn.ops.common.locations import Source, data_dir_option, example, log_path
from cairn.ops.common.output import printable
from cairn.ops.common.times import moment_of, time_of

_POLL_S = 0.25
_LINES = 10
_COLORS = {"warning": "yellow", "error": "red", "critical": "red"}


@attrs.frozen(kw_only=True)
class Entry:
    """
    A line of the log, or an event.

    Attributes:
        cursor: where to go on behind it.
        text: as JSON.
        fields: by name, for FIELD=VALUE.
        moment: when it was written; None where it does not say.
        head: what stands first on a terminal: level or position, and what happened.
        rest: the fields that follow there.
    """

    cursor: int
    text: str
    fields: dict[str, Any]
    moment: datetime | None
    session: str
    head: tuple[str, str]
    rest: dict[str, Any]


class Reader(Protocol):
    """Where entries come from."""

    cursor: int

    def read(self) -> Iterator[Entry]:
        """The entries behind the cursor, which moves with them."""


@attrs.frozen(kw_only=True)
class Filter:
    """Which entries to show."""

    since: datetime | None
    session: str | None
    pattern: re.Pattern[str] | None
    values: tuple[tuple[str, str], ...]

    @property
    def all(self) -> bool:
        """Whether nothing in particular is chosen."""
        return self == Filter(since=None, session=None, pattern=None, values=())

    def __call__(self, entry: Entry) -> bool:
        """Whether an entry is to be shown."""
        if self.since is not None and (entry.moment is None or entry.moment < self.since):
            return False
        if not self.is_of_session(entry):
            return False
        if self.pattern is not None and not self.pattern.search(entry.text):
            return False
        return all(
            name in entry.fields and _text(entry.fields[name]) == value
            for name, value in self.values
        )

    def is_of_session(self, entry: Entry) -> bool:
        """Whether an entry is of the session that is chosen, if one is."""
        called = entry.session, session_name(entry.session)
        return self.session is None or any(one.startswith(self.session) for one in called)


@attrs.define
class Seen:
    """What there was of that which is chosen, to tell what is misspelt from what did not happen."""

    _filter: Filter
    _fields: set[str] = attrs.field(factory=set, init=False)
    _has_session: bool = attrs.field(default=False, init=False)
    _is_empty: bool = attrs.field(default=True, init=False)

    def passing(self, entries: Iterator[Entry]) -> Iterator[Entry]:
        """The entries, looked at as they pass."""
        for entry in entries:
            self._is_empty = False
            self._fields.update(entry.fields)
            self._has_session = self._has_session or self._filter.is_of_session(entry)
            yield entry

    def missing(self, where: str) -> Iterator[str]:
        """
        Sentences on what no entry had.

        Args:
            where: what was read, for people.
        """
        if self._is_empty:
            return
        if self._filter.session is not None and not self._has_session:
            yield (
                f"No session {self._filter.session} is in what was read of the {where}; "
                "`ops sessions` lists them."
            )
        for name, _ in self._filter.values:
            if name not in self._fields:
                yield f"Nothing that was read of the {where} {_no_field(name, self._fields)}"


@click.command(
    epilog=example(
        "ops tail -f --session 3f2a1b level=warning",
        "ops tail --journal -n 50 kind=path_selected path=new_session",
    )
)
@data_dir_option
@click.argument("values", metavar="[FIELD=VALUE]...", nargs=-1)
@click.option("--journal", is_flag=True, help="The events of the journal in place of the log.")
@click.option("--url", metavar="URL", help="The journal, if it is not in the data directory.")
@click.option("-f", "--follow", is_flag=True, help="Keep printing new lines until Ctrl-C.")
@click.option("-n", "--lines", type=click.IntRange(min=0), help="The last N only. [default: 10]")
@click.option("--since", metavar="T", help="A time (ISO 8601), or how long ago: 90s, 10m, 2h, 1d.")
@click.option(
    "--session", metavar="ID", help="Only this session; the beginning of its id is enough."
)
@click.option("--grep", metavar="RE", help="What matches a regular expression.")
@click.option("--after", type=click.IntRange(min=0), metavar="CURSOR", help="Go on behind there.")
@click.option("--private", is_flag=True, help="Texts and token ids of events too.")
def tail(
    data_dir: Path,
    values: tuple[str, ...],
    journal: bool,
    url: str | None,
    follow: bool,
    lines: int | None,
    since: str | None,
    session: str | None,
    grep: str | None,
    after: int | None,
    private: bool,
) -> None:
    """
    Show the log of the server, or the events of the journal.

    Pretty on a terminal, a JSON object a line elsewhere. The cursor to resume at with --after goes
    to stderr at the end. With --since or --after all of it is shown, not the last lines only.
    """
    chosen = Filter(
        since=_since(since) if since else None,
        session=session,
        pattern=_pattern(grep) if grep else None,
        values=tuple(map(_pair, values)),
    )
    if lines is None and since is None and after is None:
        lines = _LINES
    show = _show_pretty if sys.stdout.isatty() else _show_json
    reader: Reader
    if journal or url is not None:
        _check_fields(chosen)
        _check_kinds(chosen)
        reader = Events(Source.of(data_dir, url), after or 0, private=private)
        if lines is not None and after is None and chosen.all:
            reader.skip_to_last(lines)
    else:
        reader = Log(log_path(data_dir), after or 0)
        if any(name == "kind" for name, _ in chosen.values):
            # It would wait for ever, in silence.
            raise click.BadParameter(
                "no line of the log has a field kind; events have it: add --journal",
                param_hint="FIELD=VALUE",
            )
    seen = Seen(chosen)
    try:
        found = (entry for entry in seen.passing(reader.read()) if chosen(entry))
        for entry in found if lines is None else deque(found, maxlen=lines):
            show(entry)
        # Before more is waited for: what is misspelt waits for ever.
        for words in seen.missing("journal" if isinstance(reader, Events) else "log"):
            click.echo(words, err=True)
        while follow:
            sys.stdout.flush()
            time.sleep(_POLL_S)
            for entry in reader.read():
                if chosen(entry):
                    show(entry)
    except KeyboardInterrupt:
        if not follow:
            raise
        # Else it is how following ends.
    click.echo(f"cursor: {reader.cursor}", err=True)


# --- where entries come from ---------------------------------------------------------------------


class Log:
    """The lines of a log file. A file that was put aside for a new one is read to its end first."""

    def __init__(self, path: Path, cursor: int) -> None:
        self.cursor = cursor
        self._path = path
        if not path.exists():
            raise StoreError(f"There is no log at {path}; the server writes it. Check --data-dir.")
        self._file = path.open("rb")
        size = path.stat().st_size
        if cursor > size:
            click.echo(
                f"The log has {size} bytes, and none behind {cursor}: it was begun anew, or the "
                "cursor is another's. Going on at its beginning.",
                err=True,
            )

    def read(self) -> Iterator[Entry]:
        """See ``Reader.read``. A line that is not finished yet is left for the next time."""
        if os.fstat(self._file.fileno()).st_size < self.cursor:
            self.cursor = 0  # it was cut back in place
        yield from self._lines()
        if self._replaced():
            self._file.close()
            self._file = self._path.open("rb")
            self.cursor = 0
            yield from self._lines()

    def _replaced(self) -> bool:
        try:
            there = self._path.stat()
        except FileNotFoundError:
            return False
        mine = os.fstat(self._file.fileno())
        return (there.st_dev, there.st_ino) != (mine.st_dev, mine.st_ino)

    def _lines(self) -> Iterator[Entry]:
        self._file.seek(self.cursor)
        for line in self._file:
            if not line.endswith(b"\n"):
                return
            self.cursor += len(line)
            yield self._entry(line)

    def _entry(self, line: bytes) -> Entry:
        text = line.decode(errors="replace").rstrip("\n")
        try:
            fields = msgspec.json.decode(line, type=dict[str, Any])
        except (msgspec.MsgspecError, UnicodeDecodeError):
            fields = {"event": text}  # another library's line, or a damaged one
        first = ("timestamp", "level", "event")
        return Entry(
            cursor=self.cursor,
            text=text,
            fields=fields,
            moment=time_of(fields.get("timestamp")),
            session=str(fields.get("session", "")),
            head=(str(fields.get("level", "")), str(fields.get("event", ""))),
            rest={name: value for name, value in fields.items() if name not in first},
        )


class Events:
    """The events of a journal, read beside the server."""

    def __init__(self, source: Source, cursor: int, *, private: bool) -> None:
        self.cursor = cursor
        self._store = source.open()
        self._private = private
        base = self._store.base()
        if base is not None and 0 < cursor < base.position:
            click.echo(f"The events up to {base.position} were pruned.", err=True)
        if cursor > (head := self._store.head()[0]):
            click.echo(
                f"There is no event {cursor}: the journal ends at {head}. Going on behind that.",
                err=True,
            )
            self.cursor = head

    def skip_to_last(self, count: int) -> None:
        """Move the cursor so that ``count`` events are left: positions have no gaps."""
        self.cursor = max(0, self._store.head()[0] - count)

    def read(self) -> Iterator[Entry]:
        """See ``Reader.read``."""
        for row in self._store.read(self.cursor):
            self.cursor = row.position
            yield self._entry(row)

    def _entry(self, row: Row) -> Entry:
        shown = row if self._private else attrs.evolve(row, private=None)
        line = to_line(shown)
        fields = msgspec.json.decode(line, type=dict[str, Any])
        payload = fields.pop("payload")
        payload = payload if isinstance(payload, dict) else {}  # a damaged row has text there
        hidden = fields.pop("private")
        rest = payload | (hidden if isinstance(hidden, dict) else {})
        return Entry(
            cursor=row.position,
            text=line.decode().rstrip("\n"),
            fields=fields | payload,
            moment=time_of(fields["time"]),
            session=(
                row.stream.removeprefix("session/")
                if row.stream != "server"
                else str(payload.get("of_session", ""))
            ),
            head=(f"{row.position:>8}", row.kind),
            rest=rest,
        )


# --- how they are shown, and what is asked for ---------------------------------------------------


def _show_json(entry: Entry) -> None:
    click.echo(entry.text)


def _show_pretty(entry: Entry) -> None:
    first, what = entry.head
    moment = entry.moment.strftime("%H:%M:%S.%f")[:-3] if entry.moment else " " * 12
    parts = [
        click.style(moment, dim=True),
        click.style(f"{first:<8}", fg=_COLORS.get(first)),
        click.style(printable(what), bold=True),
    ]
    for name, value in entry.rest.items():
        text = _text(value)
        if name in ("session", "request"):
            text = text[:8]
        short = printable(text if len(text) <= 60 else f"{text[:57]}...")
        parts.append(f"{click.style(f'{name}=', dim=True)}{short}")
    click.echo(" ".join(parts))


def _text(value: Any) -> str:
    """A value as it is written on the command line: text as it is, the rest as JSON."""
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _since(text: str) -> datetime:
    moment = moment_of(text, datetime.now(UTC))
    if moment is None:
        raise click.BadParameter(
            f"{text} is no time; write 10m or 2026-01-31T12:00:00Z", param_hint="--since"
        )
    return moment


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise click.BadParameter(f"{text}: {error}", param_hint="--grep") from error


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise click.BadParameter(f"{text} is not FIELD=VALUE", param_hint="FIELD=VALUE")
    return name, value


def _no_field(name: str, known: Iterable[str]) -> str:
    """The end of a sentence: that there is no field of a name, and which one may be meant."""
    near = get_close_matches(name, known, n=1)
    return f"has a field {name}{f'; did you mean {near[0]}?' if near else '.'}"


def _check_fields(chosen: Filter) -> None:
    """
    A field that no event has would wait for ever, in silence, and so would a private one.

    Raises:
        click.BadParameter: there is no such field.
    """
    of_events = [field for event in ALL_EVENTS for field in attrs.fields(event)]
    known = {name for name in LINE_FIELDS if name not in ("payload", "private")}
    known |= {field.name for field in of_events if not field.metadata.get("private")}
    private = {field.name for field in of_events} - known
    for name, _ in chosen.values:
        if name in private:
            raise click.BadParameter(
                f"{name} is a text or token ids, and nothing is chosen by these; --private shows "
                "them",
                param_hint="FIELD=VALUE",
            )
        if name not in known:
            raise click.BadParameter(f"no event {_no_field(name, known)}", param_hint="FIELD=VALUE")


def _check_kinds(chosen: Filter) -> None:
    """
    A kind that no event has would wait for ever, in silence.

    Raises:
        click.BadParameter: there is no such kind.
    """
    kinds = [event.kind for event in ALL_EVENTS]
    for name, value in chosen.values:
        if name == "kind" and value not in kinds:
            raise click.BadParameter(
                f"there is no kind {value}; the kinds are {', '.join(kinds)}",
                param_hint="FIELD=VALUE",
            )
