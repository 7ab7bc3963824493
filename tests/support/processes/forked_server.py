"""
Servers forked from a process that has imported Cairn: four fifths of a start are imports.

A forked server has the environment, limits, BLAS and output of one that ``subprocess.Popen``
starts. It differs in what imports leave behind: two parents take turns, each with its own hash
seed, so the servers of one worker iterate over their sets in one of two orders, and trio runs their
tasks in one of two. Tests whose subject is the start itself do not fork.
"""

from __future__ import annotations

import contextlib
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
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Final

from cairn.engine.machine.cuda import has_cuda
from tests.support.processes.child_process import die_with_parent, server_environment

ANSWER_WITHIN_S: Final = 120.0
_PARENTS: Final = 2
_ROOT: Final = Path(__file__).parents[3]
_IMPORTED: Final = ("cairn.ops.cli", "cairn.ops.serve.run", "cairn.engine.mlx.start")
_IGNORED: Final = {
    "PYTEST_CURRENT_TEST",
    "COVERAGE_PROCESS_CONFIG",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS",  # mlx-lm sets it when it is imported
}
_BLAS_OPTIONS: Final = ("--blas", "--config")


class Forking:
    """Whether servers are forked. Off until the tests turn it on."""

    def __init__(self) -> None:
        self._environment: dict[str, str] | None = None
        self._parents: deque[_Parent] = deque()
        self._starting = threading.Lock()

    def turn_on(self) -> None:
        """Fork servers from now on, with the environment that this process has."""
        self._environment = _environment()

    @contextlib.contextmanager
    def turned_off(self) -> Iterator[None]:
        """Start all servers of this context as processes of their own."""
        environment, self._environment = self._environment, None
        try:
            yield
        finally:
            self._environment = environment

    def can_fork(self, arguments: Sequence[str]) -> bool:
        """
        Whether a server with these arguments can be forked: on Linux without a GPU, with the usual
        BLAS, unless its coverage is measured, or a test has changed this process's environment.
        """
        return (
            self._environment is not None
            and _environment() == self._environment
            and sys.platform == "linux"
            and not has_cuda()
            and not {"COVERAGE_PROCESS_CONFIG", "CAIRN_BLAS"} & os.environ.keys()
            and not any(one.startswith(_BLAS_OPTIONS) for one in arguments)
        )

    def start(self, arguments: Sequence[str], stderr: IO[str]) -> ForkedProcess:
        """Start `ops` with these arguments. Its messages go to the file ``stderr``."""
        assert self._environment is not None
        with self._starting:
            self._parents = deque(one for one in self._parents if one.answers)
            if len(self._parents) < _PARENTS:
                self._parents.append(_Parent(self._environment))
            self._parents.rotate()
            return self._parents[0].start(arguments, stderr)


class ForkedProcess:
    """The part of ``subprocess.Popen`` that tests use. The forking process has its exit code."""

    def __init__(self, parent: _Parent, pid: int, stdout: IO[str]) -> None:
        self._parent = parent
        self._reading_code = threading.Lock()
        self._ended = os.pidfd_open(pid)
        # Not sooner: another thread may be waiting for it.
        weakref.finalize(self, os.close, self._ended)
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
        end = select.poll()
        end.register(self._ended, select.POLLIN)
        if not end.poll(None if timeout is None else 1000 * timeout):
            return None
        with self._reading_code:
            if self._code is None:
                self._code = self._parent.code_of(self.pid)
            return self._code


class _Parent:
    """A process that has imported Cairn, and forks servers when it is asked to."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._asking = threading.Lock()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(ANSWER_WITHIN_S)
        program = f"""
import sys
sys.path.append({str(_ROOT)!r})
from tests.support.processes.forked_server import main
main({theirs.fileno()})
"""
        self.answers = True
        with theirs:
            # It ends when this process closes the socket. Linux would kill it with its parent's
            # thread, and some tests start servers in threads that end.
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", program],
                env=environment,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )

    def start(self, arguments: Sequence[str], stderr: IO[str]) -> ForkedProcess:
        ours, theirs = os.pipe()
        stdout = os.fdopen(ours, encoding="utf-8")
        try:
            pid = self._ask(
                {"start": arguments, "folder": str(Path.cwd())}, theirs, stderr.fileno()
            )
            return ForkedProcess(self, pid, stdout)
        except BaseException:
            stdout.close()
            raise
        finally:
            os.close(theirs)

    def code_of(self, pid: int) -> int:
        """The exit code of a server that has ended."""
        return self._ask({"ended": pid})

    def _ask(self, request: object, *files: int) -> int:
        with self._asking:
            try:
                socket.send_fds(self._socket, [json.dumps(request).encode()], files)
                return int(self._socket.recv(1000))
            except BaseException:
                # Its answer may still come, and would be taken for that of the next request.
                self.answers = False
                self._socket.close()
                raise


forking: Final = Forking()


def _environment() -> dict[str, str]:
    found = server_environment()
    return {name: value for name, value in found.items() if name not in _IGNORED}


# --- in the parent ------------------------------------------------------------------------------


def _serve(asked: socket.socket) -> list[str] | None:
    """Fork a server for each request. Returns its arguments in the server, None in the parent."""
    own = os.getpid()
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
            if os.getppid() != own:
                sys.exit("the process that forks servers has ended")
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
    sys.path.remove(str(_ROOT))
    # Ctrl-C reaches the whole process group. This process goes on, because it has the exit codes.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    arguments = _serve(socket.socket(fileno=number))
    if arguments is not None:
        sys.argv[1:] = arguments
        runpy.run_module("cairn.ops", run_name="__main__", alter_sys=True)
