"""``ops chat``: a conversation on a terminal, over the HTTP interface of all clients."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import click
from click.core import ParameterSource
from rich.console import Console
from rich.status import Status
from rich.text import Text

from cairn.ops.chat.client import ServerGone, Stream, TurnFailed, read_url
from cairn.ops.chat.server import (
    DEFAULT_URL,
    OwnServer,
    Server,
    server_at_hand,
    server_named,
    server_over,
)
from cairn.ops.chat.transcript import (
    COMMANDS,
    Answer,
    Conversation,
    Shown,
    harmless,
    help_text,
    read_line,
    summary,
    waiting_words,
)
from cairn.ops.common.locations import data_dir_option, example
from cairn.ops.common.output import printable
from cairn.ops.serve.api_keys import api_key_option

_PROMPT = "> "
_FAILED = 1
_INTERRUPTED = 130
# Signals that end a process by default. SIGQUIT is Ctrl-\ on a terminal.
_LEAVE = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def _url(_: click.Context, __: click.Parameter, value: str | None) -> str | None:
    return None if value is None else read_url(value)


@click.command(
    epilog=example(
        "ops chat",
        "ops chat --model ~/models/Qwen3-4B-4bit --think",
        "printf 'Hello\\nAnd then?\\n' | ops chat --seed 1 --max-tokens 64",
    )
)
@click.option(
    "--url",
    metavar="URL",
    callback=_url,
    help=f"The server to use. Default: the one at {DEFAULT_URL}, else the one that uses the data "
    "directory, else one started for the chat.",
)
@api_key_option
@data_dir_option
@click.option("--model", metavar="DIR", help="Start a server for the chat with this model.")
@click.option("--system", metavar="TEXT", help="The system message.")
@click.option(
    "--temperature", type=click.FloatRange(0, 100), help="The sampling temperature; 0 is greedy."
)
@click.option(
    "--top-p",
    type=click.FloatRange(0, 1, min_open=True),
    help="Sample among the likeliest tokens that together have this probability.",
)
@click.option(
    "--seed", type=int, help="The sampling seed. The same seed and messages give the same answers."
)
@click.option("--max-tokens", type=click.IntRange(1), help="The longest answer, in tokens.")
@click.option("--think", is_flag=True, help="Let the model think before it answers, if it can.")
@click.pass_context
def chat(
    context: click.Context,
    /,
    url: str | None,
    api_key: str | None,
    data_dir: Path,
    model: str | None,
    system: str | None,
    think: bool,
    **sampling: Any,
) -> None:
    """
    Chat with a model in the terminal.

    Connects to the server at the default address or, if there is none, to the one that uses the
    data directory, on any port. With --data-dir, only the directory decides. If no server is
    running, one is started for the chat and stopped with it. A line after each answer shows the
    path that the server chose, how many prompt tokens were reused, and the time to the first token.
    /help lists the commands of the chat.

    Answers go to stdout, everything else to stderr. If stdin or stdout is not a terminal, each line
    is a message, and the first one that fails ends the chat with exit code 1.
    """
    over = context.get_parameter_source("data_dir") is ParameterSource.COMMANDLINE
    if url is not None and (over or model is not None):
        raise click.UsageError(
            "--url names a running server. Omit --data-dir and --model, or omit --url."
        )
    screen = Screen()
    with _signals_that_leave():
        if url is not None:
            server = server_named(url, api_key)
        else:
            at_hand = None if over or model is not None else server_at_hand(api_key)
            server = at_hand or server_over(data_dir, model, api_key)
        settings = {name: value for name, value in sampling.items() if value is not None}
        talk = Chat(server, screen, Conversation(system), settings, think=think)
        try:
            code = talk.run()
        except KeyboardInterrupt:
            code = _INTERRUPTED
        finally:
            if isinstance(server, OwnServer):
                # Before any output, which fails if the terminal was closed.
                server.end()
                with _on_interrupt(server.end), screen.waiting("stopping the server"):
                    server.wait()
    context.exit(code)


class Chat:
    """A conversation with a server, line by line."""

    def __init__(
        self,
        server: Server,
        screen: Screen,
        conversation: Conversation,
        settings: dict[str, Any],
        *,
        think: bool,
    ) -> None:
        self._server = server
        self._screen = screen
        self._conversation = conversation
        self._settings = settings
        self._think = think
        self._commands: dict[str, Callable[[str], bool]] = {
            "help": self._help,
            "new": self._new,
            "again": self._again,
            "edit": self._edit,
            "system": self._system,
            "think": self._toggle,
            "why": self._why,
        }
        self._explanation: str | None = None
        assert {*self._commands, "quit"} == set(COMMANDS)

    def run(self) -> int:
        """Run until the user leaves. Returns the exit code."""
        self._start_server()
        if not isinstance(self._server, OwnServer):
            self._screen.note(f"Chatting with {self._model_and_url()}.")
        for line in self._screen.lines():
            name, rest = read_line(line)
            if name == "quit":
                break
            if not name and not rest:
                continue
            if not self._act(name, rest) and not self._screen.interactive:
                return _FAILED
        return 0

    def _act(self, name: str, rest: str) -> bool:
        """Run a line. Returns whether that succeeded."""
        if not name:
            return self._turn(self._conversation.asking(rest))
        command = self._commands.get(name)
        if command is None:
            self._screen.complain(
                f"There is no command /{printable(name)}; /help lists the commands."
            )
            return False
        return command(rest)

    def _help(self, _: str) -> bool:
        self._screen.note(help_text())
        return True

    def _new(self, _: str) -> bool:
        self._conversation = Conversation(self._conversation.system)
        self._screen.note("New conversation.")
        return True

    def _again(self, _: str) -> bool:
        return self._has_said() and self._turn(self._conversation.unanswered())

    def _edit(self, text: str) -> bool:
        if not text:
            self._screen.complain("/edit needs the new text of your last message.")
            return False
        return self._has_said() and self._turn(self._conversation.edited(text))

    def _has_said(self) -> bool:
        if self._conversation.said:
            return True
        self._screen.complain("There is no message yet.")
        return False

    def _system(self, text: str) -> bool:
        self._conversation = attrs.evolve(self._conversation, system=text or None)
        what = "set" if text else "removed"
        self._screen.note(f"System message {what}; it takes effect with the next message.")
        return True

    def _toggle(self, _: str) -> bool:
        self._think = not self._think
        what = "on" if self._think else "off"
        self._screen.note(f"Thinking {what} from the next message on, if the model supports it.")
        return True

    def _why(self, _: str) -> bool:
        if self._explanation is None:
            self._screen.complain("There is no answer yet to explain.")
            return False
        self._screen.note(harmless(self._explanation))
        return True

    def _start_server(self) -> None:
        """Start the server if it belongs to the chat and is not running."""
        if not isinstance(self._server, OwnServer) or self._server.is_running:
            return
        with self._screen.waiting("starting a server") as waiting:
            with _signals_later():
                self._server.start()
            self._server.wait_ready(lambda what: waiting.update(f"starting a server: {what}"))
        self._screen.note(
            f"Started a server for this chat: {self._model_and_url()}. It stops when the chat ends."
        )

    def _model_and_url(self) -> str:
        return f"{printable(self._server.model)} at {self._server.url}"

    def _turn(self, asked: Conversation) -> bool:
        """Show a new answer as it arrives. If there is none, the conversation is unchanged."""
        self._start_server()
        server = self._server
        stream = Stream(server.url, self._body(asked), server.options, server.key)
        try:
            answer = self._screen.answer(stream)
        except TurnFailed as failed:
            # A server that refused the request has not ended, so there is no wait for its end.
            ended = self._server.end_words() if isinstance(failed, ServerGone) else None
            words = ended or str(failed)
            self._screen.complain(f"{words}\nThe conversation is unchanged.")
            return False
        if stream.stopped and not answer.text:
            self._screen.note("Stopped before the first word; the conversation is unchanged.")
        else:
            self._conversation = asked.answered(answer.text, answer.thoughts)
            self._explanation = answer.cairn.explanation if answer.cairn is not None else None
            stopped = "stopped · " if stream.stopped else ""
            self._screen.note(f"{stopped}{summary(answer)}")
        if stream.stopped and not self._screen.interactive:
            raise KeyboardInterrupt
        return True

    def _body(self, asked: Conversation) -> dict[str, Any]:
        return {
            "model": self._server.model,
            "messages": asked.messages(),
            "stream": True,
            "stream_options": {"include_usage": True},
            "enable_thinking": self._think,
            "explain": True,
            **self._settings,
        }


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
            # A Text, so that brackets are not markup.
            self._status.update(Text(f"{words} ..."))

    def stop(self) -> None:
        """Remove the spinner. May be called again."""
        if self._status is not None:
            self._status.stop()


class Screen:
    """
    Reads lines, and shows answers and notes.

    Attributes:
        interactive: whether stdin and stdout are a terminal.
    """

    def __init__(self) -> None:
        for stream in (sys.stdin, sys.stdout):
            if isinstance(stream, io.TextIOWrapper):
                # A character that the terminal cannot show does not end the conversation.
                stream.reconfigure(errors="replace")
        self._shown = sys.stdout.isatty()
        self.interactive = sys.stdin.isatty() and self._shown
        self._clever = os.environ.get("TERM") != "dumb"
        styled = self._clever and not os.environ.get("NO_COLOR")
        self._styles_answers = styled and self._shown
        self._styles_notes = styled and sys.stderr.isatty()
        self._moves = self._clever and self._shown and sys.stderr.isatty()

    def lines(self) -> Iterator[str]:
        """
        The lines of stdin. On a terminal, Ctrl-C clears the line, so that a user who stops an
        answer too late does not lose the conversation; a second Ctrl-C on the empty line leaves.
        """
        if not self.interactive:
            for line in sys.stdin:
                if self._shown:
                    self.note(f"{_PROMPT}{printable(line.strip())}")
                yield line
            return
        typed: Callable[[], str] = str  # without readline, the typed text is unknown
        with contextlib.suppress(ImportError):
            import readline  # gives `input` a history and an editor

            typed = readline.get_line_buffer
            if self._clever and "libedit" not in (readline.__doc__ or ""):
                # Pasted lines are one message. Python turns this off by default.
                readline.parse_and_bind("set enable-bracketed-paste on")
        leaves = False
        while True:
            try:
                line = input(_PROMPT)
            except EOFError:
                click.echo()
                return
            except KeyboardInterrupt:
                click.echo()
                if leaves and not typed():
                    return
                leaves = True
                self.note("Press Ctrl-C again, or Ctrl-D, to leave.")
                continue
            leaves = False
            yield line

    def note(self, text: str) -> None:
        """Show a note on stderr."""
        click.echo(click.style(text, dim=True) if self._styles_notes else text, err=True)

    def complain(self, text: str) -> None:
        """Show an error on stderr."""
        click.echo(text, err=True)

    def waiting(self, words: str) -> Waiting:
        """A spinner with a text while the context lasts."""
        if not self._moves:
            return Waiting(words, None)
        return Waiting(words, Status("", console=Console(stderr=True)))

    def answer(self, stream: Stream) -> Answer:
        """
        Show an answer as it arrives, until it ends or Ctrl-C stops it.

        Raises:
            TurnFailed: there is no answer, or it is incomplete.
        """
        answer, shown = Answer(), Shown(styled=self._styles_answers)
        last = ""
        try:
            with (
                _on_interrupt(stream.stop),
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
                        last = shown.take(harmless(piece), is_thought)
                        self._write(last, is_thought)
        finally:
            if last and not last.endswith("\n"):
                click.echo()
        return answer

    def _write(self, text: str, is_thought: bool) -> None:
        styled = is_thought and self._styles_answers
        click.echo(click.style(text, dim=True) if styled else text, nl=False)


@contextlib.contextmanager
def _on_interrupt(act: Callable[[], None]) -> Iterator[None]:
    """
    Call a function at Ctrl-C while the context lasts. A KeyboardInterrupt at any point could leave
    half a line, or a server running.
    """
    before = signal.signal(signal.SIGINT, lambda *_: act())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before or signal.default_int_handler)


@contextlib.contextmanager
def _signals_that_leave() -> Iterator[None]:
    """Turn the signals that end a process into SystemExit, so that the chat's server is stopped."""

    def leave(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    with _handled(_LEAVE, leave):
        yield


@contextlib.contextmanager
def _signals_later() -> Iterator[None]:
    """
    Delay signals until the context ends: one between the start of a server and the assignment of
    its process would leave the server running.
    """
    came: list[int] = []
    with _handled((signal.SIGINT, *_LEAVE), lambda number, _: came.append(number)):
        yield
    for number in came:
        signal.raise_signal(number)


@contextlib.contextmanager
def _handled(
    numbers: tuple[signal.Signals, ...], handler: Callable[[int, Any], object]
) -> Iterator[None]:
    """
    Handle signals while the context lasts. Signals that are ignored, as with `nohup`, stay ignored.
    """
    heard = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    before = [(number, signal.signal(number, handler)) for number in heard]
    try:
        yield
    finally:
        for number, was in before:
            signal.signal(number, was or signal.SIG_DFL)
