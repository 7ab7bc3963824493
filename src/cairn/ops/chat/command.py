"""``ops chat``: a conversation on a terminal, over the same HTTP as any client's."""

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
# Those that end a process which says nothing of them: the third is Ctrl-\ on a terminal.
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
    help=f"The server to talk to, if not the one at {DEFAULT_URL} or one started for the chat.",
)
@api_key_option
@data_dir_option
@click.option("--model", metavar="DIR", help="Start a server with this model, as `ops serve` does.")
@click.option("--system", metavar="TEXT", help="The system message.")
@click.option(
    "--temperature", type=click.FloatRange(0, 100), help="The sampling temperature; 0 is greedy."
)
@click.option(
    "--top-p",
    type=click.FloatRange(0, 1, min_open=True),
    help="Sample among the likeliest tokens that together have this probability.",
)
@click.option("--seed", type=int, help="Of sampling: with it the same words give the same answer.")
@click.option("--max-tokens", type=click.IntRange(1), help="The longest answer, in tokens.")
@click.option("--think", is_flag=True, help="Let a model that can do so think before it answers.")
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

    Connects to the server at the default address or, with --data-dir, to the one that uses this
    directory. If none is running, a server is started for the chat and stopped with it. A line
    after each answer shows the path that the server chose, how many prompt tokens were reused, and
    the time to the first token. /help lists the commands of the chat.

    Answers go to stdout, everything else to stderr. If stdin or stdout is not a terminal, each line
    is a message, and the first one that fails ends the chat with exit code 1.
    """
    over = context.get_parameter_source("data_dir") is ParameterSource.COMMANDLINE
    if url is not None and (over or model is not None):
        raise click.UsageError("--url names a server that runs: leave --data-dir and --model out.")
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
                # First of all: a terminal that was closed takes no words any more.
                server.end()
                with _on_interrupt(server.end), screen.waiting("stopping the server"):
                    server.wait()
    context.exit(code)


class Chat:
    """A conversation with a server, a line at a time."""

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
        }
        assert {*self._commands, "quit"} == set(COMMANDS)

    def run(self) -> int:
        """Talk until the user leaves; gives the exit code."""
        self._start_server()
        if not isinstance(self._server, OwnServer):
            self._screen.note(f"Talking with {self._model_and_url()}.")
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
        """Do what a line says; gives whether that could be done."""
        if not name:
            return self._turn(self._conversation.asking(rest))
        command = self._commands.get(name)
        if command is None:
            self._screen.complain(f"There is no command /{printable(name)}; /help lists them.")
            return False
        return command(rest)

    def _help(self, _: str) -> bool:
        self._screen.note(help_text())
        return True

    def _new(self, _: str) -> bool:
        self._conversation = Conversation(self._conversation.system)
        self._screen.note("A new conversation.")
        return True

    def _again(self, _: str) -> bool:
        return self._has_said() and self._turn(self._conversation.unanswered())

    def _edit(self, text: str) -> bool:
        if not text:
            self._screen.complain("/edit takes the text that your last message shall be.")
            return False
        return self._has_said() and self._turn(self._conversation.edited(text))

    def _has_said(self) -> bool:
        if self._conversation.said:
            return True
        self._screen.complain("Nothing was said yet.")
        return False

    def _system(self, text: str) -> bool:
        self._conversation = attrs.evolve(self._conversation, system=text or None)
        what = "The system message is set" if text else "There is no system message"
        self._screen.note(f"{what}, from the next message on.")
        return True

    def _toggle(self, _: str) -> bool:
        self._think = not self._think
        thinks = "thinks" if self._think else "does not think"
        self._screen.note(f"From the next message on the model {thinks}, where it can be told so.")
        return True

    def _start_server(self) -> None:
        """Start the server where it is the chat's own and does not run."""
        if not isinstance(self._server, OwnServer) or self._server.is_running:
            return
        with self._screen.waiting("starting a server") as waiting:
            with _signals_later():
                self._server.start()
            self._server.wait_ready(lambda what: waiting.update(f"starting a server: {what}"))
        self._screen.note(
            f"Started a server for this chat: {self._model_and_url()}. It ends with the chat."
        )

    def _model_and_url(self) -> str:
        return f"{printable(self._server.model)} at {self._server.url}"

    def _turn(self, asked: Conversation) -> bool:
        """
        Ask for an answer, and show it as it comes. Without one the conversation stays as it was.
        """
        self._start_server()
        server = self._server
        stream = Stream(server.url, self._body(asked), server.options, server.key)
        try:
            answer = self._screen.answer(stream)
        except TurnFailed as failed:
            # Who says no has not ended, and nobody waits to see whether it does.
            ended = self._server.end_words() if isinstance(failed, ServerGone) else None
            words = ended or str(failed)
            self._screen.complain(f"{words}\nThe conversation is as it was before.")
            return False
        if stream.stopped and not answer.text:
            self._screen.note("Stopped before the first word; the conversation is as it was.")
        else:
            self._conversation = asked.answered(answer.text, answer.thoughts)
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
            **self._settings,
        }


