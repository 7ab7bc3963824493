"""``ops drill``: an operator's fire drill."""

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
from cairn.ops.drills import CHECKS, DRILLS, Check, Drill, Outcome, Reference, reference
from cairn.ops.drills.outcome import Scene
from cairn.ops.serve.data_dir import make_home
from cairn.ops.serve.preload import preload_blas

_ALL = "all"
_INTERRUPTED = 130
_MARKS = {True: "yes", False: "NO", None: "-"}
_COLOURS = {True: "green", False: "red", None: None}


@attrs.frozen(kw_only=True)
class Played:
    """A drill that was held."""

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

    A drill starts a server of its own on the loopback, with Pebble and a new journal. It damages
    the real thing in it (an array, a slab, an order, a row), and checks that the damage is
    detected, journaled, counted, logged, answered as documented, confined to its scope, and
    replayed. Servers that are running are not touched. The drill's journal stays in
    DATA_DIR/drills/TIME-NAME, so that its bug id can be replayed; delete that directory when you
    are done.

    \b
    Exit code
      0  all checks pass
      1  a check failed; it is marked NO
      2  no such drill, or it could not be run
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
    held = _hold(chosen, data_dir)
    if name == _ALL:
        _tell_all(held)
    for played in held:
        if name != _ALL or not played.outcome.passed:
            _tell(played)
    sys.exit(0 if all(played.outcome.passed for played in held) else 1)


def _hold(chosen: Sequence[Drill], data_dir: Path) -> list[Played]:
    """Hold drills, one after the other. Called off, the one in hand leaves nothing behind."""
    make_home(data_dir)
    model = builtin_directory()
    held: list[Played] = []
    begun: list[Path] = []
    called_off = False
    shelf = data_dir.absolute() / "drills"
    with tempfile.TemporaryDirectory(prefix="cairn-drill-") as scratch:

        async def main() -> None:
            click.echo("serving undisturbed, to compare with ...", err=True)
            undisturbed = await reference(Path(scratch), model)
            for place, one in enumerate(chosen, start=1):
                click.echo(f"[{place}/{len(chosen)}] {one.name} ...", err=True)
                stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S")
                begun.append(shelf / f"{stamp}-{one.name}")
                held.append(await _held(one, begun[-1], model, undisturbed))

        try:
            trio.run(main)
        except* KeyboardInterrupt:
            called_off = True
    if called_off:
        if len(begun) > len(held):
            shutil.rmtree(begun[-1], ignore_errors=True)
        click.echo("Called off; the drill in hand left nothing behind.", err=True)
        sys.exit(_INTERRUPTED)
    return held


async def _held(one: Drill, directory: Path, model: Path, undisturbed: Reference) -> Played:
    began_s = time.monotonic()
    scene = Scene(directory=directory, model=model, reference=undisturbed)
    try:
        outcome = await one.play(scene)
    except Exception as error:  # damage may do what nobody foresaw; that is no pass either
        traceback.print_exception(error)
        fact = "the drill came to no end; the stack of what failed stands above"
        outcome = Outcome(
            checks=(Check("caught", False, fact),), bug_id=None, command="", caught_ms=None
        )
    took_s = time.monotonic() - began_s
    return Played(drill=one, outcome=outcome, directory=directory, took_s=took_s)


# --- what is told --------------------------------------------------------------------------------


def _tell(played: Played) -> None:
    """The story of one drill."""
    one, outcome = played.drill, played.outcome
    click.echo(f"{one.name}: {one.damage}")
    seen = {check.name: check for check in outcome.checks}
    for check in (seen[name] for name in CHECKS if name in seen):
        mark = click.style(f"{_MARKS[check.held]:<3}", fg=_COLOURS[check.held])
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
    word = "passed" if outcome.passed else click.style("NOT PASSED", fg="red")
    click.echo(f"{word} in {played.took_s:.1f} s")


def _tell_all(held: Sequence[Played]) -> None:
    """A row for each drill, a column for each thing that was looked at."""
    rows = []
    for played in held:
        seen = {check.name: _MARKS[check.held] for check in played.outcome.checks}
        rows.append(
            (
                played.drill.name,
                played.drill.invariant,
                *(seen.get(name, "NO") for name in CHECKS),
                f"{played.took_s:.1f}",
                played.outcome.bug_id,
            )
        )
    table(("drill", "breaks", *CHECKS, "seconds", "bug id"), rows, spare=("bug id", "seconds"))
    failed = [played.drill.name for played in held if not played.outcome.passed]
    click.echo(f"drills: {len(held)}, not passed: {' '.join(failed) or 'none'}")
    click.echo(f"journals: {held[0].directory.parent} (delete what you do not need)")
