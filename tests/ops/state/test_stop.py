"""`ops stop`: the right process gets the signal, or none."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cairn.journal import events as ev
from cairn.ops.serve.data_dir import hold_directory
from cairn.ops.state.running import Running, is_the_server, resident_bytes, running
from tests.support.journals import healthy
from tests.support.processes.child_process import die_with_parent

HOLDS = """
import signal, sys
from pathlib import Path
from cairn.ops.serve.data_dir import hold_directory
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
with hold_directory(Path(sys.argv[1]), "", who="serve") as held:
    held.record_address("http://127.0.0.1:9")
    print("ready", flush=True)
    for _ in range(int(sys.argv[2])):
        signal.sigwait([signal.SIGTERM])
"""


@contextmanager
def holder(folder: Path, signals: int = 1) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the lock of a data directory until it got so many signals."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", HOLDS, str(folder), str(signals)],
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=die_with_parent,
    )
    assert process.stdout is not None
    try:
        assert "ready\n" == process.stdout.readline()
        yield process
    finally:
        process.kill()
        process.wait(60)
        process.stdout.close()


def test_it_waits_for_the_end(run, tmp_path: Path):
    """The process that holds the lock gets SIGTERM once, and its end is reported."""
    with holder(tmp_path) as process:
        assert Running(tmp_path, process.pid, "http://127.0.0.1:9") == running(tmp_path)
        result = run("stop", "--data-dir", tmp_path)
        assert (0, 0) == (result.exit_code, process.wait(60))
    words = f"Stopping the server at http://127.0.0.1:9 (process {process.pid}) ...\n"
    assert words == result.stderr
    assert result.stdout.startswith("Stopped after ")
    assert running(tmp_path) is None


def test_now(run, tmp_path: Path):
    """A second signal ends a server at once."""
    with holder(tmp_path, signals=2) as process:
        assert 0 == run("stop", "--data-dir", tmp_path, "--now").exit_code
        assert 0 == process.wait(60)


def test_the_wait_has_an_end(run, tmp_path: Path):
    """After --wait the command leaves, with a code and the next step."""
    with holder(tmp_path, signals=2) as process:
        result = run("stop", "--data-dir", tmp_path, "--wait", "0")
        assert (1, None) == (result.exit_code, process.poll())
        assert f"`ops stop --now --data-dir {tmp_path}` ends it at once" in result.stderr


def test_no_server(run, tmp_path: Path):
    """That is no error, and nothing is created."""
    result = run("stop", "--data-dir", tmp_path / "none")
    assert (0, f"No server uses {tmp_path / 'none'}.\n") == (result.exit_code, result.stderr)
    assert not (tmp_path / "none").exists()


def test_another_process_is_spared(run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """If the recorded id is that of another process, no signal is sent."""
    monkeypatch.setattr("cairn.ops.state.stop.LOOKS", 2)
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append((pid, number)))
    with hold_directory(tmp_path, "", who="serve"):
        for text in (f"{os.getppid()} serve http://127.0.0.1:9", "x serve", ""):
            (tmp_path / "lock").write_text(text)
            result = run("stop", "--data-dir", tmp_path)
            assert 2 == result.exit_code
            assert "is not that server" in result.stderr
    assert [] == sent


def test_another_command_is_not_a_server(run, tmp_path: Path):
    """A prune holds the lock too, and is not stopped."""
    with hold_directory(tmp_path, "", who="journal prune"):
        result = run("stop", "--data-dir", tmp_path)
    assert (0, f"No server uses {tmp_path}.\n") == (result.exit_code, result.stderr)


def test_another_users_server(run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The message says what to do."""

    def refuses(pid: int, number: int) -> None:
        raise PermissionError

    with holder(tmp_path), monkeypatch.context() as patch:
        patch.setattr(os, "kill", refuses)
        result = run("stop", "--data-dir", tmp_path)
    assert 2 == result.exit_code
    assert "it is another user's" in result.stderr


def test_a_server_that_ends_by_itself(run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Between the look and the signal: it has ended, and that was asked for."""
    kill = os.kill

    def too_late(pid: int, number: int) -> None:
        kill(pid, signal.SIGTERM)
        raise ProcessLookupError

    with holder(tmp_path), monkeypatch.context() as patch:
        patch.setattr(os, "kill", too_late)
        assert 0 == run("stop", "--data-dir", tmp_path).exit_code


def test_what_it_waited_for(run, stored, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """By the journal: requests that ended, and blocks that were written, after the signal."""
    folder = stored(healthy())
    finished = [row.position for row in healthy() if row.kind == ev.RequestFinished.kind]
    monkeypatch.setattr("cairn.ops.state.stop.position_of", lambda _: finished[-1] - 1)
    with holder(folder):
        result = run("stop", "--data-dir", folder)
    assert result.stdout.endswith(": 1 request finished.\n")


def test_the_process_is_told_apart(tmp_path: Path):
    """By the lock that it has open; without one, or without an id, it is not the server."""
    with holder(tmp_path) as process:
        assert is_the_server(Running(tmp_path, process.pid, None))
        assert not is_the_server(Running(tmp_path, os.getpid(), None))
        assert not is_the_server(Running(tmp_path, None, None))
        resident = resident_bytes(process.pid)
    assert resident is not None
    assert resident > 1 << 20
    assert resident_bytes(2**30) is None
