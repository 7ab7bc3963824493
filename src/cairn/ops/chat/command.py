"""``cairn chat``: a conversation on a terminal, over the HTTP interface of all clients."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click
from click.core import ParameterSource

from cairn.ops.chat.client import TurnFailed, read_url
from cairn.ops.chat.conversation import Conversation
from cairn.ops.chat.dialog import Dialog
from cairn.ops.chat.server import (
    DEFAULT_URL,
    OwnServer,
    Server,
    server_at_hand,
    server_named,
    server_over,
)
from cairn.ops.chat.settings import OPTIONS, PARAMETERS
from cairn.ops.chat.terminal.keyboard import Keyboard, Piped
from cairn.ops.chat.terminal.screen import Screen, Waiting
from cairn.ops.chat.terminal.signals import (
    Interrupts,
    interrupt,
    on_interrupt,
    signals_that_leave,
)
from cairn.ops.chat.turns import Turns
from cairn.ops.cli import Unreadable
from cairn.ops.common.completions import complete_chat, complete_model
from cairn.ops.common.locations import data_dir_option, example
from cairn.ops.models.fitting import Machine, this_machine
from cairn.ops.models.ready import ready_model
from cairn.ops.serve.api_keys import api_key_option

_INTERRUPTED = 130
_STDIN = "-"
_UNTIL_THEN = "the chat does not begin before"
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


def _url(_: click.Context, __: click.Parameter, value: str | None) -> str | None:
    return None if value is None else read_url(value)


def _sampling_options(command: Callable[..., None]) -> Callable[..., None]:
    for name in reversed(OPTIONS):
        parameter = PARAMETERS[name]
        option = click.option(
            f"--{name.replace('_', '-')}", type=parameter.kind, help=parameter.help
        )
        command = option(command)
    return command


@click.command(
    epilog=example(
        "ops chat",
        'ops chat "What is a KV cache?"',
        'git diff | ops chat "Review this change." > review.md',
        "ops chat --continue",
        "ops chat --model qwen3-4b --think",
        "printf 'Hello\\nAnd then?\\n' | ops chat --seed 1 --max-tokens 64",
    )
)
@click.argument("question", nargs=-1)
@click.option(
    "--url",
    metavar="URL",
    callback=_url,
    help=f"The server to use. Default: the one at {DEFAULT_URL}, else the one that uses the data "
    "directory, else one started for the chat.",
)
@api_key_option
@data_dir_option
@click.option(
    "--model",
    shell_complete=complete_model,
    metavar="MODEL",
    help="Start a server for the chat with this model: a short name (`ops models --all`), a "
    "directory, or a name on Hugging Face.",
)
@click.option("--system", metavar="TEXT", help="The system message.")
@click.option("--continue", "continues", is_flag=True, help="Continue the last chat.")
@click.option(
    "--resume",
    metavar="[ID]",
    is_flag=False,
    flag_value="",
    shell_complete=complete_chat,
    help="Continue a stored chat; without ID, choose one from a list.",
)
@click.option(
    "--no-store", is_flag=True, help="Delete the chat when it ends; the journal has its rows."
)
@_sampling_options
@click.option("--think", is_flag=True, help="Let the model think before it answers, if it can.")
@click.option("--raw", is_flag=True, help="Show answers as they are, and not as Markdown.")
@click.pass_context
def chat(
    context: click.Context,
    /,
    question: tuple[str, ...],
    url: str | None,
    api_key: str | None,
    data_dir: Path,
    model: str | None,
    system: str | None,
    continues: bool,
    resume: str | None,
    no_store: bool,
    think: bool,
    raw: bool,
    **sampling: Any,
) -> None:
    """
    Chat with a model in the terminal, or ask it one QUESTION.

    Connects to the server at the default address or, if there is none, to the one that uses the
    data directory, on any port. With --data-dir, only the directory decides. Waits for a server
    that is starting. If no server is
    running, one is started for the chat and stopped with it. A line after each answer shows the
    path that the server chose, how many prompt tokens were reused, the time to the first token and
    the tokens per second. /help lists the commands of the chat.

    The server stores each chat, as an agent whose name begins with chat-. --continue and --resume
    go on with one.

    Answers go to stdout, everything else to stderr. If stdin or stdout is not a terminal, each line
    is a message, and the first one that fails ends the chat with exit code 1. With a QUESTION, what
    comes through a pipe is put before it; the question - is all of it.
    """
    over = context.get_parameter_source("data_dir") is ParameterSource.COMMANDLINE
    if url is not None and (over or model is not None):
        raise click.UsageError(
            "--url names a running server. Omit --data-dir and --model, or omit --url."
        )
    if continues and resume is not None:
        raise click.UsageError("--continue is for the last chat. Omit it, or omit --resume.")
    if system is not None and (continues or resume is not None):
        raise click.UsageError(
            "A stored chat has its own system message. Omit --system, or change it with /system."
        )
    screen = Screen(raw=raw)
    asked = _asked(question)
    if asked is None and resume == "" and not screen.interactive:
        raise click.UsageError("--resume without ID needs a terminal. Name a chat, or --continue.")
    with signals_that_leave():
        try:
            with on_interrupt(interrupt), _Start(screen) as report:
                if url is not None:
                    server = server_named(url, api_key, report)
                else:
                    at_hand = None if over or model else server_at_hand(api_key, report)
                    server = at_hand or server_over(data_dir, model, api_key, report)
            if isinstance(server, OwnServer):
                ready_model(server.chosen, until_then=_UNTIL_THEN)
        except KeyboardInterrupt:
            screen.note("Stopped before the chat began.")
            context.exit(_INTERRUPTED)
        settings = {name: value for name, value in sampling.items() if value is not None}
        turns = Turns(server, screen, settings, think=think, stores=not no_store)
        try:
            history = None if no_store else data_dir
            with _lines(screen, history, typed=asked is None) as lines:
                dialog = Dialog(
                    server, screen, turns, Conversation(system), lines, _machine(server)
                )
                code = _run(dialog, asked, None if continues else resume, continues)
        except KeyboardInterrupt:
            code = _INTERRUPTED
        except TurnFailed as failed:
            raise Unreadable(str(failed)) from failed
        finally:
            turns.close()
            if isinstance(server, OwnServer):
                # Before any output, which fails if the terminal was closed.
                server.end()
                with on_interrupt(server.end), screen.waiting("stopping the server"):
                    server.wait()
    context.exit(code)


def _run(dialog: Dialog, asked: str | None, resume: str | None, continues: bool) -> int:
    dialog.start()
    if continues or resume is not None:
        dialog.resume(resume)
    elif asked is None:
        dialog.greet()
    return dialog.run() if asked is None else dialog.once(asked)


class _Start:
    """Shows what a server does that is not ready yet. Shows nothing of one that is."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._waiting: Waiting | None = None

    def __enter__(self) -> _Start:
        return self

    def __exit__(self, *error: object) -> None:
        if self._waiting is not None:
            self._waiting.stop()

    def __call__(self, words: str) -> None:
        if self._waiting is None:
            self._screen.note(
                f"{words[0].upper()}{words[1:]}. The chat begins when it is ready; Ctrl-C leaves."
            )
            self._waiting = self._screen.waiting(words).__enter__()
        self._waiting.update(words)


