"""``ops bench --long``: from the command line to the report."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, Final

import attrs
import click

from cairn.journal.errors import JournalError
from cairn.journal.rows.verification import Verification
from cairn.ops.cli import Unreadable
from cairn.ops.common.locations import Source
from cairn.ops.common.output import printable, table
from cairn_bench import report
from cairn_bench.long import report as long_report
from cairn_bench.long.chart import chart
from cairn_bench.long.plan import Plan
from cairn_bench.long.record import Begun, NoRecord, Record, Session, Turn
from cairn_bench.long.report import Checked
from cairn_bench.long.session import DEADLINE_S, OVER, hold
from cairn_bench.servers.processes import DidNotStart, Kind, running
from cairn_conform.client_texts import new_salt

MISSED: Final = 3
"""The exit code if a goal is missed."""

RECORD: Final = "long.jsonl"
FIGURES: Final = "long.json"
CHART: Final = "long.svg"

_SIGNALLED: Final = 128
_HOUR_S: Final = 3600.0
_TOLD_EACH: Final = 20
_MIB: Final = 1 << 20
# In tokens, so that a few conversations fill each budget, whatever the model's size.
_POOL_TOKENS: Final = 3 * 8192
_BLOCKS_TOKENS: Final = 3 * 6144
_DISK_TOKENS: Final = 6 * 6144
_BYTES_A_NUMBER: Final = 4


def hold_long(
    *, hours: float, kind: Kind, model: Path, out: Path | None, salt: str | None, resume: bool
) -> int:
    """
    Hold a long session and report the result; returns the exit code.

    Raises:
        click.UsageError: there is no folder to write to, or no number of hours.
        Unreadable: the server did not start, or the record cannot be used.
    """
    if math.isnan(hours):
        raise click.UsageError("--long: nan is not a number of hours.")
    if out is None:
        raise click.UsageError("--long needs -o, a directory in which each turn is recorded.")
    try:
        record = _record(out, hours, model, salt, resume=resume)
        code = _hold(record, kind, model, out)
        checked = verified(out / "data")
        _write(out, record.session, checked, kind)
    except OSError as error:
        raise Unreadable(f"{out} cannot be used: {error.strerror}.") from error
    found = _tell(record.session, checked)
    return code or (MISSED if any(goal.reached is False for goal in found) else 0)


def _record(out: Path, hours: float, model: Path, salt: str | None, *, resume: bool) -> Record:
    """
    The record to write to: a new one, or that of a session to resume.

    Raises:
        Unreadable: it is missing, already exists, is invalid, or is of a different session.
    """
    out.mkdir(parents=True, exist_ok=True)
    path = out / RECORD
    begun = Begun(plan=Plan.of(hours, salt or new_salt()), model=model.name)
    if not resume:
        if path.exists():
            raise Unreadable(
                f"{path} already exists. Continue it with --resume, or choose another directory."
            )
        return Record.new(path, begun)
    try:
        record = Record.again(path)
    except FileNotFoundError as error:
        raise Unreadable(
            f"There is no {path} to resume. Start a session without --resume."
        ) from error
    except NoRecord as error:
        raise Unreadable(f"{error}. Choose another directory with -o.") from error
    was = record.session.begun
    same_salt = salt is None or salt == was.plan.salt
    if not (same_salt and (was.plan.seconds, was.model) == (begun.plan.seconds, begun.model)):
        raise Unreadable(
            f"{path} belongs to a different session: --long {was.plan.seconds / _HOUR_S:g} on "
            f"{was.model}, --salt {was.plan.salt}. Resume it with the same options, or choose "
            "another directory with -o."
        )
    return record


def _hold(record: Record, kind: Kind, model: Path, out: Path) -> int:
    """
    Hold the rest of it. The server ends with this; returns 0, or the exit code of a signal.

    Raises:
        Unreadable: the server did not start.
    """
    if record.session.end is not None and record.session.end.why == OVER:
        click.echo(f"{record.path} is complete; there is nothing to resume.", err=True)
        return 0
    plan = record.session.begun.plan
    click.echo(
        f"{plan.seconds / _HOUR_S:g} hours, a turn every {plan.every_s:g} s; --salt {plan.salt}; "
        f"each turn is recorded in {record.path}",
        err=True,
    )
    kind = attrs.evolve(kind, command=(*kind.command, *budgets(model)))
    with _stopping() as stop:
        try:
            with running(kind, model, out, deadline_s=DEADLINE_S) as server:
                hold(server, record, stop, data=out / "data", told=Progress(record))
        except DidNotStart as error:
            raise Unreadable(str(error)) from error
    return 0 if stop.signal is None else _SIGNALLED + stop.signal


def budgets(model: Path) -> tuple[str, ...]:
    """
    Options that limit memory and disk to a few conversations of that model, so that a long session
    reaches the limits; none if its KV size cannot be derived from its configuration.
    """
    try:
        config = json.loads((model / "config.json").read_text("utf-8"))
        heads = config.get("num_key_value_heads") or config["num_attention_heads"]
        size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        token_bytes = 2 * config["num_hidden_layers"] * heads * size * _BYTES_A_NUMBER
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError):
        return ()
    options = (
        ("--pool-mb", _POOL_TOKENS),
        ("--blocks-mb", _BLOCKS_TOKENS),
        ("--disk-mb", _DISK_TOKENS),
    )
    return tuple(
        word for name, tokens in options for word in (name, str(-(-tokens * token_bytes // _MIB)))
    )


class _Stop(threading.Event):
    """Set by the first signal."""

    signal: int | None = None


@contextlib.contextmanager
def _stopping() -> Iterator[_Stop]:
    """
    The first SIGINT or SIGTERM ends the session after its turn; the second ends it at once. The
    server is stopped in either case.
    """
    stop = _Stop()

    def stopped(number: int, _: FrameType | None) -> None:
        if stop.is_set():
            raise SystemExit(_SIGNALLED + number)
        click.echo("Stopping after this turn; repeat to stop at once.", err=True)
        stop.signal = number
        stop.set()

    usual = {number: signal.signal(number, stopped) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)


def verified(data: Path) -> Checked:
    """Verify the whole journal of a server that has ended, as `ops verify` does."""
    source = Source.of(data, None)
    checked = None
    try:
        base = source.base()
        checked = Verification(may_be_excerpt=False, base=base)
        for row in source.rows("verify", base=base):
            checked.feed(row)
        findings = checked.findings()
    except JournalError as error:
        rows = None if checked is None else checked.rows
        return Checked(rows=rows or None, broken=1, why=" ".join(str(error).split()))
    why = findings[0] if findings else None
    return Checked(
        rows=checked.rows,
        broken=len(findings),
        why="" if why is None else f"{why.invariant} at row {why.position}: {why.message}",
        head=str(checked.head),
    )


# --- output --------------------------------------------------------------------------------------


class Progress:
    """A progress line now and then, and one for each error."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._turns = 0

    def __call__(self, turn: Turn) -> None:
        self._turns += 1
        if turn.is_error:
            click.echo(f"{turn.outcome}: {printable(turn.why)}", err=True)
        elif self._turns % _TOLD_EACH == 0:
            session = self._record.session
            due_s = session.begun.plan.seconds
            click.echo(
                f"[{turn.at_s / due_s:.0%}] {len(session.turns)} turns, the last of "
                f"{turn.tokens} tokens",
                err=True,
            )


def _tell(session: Session, checked: Checked) -> list[long_report.Goal]:
    for line in long_report.told(session):
        click.echo(line)
    found = long_report.goals(session, checked)
    table(
        ("goal", "value", "due", "verdict"),
        [(goal.name, goal.value, goal.goal, goal.verdict) for goal in found],
        wrapped="value",
    )
    return found


def _write(out: Path, session: Session, checked: Checked, kind: Kind) -> None:
    blas = kind.environment.get("LD_PRELOAD") or os.environ.get("LD_PRELOAD") or None
    about: dict[str, Any] = {"machine": report.machine(blas), "model": session.begun.model}
    figures = long_report.as_json(about, session, checked)
    (out / FIGURES).write_text(json.dumps(figures, indent=1) + "\n", "utf-8")
    (out / CHART).write_text(chart(session), "utf-8")
    click.echo(f"written: {out / FIGURES}, {out / CHART}", err=True)
