"""
Installs the packages of a lock with pip, and shows how far it is: for `make env`.

``python -P tools/install_lock.py requirements.lock``. Needs nothing but pip. A terminal shows one
line that changes; elsewhere there is a line every ten seconds.
"""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

_POLL_S = 0.2
_REPORT_S = 10.0
_LAST_LINES = 30
_WIDTH = 79
_COLLECTING = re.compile(r"\s*Collecting ([A-Za-z0-9._-]+)")
_INSTALLING = "Installing collected packages: "


def main(arguments: Sequence[str]) -> int:
    """Install the packages of a lock. Returns pip's exit code."""
    (lock,) = arguments
    command = [sys.executable, "-m", "pip", "install", "--no-compile", "--require-hashes"]
    pip = subprocess.Popen(
        [*command, "--no-input", "--progress-bar", "off", "-r", lock],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    assert pip.stdout is not None
    said: list[str] = []
    reader = threading.Thread(target=_read, args=(pip.stdout, said))
    reader.start()
    begin_s = time.monotonic()
    total = len(re.findall(r"^\S+==", Path(lock).read_text(encoding="utf-8"), re.MULTILINE))
    folder = Path(sysconfig.get_path("purelib"))
    before = _installed(folder)
    shown = Line(sys.stderr)
    while pip.poll() is None:
        shown.show(words(said, total, _installed(folder) - before), time.monotonic() - begin_s)
        time.sleep(_POLL_S)
    reader.join()
    shown.clear()
    if pip.returncode != 0:
        print("env: the packages cannot be installed. pip said:", file=sys.stderr)
        print("".join(said[-_LAST_LINES:]), end="", file=sys.stderr)
        return pip.returncode
    duration_s = time.monotonic() - begin_s
    print(f"env: {_installed(folder) - before} packages installed in {duration_s:.0f} s")
    return 0


def words(said: Sequence[str], total: int, installed: int) -> str:
    """
    How far pip is.

    Args:
        said: the lines that it wrote.
        total: of the packages of the lock; some are for other systems.
        installed: how many packages were installed since it began.
    """
    names: list[str] = []
    for line in said:
        if line.startswith(_INSTALLING):
            number = len(line.removeprefix(_INSTALLING).split(","))
            return f"installed {installed} of {number} packages"
        if found := _COLLECTING.match(line):
            names.append(found[1])
    if not names:
        return "starting pip"
    return f"fetching {names[-1]}, package {len(names)} of at most {total}"


class Line:
    """
    What is shown: on a terminal one line that changes, elsewhere one every ten seconds.

    Args:
        output: where it is shown.
    """

    def __init__(self, output: IO[str]) -> None:
        self._output = output
        self._changes = output.isatty()
        self._next_s = _REPORT_S

    def show(self, text: str, elapsed_s: float) -> None:
        """Show how far it is after a time in seconds."""
        text = f"env: {text} ({elapsed_s:.0f} s)"
        if self._changes:
            print(f"\r{text[:_WIDTH]:<{_WIDTH}}", end="", file=self._output, flush=True)
        elif elapsed_s >= self._next_s:
            self._next_s += _REPORT_S
            print(text, file=self._output, flush=True)

    def clear(self) -> None:
        """Remove the line from the terminal."""
        if self._changes:
            print(f"\r{'':<{_WIDTH}}\r", end="", file=self._output, flush=True)


def _read(stdout: IO[str], said: list[str]) -> None:
    for line in stdout:
        said.append(line)  # noqa: PERF402  # one by one, as they come


def _installed(folder: Path) -> int:
    return sum(1 for _ in folder.glob("*.dist-info"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