class Waiting:
    """A line that moves while nothing else does; none where nobody looks."""

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
        """Say what is waited for."""
        if self._status is not None:
            # As text, in which no brackets are markup.
            self._status.update(Text(f"{words} ..."))

    def stop(self) -> None:
        """Take the line away. Again does no harm."""
        if self._status is not None:
            self._status.stop()


class Screen:
    """
    Where lines come from, and where answers and remarks go.

    Attributes:
        interactive: whether somebody types, and sees what comes.
    """

    def __init__(self) -> None:
        for stream in (sys.stdin, sys.stdout):
            if isinstance(stream, io.TextIOWrapper):
                # What the terminal's encoding does not have ends no conversation.
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
        What is typed, or comes through a pipe, until it ends. Where somebody types, Ctrl-C clears
        the line: who stops an answer a moment too late does not lose the conversation. One right
        behind another ends it.
        """
        if not self.interactive:
            for line in sys.stdin:
                if self._shown:
                    self.note(f"{_PROMPT}{printable(line.strip())}")
                yield line
            return
        typed: Callable[[], str] = str  # without an editor nobody knows what was typed
        with contextlib.suppress(ImportError):
            import readline  # `input` has a history and an editor then

            typed = readline.get_line_buffer
            if self._clever and "libedit" not in (readline.__doc__ or ""):
                # What is pasted is one message, of however many lines; Python turns this off.
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
                self.note("Once more, or Ctrl-D, leaves.")
                continue
            leaves = False
            yield line

    def note(self, text: str) -> None:
        """A remark."""
        click.echo(click.style(text, dim=True) if self._styles_notes else text, err=True)

    def complain(self, text: str) -> None:
        """What could not be done, and what to do."""
        click.echo(text, err=True)

    def waiting(self, words: str) -> Waiting:
        """A line that moves while the context lasts, where somebody looks."""
        if not self._moves:
            return Waiting(words, None)
        return Waiting(words, Status("", console=Console(stderr=True)))

    def answer(self, stream: Stream) -> Answer:
        """
        Show an answer as it comes, until it ends or Ctrl-C stops it.

        Raises:
            TurnFailed: there is none, or no complete one.
        """
        answer, shown = Answer(), Shown(styled=self._styles_answers)
        last = ""
        try:
            with (
                _on_interrupt(stream.stop),
                self.waiting("waiting for the answer") as waiting,
            ):
                # Only now: what a terminal takes to begin is no time of the server's.
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
    Have Ctrl-C do something else while the context lasts. An exception out of nowhere could leave
    half a line, or a server that nobody stops.
    """
    before = signal.signal(signal.SIGINT, lambda *_: act())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before or signal.default_int_handler)


@contextlib.contextmanager
def _signals_that_leave() -> Iterator[None]:
    """Let the signals that end a process end the server of the chat first."""

    def leave(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    with _handled(_LEAVE, leave):
        yield


@contextlib.contextmanager
def _signals_later() -> Iterator[None]:
    """
    Let signals wait until the context ends: one in the moment between a server's start and the note
    of its process would leave a server that nobody knows of.
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
    Handle signals while the context lasts. Those that are ignored, as `nohup` has it, stay so.
    """
    heard = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    before = [(number, signal.signal(number, handler)) for number in heard]
    try:
        yield
    finally:
        for number, was in before:
            signal.signal(number, was or signal.SIG_DFL)
