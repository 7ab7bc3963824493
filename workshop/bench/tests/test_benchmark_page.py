"""The figures of docs/benchmarks.md are those of the file next to it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import cairn_bench.benchmark_page as benchmark_page
from cairn_bench import report
from cairn_bench.benchmark_page import BEGIN, CHART, END, FIGURES, PAGE, block, kept, with_block
from cairn_bench.rows import NoRow, Row


def figures() -> dict[str, Any]:
    """Made-up figures, in the shape in which the bench writes them."""
    rows = [
        Row(name="a figure", value=0.5, goal=0.8, of="1 | 2"),
        Row(name="another", value=0.9, goal=0.8, shown="share"),
        Row(name="a third", value=3, shown="count"),
    ]
    none = [NoRow(name="a step", why="no hit")]
    lost = [report.Lost(scenario="edits", server="mlx-lm", pause_s=0.5, why="gone")]
    about = {
        "date": "2026-11-22",
        "machine": report.machine("/somewhere/libopenblas.so"),
        "load": 0.05,
        "quick": True,
        "size": None,
        "salt": "s",
        "model": "random weights",
        "took_s": 540,
    }
    found = json.loads(json.dumps(report.as_json(about, [], lost, "cairn", rows, none)))
    mean = {"peer": "mlx-lm", "pause_s": 0.5, "scenarios": 7, "goal": 0.8, "worst_goal": 1.1}
    mean |= {"worst": 1.2, "worst_scenario": "edits"}
    ratio = {
        "scenario": "edits",
        "peer": "mlx-lm",
        "pause_s": 0.5,
        "ours_s": 0.05,
        "theirs_s": 0.1,
        "ours_reused": 0.9,
        "theirs_reused": None,
        "ratio": 0.5,
    }
    means = [{**mean, "value": 0.5, "applies": True}, {**mean, "value": 0.9, "applies": False}]
    run = {
        "scenario": "edits",
        "pause_s": 0.5,
        "settled": {"computed_tokens": 128, "used_tokens": 64},
    }
    peer = {"scenario": "edits", "pause_s": 0.5, "settled": None}
    return {**found, "means": means, "ratios": [ratio], "runs": [run, peer]}


def test_the_page_says_what_the_file_says():
    """
    Between its marks the page is what the tool makes of docs/benchmarks.json; without that file it
    says that there is nothing.
    """
    found = json.loads(FIGURES.read_text("utf-8")) if FIGURES.exists() else None
    page = PAGE.read_text("utf-8")
    assert with_block(page, block(found, charted=CHART.exists())) == page


def test_each_figure_is_a_line():
    """
    Means, rows, what has no result and what was lost; what is missed stands out, and a goal that
    does not apply is none.
    """
    made = block(figures(), charted=True)
    assert "| a figure | 0.5 | at most 0.8 | reached | 1 / 2 |" in made
    assert "| another | 90% | at most 80% | **missed** |  |" in made
    assert "| a third | 3 |  |  |  |" in made
    assert "| a step | no result |  |  | no hit |" in made
    assert "| edits, 0.5 s | lost |  |  | gone |" in made
    assert "over 7 scenarios, 0.5 s of pause | 0.50 | at most 0.8 | reached |" in made
    assert "over 7 scenarios, 0.5 s of pause | 0.90 |  |  |" in made
    where = "first token, worst ratio to mlx-lm over 7 scenarios, 0.5 s of pause"
    assert f"{where} | 1.20 | at most 1.1 | **missed** | edits |" in made
    assert f"{where} | 1.20 |  |  | edits |" in made
    assert (
        "| edits | 0.5 s | mlx-lm | 50.0 ms | 100.0 ms | 0.50 | 90% / not reported | 128 / 64 |"
        in made
    )
    assert "`ops bench --quick --salt s`, 9 minutes" in made
    sized = block({**figures(), "size": "4x1024"}, charted=False)
    assert "`ops bench --quick --size 4x1024 --salt s`, 9 minutes" in sized
    assert "pictures/benchmarks.svg" in made
    assert "pictures/" not in block(figures(), charted=False)


def test_a_page_without_marks_is_not_written():
    """What is made goes between two marks and nowhere else."""
    assert f"a {BEGIN} new {END} b" == with_block(f"a {BEGIN} old {END} b", f"{BEGIN} new {END}")
    with pytest.raises(ValueError, match="the page has no part between"):
        with_block("a page", "new")


def test_a_folder_becomes_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """
    Figures, chart and page are written; single requests are not kept, and a chart of before goes
    where there is none.
    """
    folder = tmp_path / "out"
    folder.mkdir()
    runs = [{**run, "requests": [1, 2]} for run in figures()["runs"]]
    (folder / "figures.json").write_text(json.dumps({**figures(), "runs": runs}), "utf-8")
    (folder / "chart.svg").write_text("<svg/>", "utf-8")
    for name in ("PAGE", "FIGURES", "CHART"):
        monkeypatch.setattr(benchmark_page, name, tmp_path / name)
    (tmp_path / "PAGE").write_text(f"before\n{BEGIN}\n{END}\nafter\n", "utf-8")
    benchmark_page.main([str(folder)])
    page = (tmp_path / "PAGE").read_text("utf-8")
    assert page.startswith("before\n")
    assert page.endswith("after\n")
    assert "a figure" in page
    found = json.loads((tmp_path / "FIGURES").read_text("utf-8"))
    assert figures()["runs"] == found["runs"] == kept(found)["runs"]
    assert "<svg/>" == (tmp_path / "CHART").read_text("utf-8")
    (folder / "chart.svg").unlink()
    benchmark_page.main([str(folder)])
    assert not (tmp_path / "CHART").exists()
