"""
``ops tail``: prints the server's log or the journal's events, and follows them.

Both are sequences of JSON objects with a cursor: a byte offset in the log, a position in the
journal. Both readers give entries of one type.
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

from cairn.journal.errors import StoreError
from cairn.journal.events import ALL_EVENTS, CacheExtended
from cairn.journal.rows.codec import Row, shown
from cairn.journal.rows.export import LINE_FIELDS, to_line
from cairn.journal.rows.sealing import key_id
from cairn.journal.tenants import session_name
from cairn.journal.unread import FORGOTTEN
from cairn.ops.common.locations import (
    Source,
    data_dir_option,
    example,
    log_path,
    node_option,
    of_the_node,
)
from cairn.ops.common.output import abbreviated, printable
from cairn.ops.common.times import moment_of, time_of

_POLL_S = 0.25
_LINES = 10
_OWN = ""
"""The value of --journal without a value: the journal of the data directory."""
_FILTER = re.compile(r"\w+=")
"""How FIELD=VALUE begins, which is no journal's URL and unlikely its path."""
_COLORS = {"warning": "yellow", "error": "red", "critical": "red"}


@attrs.frozen(kw_only=True)
class Entry:
    """
    A line of the log, or an event.

    Attributes:
        cursor: where to continue after it.
        text: as JSON.
        fields: by name, for FIELD=VALUE.
        moment: when it was written; None if it has no time.
        head: what a terminal shows first: level or position, and what happened.
        rest: the fields that follow.
    """

    cursor: int
    text: str
    fields: dict[str, Any]
    moment: datetime | None
    session: str
    head: tuple[str, str]
    rest: dict[str, Any]


class Reader(Protocol):
    """A source of entries."""

    cursor: int

    def read(self) -> Iterator[Entry]:
        """The entries after the cursor. Moves the cursor."""


@attrs.frozen(kw_only=True)
class Filter:
    """Which entries to show."""

    since: datetime | None
    session: str | None
    pattern: re.Pattern[str] | None
    values: tuple[tuple[str, str], ...]

    @property
    def all(self) -> bool:
        """Whether every entry is shown."""
        return self == Filter(since=None, session=None, pattern=None, values=())

    def __call__(self, entry: Entry) -> bool:
        """Whether to show an entry."""
        if self.since is not None and (entry.moment is None or entry.moment < self.since):
            return False
        if not self.is_of_session(entry):
            return False
        if self.pattern is not None and not self.pattern.search(entry.text):
            return False
        return all(
            name in entry.fields and _is(_text(entry.fields[name]), value)
            for name, value in self.values
        )

    def is_of_session(self, entry: Entry) -> bool:
        """Whether an entry is of the chosen session, or no session was chosen."""
        names = entry.session, session_name(entry.session)
        return self.session is None or any(name.startswith(self.session) for name in names)


@attrs.define
class Seen:
    """What the entries had of the filter's names, to distinguish a typing error from no match."""

    _filter: Filter
    _fields: set[str] = attrs.field(factory=set, init=False)
    _has_session: bool = attrs.field(default=False, init=False)
    _is_empty: bool = attrs.field(default=True, init=False)

    def passing(self, entries: Iterator[Entry]) -> Iterator[Entry]:
        """The entries, unchanged."""
        for entry in entries:
            self._is_empty = False
            self._fields.update(entry.fields)
            self._has_session = self._has_session or self._filter.is_of_session(entry)
            yield entry

    def missing(self, where: str) -> Iterator[str]:
        """
        A sentence for each name of the filter that no entry had.

        Args:
            where: what was read: log or journal.
        """
        if self._is_empty:
            return
        if self._filter.session is not None and not self._has_session:
            yield (
                f"The {where} that was read has no session {self._filter.session}; "
                "`ops sessions` lists them."
            )
        for name, _ in self._filter.values:
            if name not in self._fields:
                yield f"No entry of the {where} that was read {_no_field(name, self._fields)}"


