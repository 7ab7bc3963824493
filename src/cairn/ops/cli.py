"""
The commands. Turns errors into sentences and exit codes.

A command's module is loaded when the command runs, so that `ops verify` works without MLX and
`ops --help` is fast. The table below therefore repeats the first sentence of each command's help.
"""

from __future__ import annotations

import copy
import errno
import importlib.util
import os
import sys
import traceback
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

import click
from click.shell_completion import CompletionItem

from cairn import __version__
from cairn.journal.errors import JournalError
from cairn.ops.common.program import as_called, note_call
from cairn.ops.common.ranges import number_words

COMMANDS = {
    "serve": ("cairn.ops.serve.command:serve", "Run the server."),
    "chat": ("cairn.ops.chat.command:chat", "Chat with a model in the terminal."),
    "models": (
        "cairn.ops.models.command:models",
        "List the models on this machine, and whether they are loaded and fit.",
    ),
    "pull": (
        "cairn.ops.models.pull_command:pull",
        "Download a model, or bring it up to date.",
    ),
    "rm": (
        "cairn.ops.models.pull_command:rm",
        "Remove a downloaded model from the hub's cache, with what was downloaded of it in part.",
    ),
    "status": ("cairn.ops.state.status:status", "Show whether a server runs, and how it is."),
    "stop": (
        "cairn.ops.state.stop:stop",
        "Stop the running server, and wait until it has ended.",
    ),
    "logs": ("cairn.ops.state.logs:logs", "Show the log of the server."),
    "config": (
        "cairn.ops.state.config:config",
        "Show what is set and where, or write a configuration file.",
    ),
    "verify": (
        "cairn.ops.journal.verify:verify",
        "Check a journal: its hash chain and all invariants.",
    ),
    "replay": (
        "cairn.ops.journal.replay:replay",
        "Show what happened in a bug or a session, and check it again.",
    ),
    "sessions": ("cairn.ops.journal.sessions:sessions", "List the sessions of a journal."),
    "top": ("cairn.ops.state.top:top", "Show what a running server does now."),
    "explain": (
        "cairn.ops.journal.explain:explain_command",
        "Explain why a prompt was computed, or reused.",
    ),
    "agents": (
        "cairn.ops.journal.agents:agents",
        "List the agents of a journal, show one, or hand one over to another node.",
    ),
    "tail": (
        "cairn.ops.journal.tail:tail",
        "Show the log of the server, or the events of the journal.",
    ),
    "export": ("cairn.ops.journal.export:export", "Write a journal as lines of JSON."),
    "forget": (
        "cairn.ops.forget:forget",
        "Make the texts of a session unreadable, in all copies of the journal.",
    ),
    "bundle": (
        "cairn.ops.bundle:bundle",
        "Pack what another machine needs to replay a bug.",
    ),
    "drill": (
        "cairn.ops.drills.command:drill",
        "Damage a private server on purpose, and check that the damage is caught.",
    ),
    "conform": (
        "cairn_conform.command:conform",
        "Check over HTTP that a server's cache does not change its answers.",
    ),
    "bench": (
        "cairn_bench.command:bench",
        "Measure Cairn and mlx-lm's server on the same model, in one run.",
    ),
    "migrate": (
        "cairn.ops.journal.migrate:migrate",
        "Create a journal, or bring its schema up to date.",
    ),
    "takeover": (
        "cairn.ops.fleet.takeover:takeover",
        "Take NODE over from a server that hangs, or whose machine does not answer.",
    ),
    "journal": (
        "cairn.ops.journal.command:journal",
        "Show the journal's size and growth, and prune it.",
    ),
    "doctor": ("cairn.ops.doctor:doctor", "Check this machine, and say what to fix."),
    "version": ("cairn.ops.state.version:version", "Show the version of Cairn."),
    "service": (
        "cairn.ops.state.service:service",
        "Run the server as a service, from login on.",
    ),
    "completion": (
        "cairn.ops.state.completion:completion",
        "Print the completion of commands and options for a shell.",
    ),
    "help": (
        "cairn.ops.state.help:help_command",
        "Show the commands, or the help of one COMMAND.",
    ),
}
"""Name of a command: its module and function, and the first sentence of its help."""


_NAME, _OTHER_NAME = "ops", "cairn"


class Unreadable(click.ClickException):
    """Something that a command needs cannot be read or written, or does not exist."""

    exit_code = 2

    def show(self, file: Any = None) -> None:
        """Print the sentence without click's prefix."""
        click.echo(as_called(self.format_message()), file=file, err=True)


class Interrupted(Unreadable):
    """Ctrl-C ended a command. The exit code 1 belongs to the command itself."""

    exit_code = 130


