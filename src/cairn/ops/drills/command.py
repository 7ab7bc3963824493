"""``ops drill``: fire drills for operators."""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import attrs
import click
import trio

from cairn.engine.model.builtin import builtin_directory, builtin_fault
from cairn.ops.cli import Unreadable
from cairn.ops.common.locations import data_dir_option, example
from cairn.ops.common.output import facts, table
from cairn.ops.common.program import as_called
from cairn.ops.drills.outcome import CHECKS, Drill, Outcome, Scene
from cairn.ops.drills.server.baseline import Baseline, record_baseline
from cairn.ops.drills.table import DRILLS
from cairn.ops.serve.data_dir import make_home
from cairn.ops.serve.preload import preload_blas

_ALL = "all"
_INTERRUPTED = 130
_MARKS = {True: "yes", False: "NO", None: "-"}
_COLOURS = {True: "green", False: "red", None: None}


@attrs.frozen(kw_only=True)
class Played:
    """A drill that was run."""

    drill: Drill
    outcome: Outcome
    directory: Path
    took_s: float


@click.command(epilog=example("ops drill --list", "ops drill bit-flipped", "ops drill all"))
@click.argument("name", metavar="[NAME|all]", required=False)
@click.option("--list", "listed", is_flag=True, help="List the drills and what each damages.")
@data_dir_option
def drill(name: str | None, listed: bool, data_dir: Path) -> None:
    """
    Damage a private server on purpose, and check that the damage is caught.

    A drill starts its own server on the loopback, with Pebble and a new journal, and damages
    something real in it: an array, a slab, the order of events, or a row. It checks that the damage
    is caught, journaled, counted, logged, answered as documented, confined to its scope, and
    replayed. Running servers are not touched. The drill's journal stays in
    DATA_DIR/drills/TIME-NAME, so that you can replay its bug id; delete that directory when you are
    done.

    \b
    Exit code
      0  all checks pass
      1  a check failed; it is marked NO
      2  there is no such drill, or it could not be run
    """
    if listed:
        table(
            ("drill", "breaks", "out of service", "what is damaged"),
            ((one.name, one.invariant, one.scope, one.damage) for one in DRILLS.values()),
            spare=("out of service",),
            wrapped="what is damaged",
        )
        return
    if name is None:
        raise click.UsageError("Name a drill, or `all`; --list lists them.")
    if name != _ALL and name not in DRILLS:
        raise click.UsageError(f"There is no drill {name}; --list lists them.")
    if fault := builtin_fault():
        raise Unreadable(fault)
    preload_blas()
    chosen = list(DRILLS.values()) if name == _ALL else [DRILLS[name]]
    played = _run(chosen, data_dir)
    if name == _ALL:
        _show_all(played)
    for one in played:
        if name != _ALL or not one.outcome.passed:
            _show(one)
    sys.exit(0 if all(one.outcome.passed for one in played) else 1)


def _run(chosen: Sequence[Drill], data_dir: Path) -> list[Played]:
    """Run drills, one after the other. If interrupted, delete the directory of the current one."""
    make_home(data_dir)
    model = builtin_directory()
    played: list[Played] = []
    begun: list[Path] = []
    interrupted = False
    shelf = data_dir.absolute() / "drills"
    with tempfile.TemporaryDirectory(prefix="cairn-drill-") as scratch:

        async def main() -> None:
            click.echo("recording the answers of an undamaged server ...", err=True)
            baseline = await record_baseline(Path(scratch), model)
            for place, one in enumerate(chosen, start=1):
                click.echo(f"[{place}/{len(chosen)}] {one.name} ...", err=True)
                stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S")
                begun.append(shelf / f"{stamp}-{one.name}")
                played.append(await _play(one, begun[-1], model, baseline))

        try:
            trio.run(main)
        except* KeyboardInterrupt:
            interrupted = True
    if interrupted:
        if len(begun) > len(played):
            shutil.rmtree(begun[-1], ignore_errors=True)
        click.echo("Stopped. The directory of the current drill was deleted.", err=True)
        sys.exit(_INTERRUPTED)
    return played


async def _play(one: Drill, directory: Path, model: Path, baseline: Baseline) -> Played:
    began_s = time.monotonic()
    scene = Scene(directory=directory, model=model, baseline=baseline)
    try:
        outcome = await one.play(scene)
    except Exception as error:  # damage can have any consequence; an unexpected one is a failure
        traceback.print_exception(error)
        outcome = Outcome.uncaught("the drill itself failed; see the stack above")
    took_s = time.monotonic() - began_s
    return Played(drill=one, outcome=outcome, directory=directory, took_s=took_s)


# --- output --------------------------------------------------------------------------------------


def _show(played: Played) -> None:
    """Print the checks of one drill."""
    one, outcome = played.drill, played.outcome
    click.echo(f"{one.name}: {one.damage}")
    checks = {check.name: check for check in outcome.checks}
    for check in (checks[name] for name in CHECKS if name in checks):
        mark = click.style(f"{_MARKS[check.passed]:<3}", fg=_COLOURS[check.passed])
        timed = check.name == "caught" and outcome.caught_ms is not None
        took = f" ({outcome.caught_ms:.0f} ms after the damage)" if timed else ""
        click.echo(f"  {check.name:<9}  {mark}  {check.fact}{took}")
    facts(
        (
            ("bug id", outcome.bug_id or "none"),
            ("replay it", outcome.command or None),
            ("what it means", f"docs/bugs/{one.invariant}.md"),
            ("journal, log", f"{played.directory} (delete it when you are done)"),
        ),
        indent=2,
    )
    word = "passed" if outcome.passed else click.style("FAILED", fg="red")
    click.echo(f"{word} in {played.took_s:.1f} s")


def _show_all(played: Sequence[Played]) -> None:
    """Print a row for each drill, with a column for each check."""
    rows = []
    for one in played:
        marks = {check.name: _MARKS[check.passed] for check in one.outcome.checks}
        rows.append(
            (
                one.drill.name,
                one.drill.invariant,
                *(marks.get(name, "NO") for name in CHECKS),
                f"{one.took_s:.1f}",
                one.outcome.bug_id,
            )
        )
    table(("drill", "breaks", *CHECKS, "seconds", "bug id"), rows, spare=("bug id", "seconds"))
    if any(_MARKS[None] in row for row in rows):
        why = as_called("`ops drill NAME` says why")
        click.echo(f"{_MARKS[None]}: the check does not apply; {why}")
    failed = [one.drill.name for one in played if not one.outcome.passed]
    click.echo(f"drills: {len(played)}, failed: {' '.join(failed) or 'none'}")
    click.echo(f"journals: {played[0].directory.parent} (delete the ones you do not need)")
