"""
The tutorial is run as a reader would: each command on a terminal, in order, in an empty home.

A block ``sh`` holds commands, and the block ``text`` after it the expected output, where ``…`` is
anything. Words in capitals are output of an earlier command. A block ``sh server`` runs in the
other terminal, and ``sh kill`` ends what runs there.
"""

from __future__ import annotations

import contextlib
import os
import pty
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest

TUTORIAL = Path(__file__).parent.parent / "docs" / "tutorial.md"
DEADLINE_S = 240.0

_BLOCK = re.compile(r"^```(sh|text)(?: (server|kill))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")
_CAPTURED = {
    "BUG_ID": r"[0-9a-f]{8}-[0-9a-f-]{27}",
    "DIRECTORY": r"\S+",
}


@attrs.frozen
class Step:
    """Commands, and their expected output."""

    commands: str
    terminal: str
    expected: str


def steps() -> list[Step]:
    """The tutorial's commands in their order."""
    found: list[Step] = []
    for language, terminal, text in _BLOCK.findall(TUTORIAL.read_text(encoding="utf-8")):
        if language == "sh":
            found.append(Step(text, terminal, ""))
        else:
            found[-1] = attrs.evolve(found[-1], expected=text)
    return found


def fits(expected: str, shown: str, captured: dict[str, str]) -> bool:
    """
    Whether a whole line is as expected. New captures are added to ``captured``; from then on they
    must be the same.
    """
    parts = re.split(rf"(\s+|{'|'.join(_CAPTURED)}|…)", expected.strip())
    # A space next to an ellipsis may be part of what it replaces.
    loose = [i for i in range(len(parts)) if "…" in parts[max(0, i - 2) : i + 3]]
    for place, part in enumerate(parts):
        if part.isspace():
            parts[place] = r"\s*" if place in loose else r"\s+"
        elif part == "…":
            parts[place] = ".*"
        elif part in _CAPTURED:
            known = captured.get(part)
            parts[place] = f"(?P<{part}>{re.escape(known) if known else _CAPTURED[part]})"
        else:
            parts[place] = re.escape(part)
    found = re.fullmatch("".join(parts), shown.strip())
    if found:
        captured.update(found.groupdict())
    return found is not None


