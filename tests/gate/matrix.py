"""
Random histories under each of OpenBLAS's kernels, with one thread and with two, with both grains.

``python -P -m tests.gate.matrix --requests 500 --seed 1`` prints a line for each cell, and a table
at the end. Each cell is a process of its own, because kernels are chosen before a process starts.
It exits with 1 if an answer differs from the cold one or a journal breaks an invariant.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest

from cairn.engine import schedule
from cairn.engine.machine.blas import loaded_blas
from cairn.engine.row_class import RowClass
from cairn.journal import events as ev
from cairn.journal.rows.codec import Row, decode
from tests.gate.jitter import ROUND, begun, lived, written, wrong
from tests.gate.kernels import has_avx512, on_kernels
from tests.support.models.random_model import make_random_model
from tests.support.self_tests import self_tests_run_once, without_row_class

CORES = ("Haswell", "Zen", "SkylakeX")
THREADS = (1, 2)
GRAINS = ("1", "C")
COLUMNS = ("kernels", "threads", "grain", "row class", "requests", "tokens reused", "differ")
# With two threads on a busy machine OpenBLAS waits for itself.
_LIMIT_S = 4 * 3600


@attrs.frozen(kw_only=True)
class Cell:
    """
    Which kernels, how many threads, and whether a row class is searched: the grain is 1 with one,
    else C.
    """

    core: str
    threads: int
    grain: str


@attrs.frozen(kw_only=True)
class Result:
    """
    What a cell found.

    Attributes:
        core: the kernels that ran: an OpenBLAS that has no kernels of its own for Zen uses
            Haswell's.
        row_class: its fields; empty without one.
        differ: answers that are not the cold ones.
        wrong: these in words, with what else is wrong.
        skipped: why nothing was run; empty if it was.
    """

    core: str = ""
    row_class: tuple[int, ...] = ()
    requests: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    differ: int = 0
    wrong: tuple[str, ...] = ()
    skipped: str = ""
    seconds: float = 0.0


# --- in the process of a cell ---------------------------------------------------------------------


def ran(cell: Cell, requests: int, seed: int) -> Result:
    """Run histories of so many requests in this process, and compare each answer."""
    blas = loaded_blas()
    if blas is None or blas.core is None or blas.threads != cell.threads:
        return Result(skipped="no OpenBLAS is preloaded, or it has another number of threads")
    same = blas.core.lower() == cell.core.lower() or {blas.core, cell.core} == {"Haswell", "Zen"}
    if not same:
        return Result(skipped=f"OpenBLAS uses {blas.core}")
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        stack.enter_context(self_tests_run_once())
        if cell.grain == "C":
            stack.enter_context(without_row_class())
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(schedule, "COPIED_AT_ONCE_BYTES", 1)  # much may run between two parts
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = make_random_model(folder / "model")
        empty = begun(model)
        result = Result(core=blas.core, row_class=class_of(empty))
        if (cell.grain == "1") != bool(result.row_class):
            why = self_test_of(empty).row_class_reason
            return attrs.evolve(result, wrong=(f"the grain is not {cell.grain}: {why}",))
        for number, first in enumerate(range(0, requests, ROUND)):
            some = min(ROUND, requests - first)
            acts = written(model, empty, seed + number, some)
            setup = lived(model, empty, folder / f"blocks-{number}", acts, seed + number)
            happened = setup.happened()
            result = attrs.evolve(
                result,
                requests=result.requests + len(setup.heard),
                prompt_tokens=result.prompt_tokens + happened["prompt tokens"],
                reused_tokens=result.reused_tokens + happened["reused tokens"],
                differ=result.differ + len(setup.differences()),
                wrong=(*result.wrong, *(f"seed {seed + number}: {what}" for what in wrong(setup))),
            )
    if not result.reused_tokens:
        result = attrs.evolve(result, wrong=(*result.wrong, "nothing was reused"))
    return attrs.evolve(result, seconds=time.monotonic() - began)


def class_of(rows: Sequence[Row]) -> tuple[int, ...]:
    """The fields of the row class of the model that was loaded last."""
    *_, loaded = (row for row in rows if row.kind == ev.ModelLoaded.kind)
    event = decode(loaded).event
    assert isinstance(event, ev.ModelLoaded)
    return tuple(event.fields["row_class"])


def self_test_of(rows: Sequence[Row]) -> ev.SelfTestFinished:
    """The self-test of that model."""
    *_, tested = (row for row in rows if row.kind == ev.SelfTestFinished.kind)
    event = decode(tested).event
    assert isinstance(event, ev.SelfTestFinished)
    return event


# --- in the process of the table ------------------------------------------------------------------


def started(cell: Cell, requests: int, seed: int) -> Result:
    """Run a cell in a process of its own, unless this processor cannot."""
    if (why := unable(cell.core)) is not None:
        return Result(skipped=why)
    arguments = ("--requests", str(requests), "--seed", str(seed))
    try:
        found = on_kernels(
            cell.core,
            cell.threads,
            "tests.gate.matrix",
            *("--cell", json.dumps(attrs.asdict(cell))),
            *arguments,
            limit_s=_LIMIT_S,
        )
    except AssertionError as failed:
        return Result(wrong=tuple(str(failed).splitlines()[-20:]) or ("the process failed",))
    lists = {name: tuple(found[name]) for name in ("row_class", "wrong")}
    return Result(**{**found, **lists})


def unable(core: str) -> str | None:
    """Why this processor cannot run these kernels; None if it can."""
    if sys.platform != "linux":
        return "the kernels are those of OpenBLAS on Linux"
    if core == "SkylakeX" and not has_avx512():
        return "this processor has no AVX-512"
    return None


def in_words(fields: Sequence[int]) -> str:
    """A row class, short."""
    row_class = RowClass.of(fields)
    if row_class is None:
        return "none"
    if row_class.least == row_class.most:
        return f"{row_class.most} rows"
    steps = f" by {row_class.quantum}" if row_class.quantum > 1 else ""
    return f"{row_class.least} to {row_class.most} rows{steps}"


def row_of(cell: Cell, result: Result) -> tuple[str, ...]:
    """A row of the table."""
    kernels = cell.core if result.core in ("", cell.core) else f"{cell.core} ({result.core}'s)"
    first = (kernels, str(cell.threads), cell.grain)
    if result.skipped:
        return (*first, f"skipped: {result.skipped}", "", "", "")
    share = result.reused_tokens / max(1, result.prompt_tokens)
    return (
        *first,
        in_words(result.row_class),
        str(result.requests),
        f"{result.reused_tokens} ({share:.0%})",
        str(result.differ),
    )


def table(rows: Sequence[Sequence[str]]) -> str:
    """The table in Markdown."""
    lines = [COLUMNS, tuple("---" for _ in COLUMNS), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main(
    requests: int,
    seed: int,
    run: Callable[[Cell, int, int], Result] = started,
    threads: Sequence[int] = THREADS,
) -> int:
    """Run the cells, print what they found, and return the exit code."""
    rows, failed = [], False
    for cell in cells(threads):
        result = run(cell, requests, seed)
        rows.append(row_of(cell, result))
        print(
            f"gate-matrix: {', '.join(filter(None, rows[-1]))}; {result.seconds:.0f} s", flush=True
        )
        for what in result.wrong:
            print(f"  {what}", flush=True)
        failed = failed or bool(result.wrong or result.differ)
    print(f"\n{table(rows)}\n\nSEED={seed} REQUESTS={requests}")
    return 1 if failed else 0


def cells(threads: Sequence[int] = THREADS) -> Iterator[Cell]:
    """The cells with these numbers of threads."""
    for number, core, grain in itertools.product(threads, CORES, GRAINS):
        yield Cell(core=core, threads=number, grain=grain)


def _arguments() -> Any:
    parser = argparse.ArgumentParser(
        description="Random histories under each of OpenBLAS's kernels."
    )
    parser.add_argument("--requests", type=int, default=500, help="of each cell, about")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, nargs="+", choices=THREADS, default=THREADS)
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    given = _arguments()
    if given.cell is None:
        sys.exit(main(given.requests, given.seed, threads=given.threads))
    one = ran(Cell(**json.loads(given.cell)), given.requests, given.seed)
    print(json.dumps(attrs.asdict(one)))
