"""Servers that are forked behave as servers that are started do."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cairn.engine.machine.cuda import has_cuda
from tests.e2e.conftest import Start
from tests.support.processes.forked_server import ForkedProcess, forking
from tests.support.processes.subprocess_server import Serving

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or has_cuda(), reason="servers are forked on Linux, without a GPU"
)
# These differ between any two processes.
OWN = re.compile(r"^(PYTEST_CURRENT_TEST|TRANSFORMERS_NO_ADVISORY_WARNINGS)=")
SIGNALS = re.compile(r"^(Sig(?:Ign|Cgt|Blk)|Umask):\s*(\S+)$", re.MULTILINE)


@contextmanager
def forked(folder: Path, *arguments: str) -> Iterator[tuple[ForkedProcess, Path]]:
    """A forked `ops`, and the file with its messages."""
    log = folder / "stderr"
    with log.open("w", encoding="utf-8") as stderr:
        process = forking.start(arguments, stderr)
    try:
        yield process, log
    finally:
        process.kill()
        process.stdout.close()


def surroundings(server: Serving) -> dict[str, object]:
    """What a process has from the one that started it."""
    its = Path(f"/proc/{server.pid}")
    variables = (its / "environ").read_text(encoding="utf-8").split("\0")
    return {
        "variables": sorted(one for one in variables if one and not OWN.match(one)),
        "limits": (its / "limits").read_text(encoding="utf-8"),
        "signals": SIGNALS.findall((its / "status").read_text(encoding="utf-8")),
        "folder": (its / "cwd").readlink(),
        "libraries": sorted(set(re.findall(r"\S*blas\S*", (its / "maps").read_text("utf-8")))),
        "fingerprint": server.health()["fingerprint"],
    }


def test_the_same_surroundings(start: Start):
    """A forked server has the environment, limits, signals, BLAS and fingerprint of another one."""
    server = start()
    assert isinstance(server.process, ForkedProcess)
    with forking.turned_off():
        other = start()
    assert isinstance(other.process, subprocess.Popen)
    assert surroundings(other) == surroundings(server)


def test_the_same_command_in_both(tmp_path: Path):
    """Both parents give the output and the exit code of a process that was started."""
    own = [sys.executable, "-P", "-m", "cairn.ops", "version"]
    expected = subprocess.run(own, capture_output=True, text=True, check=True)
    for _ in range(2):
        with forked(tmp_path, "version") as (process, _):
            assert expected.stdout == process.stdout.read()
            assert 0 == process.wait(60)


def test_a_wrong_command(tmp_path: Path):
    """It ends with its exit code and its message, as often as it is asked."""
    with forked(tmp_path, "serve", "--no-such-option") as (process, log):
        assert 2 == process.wait(60)
        assert "No such option" in log.read_text(encoding="utf-8")
        assert 2 == process.poll()


def test_a_killed_process(tmp_path: Path):
    """The exit code is the signal, and a second signal does nothing."""
    options = ("--data-dir", str(tmp_path / "home"), "--port", "0")
    with forked(tmp_path, "serve", *options) as (process, _):
        assert process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0)
        process.kill()
        assert -9 == process.wait(60)
        process.kill()


def test_a_process_that_a_thread_waits_for(tmp_path: Path):
    """Another thread can look at it and kill it, and both see its end."""
    codes: list[int] = []
    options = ("--data-dir", str(tmp_path / "home"), "--port", "0")
    with forked(tmp_path, "serve", *options) as (process, _):
        waiting = threading.Thread(target=lambda: codes.append(process.wait(20)))
        waiting.start()
        waiting.join(0.1)
        assert process.poll() is None
        process.kill()
        waiting.join()
        assert [-9] == codes
        assert -9 == process.poll()


def test_what_is_not_forked(monkeypatch: pytest.MonkeyPatch):
    """A changed environment, another BLAS, and a configuration file need a process of their own."""
    assert forking.can_fork(("serve", "--port", "0"))
    assert not forking.can_fork(("serve", "--blas=bundled"))
    assert not forking.can_fork(("serve", "--config", "cairn.toml"))
    with forking.turned_off():
        assert not forking.can_fork(())
    monkeypatch.setenv("CAIRN_PORT", "0")
    assert not forking.can_fork(())
