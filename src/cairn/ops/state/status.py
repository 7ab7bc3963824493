"""``ops status``: whether a server runs over a data directory, and how it is."""

from __future__ import annotations

import shutil
import sys
import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import click
import msgspec

from cairn.journal.errors import JournalError
from cairn.journal.events import RequestFinished
from cairn.ops.common.heads import is_elsewhere
from cairn.ops.common.locations import (
    bytes_on_disk,
    example,
    journal_options,
    log_path,
    options_of,
    url_of,
)
from cairn.ops.common.output import counted, facts, printable, size_text, start_words
from cairn.ops.common.program import program
from cairn.ops.journal.growth import Growth, growth
from cairn.ops.serve.api_keys import KEY_VARIABLE, api_key_option
from cairn.ops.state.running import Running, health_of, resident_bytes, running

NOT_OK = 1
"""The exit code if a server runs and does not serve as it should."""

NOT_RUNNING = 3
"""The exit code if no server runs, as that of `systemctl status`."""

_HOUR_US = 3_600_000_000


@attrs.frozen
class Reuse:
    """
    The answers of the last hour.

    Attributes:
        prompt_tokens: of the requests whose answers are complete.
        reused_tokens: those among them that were not computed.
    """

    requests: int
    prompt_tokens: int
    reused_tokens: int


@attrs.frozen(kw_only=True)
class Status:
    """
    What is known of a server and its data directory.

    Attributes:
        server: None if none runs.
        health: what it answers; None if it does not.
        resident: its memory in RAM, in bytes; None if that is not known.
        reuse: None if the journal does not say.
        rows: the position of the journal's last row; None if there is no journal.
        journal_bytes: of its database alone.
        log_bytes: of SQLite's write-ahead log.
        grown: how much the journal grew in the last days.
        is_elsewhere: whether the server named a journal outside of the data directory, and this
            command did not.
        free_bytes: of the disk with the data directory; None if there is no such directory.
    """

    data_dir: Path
    server: Running | None
    health: Mapping[str, Any] | None
    resident: int | None
    reuse: Reuse | None
    rows: int | None
    journal_bytes: int
    log_bytes: int
    grown: Growth
    is_elsewhere: bool
    free_bytes: int | None

    @property
    def word(self) -> str:
        """How it is, in one word."""
        if self.server is None:
            return "not running"
        if self.health is None:
            return "starting" if self.server.url is None else "not answering"
        return printable(str(self.health["status"]))

    @property
    def code(self) -> int:
        """The exit code."""
        if self.server is None:
            return NOT_RUNNING
        return 0 if self.word == "ok" else NOT_OK