def installed(name: str) -> bool:
    """Whether the package of a command is installed. Does not load it."""
    package = COMMANDS[name][0].partition(".")[0]
    return importlib.util.find_spec(package) is not None


class Commands(click.Group):
    """A group that loads the module of a command when the command is called."""

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
        return called_by(ctx.find_root().info_name, command)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """
        The command that the first argument names, and the other arguments.

        Raises:
            click.UsageError: there is no such command; the message suggests similar names.
        """
        name = args[0]
        # click suggests only loaded commands, and none is loaded.
        near = [] if name in COMMANDS else get_close_matches(name, COMMANDS)
        if near and not ctx.resilient_parsing:
            words = " or ".join(f"`{ctx.info_name} {one}`" for one in near)
            raise click.UsageError(f"No such command {name!r}. Did you mean {words}?", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands from the table, without loading any."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name][1]) for name in self.list_commands(ctx)])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """The commands and options that begin with a text, without loading any command."""
        named = [
            CompletionItem(name, help=COMMANDS[name][1])
            for name in self.list_commands(ctx)
            if name.startswith(incomplete)
        ]
        return [*named, *click.Command.shell_complete(self, ctx, incomplete)]

    def invoke(self, ctx: click.Context) -> Any:
        """
        Run a command. A journal error ends it with a sentence and exit code 2, Ctrl-C with 130
        unless the command handles it. A number that cannot be used is refused with its range.
        """
        try:
            return super().invoke(ctx)
        except click.BadParameter as error:
            must = number_words(error.param.type) if error.param is not None else ""
            if must:
                given = error.message.partition(" is not ")[0]
                raise click.BadParameter(
                    f"it is {given}; it must be {must}.", error.ctx, error.param, error.param_hint
                ) from error
            raise
        except JournalError as error:
            _clear(error)
            raise Unreadable(str(error)) from error
        except KeyboardInterrupt as interrupt:
            _clear(interrupt)
            raise Interrupted("Stopped.") from interrupt


@click.group(
    cls=Commands,
    invoke_without_command=True,
    subcommand_metavar="COMMAND [ARGS]...",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="\b\nExample:\n  ops verify && ops tail -f",
)
@click.version_option(__version__, prog_name="cairn", message="%(prog)s %(version)s")
@click.pass_context
def ops(context: click.Context) -> None:
    """
    Operate Cairn. Data goes to stdout, logs and progress to stderr. A command stopped by Ctrl-C
    exits with 130.
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help(), color=context.color)


def called_by(program: str | None, command: click.Command) -> click.Command:
    """
    A command whose examples have the name by which the program was called. Does not modify the
    command itself.
    """
    if program != _OTHER_NAME:
        return command
    named = copy.copy(command)
    named.epilog = (command.epilog or "").replace(f"{_NAME} ", f"{program} ")
    if isinstance(named, click.Group):
        named.commands = {name: called_by(program, one) for name, one in named.commands.items()}
    return named


def main(program: str | None = None) -> None:
    """
    Run the command line, and end the process with its code.

    Args:
        program: the name that help shows; None for the one by which this process was called.
    """
    note_call(sys.argv[0])
    called = program or Path(sys.argv[0]).name
    shown = called if called in (_NAME, _OTHER_NAME) else _NAME
    try:
        called_by(shown, ops)(prog_name=shown)
        code = 0
    except SystemExit as ended:
        code = _code(ended)
    except KeyboardInterrupt:  # before the command has begun
        click.echo("Stopped.", err=True)
        code = Interrupted.exit_code
    except BaseException as error:
        click.echo(_stack_of(error), err=True)
        code = 1
    _leave(code)


def _stack_of(error: BaseException) -> str:
    """The stack of an error that is a fault of Cairn's, and what to do about it."""
    from cairn.ops.common.stacks import own_frames

    stack = own_frames("".join(traceback.format_exception(error)))
    return f"This is a fault of Cairn's; please report it with these lines:\n{stack}"


def _clear(error: BaseException) -> None:
    """
    Close the generators in an error's traceback: a progress bar that is not closed leaves the
    cursor hidden.
    """
    traceback.clear_frames(error.__traceback__)


def _code(ended: SystemExit) -> int:
    """The exit code that Python would use; a message in its place is printed on stderr."""
    if ended.code is None or isinstance(ended.code, int):
        return ended.code or 0
    click.echo(ended.code, err=True)
    return 1


def _leave(code: int) -> NoReturn:
    """
    Flush the output and end the process without shutting the interpreter down.

    A thread that has ended for Python may still be freeing memory of MLX, for which it needs the
    interpreter. An interpreter that shuts down kills such a thread inside C++ code that does not
    allow it, and the process aborts. Commands close what must be closed.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError as error:
            if error.errno != errno.EPIPE:  # the reader closed the pipe, and needs no more
                code = code or 1
    os._exit(code)
