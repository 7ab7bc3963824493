"""What a chat shows: answers on stdout, everything else on stderr."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from cairn.ops.chat.client import Stream
from cairn.ops.chat.terminal.rendering import Breaking, Plain, Rendering, Wrapped
from cairn.ops.chat.terminal.signals import Interrupts, on_interrupt
from cairn.ops.chat.transcript import Answer, harmless, summary, waiting_words

if TYPE_CHECKING:
    from rich.status import Status

_BLOCKS, _ASCII_BLOCKS = "█░", "#."


class Waiting:
    """A spinner with a text; shows nothing without a terminal."""

    def __init__(self, words: str, status: Status | None) -> None:
        self._status = status
        self.update(words)

    def __enter__(self) -> Waiting:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def update(self, words: str) -> None:
        """Change the text."""
        if self._status is not None:
            from rich.text import Text

            # A Text, so that brackets are not markup. One line: a terminal that is made narrower
            # would keep the rest.
            self._status.update(Text(f"{words} ...", no_wrap=True, overflow="ellipsis"))

    def stop(self) -> None:
        """Remove the spinner. May be called again."""
        if self._status is not None:
            self._status.stop()


class Screen:
    """
    Shows answers and notes.

    Args:
        raw: whether answers are shown as they are, and not as Markdown.

    Attributes:
        interactive: whether stdin and stdout are a terminal.
        shown: whether stdout is one.
        clever: whether it can move its cursor.
        interrupts: what Ctrl-C does, while a chat on a terminal has begun.
    """

    def __init__(self, *, raw: bool = False) -> None:
        for stream in (sys.stdin, sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                # A character that the terminal cannot show does not end the conversation.
                stream.reconfigure(errors="replace")
        self.shown = sys.stdout.isatty()
        self.interactive = sys.stdin.isatty() and self.shown
        self.clever = os.environ.get("TERM") != "dumb"
        self.interrupts: Interrupts | None = None
        styled = self.clever and not os.environ.get("NO_COLOR")
        self._as_markdown = styled and self.shown and not raw
        self._styles_notes = styled and sys.stderr.isatty()
        self._moves = self.clever and self.shown and sys.stderr.isatty()

    def note(self, text: str) -> None:
        """Show a note on stderr."""
        text = self._broken(text)
        click.echo(click.style(text, dim=True) if self._styles_notes else text, err=True)

    def complain(self, text: str) -> None:
        """Show an error on stderr."""
        click.echo(self._broken(text), err=True)

    def result(self, answer: Answer, *, stopped: bool = False, always_bar: bool = False) -> None:
        """
        Show the line below an answer.

        Args:
            always_bar: draw the bar also where there is no terminal.
        """
        blocks = ""
        if always_bar or sys.stderr.isatty():
            utf8 = (getattr(sys.stderr, "encoding", None) or "").lower().replace("-", "") == "utf8"
            blocks = _BLOCKS if utf8 else _ASCII_BLOCKS
        self.note(f"{'stopped · ' if stopped else ''}{summary(answer, blocks)}")

    def waiting(self, words: str) -> Waiting:
        """A spinner with a text while the context lasts."""
        if not self._moves:
            return Waiting(words, None)
        from rich.console import Console
        from rich.status import Status

        return Waiting(words, Status("", console=Console(stderr=True)))

    def until_interrupt(self, act: Callable[[], object]) -> contextlib.AbstractContextManager[None]:
        """Call a function at Ctrl-C while the context lasts."""
        if self.interrupts is not None:
            return self.interrupts.during(act)
        return on_interrupt(act)

    def answer(self, stream: Stream) -> Answer:
        """
        Show an answer as it arrives, until it ends or Ctrl-C stops it.

        Raises:
            TurnFailed: there is no answer, or it is incomplete.
        """
        answer, rendering = Answer(), self._rendering()
        try:
            with (
                self.until_interrupt(stream.stop),
                self.waiting("waiting for the answer") as waiting,
            ):
                # After the spinner has started, which is not the server's time.
                begun_s = time.monotonic()
                for event in stream:
                    if isinstance(event, str):
                        waiting.update(waiting_words(event))
                        continue
                    for piece, is_thought in answer.take(event, time.monotonic() - begun_s):
                        waiting.stop()
                        rendering.feed(harmless(piece), is_thought=is_thought)
        finally:
            rendering.finish()
        return answer

    def say(self, text: str) -> None:
        """Show a text as an answer is shown."""
        rendering = self._rendering()
        rendering.feed(harmless(text), is_thought=False)
        rendering.finish()

    def _broken(self, text: str) -> str:
        """A text whose lines break between words, if it goes to a terminal."""
        if not sys.stderr.isatty():
            return text
        wrapped = Wrapped(shutil.get_terminal_size().columns)
        return wrapped.feed(text) + wrapped.flush()

    def _rendering(self) -> Rendering:
        if self._as_markdown:
            from rich.console import Console

            from cairn.ops.chat.terminal.markdown import Markdown

            return Markdown(Console(highlight=False))
        if self.shown:
            return Breaking(_write, shutil.get_terminal_size().columns)
        return Plain(_write)


def _write(text: str) -> None:
    if text:
        click.echo(text, nl=False)
