"""`make env` shows how far pip is, and its words if it fails."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import install_lock
import pytest


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ([], "starting pip"),
        (["WARNING: something\n"], "starting pip"),
        (
            ["Collecting aiofiles==25.1.0 (from -r x)\n"],
            "fetching aiofiles, package 1 of at most 9",
        ),
        (
            ["Collecting a==1\n", "  Downloading a-1.whl (1 kB)\n", "Collecting b-c==2\n"],
            "fetching b-c, package 2 of at most 9",
        ),
        (
            ["Collecting a==1\n", "Installing collected packages: a, b-c, d\n"],
            "installed 2 of 3 packages",
        ),
    ],
)
def test_how_far_it_is(said: list[str], words: str):
    """First the packages are fetched, then installed."""
    assert words == install_lock.words(said, total=9, installed=2)


class Terminal(io.StringIO):
    """A terminal that keeps what it gets."""

    def isatty(self) -> bool:
        """It is one."""
        return True


def test_a_terminal_has_one_line():
    """It changes, and is empty at the end."""
    output = Terminal()
    line = install_lock.Line(output)
    line.show("fetching numpy", 1.0)
    line.show("installed 3 of 9", 2.0)
    line.clear()
    shown = output.getvalue()
    assert "\n" not in shown
    assert ["", "env: fetching numpy (1 s)", "env: installed 3 of 9 (2 s)", "", ""] == [
        one.rstrip() for one in shown.split("\r")
    ]


def test_a_log_has_few_lines():
    """One every ten seconds."""
    output = io.StringIO()
    line = install_lock.Line(output)
    for seconds in range(25):
        line.show("fetching numpy", float(seconds))
    line.clear()
    assert "env: fetching numpy (10 s)\nenv: fetching numpy (20 s)\n" == output.getvalue()


def test_what_pip_says_if_it_fails(tmp_path: Path):
    """Of a lock that pip cannot read, for example; the exit code is pip's."""
    lock = tmp_path / "lock"
    lock.write_text("!==1.0\n")
    done = subprocess.run(
        [sys.executable, "-P", install_lock.__file__, str(lock)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert 1 == done.returncode
    assert "env: the packages cannot be installed. pip said:" in done.stderr
    assert "Invalid requirement: '!==1.0'" in done.stderr
    assert "" == done.stdout
