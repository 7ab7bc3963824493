"""
Write the figures of docs/benchmarks.md from the output of ``ops bench -o FOLDER``.

``python -P -m cairn_bench.benchmark_page FOLDER`` saves the figures in docs/benchmarks.json and the
chart in docs/pictures/benchmarks.svg, and replaces the part of the page between its two marks. A
test checks that the page matches the file.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[4] / "docs"
PAGE, FIGURES = DOCS / "benchmarks.md", DOCS / "benchmarks.json"
CHART = DOCS / "pictures" / "benchmarks.svg"
BEGIN = "<!-- Made by workshop/bench/src/cairn_bench/benchmark_page.py. -->"
END = "<!-- End of what is made. -->"

_NONE = "None yet: no run on a quiet machine has been recorded."


def block(figures: Mapping[str, Any] | None, *, charted: bool) -> str:
    """
    The text between the marks.

    Args:
        figures: as ``ops bench`` writes them; None if there are none.
        charted: whether there is a chart to show.
    """
    if figures is None:
        return f"{BEGIN}\n\n{_NONE}\n\n{END}"
    parts = [BEGIN, _about(figures), _goals(figures)]
    if figures["ratios"]:
        parts.append(_ratios(figures["ratios"], figures["runs"]))
    if charted:
        parts.append(
            "![Time to first token against the tokens of the prompt](pictures/benchmarks.svg)"
        )
    return "\n\n".join([*parts, END])


def _about(figures: Mapping[str, Any]) -> str:
    machine = figures["machine"]
    blas = machine["blas"] or "what MLX brings"
    versions = f"Cairn {machine['cairn']}, MLX {machine['mlx']}, mlx-lm {machine['mlx-lm']}"
    size = f" --size {figures['size']}" if figures["size"] else ""
    quick = " --quick" if figures["quick"] else ""
    command = f"ops bench{quick}{size} --salt {figures['salt']}"
    load = "" if figures["load"] is None else f", a load of {figures['load']:g} before it began"
    return (
        f"{figures['date']}: {versions}, Python {machine['python']}, on {machine['processor']} "
        f"({machine['system']}, {blas}){load}. Model: {figures['model']}. "
        f"`{command}`, {figures['took_s'] / 60:.0f} minutes."
    )


def _goals(figures: Mapping[str, Any]) -> str:
    """Means and rows with their goals, then the parts without a result."""
    lines = [line for mean in figures["means"] for line in _of_mean(mean)]
    lines += [
        (row["name"], row["told"], row["told_goal"], row["verdict"], row["of"])
        for row in figures["rows"]
    ]
    lines += [(one["name"], "no result", "", "", one["why"]) for one in figures["no_rows"]]
    lines += [
        (f"{one['scenario']}, {one['pause_s']:g} s", "lost", "", "", one["why"])
        for one in figures["lost"]
    ]
    return _table(("figure", "value", "goal", "", "made of"), map(_loud, lines))


def _of_mean(mean: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """The mean, and the worst scenario of it."""
    where = f"to {mean['peer']} over {mean['scenarios']} scenarios, {mean['pause_s']:g} s of pause"
    named = (
        ("mean", "value", "goal", ""),
        ("worst", "worst", "worst_goal", mean["worst_scenario"]),
    )
    for name, value, goal, of in named:
        told_goal, verdict = "", ""
        if mean["applies"]:
            told_goal = f"at most {mean[goal]:g}"
            verdict = "missed" if mean[value] > mean[goal] else "reached"
        yield f"first token, {name} ratio {where}", f"{mean[value]:.2f}", told_goal, verdict, of


def _loud(cells: Sequence[str]) -> Iterator[str]:
    """Missed goals stand out."""
    return (f"**{cell}**" if cell == "missed" else cell for cell in cells)


def _ratios(ratios: Sequence[Mapping[str, Any]], runs: Sequence[Mapping[str, Any]]) -> str:
    """The scenarios: both servers' times, and what ours computed ahead."""
    ahead = {(run["scenario"], run["pause_s"]): run["settled"] for run in runs if run["settled"]}
    rows = [
        (
            ratio["scenario"],
            f"{ratio['pause_s']:g} s",
            ratio["peer"],
            f"{ratio['ours_s'] * 1000:.1f} ms",
            f"{ratio['theirs_s'] * 1000:.1f} ms",
            f"{ratio['ratio']:.2f}",
            f"{_share(ratio['ours_reused'])} / {_share(ratio['theirs_reused'])}",
            _ahead(ahead.get((ratio["scenario"], ratio["pause_s"]))),
        )
        for ratio in ratios
    ]
    columns = (
        "scenario",
        "pause",
        "peer",
        "ours",
        "theirs",
        "ratio",
        "reused, ours / theirs",
        "tokens prewarmed / used",
    )
    return _table(columns, rows)


def _ahead(settled: Mapping[str, Any] | None) -> str:
    return "" if settled is None else f"{settled['computed_tokens']} / {settled['used_tokens']}"


def _share(value: float | None) -> str:
    return "not reported" if value is None else f"{value:.0%}"


def _table(columns: Sequence[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)


def kept(figures: Mapping[str, Any]) -> dict[str, Any]:
    """The figures to save: without the individual requests."""
    runs = [{name: run[name] for name in run if name != "requests"} for run in figures["runs"]]
    return {**figures, "runs": runs}


def with_block(page: str, made: str) -> str:
    """
    A page with a new text between its marks.

    Raises:
        ValueError: it has no marks.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no part between {BEGIN} and {END}")
    return before + made + after


def main(arguments: Sequence[str] | None = None) -> int:
    """Update the page from the folder."""
    parser = argparse.ArgumentParser(
        prog="python -P -m cairn_bench.benchmark_page", description=__doc__
    )
    parser.add_argument("folder", type=Path, help="what `ops bench -o` named")
    folder = parser.parse_args(arguments).folder
    figures = kept(json.loads((folder / "figures.json").read_text("utf-8")))
    FIGURES.write_text(json.dumps(figures, indent=1) + "\n", "utf-8")
    CHART.unlink(missing_ok=True)
    if (folder / "chart.svg").exists():
        shutil.copyfile(folder / "chart.svg", CHART)
    made = block(figures, charted=CHART.exists())
    PAGE.write_text(with_block(PAGE.read_text("utf-8"), made), "utf-8")
    print(f"written: {PAGE}, {FIGURES}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