@click.command(
    epilog=example(
        "ops tail -f --session 3f2a1b level=warning",
        "ops tail --journal -n 50 kind=path_selected path=new_session",
        "ops tail --node n1 --journal postgresql://cairn@db/cairn -f",
    )
)
@data_dir_option
@click.argument("values", metavar="[FIELD=VALUE]...", nargs=-1)
@click.option(
    "--journal",
    metavar="[URL]",
    is_flag=False,
    flag_value=_OWN,
    help="Show the events of the journal instead of the log: that of the data directory, or one "
    "by its database URL or the path of an SQLite file. FIELD=VALUE after it is a filter.",
)
@click.option("--url", metavar="URL", help="The same as --journal URL.")
@node_option
@click.option("-f", "--follow", is_flag=True, help="Keep printing new lines until Ctrl-C.")
@click.option("-n", "--lines", type=click.IntRange(min=0), help="Only the last N. [default: 10]")
@click.option(
    "--since", metavar="T", help="Only since a time (ISO 8601) or an age: 90s, 10m, 2h, 1d."
)
@click.option(
    "--session", metavar="ID", help="Only this session; the beginning of its id is enough."
)
@click.option("--grep", metavar="RE", help="Only what matches a regular expression.")
@click.option(
    "--after", type=click.IntRange(min=0), metavar="CURSOR", help="Continue after this cursor."
)
@click.option("--private", is_flag=True, help="Also show texts and token ids of events.")
@click.option(
    "--all", "every", is_flag=True, help="On a terminal: show each row of an answer's decoding."
)
def tail(
    data_dir: Path,
    values: tuple[str, ...],
    journal: str | None,
    url: str | None,
    follow: bool,
    lines: int | None,
    since: str | None,
    session: str | None,
    grep: str | None,
    after: int | None,
    private: bool,
    every: bool,
) -> None:
    """
    Show the log of the server, or the events of the journal.

    Prints readable lines to a terminal, and JSON objects, one per line, elsewhere. At the end it
    prints a cursor to stderr; pass it with --after to continue there. With --since or --after it
    shows everything from there on, unless --lines is given.

    On a terminal, the rows of the journal in which an answer is decoded are one line, written when
    the session goes on to something else; --all shows each.
    """
    if journal is not None and _FILTER.match(journal):
        journal, values = _OWN, (journal, *values)
    if url is not None and journal not in (None, _OWN):
        raise click.UsageError("--journal and --url name two journals. Omit one of them.")
    place = of_the_node(url or (journal if journal != _OWN else None))
    chosen = Filter(
        since=_since(since) if since else None,
        session=session,
        pattern=_pattern(grep) if grep else None,
        values=tuple(map(_pair, values)),
    )
    if lines is None and since is None and after is None:
        lines = _LINES
    terminal = sys.stdout.isatty()
    fold = Decoding() if terminal and not every else None
    plain = show_pretty if terminal else show_json

    def show(entry: Entry) -> None:
        for one in (entry,) if fold is None else fold.take(entry):
            plain(one)

    reader: Reader
    if journal is not None or place is not None:
        _check_fields(chosen)
        _check_kinds(chosen)
        reader = Events(Source.of(data_dir, place), after or 0, private=private)
        if lines is not None and after is None and chosen.all:
            reader.skip_to_last(lines)
    else:
        reader = Log(log_path(data_dir), after or 0)
        if any(name == "kind" for name, _ in chosen.values):
            # It would wait forever, without a word.
            raise click.BadParameter(
                "lines of the log have no field kind; events do: add --journal",
                param_hint="FIELD=VALUE",
            )
    seen = Seen(chosen)
    try:
        found = (entry for entry in seen.passing(reader.read()) if chosen(entry))
        for entry in found if lines is None else deque(found, maxlen=lines):
            show(entry)
        for one in fold.rest() if fold is not None and not follow else ():
            plain(one)
        # Before waiting for more, because a misspelt name would wait forever.
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
        # Ctrl-C is how following ends.
    click.echo(f"cursor: {reader.cursor}", err=True)


# --- sources of entries --------------------------------------------------------------------------


