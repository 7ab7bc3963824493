"""Programs that end by themselves, or are ended after a timeout by their process group's id."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import attrs

_PDEATHSIG = 1
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


class Failed(Exception):
    """A client did not do its task. The message has the end of its output."""


@attrs.frozen(kw_only=True)
class Place:
    """
    The place where a client runs: its own home, with nothing of the user's, and a working folder.

    Attributes:
        env: all of its environment.
        limit_s: how long one run may take.
    """

    home: Path
    work: Path
    env: Mapping[str, str]
    limit_s: float

    def changed(self, **env: str) -> Place:
        """The same place with additional environment variables."""
        return attrs.evolve(self, env={**self.env, **env})


@contextmanager
def place(limit_s: float, env: Mapping[str, str]) -> Iterator[Place]:
    """
    A temporary place.

    Args:
        env: environment variables in addition to the path and its home.
    """
    with tempfile.TemporaryDirectory(prefix="cairn-client-", ignore_cleanup_errors=True) as folder:
        home, work, scratch = (Path(folder) / name for name in ("home", "work", "tmp"))
        for one in (home, work, scratch):
            one.mkdir()
        own = {
            "HOME": str(home),
            "TMPDIR": str(scratch),
            "PATH": os.environ.get("PATH", os.defpath),
            "LANG": "C.UTF-8",
            "TERM": "dumb",
            "NO_COLOR": "1",
            "CI": "1",
        }
        yield Place(home=home, work=work, env={**own, **env}, limit_s=limit_s)


def run(at: Place, *command: str | Path) -> str:
    """
    Run a program and return its stdout.

    Raises:
        Failed: it ended with an error, or not in time.
    """
    (said,) = run_together((at, command))
    return said


def run_together(*jobs: tuple[Place, Sequence[str | Path]]) -> list[str]:
    """
    Run programs in parallel and return the stdout of each.

    Raises:
        Failed: one ended with an error, or not in time.
    """
    started = [_start(at, command) for at, command in jobs]
    try:
        return [
            _heard(at, Path(command[0]).name, process)
            for (at, command), process in zip(jobs, started, strict=True)
        ]
    finally:
        for process in started:
            _end(process)


def _heard(at: Place, name: str, process: subprocess.Popen[str]) -> str:
    """What it writes to stdout until it ends."""
    try:
        out, err = process.communicate(timeout=at.limit_s)
    except subprocess.TimeoutExpired:
        _end(process)
        out, err = process.communicate()
        problem = f"did not end within {at.limit_s:g} s"
    else:
        problem = f"ended with {process.returncode}" if process.returncode else ""
    if problem:
        raise Failed(f"{name} {problem}: {_tail(out, err)}")
    return out


def _start(at: Place, command: Sequence[str | Path]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [str(part) for part in command],
        cwd=at.work,
        env=dict(at.env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        # What it starts and does not stop is in its group, and ends with it.
        start_new_session=True,
        preexec_fn=_die_with_parent,
    )


def _die_with_parent() -> None:
    if _libc is not None:
        _libc.prctl(_PDEATHSIG, signal.SIGKILL)


def _end(process: subprocess.Popen[str]) -> None:
    # It may be gone while its children still run.
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _tail(out: str, err: str) -> str:
    text = "\n".join(part.strip() for part in (out, err) if part.strip())
    return text[-1500:] or "it said nothing"
