"""`ops doctor --report`: what it writes, and what it does if the server does not start."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from cairn.ops import doctor
from cairn.ops.chat.server import OwnServer
from cairn.ops.cli import Unreadable, ops
from cairn.ops.doctor import Found
from cairn.ops.state import report
from tests.support.processes.subprocess_server import DEADLINE_S


@pytest.fixture(autouse=True)
def checks(monkeypatch: pytest.MonkeyPatch):
    """One check of the doctor, which finds a file in the home directory."""
    fact = f"all in {Path.home() / 'models'}"
    monkeypatch.setattr(
        doctor, "checks", lambda *_: iter([("model", lambda: Found("ok", fact, "advice"))])
    )


def run(*words: str | Path) -> Result:
    """Call `cairn doctor`."""
    return CliRunner().invoke(ops, ["doctor", *map(str, words)], prog_name="cairn")


@pytest.mark.long
def test_a_report_of_a_machine(tmp_path: Path, model_directory: Path):
    """It has the checks, the fingerprint, the findings and the rates, and no home directory."""
    path = tmp_path / "report.json"
    steps: list[str] = []
    fault = report.write_report(path, str(model_directory), [], steps.append, probe_s=0.0)
    assert fault is None
    found = json.loads(path.read_text("utf-8"))
    assert found["model_loaded"]["fingerprint"] == found["self_test_finished"]["fingerprint"]
    assert found["model_loaded"]["grain"] in (1, found["model_loaded"]["block_tokens"])
    assert found["self_test_finished"]["passed"]
    assert not found["self_test_finished"]["from_cache"]
    assert "directory" not in found["model_loaded"]
    assert 0 < found["probes"]["decode"]["tokens_per_s"]
    short, middle, long = (one["tokens"] for one in found["probes"]["prefill"])
    assert 0 < short < middle < long
    assert ["decoding for 0 s", "prefilling for 0 s", "stopping the server"] == steps[-3:]
    assert all(before != after for before, after in pairwise(steps))


def test_a_server_that_does_not_start(tmp_path: Path):
    """The report says why, and so does the exit code; the home directory is a tilde."""
    path = tmp_path / "report.json"
    done = run("--report", path, "--model", tmp_path / "none")
    assert 1 == done.exit_code
    assert "The report says what was found." in done.stderr
    text = path.read_text("utf-8")
    found = json.loads(text)
    assert "did not start" in found["fault"]
    assert [{"name": "model", "status": "ok", "fact": "all in ~/models"}] == found["checks"]
    assert found["self_test_finished"] is None
    assert {} == found["probes"]


def test_a_file_is_not_replaced(tmp_path: Path):
    """Nor is a server started for it."""
    path = tmp_path / "report.json"
    path.write_text("mine")
    done = run("--report", path)
    assert 2 == done.exit_code
    assert f"{path} exists. Name another file.\n" == done.stderr
    assert "mine" == path.read_text()
    assert 2 == run("--report", tmp_path / "none" / "report.json").exit_code


def test_an_interrupted_report_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The next try can use its name."""

    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(OwnServer, "start", interrupted)
    assert 130 == run("--report", tmp_path / "report.json").exit_code
    assert [] == list(tmp_path.iterdir())


def test_a_step_is_reported_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """However often the server is asked how far its start has come."""

    def polled(_: OwnServer, report: Callable[[str], None]) -> None:
        for step in ("loading", "loading", "self-test", "self-test", "loading"):
            report(step)
        raise Unreadable("enough")

    monkeypatch.setattr(OwnServer, "start", lambda _: None)
    monkeypatch.setattr(OwnServer, "wait_ready", polled)
    steps: list[str] = []
    report.write_report(tmp_path / "report.json", None, [], steps.append)
    start = "starting a server"
    expected = [f"{start}: loading", f"{start}: self-test", f"{start}: loading"]
    assert [*expected, "stopping the server"] == steps


@pytest.mark.parametrize("at", ["start", "wait_ready"])
@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGINT, 130),
        (signal.SIGTERM, 143),
        (signal.SIGHUP, 129),
        (signal.SIGQUIT, 131),
    ],
)
def test_a_signal_ends_the_server_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, code: int, at: str
):
    """While it is started and while it is waited for; the file is removed."""
    made: list[subprocess.Popen[str]] = []

    class Asleep(subprocess.Popen[str]):
        def __init__(self, command: object, **options: Any) -> None:
            asleep = (sys.executable, "-c", "import signal; signal.pause()")
            super().__init__(asleep, **options)
            made.append(self)
            if at == "start":
                signal.raise_signal(number)

    def waited(*_: object) -> None:
        signal.raise_signal(number)
        raise AssertionError

    # Stands in for an end of this process.
    before = signal.signal(number, lambda *_: None) if number != signal.SIGINT else None
    monkeypatch.setattr("cairn.ops.chat.server.subprocess.Popen", Asleep)
    monkeypatch.setattr(OwnServer, "wait_ready", waited)
    try:
        assert code == run("--report", tmp_path / "report.json").exit_code
        assert [-signal.SIGTERM] == [process.returncode for process in made]
        assert not (tmp_path / "report.json").exists()
    finally:
        if before is not None:
            signal.signal(number, before)
        for process in made:
            process.kill()
            process.wait(DEADLINE_S)
            assert process.stdout is not None
            process.stdout.close()


def test_a_model_is_for_the_report():
    """Without one, the option is refused."""
    done = run("--model", "any")
    assert 2 == done.exit_code
    assert "Add --report FILE" in done.output