@click.command(
    epilog=example("ops status", "ops status --json", "ops status || ops serve"),
)
@journal_options
@api_key_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def status(data_dir: Path, journal: str | None, api_key: str | None, as_json: bool) -> None:
    """
    Show whether a server runs, and how it is.

    Finds the server that uses the data directory, on any port. Shows its address, model, memory and
    sessions, how much of the prompts of the last hour was reused, and what the journal and the
    block files take. Changes nothing.

    \b
    Exit code
      0  a server runs, and all is well
      1  a server runs, and starts, stops, or has a fault
      3  no server runs
    """
    found = status_of(data_dir, api_key, journal)
    if as_json:
        click.echo(msgspec.json.encode(as_object(found)).decode())
    else:
        facts(lines(found, time.time_ns() // 1000))
    sys.exit(found.code)


def status_of(data_dir: Path, key: str | None, journal: str | None = None) -> Status:
    """
    Look at a data directory and its server.

    Args:
        key: the API key, if there is one.
        journal: the option that names the journal, if it is elsewhere.

    Raises:
        Unreadable: its lock cannot be read.
    """
    server = running(data_dir)
    health = health_of(server.url, key) if server is not None and server.url is not None else None
    url = url_of(data_dir, journal)
    rows, reuse = _journal_of(url)
    journal_bytes, log_bytes = bytes_on_disk(url) or (0, 0)
    return Status(
        data_dir=data_dir,
        server=server,
        health=health,
        resident=resident_bytes(server.pid) if server is not None and server.pid else None,
        reuse=reuse,
        rows=rows,
        journal_bytes=journal_bytes,
        log_bytes=log_bytes,
        grown=growth(url),
        is_elsewhere=journal is None and is_elsewhere(data_dir),
        free_bytes=shutil.disk_usage(data_dir).free if data_dir.is_dir() else None,
    )


def _journal_of(url: str) -> tuple[int | None, Reuse | None]:
    """The position of the last row, and what the last hour reused. Opens the journal read-only."""
    from cairn.journal.rows.database.schema import schema_revision
    from cairn.journal.rows.store_sql import SqlStore

    try:
        if schema_revision(url) is None:
            return None, None
        store = SqlStore.open(url, read_only=True)
        try:
            position, _ = store.head()
            return position, reused_since(store, time.time_ns() // 1000 - _HOUR_US)
        finally:
            store.close()
    except JournalError:
        return None, None  # `ops doctor` and `ops verify` report what is wrong with it


def reused_since(store: Any, since_us: int) -> Reuse:
    """
    What the requests reused that were finished since a time. Positions have no gaps, so the first
    row is found by a few looks, and only rows of that kind are read.

    Args:
        store: the journal, an ``SqlStore``.
        since_us: in microseconds since 1970.

    Raises:
        JournalError: it cannot be read.
    """
    from cairn.journal.rows.codec import decode

    base = store.base()
    low, high = (base.position if base is not None else 0), store.head()[0]
    places = range(low + 1, high + 1)
    first = low + 1 + bisect_left(places, since_us, key=lambda at: store.time_at(at) or 0)
    requests = prompt = reused = 0
    for row in store.read(first - 1, kinds=(RequestFinished.kind,)):
        event = decode(row).event
        assert isinstance(event, RequestFinished)
        requests += 1
        prompt += event.prompt_tokens
        reused += event.cached_tokens
    return Reuse(requests, prompt, reused)


def lines(found: Status, now_us: int) -> Iterator[tuple[str, str | None]]:
    """
    What is shown: (name, value) of each line.

    Args:
        now_us: the time, in microseconds since 1970.
    """
    health = found.health or {}
    yield "server", _server_words(found, now_us)
    if found.server is not None:
        yield "address", found.server.url or "none yet: the server starts"
        yield "model", _model_words(health)
        yield "requests", _requests_words(health)
        yield "memory", _memory_words(found)
        yield "sessions", _sessions_words(health)
    yield "reused", _reuse_words(found.reuse)
    yield "journal", _journal_words(found)
    yield "disk", _disk_words(found)
    yield "bugs", _bugs_words(health)
    yield "data", str(found.data_dir.absolute())
    log = log_path(found.data_dir)
    yield "log", str(log.absolute()) if log.exists() else None


def _server_words(found: Status, now_us: int) -> str:
    server, health = found.server, found.health
    if server is None:
        return f"not running; start it with `{program()} serve{options_of(found.data_dir)}`"
    who = f"process {server.pid}" if server.pid is not None else "process unknown"
    if found.word == "starting":
        if health is None:
            return f"starting ({who}): it does not listen yet"
        step = str(health.get("step", ""))  # not without an API key
        far = start_words(step, health.get("done", 0), health.get("total", 0))
        return f"starting ({who}): {far}" if step else f"starting ({who})"
    if health is None:
        return f"not answering ({who}): it is stopping, or too busy to answer"
    up = ""
    if isinstance(health.get("started"), int):
        up = f" for {_span(now_us // 1_000_000 - health['started'])}"
    words = f"up{up} ({who})" if found.word == "ok" else f"{found.word}{up} ({who})"
    if "api_key" in health:
        words += f"; it shows more with an API key: set ${KEY_VARIABLE}"
    for name, why in (health.get("degraded") or {}).items():
        words += f"; {printable(str(name))}: {printable(str(why))}"
    return words


def _span(seconds: int) -> str:
    """A time in its two largest units."""
    for size, unit, below, small in (
        (86_400, "d", 3600, "h"),
        (3600, "h", 60, "min"),
        (60, "min", 1, "s"),
    ):
        if seconds >= size:
            return f"{seconds // size} {unit} {seconds % size // below} {small}"
    return f"{max(0, seconds)} s"


def _model_words(health: Mapping[str, Any]) -> str | None:
    if "model" not in health:
        return None
    words = f"{printable(str(health['model']))}, context {health['context_tokens']} tokens"
    others = [
        f"{printable(str(one['name']))} ({str(one['state']).replace('_', ' ')})"
        for one in health.get("models", ())
        if one["name"] != health["model"]
    ]
    return f"{words}; also {', '.join(others)}" if others else words


def _requests_words(health: Mapping[str, Any]) -> str | None:
    queue = health.get("queue")
    return None if queue is None else f"{queue['running']} running, {queue['queued']} waiting"


def _memory_words(found: Status) -> str | None:
    parts = [] if found.resident is None else [f"{size_text(found.resident)} in RAM"]
    health = found.health or {}
    if (memory := health.get("memory")) is not None:
        parts.append(f"weights {size_text(memory['weights_bytes'])}")
        room = health["pool"]["bytes_total"] + health["blocks"]["bytes_total"]
        parts.append(f"KV {size_text(memory['kv_live_bytes'])} of at most {size_text(room)}")
    return "; ".join(parts) or None


def _sessions_words(health: Mapping[str, Any]) -> str | None:
    states = health.get("sessions")
    if states is None:
        return None
    parts = ", ".join(f"{count} {state}" for state, count in states.items() if count)
    total = sum(states.values())
    return f"{total} ({parts})" if parts else f"{total}"


def _reuse_words(reuse: Reuse | None) -> str | None:
    if reuse is None:
        return None
    if not reuse.requests:
        return "no request was answered in the last hour"
    share = 100 * reuse.reused_tokens // reuse.prompt_tokens if reuse.prompt_tokens else 0
    return (
        f"{share} % of {reuse.prompt_tokens} prompt tokens in the last hour "
        f"({counted(reuse.requests, 'answer')})"
    )


def _journal_words(found: Status) -> str:
    if found.rows is None and found.is_elsewhere:
        health = found.health or {}
        position, node = health.get("journal_position"), health.get("node")
        up_to = f"up to row {position}, " if position is not None else ""
        which = f" --node {printable(str(node))}" if node is not None else ""
        return f"{up_to}not in the data directory; for more, add --journal URL{which}"
    if found.rows is None:
        return "none yet"
    words = f"{counted(found.rows, 'row')}, {size_text(found.journal_bytes)}"
    if found.grown.size:
        words += f", which grew by {found.grown}"
    if found.log_bytes:
        words += f"; and {size_text(found.log_bytes)} of write-ahead log, which is used again"
    return words


def _disk_words(found: Status) -> str | None:
    parts = []
    if (blocks := (found.health or {}).get("blocks")) is not None:
        parts.append(
            f"{counted(blocks['disk_count'], 'block file')}, {size_text(blocks['disk_bytes'])} of "
            f"at most {size_text(blocks['disk_bytes_total'])}"
        )
    if found.free_bytes is not None:
        parts.append(f"{size_text(found.free_bytes)} free")
    return "; ".join(parts) or None


def _bugs_words(health: Mapping[str, Any]) -> str | None:
    bugs = health.get("bugs")
    return f"{bugs}; `{program()} verify` shows them" if bugs else None


def as_object(found: Status) -> dict[str, Any]:
    """All of it, for JSON. What is not known is null."""
    health = found.health or {}
    server, reuse = found.server, found.reuse
    return {
        "status": found.word.replace(" ", "_"),
        "pid": server.pid if server is not None else None,
        "url": server.url if server is not None else None,
        "data_dir": str(found.data_dir.absolute()),
        "log": str(log_path(found.data_dir).absolute()),
        "model": health.get("model"),
        "started": health.get("started"),
        "sessions": health.get("sessions"),
        "queue": health.get("queue"),
        "bugs": health.get("bugs"),
        "memory": {
            "resident_bytes": found.resident,
            **(health.get("memory") or {}),
        },
        "last_hour": attrs.asdict(reuse) if reuse is not None else None,
        "journal": {"rows": found.rows, "bytes": found.journal_bytes, "log_bytes": found.log_bytes},
        "disk": {
            "block_files": (health.get("blocks") or {}).get("disk_count"),
            "block_bytes": (health.get("blocks") or {}).get("disk_bytes"),
            "block_bytes_max": (health.get("blocks") or {}).get("disk_bytes_total"),
            "free_bytes": found.free_bytes,
        },
    }
