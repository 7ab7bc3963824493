"""
Servers forked from a process that has imported Cairn: four fifths of a start are imports.

A forked server has the environment, BLAS and output of one that ``subprocess.Popen`` starts.
Two parents take turns, each with its own hash seed, so that a server that is started again may
iterate over its sets in another order.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import IO, Final

from tests.support.processes.child_process import die_with_parent, server_environment

_PARENTS: Final = 2
_ROOT: Final = Path(__file__).parents[3]
_IMPORTED: Final = ("cairn.ops.cli", "cairn.ops.serve.run", "cairn.engine.mlx.start")
_CHANGING: Final = {"PYTEST_CURRENT_TEST", "COVERAGE_PROCESS_CONFIG"}


def _environment() -> dict[str, str]:
    found = server_environment()
    return {name: value for name, value in found.items() if name not in _CHANGING}


@cache
def usual_environment() -> dict[str, str]:
    """The environment of forked servers: what this process had when this was called first."""
    return _environment()


def can_fork() -> bool:
    """
    Whether a server can be forked: on Linux, unless its coverage is measured, or a test has changed
    this process's environment.
    """
    measured = "COVERAGE_PROCESS_CONFIG" in os.environ
    return sys.platform == "linux" and not measured and _environment() == usual_environment()


def start_forked(arguments: Sequence[str], stderr: IO[str]) -> ForkedProcess:
    """Start `ops` with these arguments. Its messages go to the file ``stderr``."""
    if len(_parents) < _PARENTS:
        _parents.append(_Parent())
    _parents.rotate()
    return _parents[0].start(arguments, stderr)


class ForkedProcess:
    """The part of ``subprocess.Popen`` that tests use. The forking process has its exit code."""

    def __init__(self, parent: _Parent, pid: int, stdout: IO[str]) -> None:
        self._parent = parent
        self._ended = os.pidfd_open(pid)
        self._code: int | None = None
        self.pid = pid
        self.stdout = stdout

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        return self._code_within(0)

    def wait(self, timeout: float | None = None) -> int:
        """
        Wait for its end, and return its exit code.

        Raises:
            subprocess.TimeoutExpired: it still runs after ``timeout`` seconds.
        """
        code = self._code_within(timeout)
        if code is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired("ops serve", timeout)
        return code

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it, unless it has ended."""
        self.send_signal(signal.SIGKILL)

    def _code_within(self, timeout: float | None) -> int | None:
        if self._code is None and select.select([self._ended], [], [], timeout)[0]:
            os.close(self._ended)
            self._code = self._parent.code_of(self.pid)
        return self._code


class _Parent:
    """A process that has imported Cairn, and forks servers when it is asked to."""

    def __init__(self) -> None:
        self._asking = threading.Lock()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        program = f"""
import sys
sys.path.append({str(_ROOT)!r})
from tests.support.processes.forked_server import main
main({theirs.fileno()})
"""
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", program],
                env=usual_environment(),
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                preexec_fn=die_with_parent,
            )

    def start(self, arguments: Sequence[str], stderr: IO[str]) -> ForkedProcess:
        ours, theirs = os.pipe()
        pid = self._ask({"start": arguments, "folder": str(Path.cwd())}, theirs, stderr.fileno())
        os.close(theirs)
        return ForkedProcess(self, pid, os.fdopen(ours, encoding="utf-8"))

    def code_of(self, pid: int) -> int:
        """The exit code of a server that has ended."""
        return self._ask({"ended": pid})

    def _ask(self, request: object, *files: int) -> int:
        with self._asking:
            socket.send_fds(self._socket, [json.dumps(request).encode()], files)
            answer = self._socket.recv(1000)
        assert answer, "the process that forks servers has ended"
        return int(answer)


_parents: Final[deque[_Parent]] = deque()


# --- in the parent ------------------------------------------------------------------------------


def _serve(asked: socket.socket) -> list[str] | None:
    """Fork a server for each request. Returns its arguments in the server, None in the parent."""
    while True:
        line, files, _, _ = socket.recv_fds(asked, 1_000_000, 2)
        if not line:
            return None
        request = json.loads(line)
        if "ended" in request:
            _, status = os.waitpid(request["ended"], 0)
            asked.sendall(str(os.waitstatus_to_exitcode(status)).encode())
            continue
        pid = os.fork()
        if pid == 0:
            die_with_parent()
            asked.close()
            for number, file in enumerate(files, start=1):
                os.dup2(file, number)
                os.close(file)
            os.chdir(request["folder"])
            signal.signal(signal.SIGINT, signal.default_int_handler)
            return list(request["start"])
        for file in files:
            os.close(file)
        asked.sendall(str(pid).encode())


def main(number: int) -> None:
    """Import Cairn with the BLAS that `ops serve` preloads, and answer on this open socket."""
    from cairn.ops.serve.preload import blas_environment, prepare_blas

    prepare_blas()
    more = blas_environment()
    if more:
        os.execve(sys.executable, sys.orig_argv, {**os.environ, **more})

    for name in _IMPORTED:
        importlib.import_module(name)
    # An operator who interrupts the tests interrupts the servers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    arguments = _serve(socket.socket(fileno=number))
    if arguments is not None:
        sys.argv[1:] = arguments
        runpy.run_module("cairn.ops", run_name="__main__", alter_sys=True)
