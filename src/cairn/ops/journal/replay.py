"""
``ops replay``: shows what happened by the journal, and checks it again.

The journal is folded from its beginning (or from its base, if it was pruned) by the server's own
code, which repeats every check and every path decision. ``--engine`` runs the model again too.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import attrs
import click

from cairn.journal import events as ev
from cairn.journal.errors import DamagedRow, StoreError, UnknownEvent
from cairn.journal.replay import Finding, Report
from cairn.journal.replay import replay as fold
from cairn.journal.rows.base import Base
from cairn.journal.rows.codec import Row, decode, shown
from cairn.journal.rows.export import require_complete
from cairn.journal.state import Session, State
from cairn.journal.stories import bug_story, findings_of, pruned_names, request_stories
from cairn.journal.tenants import AGENT_SESSIONS, session_name
from cairn.journal.unread import FORGOTTEN
from cairn.ops.common.completions import complete_session
from cairn.ops.common.locations import (
    PREFIX_MIN,
    Source,
    example,
    file_argument,
    journal_options,
    named,
    too_short_words,
)
from cairn.ops.common.output import facts, printable, table
from cairn.ops.common.stacks import own_frames
from cairn.ops.journal.sessions import time_text
from cairn.ops.serve.preload import preload_blas


@click.command(
    epilog=example(
        "ops replay 7c9e6679-7425-40de-944b-e07fc1f90ae7",
        "ops replay 7c9e6679 journal.jsonl",
        "ops replay 3f2a1b --at 1042",
        "ops replay --at 1042",
    )
)
@click.argument(
    "target", metavar="[BUG_ID|SESSION]", required=False, shell_complete=complete_session
)
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

    With --engine, every pass of the session is run on its model again. If the model reuses to the
    token, all is then run once more with passes that are cut elsewhere. Nothing is run if rows were
    changed, or if a check fails that is not on record.

    \b
    Exit code
      0  reproduced; for a session: everything is the same again
      1  not reproduced; for a session: something is broken, or nothing could be run again
      2  no such id, or the journal cannot be read
      3  with --engine: an event came out differently; it is named
      4  with --engine: the journal was written under another fingerprint
      5  with --engine: an event came out differently, but only if passes are cut elsewhere
    """
    if at is not None and target is not None and file is None and _is_file(target):
        file, target = Path(target), None  # `ops replay --at 20 journal.jsonl`
    source = Source.of(data_dir, journal, file)
    base = source.base()
    if at is not None and base is not None and at < base.position:
        raise StoreError(
            f"Row {at} was pruned, with all rows up to {base.position}. The earliest state that "
            f"can be shown is the one after row {base.position}."
        )
    if target is None:
        if at is None or engine:
            raise click.UsageError("Name a bug id or a session.")
        _show_state(folded(source, until=at), at)
        return
    report = folded(source)
    finding, session = meant(report, target, base)
    if engine:
        if session is None:
            raise StoreError(f"Bug {target} concerns no session: there is nothing to run again.")
        rows = list(source.rows("read", base=base))
        last = max((row.position for row in rows if row.stream == f"session/{session}"), default=0)
        news = [one for one in findings_of(report, session, last) if not one.recorded]
        if news:
            # What would be compared is not what the server wrote.
            _show_broken(news)
            sys.exit(1)
        sys.exit(_engine_module().rerun(rows, session, model, adapter, base))
    if at is not None:
        _show_session(folded(source, until=at).state, session, at)
        return
    if finding is not None:
        sys.exit(_show_bug(source, finding))
    assert session is not None
    sys.exit(_show_requests(source, report, session))


def _is_file(target: str) -> bool:
    return target == "-" or Path(target).is_file()


def _engine_module() -> Any:
    """
    The module that runs the model again. It loads MLX, so it is imported only when it is needed.

    Raises:
        StoreError: it cannot be loaded here.
    """
    preload_blas()
    try:
        return importlib.import_module("cairn.ops.journal.replay_engine")
    except ImportError as error:
        raise StoreError(
            f"The model cannot be run here: {error}. `ops doctor` shows what is missing."
        ) from error


# --- finding the target --------------------------------------------------------------------------


def folded(source: Source, *, until: int | None = None) -> Report:
    """
    The replay of a journal, up to a row.

    Raises:
        StoreError: it cannot be read, or something was left out of it.
        DamagedRow: a row of an unbroken chain cannot be decoded.
    """
    base = source.base()
    try:
        return fold(
            require_complete(source.rows("replay", base=base), base), base=base, until=until
        )
    except DamagedRow as error:
        raise DamagedRow(error.position, f"{error.fact}; run `ops verify` for details") from error


def meant(report: Report, target: str, base: Base | None) -> tuple[Finding | None, str | None]:
    """
    The finding or the session with this id, or whose id begins like this.

    Raises:
        StoreError: there is none, there are several, or it was pruned.
    """
    findings = {finding.bug_id: finding for finding in report.findings}
    sessions = {
        stream.removeprefix("session/")
        for stream in report.state.streams
        if stream.startswith("session/")
    }
    gone = pruned_names(report, base)
    known = {*findings, *sessions, *gone}
    name = named(target, known)
    if name is None:
        name = _of_agent(target, known)
    if name is None:
        raise StoreError(
            f"No bug id or session {target} is in the journal{too_short_words(target)}. `ops "
            "verify` lists the bug ids, `ops sessions` the sessions, and `ops tail --journal "
            "request=ID` shows the session of a request."
        )
    if base is not None and name in gone:
        raise StoreError(
            f"{gone[name]} {name} was pruned with the rows up to {base.position}. An export that "
            "was made earlier still has it."
        )
    finding = findings.get(name)
    return finding, finding.concerns if finding is not None else name


