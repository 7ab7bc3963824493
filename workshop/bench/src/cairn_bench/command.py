"""``ops bench``: from the command line to the table."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

import attrs
import click

from cairn.engine.model.builtin import builtin_directory
from cairn.engine.model.files import directory_fault
from cairn.ops.cli import Unreadable
from cairn.ops.common.locations import example
from cairn.ops.common.output import counted, table
from cairn_bench import report
from cairn_bench.chart import chart
from cairn_bench.long.command import hold_long
from cairn_bench.parts.listed import PARTS, SCENARIOS_PART
from cairn_bench.parts.stage import Part, Stage, alone
from cairn_bench.plan import Step, planned
from cairn_bench.rows import NoRow, Row
from cairn_bench.runs import Run, hold
from cairn_bench.scenarios import SCENARIOS, Scenario
from cairn_bench.servers.asking import NoAnswer, NoResult
from cairn_bench.servers.processes import (
    DidNotStart,
    Kind,
    NeverAtRest,
    Servers,
    llama,
    mlx_lm,
    ours,
    running,
)
from cairn_bench.servers.sizes import DEFAULT, SIZES, Size
from cairn_conform.client_texts import new_salt

MISSED = 3
"""The exit code if a goal is missed."""

_TERMINATED = 143
QUICK_PAUSES_S = (0.5,)
PAUSES_S = tuple(report.GOALS)
_QUICK_LEAVES_OUT = ("20 in turn", "edits", "documents", "batch", "branches")


class Failed(Unreadable):
    """There is no result."""

    exit_code = 1


@click.command(
    epilog=example(
        "ops bench --quick",
        "ops bench --part decode --part reuse -o figures",
        "ops bench --size 4x1024 --part speculation",
        "ops bench --long 0.085 -o long",
    )
)
@click.option("--model", metavar="DIR", help="A model directory. Default: one with random weights.")
@click.option(
    "--size",
    "size_name",
    type=click.Choice(list(SIZES)),
    help=f"The layers and their width of a model with random weights. Default: {DEFAULT}.",
)
@click.option("--quick", is_flag=True, help="Measure less: about ten minutes instead of an hour.")
@click.option(
    "--part",
    "part_names",
    multiple=True,
    type=click.Choice([SCENARIOS_PART, *(part.name for part in PARTS)]),
    metavar="NAME",
    help="Run only this part. Repeat the option for several. docs/benchmarks.md lists the parts.",
)
@click.option(
    "--scenario",
    "names",
    multiple=True,
    type=click.Choice([scenario.name for scenario in SCENARIOS]),
    metavar="NAME",
    help="Run only this scenario, and no part without --part. Repeat the option for several.",
)
@click.option("--no-peer", is_flag=True, help="Measure Cairn alone.")
@click.option(
    "--as-installed", is_flag=True, help="Also measure mlx-lm's server with its default options."
)
@click.option(
    "--llama-server",
    nargs=2,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="BINARY GGUF",
    help="Also measure llama.cpp's server, with the model of --model in GGUF.",
)
@click.option(
    "--salt",
    metavar="TEXT",
    help="The beginning of all texts, to repeat a measurement; random by default.",
)
@click.option(
    "--long",
    "hours",
    type=click.FloatRange(0.01, 168),
    metavar="HOURS",
    help="Instead of all parts, measure one session of this length, on Cairn alone. The default "
    "model is Pebble.",
)
@click.option("--resume", is_flag=True, help="Continue the long session in the directory of -o.")
@click.option(
    "-o",
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="The directory for figures.json and chart.svg, or for the record of a long session.",
)
def bench(
    model: str | None,
    size_name: str | None,
    quick: bool,
    part_names: tuple[str, ...],
    names: tuple[str, ...],
    no_peer: bool,
    as_installed: bool,
    llama_server: tuple[Path, Path] | None,
    salt: str | None,
    hours: float | None,
    resume: bool,
    out: Path | None,
) -> None:
    """
    Measure Cairn and mlx-lm's server on the same model, in one run.

    Also measures the model without a server, and warm against cold requests. A figure counts only
    if the cache was hit and the sampled warm answers equal the cold ones to the last bit. Servers
    are started on the loopback with their own directories, and stop with the command. Run nothing
    else on the machine meanwhile.

    \b
    Exit code
      0  measured, and all goals are reached
      1  a result is missing: the cache was not hit, or a warm answer differs from the cold one
      2  a server could not be started
      3  measured, and a goal is missed
    """
    if llama_server is not None and model is None:
        raise click.UsageError("--llama-server needs --model, the same model in mlx-lm's format.")
    if size_name is not None and model is not None:
        raise click.UsageError("--size makes a model with random weights. Omit it, or --model.")
    fault = directory_fault(str(builtin_directory()) if model is None else model)
    if fault is not None:
        raise Unreadable(fault)
    if hours is not None:
        if quick or names or part_names or no_peer or as_installed or llama_server or size_name:
            raise click.UsageError(
                "--long measures one session on Cairn alone. Omit the options for parts, peers and "
                "sizes."
            )
        where = builtin_directory() if model is None else Path(model).expanduser()
        sys.exit(
            hold_long(hours=hours, kind=ours(), model=where, out=out, salt=salt, resume=resume)
        )
    if resume:
        raise click.UsageError("--resume needs --long.")
    kinds = _kinds(no_peer=no_peer, as_installed=as_installed, llama_server=llama_server)
    parts = chosen_parts(part_names, names, peer=not no_peer, quick=quick)
    with_scenarios = SCENARIOS_PART in part_names or bool(names) or not part_names
    scenarios = chosen_scenarios(names, quick=quick) if with_scenarios else []
    pauses_s = QUICK_PAUSES_S if quick else PAUSES_S
    steps = list(planned(scenarios, pauses_s, [kind.name for kind in kinds]))
    salt = salt or new_salt()
    measures = sum(len(part.measures) for part in parts)
    click.echo(
        f"{counted(len(steps), 'run')} and {counted(measures, 'measure')} to do; --salt {salt}",
        err=True,
    )
    about: dict[str, Any] = {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": report.machine(_blas(kinds)),
        "load": _load(),
        "quick": quick,
        "size": size_name,
        "salt": salt,
    }
    began_s = time.monotonic()
    with _ending_on_sigterm(), tempfile.TemporaryDirectory(prefix="cairn-bench-") as scratch:
        folder = Path(scratch)
        size = SIZES[size_name or DEFAULT]
        where = random_model(folder, size) if model is None else Path(model).expanduser()
        about["model"] = size.told if model is None else where.name
        with Servers(kinds, where, folder) as servers:
            runs, lost = _held(steps, servers, kinds[0].name, salt)
            stage = Stage(
                own=kinds[0],
                model=where,
                folder=folder / "apart",
                salt=f"{salt}/parts",
                quick=quick,
                named=servers.named,
                peer=None if no_peer else kinds[1].name,
                start=running,
                alone=alone,
                quoting=(lambda: random_model(folder, size, quoting=True))
                if model is None
                else lambda: where,
            )
            rows, none, steps_s = _measured(parts, stage, servers)
    about["steps_s"] = steps_s
    about["took_s"] = round(time.monotonic() - began_s)
    _tell(runs, lost, kinds[0].name)
    _tell_rows(rows, none)
    if out is not None:
        figures = report.as_json(about, runs, lost, kinds[0].name, rows, none)
        _write(out, figures, chart(runs) if runs else None)
    if any(one.ours for one in none):
        sys.exit(Failed.exit_code)
    means = report.means(report.ratios(runs, kinds[0].name))
    if any(mean.is_missed for mean in means) or any(row.is_missed for row in rows):
        sys.exit(MISSED)


def chosen_parts(
    part_names: Sequence[str], scenario_names: Sequence[str], *, peer: bool, quick: bool
) -> list[Part]:
    """
    The named parts; all by default, unless scenarios are named. Without a peer, only the measures
    that need none; of parts that are not named, only those of a quick run.

    Args:
        part_names: of ``--part``.
        scenario_names: of ``--scenario``.
        peer: whether a peer is measured.
        quick: whether there is little time.
    """
    if part_names or scenario_names:
        parts, quick = [part for part in PARTS if part.name in part_names], False
    else:
        parts = list(PARTS)
    kept = []
    for part in parts:
        measures = tuple(
            one
            for one in part.measures
            if (peer or not one.needs_peer) and (one.in_quick or not quick)
        )
        if measures:
            kept.append(attrs.evolve(part, measures=measures))
    return kept


def chosen_scenarios(names: Sequence[str], *, quick: bool) -> list[Scenario]:
    """The named scenarios, else those of a quick run, else all."""
    if names:
        return [one for one in SCENARIOS if one.name in names]
    return [one for one in SCENARIOS if not quick or one.name not in _QUICK_LEAVES_OUT]


def _kinds(
    *, no_peer: bool, as_installed: bool, llama_server: tuple[Path, Path] | None
) -> list[Kind]:
    """The servers to measure, ours first."""
    kinds = [ours()]
    if not no_peer:
        kinds.append(mlx_lm(same_footing=True))
    if as_installed:
        kinds.append(mlx_lm(same_footing=False))
    if llama_server is not None:
        kinds.append(llama(*llama_server))
    return kinds


def random_model(folder: Path, size: Size, *, quoting: bool = False) -> Path:
    """Make a model with random weights in a folder; see ``make_sized_model``."""
    # This imports MLX; the servers run as their own processes.
    from cairn_bench.servers.sized_model import make_sized_model

    directory = folder / ("quoting" if quoting else "random")
    make_sized_model(directory, size, quoting=quoting)
    return directory


def _blas(kinds: Sequence[Kind]) -> str | None:
    return kinds[0].environment.get("LD_PRELOAD") or os.environ.get("LD_PRELOAD") or None


def _load() -> float | None:
    """How busy the machine is before measuring; None if it does not report it."""
    try:
        return round(os.getloadavg()[0], 2)
    except OSError:
        return None


def _held(
    steps: Sequence[Step], servers: Servers, own: str, salt: str
) -> tuple[list[Run], list[report.Lost]]:
    """
    All runs.

    If a peer does not answer, its run is lost and it is restarted for the next run; our server has
    to answer.
    """
    runs: list[Run] = []
    lost: list[report.Lost] = []
    for place, step in enumerate(steps, start=1):
        name, pause_s = step.scenario.name, step.pause_s
        told = f"{step.server}: {name}, {pause_s:g} s of pause"
        click.echo(f"[{place}/{len(steps)}] {told} ...", err=True)
        try:
            server = servers.named(step.server)
            runs.append(hold(step.scenario, server, f"{salt}/{pause_s:g}", pause_s=pause_s))
        except DidNotStart as error:
            raise Unreadable(str(error)) from error
        except (NoResult, NeverAtRest) as error:
            raise Failed(f"No result. {error}.") from error
        except NoAnswer as error:
            if step.server == own:
                raise Failed(f"No result. {error}.") from error
            click.echo(f"Lost: {error}.", err=True)
            lost.append(
                report.Lost(scenario=name, server=step.server, pause_s=pause_s, why=str(error))
            )
            servers.end(step.server)
    return runs, lost


def _measured(
    parts: Sequence[Part], stage: Stage, servers: Servers
) -> tuple[list[Row], list[NoRow], dict[str, int]]:
    """
    All rows, and the seconds of each step.

    A step without a result is reported, and costs only its own rows.
    """
    rows: list[Row] = []
    steps_s: dict[str, int] = {}
    none: list[NoRow] = []
    for part in parts:
        for measure in part.measures:
            click.echo(f"[{part.name}] {measure.name} ...", err=True)
            ours, began_s = True, time.monotonic()
            try:
                rows += measure.rows(stage)
                steps_s[measure.name] = round(time.monotonic() - began_s)
                click.echo(f"  {steps_s[measure.name]} s", err=True)
                continue
            except NoAnswer as error:
                # A server that does not answer once may never answer again.
                servers.end(error.server)
                ours, why = error.server != stage.peer, str(error)
            except (NoResult, NeverAtRest, DidNotStart) as error:
                why = str(error)
            click.echo(f"No result: {why}.", err=True)
            none.append(NoRow(name=measure.name, why=why, ours=ours))
    return rows, none, steps_s


@contextlib.contextmanager
def _ending_on_sigterm() -> Iterator[None]:
    """SIGTERM also stops the started processes, as Ctrl-C does."""

    def ended(*_: object) -> NoReturn:
        sys.exit(_TERMINATED)

    usual = signal.signal(signal.SIGTERM, ended)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, usual)


# --- output --------------------------------------------------------------------------------------


def _tell(runs: Sequence[Run], lost: Sequence[report.Lost], own: str) -> None:
    if not runs and not lost:
        return
    table(
        ("scenario", "pause", "server", "first token", "reused", "ratio", "settled", "used"),
        [_cells(run, runs, own) for run in runs],
        spare=("used", "settled"),
    )
    checked = sum(run.cold_equal or 0 for run in runs)
    click.echo(f"{counted(checked, 'warm answer')} computed again, warm and cold: the same bits")
    for one in lost:
        click.echo(f"lost: {one.scenario}, {one.pause_s:g} s: {one.why}")
    for mean in report.means(report.ratios(runs, own)):
        click.echo(
            f"mean ratio to {mean.peer}, {mean.pause_s:g} s of pause: {mean.value:.2f} "
            f"({mean.verdict})"
        )
        click.echo(
            f"worst ratio to {mean.peer}, {mean.pause_s:g} s of pause: {mean.worst:.2f} in "
            f"{mean.worst_scenario} ({mean.worst_verdict})"
        )


def _tell_rows(rows: Sequence[Row], none: Sequence[NoRow]) -> None:
    if rows:
        table(
            ("figure", "value", "goal", "verdict", "of"),
            [(row.name, row.told, row.told_goal, row.verdict, row.of) for row in rows],
            wrapped="of",
        )
    for one in none:
        click.echo(f"no result: {one.name}: {one.why}")


def _cells(run: Run, runs: Sequence[Run], own: str) -> tuple[object, ...]:
    beside = [
        ratio.value
        for ratio in report.ratios(runs, own)
        if (ratio.scenario, ratio.peer, ratio.pause_s) == (run.scenario, run.server, run.pause_s)
    ]
    settled = run.settled
    return (
        run.scenario,
        f"{run.pause_s:g} s",
        run.server,
        f"{run.first_s * 1000:.1f} ms",
        None if run.hit_rate is None else f"{run.hit_rate:.0%}",
        f"{beside[0]:.2f}" if beside else None,
        None if settled is None else settled.computed_tokens,
        None if settled is None else settled.used_tokens,
    )


def _write(out: Path, figures: dict[str, Any], picture: str | None) -> None:
    paths = [out / "figures.json"]
    try:
        out.mkdir(parents=True, exist_ok=True)
        paths[0].write_text(json.dumps(figures, indent=1) + "\n", "utf-8")
        if picture is not None:
            paths.append(out / "chart.svg")
            paths[1].write_text(picture, "utf-8")
    except OSError as error:
        raise Unreadable(f"{out} cannot be written: {error.strerror}.") from error
    click.echo(f"written: {', '.join(map(str, paths))}", err=True)
