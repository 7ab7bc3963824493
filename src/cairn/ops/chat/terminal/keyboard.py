"""
The lines of a chat: typed on a terminal, or read from a pipe.

On a terminal, keys are not echoed while the chat is busy, and wait for the next prompt: neither a
spinner nor an answer is spoiled by them. A paste is one message, whenever it comes.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import click

from cairn.ops.chat.terminal.signals import Interrupts
from cairn.ops.chat.transcript import COMMANDS, QUOTES, is_open
from cairn.ops.cli import Unreadable
from cairn.ops.common.output import printable
from cairn.ops.serve.data_dir import make_home

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import Completer
    from prompt_toolkit.history import History
    from prompt_toolkit.key_binding import KeyBindings

HISTORY = "chat_history"
"""The file of the data directory with what was typed in chats, readable by its owner alone."""

PROMPT = "> "
_MORE = "... "
_PASTES_MARKED, _PASTES_PLAIN = "\x1b[?2004h", "\x1b[?2004l"
_LEAVES = "Press Ctrl-C again, or Ctrl-D, to leave."

Choices = Callable[[str], list[str]]
"""What may follow a command's name: completions, by the command."""


class LinesEnd(Exception):
    """The last message of a pipe has no end. The message says which."""


class Lines(Protocol):
    """Where the lines of a chat come from."""

    def __iter__(self) -> Iterator[str]:
        """The lines, until the user leaves or the pipe ends. A message may have several."""

    def ask(self, prompt: str, text: str = "") -> str | None:
        """
        Ask for one line.

        Args:
            text: that can be edited.

        Returns:
            None if the user does not want to, or cannot be asked.
        """


class Piped:
    """
    The lines of a pipe; between three quotes, several are one message.

    Args:
        echo: shows each line, if the output is a terminal.
    """

    def __init__(self, echo: Callable[[str], None] | None) -> None:
        self._echo = echo

    def __iter__(self) -> Iterator[str]:
        """
        The lines.

        Raises:
            LinesEnd: the quotes of the last one are not closed.
        """
        begun: list[str] = []
        for line in sys.stdin:
            begun.append(line)
            text = "".join(begun)
            if is_open(text):
                continue
            begun = []
            if self._echo is not None:
                self._echo(f"{PROMPT}{printable(text.strip())}")
            yield text
        if begun:
            raise LinesEnd(
                f"The message that begins with {QUOTES} has no end: end it with {QUOTES}."
            )

    def ask(self, prompt: str, text: str = "") -> str | None:
        """Nothing can be asked."""
        return None


class Keyboard:
    """
    Lines that are typed. The history of earlier chats is at hand.

    Args:
        data_dir: has the history; None to read and write none.
        note: shows a note.
        choices: what may follow a command's name.
    """

    def __init__(
        self,
        data_dir: Path | None,
        note: Callable[[str], None],
        interrupts: Interrupts,
        choices: Choices,
    ) -> None:
        self._data_dir = data_dir
        self._note = note
        self._interrupts = interrupts
        self._choices = choices
        self._marks_pastes = os.environ.get("TERM") != "dumb"
        self._sessions: dict[bool, PromptSession[str]] = {}

    def __iter__(self) -> Iterator[str]:
        """
        The lines. Ctrl-C clears the line, so that a user who stops an answer too late does not lose
        the conversation; a second Ctrl-C on the empty line leaves.
        """
        leaves = False
        while True:
            try:
                line = self._prompt(PROMPT, remembers=True)
            except EOFError:
                return
            except KeyboardInterrupt:
                if leaves and not self._typed():
                    return
                leaves = True
                self._note(_LEAVES)
                continue
            leaves = False
            yield line

    def ask(self, prompt: str, text: str = "") -> str | None:
        """Ask for one line. Returns None at Ctrl-C or Ctrl-D."""
        with contextlib.suppress(EOFError, KeyboardInterrupt):
            return self._prompt(prompt, text)
        return None

    def _prompt(self, prompt: str, text: str = "", *, remembers: bool = False) -> str:
        session = self._sessions.get(remembers)
        if session is None:
            session = self._sessions[remembers] = self._session(remembers=remembers)
        self._interrupts.forget()
        try:
            return session.prompt(prompt, default=text)
        finally:
            self._mark_pastes(self._marks_pastes)

    def _typed(self) -> str:
        """What was on the line when the last prompt ended."""
        return self._sessions[True].default_buffer.text

    def _session(self, *, remembers: bool) -> PromptSession[str]:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.history import DummyHistory

        return PromptSession(
            multiline=True,
            prompt_continuation=_MORE,
            key_bindings=_keys(),
            history=self._history() if remembers else DummyHistory(),
            completer=_completer(self._choices) if remembers else None,
            complete_while_typing=False,
            complete_in_thread=True,  # models and chats are asked of the server
            enable_suspend=True,
        )

    def _history(self) -> History:
        from prompt_toolkit.history import FileHistory, InMemoryHistory

        if self._data_dir is None:
            return InMemoryHistory()
        path = self._data_dir / HISTORY
        try:
            make_home(self._data_dir)
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600))
        except (OSError, Unreadable) as error:
            why = error.strerror if isinstance(error, OSError) else error.format_message()
            self._note(f"What you type is not stored for the next chat: {path}: {why}.")
            return InMemoryHistory()
        return FileHistory(str(path))

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hold keys back for the next prompt, without echo, while the context lasts."""
        import termios

        file = sys.stdin.fileno()
        try:
            before = termios.tcgetattr(file)
        except termios.error:  # the terminal was closed
            yield
            return
        held = termios.tcgetattr(file)
        held[0] &= ~termios.ICRNL  # Enter arrives as it is typed
        held[3] &= ~(termios.ECHO | termios.ICANON)
        termios.tcsetattr(file, termios.TCSANOW, held)
        self._mark_pastes(self._marks_pastes)
        try:
            yield
        finally:
            with contextlib.suppress(termios.error, OSError):
                termios.tcsetattr(file, termios.TCSANOW, before)
                self._mark_pastes(False)

    def _mark_pastes(self, marked: bool) -> None:
        if self._marks_pastes:
            click.echo(_PASTES_MARKED if marked else _PASTES_PLAIN, nl=False)


def _keys() -> KeyBindings:
    """Enter sends a message unless its quotes are open; Alt-Enter begins a new line."""
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    bindings = KeyBindings()

    @bindings.add("enter")
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if is_open(buffer.text):
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @bindings.add("escape", "enter")
    @bindings.add("escape", "c-j")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return bindings


def _completer(choices: Choices) -> Completer:
    """Completes the names of commands, and what may follow them."""
    from prompt_toolkit.completion import CompleteEvent, Completer, Completion
    from prompt_toolkit.document import Document

    class Commands(Completer):
        def get_completions(self, document: Document, event: CompleteEvent) -> Any:
            """The completions of a line that begins with a slash."""
            for word, begin in completions(document.text_before_cursor, choices):
                yield Completion(word, start_position=begin)

    return Commands()


def completions(typed: str, choices: Choices) -> Iterator[tuple[str, int]]:
    """
    The words that may complete a line, and where they begin, counted back from its end.

    Args:
        choices: what may follow a command's name.
    """
    if not typed.startswith("/") or typed.startswith("//"):
        return
    name, space, rest = typed[1:].partition(" ")
    found = choices(name) if space else [f"/{one}" for one in COMMANDS]
    begun = rest if space else typed
    for word in found:
        if word.startswith(begun):
            yield word, -len(begun)