def _of_agent(target: str, known: set[str]) -> str | None:
    """
    The session of the agent with this name, or whose name begins like this, which is printed; None
    if there is none.

    Raises:
        StoreError: there are several.
    """
    session = f"{AGENT_SESSIONS}{target}"
    # A tenant's name may come before it.
    names = sorted(name for name in known if session in (name, session_name(name)))
    if len(names) > 1:
        raise StoreError(f"Several tenants have an agent {target}: {', '.join(names[:5])}.")
    found = names[0] if names else None
    if found is None and len(target) >= PREFIX_MIN:
        found = named(session, known)
    if found is not None:
        click.echo(f"{target} is an agent's name; its session is {found}.", err=True)
    return found


# --- a bug ---------------------------------------------------------------------------------------


def _show_bug(source: Source, finding: Finding) -> int:
    base = source.base()
    story = bug_story(source.rows("story", base=base), finding, base)
    violated = story.violated
    facts(
        (
            ("bug", finding.bug_id),
            ("broken", f"{finding.invariant}: {finding.message}"),
            ("row", finding.position),
            ("session", finding.concerns),
            ("request", violated.request if violated else None),
            ("fingerprint", story.fingerprint),
            ("version", violated.cairn_version if violated else None),
            ("meaning", f"docs/bugs/{finding.invariant}.md"),
            ("on record", "yes" if finding.recorded else "no"),
            # Without these words, what was expected is taken for what the journal says.
            ("expected", f"{finding.expected} (by the rules)"),
            ("actual", f"{finding.actual} (on record)"),
        )
    )
    click.echo("\nwhat led to it:")
    for row in story.rows:
        mark = ">" if row.position == finding.position else " "
        moment, kind = time_text(row.time_us), shown(row.kind)
        click.echo(f"{mark} {row.position:>8}  {moment}  {kind:<19} {_gist(row)}")
    if violated is not None and violated.trace:
        click.echo("\nstack:")
        click.echo("\n".join(f"  {line}" for line in own_frames(violated.trace).splitlines()))
    click.echo()
    if finding.reproduced:
        click.echo("reproduced: the check failed again at the same row")
        return 0
    if finding.actual == FORGOTTEN:
        click.echo(f"not checked: {FORGOTTEN.strip('()')}")
    elif finding.invariant == "CRASH":
        click.echo("not reproduced: a crash of the server's code, which no check can repeat")
    else:
        click.echo("not reproduced: the check passes now, or the event is not in the journal")
    return 1


def _gist(row: Row) -> str:
    """The short fields of an event that are not private."""
    try:
        event = decode(row).event
    except (DamagedRow, UnknownEvent):
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


def _show_requests(source: Source, report: Report, session: str) -> int:
    rows = list(source.rows("story", stream=f"session/{session}"))
    stories = request_stories(rows, report.state)
    table(
        (
            *("request", "row", "path", "reason", "prompt", "reused", "prefilled", "generated"),
            *("from slab", "from pool", "in part", "joined", "sealed", "end"),
        ),
        (
            (
                *(one.request, one.position, one.path, one.reason, one.prompt, one.reused),
                *(one.prefilled, one.generated, one.from_slab, one.from_pool, one.in_part),
                *(len(one.joined), one.sealed_blocks, one.end),
            )
            for one in stories
        ),
        spare=("sealed", "joined", "in part", "from pool", "from slab", "generated", "prefilled"),
    )
    broken = findings_of(report, session, rows[-1].position if rows else 0)
    if broken:
        _show_broken(broken)
        return 1
    decided = sum(1 for one in stories if one.path)
    click.echo(f"same: {decided} path decisions made again, all checks pass")
    return 0


def _show_broken(broken: Iterable[Finding]) -> None:
    for finding in broken:
        click.echo(
            f"broken at row {finding.position}: {finding.invariant}, {finding.bug_id}: "
            f"{printable(finding.message)}"
        )


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
    found = next((one for one in state.sessions.values() if one.id == session), None)
    facts([("as of row", _reached(state, at)), ("session", session)])
    if found is None:
        click.echo("The session is not open there.")
        return
    facts(_of_session(state, found))


def _reached(state: State, at: int) -> str:
    return str(at) if state.position >= at else f"{state.position} (the last one)"


def _path(path: ev.PathSelected | None, joined: ev.PrefixJoined | None) -> str:
    if joined is not None:
        return f"not selected yet: waits for blocks of request {joined.leader}"
    if path is None:
        return "not selected yet"
    return f"{path.path} ({path.reason})" if path.reason else path.path


def _of_session(state: State, session: Session) -> Iterator[tuple[str, object]]:
    """A session's state, without texts and token ids."""
    yield "state", session.state
    yield "tenant", session.tenant
    yield "group", session.group
    if (request := session.request) is not None:
        yield "request", request.ask.request
        yield "prompt tokens", len(request.prompt_ids)
        yield "path", _path(request.path, request.joined)
        yield "sampled tokens", len(request.sampled)
        yield "emitted tokens", request.emitted
    if (last := session.last) is not None:
        yield "last request", f"{last.request}, {'answered' if last.answered else 'not answered'}"
        yield "parts", " ".join(label for label, *_ in last.chain)
    if (prewarm := session.prewarm) is not None:
        yield "prewarm tokens", f"{len(prewarm.ids)} ({prewarm.computed_tokens} computed)"
    if session.slab is not None:
        yield "slab", f"{session.slab.id} ({session.slab.capacity_tokens} tokens)"
    yield "cached tokens", session.cached_tokens
    yield "blocks in slab", len(session.slab_keys)
    yield "blocks pinned", len(state.pins.get(session.id, ()))
    yield "bug id", session.bug_id
