"""
The commands, and the border at which errors become sentences and exit codes.

A command's module is loaded when the command runs: `ops verify` works where MLX does not, and
`ops --help` is there at once. So the sentence on each command stands here as well.
"""

from __future__ import annotations

import errno
import importlib.util
import os
import sys
import traceback
from difflib import get_close_matches
from typing import Any, NoReturn

import click

from cairn import __version__
from cairn.journal.errors import JournalError

COMMANDS = {
    "serve": ("cairn.ops.serve.command:serve", "Run the server."),
    "chat": ("cairn.ops.chat.command:chat", "Talk with the model on the terminal."),
    "verify": (
        "cairn.ops.journal.verify:verify",
        "Check a journal: its hash chain and all invariants.",
    ),
    "replay": (
        "cairn.ops.journal.replay:replay",
        "Tell the story of a bug id or a session, and redo it.",
    ),
    "sessions": ("cairn.ops.journal.sessions:sessions", "List the sessions of a journal."),
    "agents": (
        "cairn.ops.journal.agents:agents",
        "List the agents of a journal, or show what was said with one.",
    ),
    "tail": (
        "cairn.ops.journal.tail:tail",
        "Show the log of the server, or the events of the journal.",
    ),
    "export": ("cairn.ops.journal.export:export", "Write a journal as lines of JSON."),
    "drill": (
        "cairn.ops.drills.command:drill",
        "Damage a private server on purpose, and see it caught.",
    ),
    "conform": (
        "cairn_conform.command:conform",
        "Ask a server from outside whether a cache hit gives what a miss gives.",
    ),
    "bench": (
        "cairn_bench.command:bench",
        "Measure Cairn beside mlx-lm's server, on the same model, in one run.",
    ),
    "migrate": (
        "cairn.ops.journal.migrate:migrate",
        "Bring a journal's schema up to date, or make one.",
    ),
    "journal": (
        "cairn.ops.journal.command:journal",
        "Show the journal's size and growth, and prune it.",
    ),
    "doctor": ("cairn.ops.doctor:doctor", "Check this machine, and say what to do."),
}
"""Name of a command: where it is, and what it does."""


class Unreadable(click.ClickException):
    """What was asked for cannot be read or written, or is not there."""

    exit_code = 2

    def show(self, file: Any = None) -> None:
        """Print the sentence, and nothing but it."""
        click.echo(self.format_message(), file=file, err=True)


class Interrupted(Unreadable):
    """Ctrl-C ended a command. What 1 means to it, nobody has found out."""

    exit_code = 130


def installed(name: str) -> bool:
    """Whether the package of a command is installed. Does not load it."""
    package = COMMANDS[name][0].partition(".")[0]
    return importlib.util.find_spec(package) is not None


class Commands(click.Group):
    """A group that loads the module of a command when it is called for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names of the installed commands, in the order of the table."""
        return [name for name in COMMANDS if installed(name)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of that name, or None."""
        if cmd_name not in COMMANDS:
            return None
        module, _, name = COMMANDS[cmd_name][0].partition(":")
        if not installed(cmd_name):
            raise Unreadable(
                f"`ops {cmd_name}` is not installed: clone Cairn's repository and run `make env` "
                "there."
            )
        command: click.Command = getattr(importlib.import_module(module), name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """
        The command that is asked for, and what is left of the line.

        Raises:
            click.UsageError: there is none of that name; it names those that are nearly so called.
        """
        name = args[0]
        # click looks among the commands that are loaded, and none is.
        near = [] if name in COMMANDS else get_close_matches(name, COMMANDS)
        if near and not ctx.resilient_parsing:
            words = " or ".join(f"`ops {one}`" for one in near)
            raise click.UsageError(f"No such command {name!r}. Did you mean {words}?", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list of commands, from the table: nothing is loaded for it."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name][1]) for name in self.list_commands(ctx)])

    def invoke(self, ctx: click.Context) -> Any:
        """
        Run a command; an error of the journal ends it with a sentence and exit code 2, Ctrl-C with
        130 where the command does not say otherwise.
        """
        try:
            return super().invoke(ctx)
        except JournalError as error:
            _clear(error)
            raise Unreadable(str(error)) from error
        except KeyboardInterrupt as interrupt:
            _clear(interrupt)
            raise Interrupted("Stopped.") from interrupt


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="\b\nExample:\n  ops verify && ops tail -f",
)
@click.version_option(__version__, prog_name="cairn")
def ops() -> None:
    """
    Operate Cairn. Data goes to stdout, logs and progress to stderr. A command that Ctrl-C stopped
    ends with 130.
    """


def main() -> None:
    """Run the command line, and end the process with its code."""
    try:
        ops(prog_name="ops")
        code = 0
    except SystemExit as ended:
        code = _code(ended)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    _leave(code)


def _clear(error: BaseException) -> None:
    """
    End what was under way when an error came: a progress bar that its reader left hides the cursor,
    and nothing else ends it before the process.
    """
    traceback.clear_frames(error.__traceback__)


def _code(ended: SystemExit) -> int:
    """The exit code that Python would give the process; what is none is told on stderr."""
    if ended.code is None or isinstance(ended.code, int):
        return ended.code or 0
    click.echo(ended.code, err=True)
    return 1


def _leave(code: int) -> NoReturn:
    """
    End the process here and now, with what was printed.

    A thread that has ended for Python may still clean up natively what MLX kept for it, and asks
    for the interpreter to do so. One that is being taken down kills such a thread, in the midst of
    C++ that permits no such thing, and the whole process aborts. So it is not taken down: what must
    be closed, the command has closed.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError as error:
            if error.errno != errno.EPIPE:  # somebody who reads no further misses nothing
                code = code or 1
    os._exit(code)