def _asked(question: tuple[str, ...]) -> str | None:
    """
    The question of the command line, after what comes through a pipe; None if there is none.

    Raises:
        click.UsageError: it is empty.
    """
    if not question:
        return None
    piped = "" if sys.stdin.isatty() else sys.stdin.read()
    words = "" if question == (_STDIN,) else " ".join(question)
    asked = "\n\n".join(part for part in (piped.strip(), words.strip()) if part)
    if not asked:
        raise click.UsageError("The question is empty.")
    return asked


@contextlib.contextmanager
def _lines(
    screen: Screen, history: Path | None, *, typed: bool
) -> Iterator[Callable[[Dialog], Keyboard | Piped]]:
    """
    Where the lines of the chat come from.

    Args:
        history: the data directory with what was typed in earlier chats; None to store nothing.
        typed: whether there is more than the question of the command line.
    """
    if not (screen.interactive and typed):
        echo = screen.note if screen.shown and not sys.stdin.isatty() else None
        yield lambda _: Piped(echo)
        return
    with Interrupts() as interrupts, contextlib.ExitStack() as held:

        def made(dialog: Dialog) -> Keyboard:
            keyboard = Keyboard(history, screen.note, interrupts, dialog.choices)
            held.enter_context(keyboard.held())
            screen.interrupts = interrupts
            return keyboard

        yield made
        screen.interrupts = None


def _machine(server: Server) -> Machine | None:
    """This machine; None if the server is on another one."""
    here = isinstance(server, OwnServer) or urlsplit(server.url).hostname in _LOOPBACK
    return this_machine() if here else None