class Terminal:
    """The reader's terminal: a new shell for each block, and what has been captured."""

    def __init__(self, folder: Path, port: int) -> None:
        self._folder = folder
        self._port = port
        self._captured: dict[str, str] = {}
        self._server: subprocess.Popen[bytes] | None = None
        self._server_end = -1
        home = folder / "home"
        home.mkdir()
        launcher = folder / "ops"
        launcher.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -P -m cairn.ops "$@"\n')
        launcher.chmod(0o755)
        passed = ("PATH", "PYTHONPATH", "LANG", "OPENBLAS_CORETYPE", "HF_HUB_OFFLINE")
        self._environment = {
            **{name: os.environ[name] for name in passed if name in os.environ},
            "HOME": str(home),
            "TERM": "xterm",
            "COLUMNS": "160",
            "OPENBLAS_NUM_THREADS": "1",
        }

    def play(self, step: Step) -> None:
        """Run a block and check its output."""
        match step.terminal:
            case "server":
                shown = self._serve(step)
            case "kill":
                self._run(step)
                assert self._server is not None
                assert -signal.SIGKILL == self._server.wait(DEADLINE_S)
                shown = ""
            case _:
                shown = self._run(step)
        self._look(step, shown)

    def end(self) -> None:
        """Ctrl-C in the server's terminal."""
        if self._server is not None and self._server.poll() is None:
            self._server.send_signal(signal.SIGINT)
            assert 0 == self._server.wait(DEADLINE_S)

    def kill(self) -> None:
        """End the server if it still runs."""
        if self._server is not None and self._server.poll() is None:
            self._server.kill()
            self._server.wait()

    def _written(self, commands: str) -> str:
        commands = commands.replace("8000", str(self._port))
        for name, value in self._captured.items():
            commands = commands.replace(name, value)
        return commands

    def _start(self, commands: str) -> tuple[subprocess.Popen[bytes], int]:
        ours, theirs = pty.openpty()
        process = subprocess.Popen(
            ["bash", "-e", "-o", "pipefail", "-c", commands],
            cwd=self._folder,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
        )
        os.close(theirs)
        return process, ours

    def _run(self, step: Step) -> str:
        process, ours = self._start(self._written(step.commands))
        shown = "".join(_read(ours, DEADLINE_S))
        os.close(ours)
        code = process.wait(DEADLINE_S)
        assert 0 == code, f"{step.commands}\nended with {code}:\n{shown}"
        # A command that fails in part may still exit with 0.
        assert not re.search(r"^bash: ", shown, re.MULTILINE), f"{step.commands}\n{shown}"
        return shown

    def _serve(self, step: Step) -> str:
        # `make serve` without the setup, which was already done for these tests.
        assert "make serve\n" == step.commands
        self._server, self._server_end = self._start(
            f"CAIRN_PROGRAM=./cairn exec ./ops serve --port {self._port}"
        )
        shown = ""
        for piece in _read(self._server_end, DEADLINE_S):
            shown += piece
            if "/logs/cairn.jsonl\n" in shown:
                return shown
        raise AssertionError(f"the server did not start:\n{shown}")

    def _look(self, step: Step, shown: str) -> None:
        """Assert that each expected line occurs, in this order."""
        shown = shown.replace(str(self._port), "8000")
        lines = iter(shown.splitlines())
        for expected in step.expected.splitlines():
            assert any(fits(expected, line, self._captured) for line in lines), (
                f"{step.commands}\nshould have shown {expected!r} and showed:\n{shown}"
            )


def _read(end: int, deadline_s: float) -> Iterator[str]:
    """The output of a terminal until all its programs have ended, without colours."""
    until = time.monotonic() + deadline_s
    while time.monotonic() < until:
        try:
            piece = os.read(end, 65536)
        except OSError:
            return
        if not piece:
            return
        yield _ESCAPES.sub("", piece.decode(errors="replace")).replace("\r\n", "\n")


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    """A terminal in an empty folder; its server is ended after the test."""
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    made = Terminal(tmp_path, port)
    try:
        yield made
    finally:
        made.kill()


@pytest.mark.long
@pytest.mark.skipif(not hasattr(os, "openpty"), reason="there are no pseudo-terminals here")
def test_the_tutorial_does_what_it_says(terminal: Terminal):
    """Every command succeeds and prints what the page shows."""
    found = steps()
    assert len(found) > 12
    for step in found:
        terminal.play(step)
    terminal.end()


@pytest.mark.parametrize(
    ("expected", "shown", "does_fit"),
    [
        ("broken: 0", "broken: 0", True),
        ("broken: 0", "broken: 2", False),
        ("broken: 0", "broken: 0, and 7 that may be consequences", False),
        ("1", "2", False),
        ("1", "11", False),
        ("64 cached: …", "64 cached: words", True),
        ("64 cached: …", "164 cached: words", False),
        ("id … state", "id    state", True),
        ("two words", "twowords", False),
        ("… same …", "it is the same: 3", True),
        ("… same …", "same", True),
        ("bug id: … BUG_ID", f"bug id:   {'1' * 8}-{'2' * 27}", True),
        ("bug id: … BUG_ID", f"bug id:   {'1' * 8}-{'3' * 27}", False),
        ("bug id: … BUG_ID", "bug id:  xyz", False),
    ],
)
def test_an_expected_line_can_fail(expected: str, shown: str, does_fit: bool):
    """An expected line matches what it should and nothing else; an id is the same throughout."""
    captured = {"BUG_ID": f"{'1' * 8}-{'2' * 27}"}
    assert does_fit == fits(expected, shown, captured)
