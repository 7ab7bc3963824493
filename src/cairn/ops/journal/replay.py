"""
``ops replay``: what happened, told from the journal, and decided again.

The journal is folded from its beginning (or from its base, where it was pruned) by the server's own
code; every check and every path decision is made again on the way. ``--engine`` runs the model
again too.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import attrs
import click

from cairn.journal import events as ev
from cairn.journal.agents import SESSIONS
from cairn.journal.base import Base, state_of
from cairn.journal.codec import Row, decode
from cairn.journal.errors import DamagedRow, StoreError
from cairn.journal.replay import Finding, Report
from cairn.journal.replay import replay as fold
from cairn.journal.state import Session, SessionId, State
from cairn.journal.tenants import session_name
from cairn.ops.common.locations import (
    Source,
    example,
    file_argument,
    journal_options,
    named,
    too_short_words,
)
from cairn.ops.common.output import facts, printable, table
from cairn.ops.journal.sessions import time_text
from cairn.ops.serve.preload import preload_blas

_STORY_ROWS = 12


@attrs.define(kw_only=True)
class Asked:
    """What became of one request of a session."""

    request: str
    position: int
    path: str = ""
    reason: str | None = None
    prompt: int = 0
    blocks_from_slab: int = 0
    blocks_from_pool: int = 0
    sealed_blocks: int = 0
    reused: int = 0
    prefilled: int = 0
    generated: int = 0
    end: str = "open"


@click.command(
    epilog=example(
        "ops replay 7c9e6679-7425-40de-944b-e07fc1f90ae7",
        "ops replay 7c9e6679 journal.jsonl",
        "ops replay 3f2a1b --at 1042",
        "ops replay --at 1042",
    )
)
@click.argument("target", metavar="[BUG_ID|SESSION]", required=False)
@file_argument
@journal_options
@click.option(
    "--at", type=click.IntRange(min=0), metavar="POSITION", help="Show the state after this row."
)
@click.option("--engine", is_flag=True, help="Run the model again and compare its tokens.")
@click.option("--model", metavar="DIR", help="For --engine: the model, if it has moved.")
@click.option("--adapter", metavar="DIR", help="For --engine: the adapter, if it has moved.")
def replay(
    data_dir: Path,
    journal: str | None,
    target: str | None,
    file: Path | None,
    at: int | None,
    engine: bool,
    model: str | None,
    adapter: str | None,
) -> None:
    """
    Show what happened in a bug or a session, and check it again.

    For a bug id: the session, the events that led to it, the row that broke, and whether the check
    fails again. For a session: its requests, with every path decision made again. The first six
    characters of an id are enough. FILE is an export; without it, the server's journal is read.

    With --engine, every pass of the session is run on its model again. Nothing is run if rows were
    changed, or if a check fails that is not on record.

    \b
    Exit code
      0  reproduced; for a session: everything is the same again
      1  not reproduced; for a session: something is broken, or nothing could be run again
      2  no such id, or the journal cannot be read
      3  with --engine: an event came out differently; it is named
      4  with --engine: the journal was written under another fingerprint
    """
    if at is not None and target is not None and file is None and _is_file(target):
        file, target = Path(target), None  # `ops replay --at 20 journal.jsonl`
    source = Source.of(data_dir, journal, file)
    base = source.base()
    if at is not None and base is not None and at < base.position:
        raise StoreError(
            f"Row {at} was pruned, with all up to {base.position}: the earliest state that can be "
            f"shown is that after row {base.position}."
        )
    if target is None:
        if at is None or engine:
            raise click.UsageError("Name a bug id or a session.")
        _show_state(_folded(source, until=at), at)
        return
    report = _folded(source)
    finding, session = _meant(report, target, base)
    if engine:
        if session is None:
            raise StoreError(f"Bug {target} concerns no session, so there is nothing to run again.")
        rows = list(source.rows("read", base=base))
        last = max((row.position for row in rows if row.stream == f"session/{session}"), default=0)
        news = [one for one in _broken(report, session, last) if not one.recorded]
        if news:
            # What would be compared is not what the server wrote.
            _tell_broken(news)
            sys.exit(1)
        sys.exit(_engine_module().rerun(rows, session, model, adapter, base))
    if at is not None:
        _show_session(_folded(source, until=at).state, session, at)
        return
    if finding is not None:
        sys.exit(_tell_bug(source, finding))
    assert session is not None
    sys.exit(_tell_session(source, report, session))


def _is_file(target: str) -> bool:
    return target == "-" or Path(target).is_file()


def _engine_module() -> Any:
    """
    What runs the model again. It loads the model's code, so it is not imported before it is needed.

    Raises:
        StoreError: that code cannot be loaded here.
    """
    preload_blas()
    try:
        return importlib.import_module("cairn.ops.journal.replay_engine")
    except ImportError as error:
        raise StoreError(
            f"The model cannot be run here: {error}. `ops doctor` tells what is missing."
        ) from error


# --- finding what is meant -----------------------------------------------------------------------


def _folded(source: Source, *, until: int | None = None) -> Report:
    base = source.base()
    try:
        return fold(_complete(source.rows("replay", base=base), base), base=base, until=until)
    except DamagedRow as error:
        raise DamagedRow(error.position, f"{error.fact}; `ops verify` tells more") from error


def _complete(rows: Iterable[Row], base: Base | None) -> Iterator[Row]:
    """
    The rows, refused where some or their contents were left out: there is nothing to fold then.
    """
    if base is not None and base.state is None:
        raise StoreError(
            "Texts and token ids were left out of this export, and with them the base that it "
            "stands on. Export the journal without --no-private."
        )
    for count, row in enumerate(rows):
        excerpt = row.position > 1 and row.stream.startswith("session/")
        if count == 0 and base is None and excerpt:
            raise StoreError(
                "This export has one session's rows only, and what the server decided depended on "
                "all. Export the journal without --session."
            )
        if row.private is None and row.private_digest:
            raise StoreError(
                "Texts and token ids were left out of this export. Export the journal without "
                "--no-private."
            )
        yield row


def _meant(report: Report, target: str, base: Base | None) -> tuple[Finding | None, str | None]:
    """
    The finding or the session that an id or the beginning of one names.

    Raises:
        StoreError: it names none or several, or what was pruned.
    """
    findings = {finding.bug_id: finding for finding in report.findings}
    sessions = {
        stream.removeprefix("session/")
        for stream in report.state.streams
        if stream.startswith("session/")
    }
    gone = _gone(report, base)
    known = {*findings, *sessions, *gone}
    name = named(target, known)
    if name is None:
        # A tenant's name may stand in front of it.
        of_agent = f"{SESSIONS}{target}"
        if any(of_agent in (name, session_name(name)) for name in known):
            raise StoreError(f"{target} is an agent's name; its session is {of_agent}.")
        raise StoreError(
            f"No bug id or session {target} is in the journal{too_short_words(target)}. `ops "
            "verify` lists the bug ids, `ops sessions` the sessions."
        )
    if base is not None and name in gone:
        raise StoreError(
            f"{gone[name]} {name} was pruned with the rows up to {base.position}; nothing "
            "is left to tell. An export that was made before still has it."
        )
    finding = findings.get(name)
    return finding, finding.concerns if finding is not None else name


def _gone(report: Report, base: Base | None) -> dict[str, str]:
    """
    The sessions and bugs that were pruned, and which of the two each is. Of a session that was at
    rest in the base, one row is left, which closed it.
    """
    try:
        then = state_of(base) if base is not None else None
    except ValueError:
        then = None
    if then is None:
        return {}
    gone = dict.fromkeys(then.faults, "Bug")
    for stream, seq in then.streams.items():
        session = stream.removeprefix("session/")
        left = SessionId(session) in then.sessions
        if stream != session and report.state.streams.get(stream, 0) <= seq + left:
            gone[session] = "Session"
    return gone


# --- a bug ---------------------------------------------------------------------------------------


def _tell_bug(source: Source, finding: Finding) -> int:
    stream = f"session/{finding.session}" if finding.session else None
    story: deque[Row] = deque(maxlen=_STORY_ROWS)
    violated: ev.InvariantViolated | None = None
    model: str | None = None
    base = source.base()
    with contextlib.suppress(ValueError):  # a damaged base is a finding of its own
        then = state_of(base).model if base is not None else None
        model = then.fingerprint if then is not None else None
    for row in source.rows("story", base=base):
        if row.position <= finding.position:
            if stream in (None, row.stream):
                story.append(row)
            if row.kind == ev.ModelLoaded.kind:
                model = _fingerprint(row)
        elif row.kind == ev.InvariantViolated.kind:
            event = decode(row).event
            if isinstance(event, ev.InvariantViolated) and event.bug_id == finding.bug_id:
                violated = event
                break
    facts(
        (
            ("bug", finding.bug_id),
            ("broken", f"{finding.invariant}: {finding.message}"),
            ("row", finding.position),
            ("session", finding.concerns),
            ("request", violated.request if violated else None),
            ("fingerprint", violated.fingerprint if violated else model),
            ("version", violated.cairn_version if violated else None),
            ("meaning", f"docs/bugs/{finding.invariant}.md"),
            ("on record", "yes" if finding.recorded else "no"),
            # Without these words, what was expected is taken for what the journal says.
            ("expected", f"{finding.expected} (by the rules)"),
            ("actual", f"{finding.actual} (on record)"),
        )
    )
    click.echo("\nwhat led to it:")
    for row in story:
        mark = ">" if row.position == finding.position else " "
        click.echo(
            f"{mark} {row.position:>8}  {time_text(row.time_us)}  {row.kind:<19} {_gist(row)}"
        )
    if violated is not None and violated.trace:
        click.echo("\nstack:")
        click.echo("\n".join(f"  {line}" for line in violated.trace.rstrip().splitlines()))
    click.echo()
    if finding.reproduced:
        click.echo("reproduced: the check broke again at the same row")
        return 0
    if finding.invariant == "CRASH":
        click.echo("not reproduced: a crash of the server's code, which no check can repeat")
    else:
        click.echo("not reproduced: the check holds now, or the event is not in the journal")
    return 1


def _fingerprint(row: Row) -> str | None:
    try:
        event = decode(row).event
    except DamagedRow:
        return None
    return event.fingerprint if isinstance(event, ev.ModelLoaded) else None


def _gist(row: Row) -> str:
    """The short fields of an event that may be shown."""
    try:
        event = decode(row).event
    except DamagedRow:
        return "(damaged)"
    shown = []
    for field in attrs.fields(type(event)):
        value = getattr(event, field.name)
        if field.name == "session" or field.metadata.get("private"):
            continue
        if isinstance(value, int | float) or (value is not None and len(str(value)) <= 40):
            shown.append(printable(f"{field.name}={value}"))
    return " ".join(shown)


# --- a session -----------------------------------------------------------------------------------


def _tell_session(source: Source, report: Report, session: str) -> int:
    rows = list(source.rows("story", stream=f"session/{session}"))
    broken = _broken(report, session, rows[-1].position if rows else 0)
    requests = asked(_readable(rows))
    for one in requests:
        # The run of the server in which it was open never stopped; that is on another stream.
        if one.end == "open" and one.request not in report.state.requests:
            one.end = "lost"
    table(
        (
            *("request", "row", "path", "reason", "prompt", "reused", "prefilled", "generated"),
            *("kept", "shared", "sealed", "end"),
        ),
        (
            (
                *(one.request, one.position, one.path, one.reason, one.prompt, one.reused),
                *(one.prefilled, one.generated, one.blocks_from_slab, one.blocks_from_pool),
                *(one.sealed_blocks, one.end),
            )
            for one in requests
        ),
        spare=("sealed", "shared", "kept", "generated", "prefilled"),
    )
    decided = sum(1 for one in requests if one.path)
    if broken:
        _tell_broken(broken)
        return 1
    click.echo(f"same: {decided} path decisions made again, every check holds")
    return 0


def _broken(report: Report, session: str, last: int) -> list[Finding]:
    """
    What is broken of a session whose last row is at ``last``: its own findings, those of shadow
    checks of its answers, and of those that are nobody's (a changed row, an eviction) the
    unrecorded ones that it may rest on. No row before its last one is beside the point, since the
    decisions are made on all of them.
    """
    return [
        finding
        for finding in report.findings
        if finding.concerns == session
        or (finding.session is None and not finding.recorded and finding.position <= last)
    ]


def _tell_broken(broken: Iterable[Finding]) -> None:
    for finding in broken:
        click.echo(
            f"broken at row {finding.position}: {finding.invariant}, {finding.bug_id}: "
            f"{printable(finding.message)}"
        )


def _readable(rows: Iterable[Row]) -> Iterator[ev.Recorded]:
    """
    The events, less those of rows that were changed until they are none. Of these there is a
    finding.
    """
    for row in rows:
        with contextlib.suppress(DamagedRow):
            yield decode(row)


def asked(events: Iterable[ev.Recorded]) -> list[Asked]:
    """The requests of a session, from its events in order."""
    found: list[Asked] = []
    for recorded in events:
        event = recorded.event
        if isinstance(event, ev.RequestReceived):
            found.append(
                Asked(request=event.request, position=recorded.position, prompt=event.prompt_tokens)
            )
        if not found:
            continue
        one = found[-1]
        match event:
            case ev.PathSelected():
                one.path, one.reason = event.path, event.reason
                one.blocks_from_slab, one.blocks_from_pool = (
                    event.blocks_from_slab,
                    event.blocks_from_pool,
                )
                one.reused = event.reused_tokens
            case ev.CacheExtended(step="prefill"):
                one.prefilled += event.end - event.start
                one.generated += len(event.sampled)
            case ev.CacheExtended(step="decode"):
                one.generated += len(event.sampled)
            case ev.BlockSealed():
                one.sealed_blocks += 1
            case ev.RequestFinished():
                one.end = event.finish_reason
            case ev.RequestCancelled():
                one.end = f"cancelled ({event.stage})"
            case ev.InvariantViolated() if one.end == "open":
                one.end = event.invariant
            case _:
                pass  # no column of the table
    return found


# --- a state of the past -------------------------------------------------------------------------


def _show_state(report: Report, at: int) -> None:
    state = report.state
    facts(
        (
            ("as of row", _reached(state, at)),
            ("hash", report.head),
            ("server", state.boot or "not running"),
            ("model", f"{state.model.name} {state.model.fingerprint}" if state.model else None),
            ("sessions", len(state.sessions)),
            ("open requests", ", ".join(state.requests) or "none"),
            ("slabs", f"{state.pool.slabs} ({state.pool.slab_bytes} bytes)"),
            ("blocks", f"{state.pool.blocks} in memory ({state.pool.block_bytes} bytes)"),
            ("block files", f"{state.pool.disk_blocks} ({state.pool.disk_bytes} bytes)"),
            ("blocks known", len(state.blocks)),
            ("bugs on record", ", ".join(state.faults) or "none"),
            ("admission", f"closed by {state.admission_bug}" if state.admission_bug else "open"),
        )
    )
    for session in sorted(state.sessions.values(), key=lambda session: session.last_used):
        click.echo(f"session {session.id}:")
        facts(_of_session(state, session), indent=2)


def _show_session(state: State, session: str | None, at: int) -> None:
    held = next((one for one in state.sessions.values() if one.id == session), None)
    facts([("as of row", _reached(state, at)), ("session", session)])
    if held is None:
        click.echo("It is not open there.")
        return
    facts(_of_session(state, held))


def _reached(state: State, at: int) -> str:
    return str(at) if state.position >= at else f"{state.position} (the last one)"


def _path(path: ev.PathSelected | None) -> str:
    if path is None:
        return "not selected yet"
    return f"{path.path} ({path.reason})" if path.reason else path.path


def _of_session(state: State, session: Session) -> Iterator[tuple[str, object]]:
    """A session's state in figures; no texts and no token ids."""
    yield "state", session.state
    yield "tenant", session.tenant
    yield "group", session.group
    if (request := session.request) is not None:
        yield "request", request.ask.request
        yield "prompt tokens", len(request.prompt_ids)
        yield "path", _path(request.path)
        yield "sampled tokens", len(request.sampled)
        yield "emitted tokens", request.emitted
    if (last := session.last) is not None:
        yield "last request", f"{last.request}, {'answered' if last.answered else 'not answered'}"
        yield "parts", " ".join(label for label, _ in last.chain)
    if (ahead := session.prewarm) is not None:
        yield "anticipated tokens", f"{len(ahead.ids)} ({ahead.computed_tokens} computed)"
    if session.slab is not None:
        yield "slab", f"{session.slab.id} ({session.slab.capacity_tokens} tokens)"
    yield "cached tokens", session.cached_tokens
    yield "blocks in slab", len(session.slab_keys)
    yield "blocks pinned", len(state.pins.get(session.id, ()))
    yield "bug id", session.bug_id