class Log:
    """The lines of a log file. When the log is rotated, the old file is read to its end first."""

    def __init__(self, path: Path, cursor: int) -> None:
        self.cursor = cursor
        self._path = path
        if not path.exists():
            raise StoreError(f"There is no log at {path}. The server creates it; check --data-dir.")
        self._file = path.open("rb")
        size = path.stat().st_size
        if cursor > size:
            click.echo(
                f"The log has only {size} bytes, and the cursor is {cursor}: it was started again, "
                "or the cursor belongs to another log. Continuing from its beginning.",
                err=True,
            )

    def read(self) -> Iterator[Entry]:
        """See ``Reader.read``. A line that is not complete yet is left for the next call."""
        if os.fstat(self._file.fileno()).st_size < self.cursor:
            self.cursor = 0  # it was truncated
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
    """The events of a journal; a server may be running."""

    def __init__(self, source: Source, cursor: int, *, private: bool) -> None:
        self.cursor = cursor
        self._store = source.open()
        self._private = private
        base = self._store.base()
        if base is not None and 0 < cursor < base.position:
            click.echo(f"The events up to {base.position} were pruned.", err=True)
        if cursor > (head := self._store.head()[0]):
            click.echo(
                f"There is no event {cursor}: the journal ends at {head}. Continuing after that.",
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
        private = row.opened or row.private if self._private else None
        line = to_line(attrs.evolve(row, private=private))
        fields = msgspec.json.decode(line, type=dict[str, Any])
        payload = fields.pop("payload")
        payload = payload if isinstance(payload, dict) else {}  # a damaged row has text there
        hidden = fields.pop("private")
        rest = payload | (hidden if isinstance(hidden, dict) else {})
        if isinstance(hidden, str) and key_id(row.private) is not None:
            rest |= {"private": FORGOTTEN}
        return Entry(
            cursor=row.position,
            text=line.decode().rstrip("\n"),
            fields=fields | payload,
            moment=time_of(fields["time"]),
            session=(
                shown(row.stream).removeprefix("session/")
                if row.stream != "server"
                else str(payload.get("of_session", ""))
            ),
            head=(f"{row.position:>8}", shown(row.kind)),
            rest=rest,
        )


class Decoding:
    """Folds the rows in which a session decodes an answer into one entry."""

    def __init__(self) -> None:
        self._open: dict[str, tuple[Entry, int, int]] = {}

    def take(self, entry: Entry) -> Iterator[Entry]:
        """The entries to show now that there is one more."""
        if _is_decoding(entry):
            _, tokens, took_us = self._open.get(entry.session, (entry, 0, 0))
            tokens += entry.rest["end"] - entry.rest["start"]
            self._open[entry.session] = entry, tokens, took_us + entry.rest["duration_us"]
            return
        yield from self._folded(entry.session)
        yield entry

    def rest(self) -> Iterator[Entry]:
        """The entries of sessions that still decode."""
        for session in tuple(self._open):
            yield from self._folded(session)

    def _folded(self, session: str) -> Iterator[Entry]:
        if (found := self._open.pop(session, None)) is None:
            return
        last, tokens, took_us = found
        what = f"decoded {tokens} tokens in {took_us // 1000} ms"
        rest: dict[str, Any] = {
            name: last.rest[name] for name in ("session", "request") if name in last.rest
        }
        yield attrs.evolve(last, head=(last.head[0], what), rest=rest)


def _is_decoding(entry: Entry) -> bool:
    fields = entry.rest
    numbers = (fields.get(name) for name in ("start", "end", "duration_us"))
    return (
        entry.head[1] == CacheExtended.kind
        and fields.get("step") == "decode"
        and all(isinstance(number, int) for number in numbers)  # of a damaged row they may not be
    )


# --- output and options --------------------------------------------------------------------------


def show_json(entry: Entry) -> None:
    """Print an entry as a line of JSON."""
    click.echo(entry.text)


def show_pretty(entry: Entry) -> None:
    """Print an entry for a terminal, in one line of its main fields."""
    first, what = entry.head
    moment = entry.moment.strftime("%H:%M:%S.%f")[:-3] if entry.moment else " " * 12
    parts = [
        click.style(moment, dim=True),
        click.style(f"{first:<8}", fg=_COLORS.get(first)),
        click.style(printable(what), bold=True),
    ]
    for name, value in entry.rest.items():
        text = _text(value)
        if name in ("session", "request", "leader"):
            text = abbreviated(text)
        short = printable(text if len(text) <= 60 else f"{text[:57]}...")
        parts.append(f"{click.style(f'{name}=', dim=True)}{short}")
    click.echo(" ".join(parts))


def _text(value: Any) -> str:
    """A value as written on the command line: text unchanged, everything else as JSON."""
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _is(text: str, given: str) -> bool:
    """Whether a value is the given one, or an id that a terminal abbreviates to it."""
    return text == given or (text != abbreviated(text) and given == abbreviated(text))


def _since(text: str) -> datetime:
    moment = moment_of(text, datetime.now(UTC))
    if moment is None:
        raise click.BadParameter(
            f"{text} is not a time; write 10m or 2026-01-31T12:00:00Z", param_hint="--since"
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
    """The end of a sentence: there is no field of this name, and perhaps which one is meant."""
    near = get_close_matches(name, known, n=1)
    return f"has a field {name}{f'; did you mean {near[0]}?' if near else '.'}"


def _check_fields(chosen: Filter) -> None:
    """
    Refuse a field that no event has, or a private one: it would wait forever, without a word.

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
                f"{name} is private (texts or token ids), so events cannot be filtered by it; "
                "--private shows it",
                param_hint="FIELD=VALUE",
            )
        if name not in known:
            raise click.BadParameter(f"no event {_no_field(name, known)}", param_hint="FIELD=VALUE")


def _check_kinds(chosen: Filter) -> None:
    """
    Refuse a kind that no event has: it would wait forever, without a word.

    Raises:
        click.BadParameter: there is no such kind.
    """
    kinds = [event.kind for event in ALL_EVENTS]
    for name, value in chosen.values:
        if name == "kind" and value not in kinds:
            near = get_close_matches(value, kinds, n=1)
            every = f"; the kinds are {', '.join(kinds)}"
            raise click.BadParameter(
                f"there is no kind {value}{f'; did you mean {near[0]}?' if near else every}",
                param_hint="FIELD=VALUE",
            )
