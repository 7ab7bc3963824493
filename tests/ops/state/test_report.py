"""`ops doctor --report`: what it writes, and what it does if the server does not start."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from cairn.ops import doctor
from cairn.ops.chat.server import OwnServer
from cairn.ops.cli import ops
from cairn.ops.doctor import Found
from cairn.ops.state import report


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


def test_a_model_is_for_the_report():
    """Without one, the option is refused."""
    done = run("--model", "any")
    assert 2 == done.exit_code
    assert "Add --report FILE" in done.output
