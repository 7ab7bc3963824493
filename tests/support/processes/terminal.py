"""
A program on a terminal, with a simulated user.

``Picture`` is what a terminal shows, as far as the programs here need one; it has no upper edge, so
nothing scrolls away. ``Terminal`` runs a program and waits for what it shows.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.support.processes.subprocess_server import DEADLINE_S, eventually

WIDTH, HEIGHT = 120, 40

_ESCAPES = re.compile(r"\x1b\[(?P<private>\?)?(?P<numbers>[\d;]*)(?P<final>[A-Za-z])|\x1b.")


class Picture:
    """The text of a terminal, line by line."""

    def __init__(self) -> None:
        self._lines: list[list[str]] = [[]]
        self._row = self._column = 0
        self._wraps = True
        self._rest = ""

    def feed(self, text: str) -> None:
        """Show more output. An escape sequence may come in pieces."""
        text, self._rest = self._rest + text, ""
        place = 0
        while place < len(text):
            if text[place] != "\x1b":
                self._put(text[place])
                place += 1
                continue
            found = _ESCAPES.match(text, place)
            if found is None:
                self._rest = text[place:]
                return
            if found["final"]:
                self._control(found["final"], found["numbers"], private=bool(found["private"]))
            place = found.end()

    def text(self) -> str:
        """All lines, without blanks at their ends."""
        return "\n".join("".join(line).rstrip() for line in self._lines)

    def _put(self, character: str) -> None:
        match character:
            case "\r":
                self._column = 0
            case "\n":
                self._go(self._row + 1)
            case "\x08":
                self._column = max(0, self._column - 1)
            case _ if character < " ":
                pass
            case _:
                if self._column >= WIDTH:
                    if self._wraps:
                        self._go(self._row + 1)
                        self._column = 0
                    else:
                        self._column = WIDTH - 1
                line = self._lines[self._row]
                line += " " * (self._column + 1 - len(line))
                line[self._column] = character
                self._column += 1

    def _control(self, final: str, numbers: str, *, private: bool) -> None:
        count = int(numbers.split(";")[0] or 0)
        many = max(1, count)
        match final:
            case "A":
                self._go(max(0, self._row - many))
            case "B":
                self._go(self._row + many)
            case "C":
                self._column += many
            case "D":
                self._column = max(0, self._column - many)
            case "K":
                line = self._lines[self._row]
                if count == 2:
                    line.clear()
                else:
                    del line[self._column :]
            case "J":
                del self._lines[self._row][self._column :]
                del self._lines[self._row + 1 :]
            case "h" | "l" if private and count == 7:
                self._wraps = final == "h"
            case _:
                pass  # colours and modes

    def _go(self, row: int) -> None:
        self._row = row
        while len(self._lines) <= row:
            self._lines.append([])


class Terminal:
    """
    A program on a terminal.

    Attributes:
        shown: all output so far, escapes included.
        process: the program.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", HEIGHT, WIDTH, 0, 0))
        # The size that a runner of tests gives its workers is not that of this terminal.
        env = {name: value for name, value in env.items() if name not in ("COLUMNS", "LINES")}
        self.process = subprocess.Popen(
            command,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            # This terminal does not say where its cursor is.
            env={**env, "PROMPT_TOOLKIT_NO_CPR": "1"},
            start_new_session=True,
            # So that Ctrl-C on it is a signal.
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(theirs)
        self.shown = ""
        self._picture = Picture()
        self._seen = ""
        self._is_open = True

    def until(self, text: str) -> str:
        """Wait until a text is shown; returns the text since the last one, to its end."""
        end_s = time.monotonic() + DEADLINE_S
        while text not in self.text()[self._unseen() :]:
            assert time.monotonic() < end_s, f"no {text!r} in {self.text()!r}"
            self._read()
        shown, begin = self.text(), self._unseen()
        self._seen = shown[: shown.index(text, begin) + len(text)]
        return self._seen[begin:]

    def _unseen(self) -> int:
        """Where the text begins that is new since ``until``. What was seen may have gone."""
        shown = self.text()
        pairs = enumerate(zip(shown, self._seen, strict=False))
        differs = (place for place, (new, seen) in pairs if new != seen)
        return next(differs, min(len(shown), len(self._seen)))

    def until_raw(self, text: str) -> None:
        """Wait until the output has a text, escapes included."""
        end_s = time.monotonic() + DEADLINE_S
        while text not in self.shown:
            assert time.monotonic() < end_s, f"no {text!r} in {self.shown!r}"
            self._read()

    def text(self) -> str:
        """What the terminal shows. Each line ends as it does on the terminal."""
        return self._picture.text()

    def type(self, text: str) -> None:
        """Press keys."""
        os.write(self._ours, text.encode())

    def say(self, text: str) -> None:
        """Type a line at the prompt."""
        self.asks()
        self.type(f"{text}\r")

    def asks(self) -> None:
        """Wait for the prompt, and until the program waits for keys there."""
        self.until("\n>")
        self.waits_for_keys()

    def waits_for_keys(self) -> None:
        """Wait until the program has taken in all keys."""
        state = Path(f"/proc/{self.process.pid}/stat")
        if state.exists():
            eventually(lambda: state.read_text().rpartition(")")[2].split()[0] == "S")

    def end(self) -> int:
        """Press Ctrl-D at the prompt; returns the exit code."""
        self.asks()
        self.type("\x04")
        return self.wait()

    def wait(self) -> int:
        """Wait for the end; returns the exit code. Reads the output meanwhile."""
        end_s = time.monotonic() + DEADLINE_S
        with contextlib.suppress(OSError):
            while self._read():
                assert time.monotonic() < end_s, f"it does not end: {self.text()!r}"
        return self.process.wait(DEADLINE_S)

    def close(self) -> None:
        """End the program if it still runs."""
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(DEADLINE_S)
        self.hang_up()

    def hang_up(self) -> None:
        """Close the terminal's window. Repeating it does no harm."""
        if self._is_open:
            os.close(self._ours)
            self._is_open = False

    def _read(self) -> bool:
        """Take in output, if there is any within a moment. Returns whether there may be more."""
        if select.select([self._ours], [], [], 0.1)[0]:
            part = os.read(self._ours, 65536)
            decoded = part.decode(errors="replace")
            self.shown += decoded
            self._picture.feed(decoded)
            return bool(part)
        return True
