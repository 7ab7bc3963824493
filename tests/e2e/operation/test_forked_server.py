"""Servers that are forked end as servers that are started do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes.forked_server import ForkedProcess, can_fork, start_forked

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="servers are forked on Linux alone")


def begun(folder: Path, *arguments: str) -> tuple[ForkedProcess, Path]:
    log = folder / "stderr"
    with log.open("w", encoding="utf-8") as stderr:
        return start_forked(arguments, stderr), log


def test_the_same_command_in_both(tmp_path: Path) -> None:
    """Both parents give the output and the exit code of a process that was started."""
    for _ in range(2):
        process, _ = begun(tmp_path, "version")
        own = [sys.executable, "-P", "-m", "cairn.ops", "version"]
        expected = subprocess.run(own, capture_output=True, text=True, check=True)
        assert expected.stdout == process.stdout.read()
        assert 0 == process.wait(60)


def test_a_wrong_command(tmp_path: Path) -> None:
    process, log = begun(tmp_path, "serve", "--no-such-option")
    assert 2 == process.wait(60)
    assert "No such option" in log.read_text(encoding="utf-8")
    assert 2 == process.poll()


def test_a_killed_process(tmp_path: Path) -> None:
    process, _ = begun(tmp_path, "serve", "--data-dir", str(tmp_path / "home"), "--port", "0")
    assert process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0)
    process.kill()
    assert -9 == process.wait(60)
    process.kill()


def test_a_changed_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COVERAGE_PROCESS_CONFIG", raising=False)
    assert can_fork()
    monkeypatch.setenv("CAIRN_PORT", "0")
    assert not can_fork()
