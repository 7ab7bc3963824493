"""A chat, line by line: each is a message, or a command that begins with a slash."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from difflib import get_close_matches
from pathlib import Path

import click

from cairn import __version__
from cairn.journal.nodes import node_named
from cairn.ops.chat.client import ServerGone, TurnFailed
from cairn.ops.chat.conversation import Conversation, as_markdown, as_messages
from cairn.ops.chat.greeting import greeting, openings_of
from cairn.ops.chat.replies import Agent
from cairn.ops.chat.server import OwnServer, Server
from cairn.ops.chat.settings import PARAMETERS, parsed
from cairn.ops.chat.settings import shown as settings_shown
from cairn.ops.chat.terminal.keyboard import Lines, LinesEnd
from cairn.ops.chat.terminal.screen import Screen
from cairn.ops.chat.terminal.signals import interrupt, signals_later
from cairn.ops.chat.transcript import COMMANDS, harmless, help_text, read_line
from cairn.ops.chat.turns import PREFIX, Turns
from cairn.ops.cli import Unreadable
from cairn.ops.common.output import counted, printable
from cairn.ops.common.times import time_of
from cairn.ops.models.fitting import Machine
from cairn.ops.models.found import all_found
from cairn.ops.models.ready import ready_model
from cairn.ops.models.short_names import known_model, short_name

_FAILED = 1
_LISTED = 20
_FIRST_WORDS = 60
_LEAVE_WORDS = ("exit", "quit")


class Dialog:
    """
    A conversation with a server, line by line.

    Args:
        lines: where messages come from.
        machine: this machine; None if the server is on another one.
    """

    def __init__(
        self,
        server: Server,
        screen: Screen,
        turns: Turns,
        conversation: Conversation,
        lines: Callable[[Dialog], Lines],
        machine: Machine | None = None,
    ) -> None:
        self._server = server
        self._screen = screen
        self._turns = turns
        self._conversation = conversation
        self._machine = machine
        self._explanation: str | None = None
        self._listed: list[str] = []  # the agents that the user saw last
        self._converses = False
        self._commands: dict[str, Callable[[str], bool]] = {
            "help": self._help,
            "tour": self._tour,
            "new": self._new,
            "again": self._again,
            "edit": self._edit,
            "system": self._system,
            "think": self._toggle,
            "set": self._set,
            "model": self._model,
            "why": self._why,
            "sessions": self._sessions,
            "resume": self._resume,
            "delete": self._delete,
            "save": self._save,
        }
        assert {*self._commands, "quit"} == set(COMMANDS)
        self._lines = lines(self)

    def start(self) -> None:
        """
        Start the server if it belongs to the chat and is not running.

        Raises:
            Unreadable: it cannot be started.
            KeyboardInterrupt: the user ended the start, which is printed.
        """
        if not isinstance(self._server, OwnServer) or self._server.is_running:
            return
        if (ended := self._server.ended) is not None:
            self._screen.note(f"{ended}. It is started again.")
        try:
            with (
                self._screen.until_interrupt(interrupt),
                self._screen.waiting("starting a server") as waiting,
            ):
                with signals_later():
                    self._server.start()
                self._server.wait_ready(lambda what: waiting.update(f"starting a server: {what}"))
        except KeyboardInterrupt:
            self._screen.note("Stopped before the server of this chat was ready.")
            raise
        self._screen.note(
            f"Started a server for this chat: {self._model_and_url()}. It stops when the chat ends."
        )

    def greet(self) -> None:
        """Say which model answers, and on a terminal what to begin with."""
        if not self._screen.interactive:
            if not isinstance(self._server, OwnServer):
                self._screen.note(f"Chatting with {self._model_and_url()}.")
            return
        health = self._server.health()
        for line in greeting(
            version=__version__,
            model=printable(self._server.model),
            where="" if isinstance(self._server, OwnServer) else f" at {self._server.url}",
            context_tokens=health.context_tokens if health is not None else 0,
            machine=self._machine,
        ):
            self._screen.note(line)

    def resume(self, name: str | None) -> None:
        """
        Continue a stored chat.

        Args:
            name: its id or how it begins; None for the last one; empty to choose from a list.

        Raises:
            Unreadable: there is none.
            TurnFailed: the server does not answer.
        """
        if name == "":
            self._show(self._stored()[:_LISTED])
            chosen = self._lines.ask("Which one? ")
            if chosen is None:
                raise Unreadable("No chat was chosen. Name one: --resume ID.")
            name = chosen
        found = self._found(name)
        self._conversation = self._turns.resumed(found)
        self._explanation = None
        said = self._conversation.said
        self._screen.note(
            f"Continuing {printable(found)}, {counted(len(said), 'message')} so far. The last:"
        )
        for one in said[-2:]:
            if one.role == "user":
                self._screen.note(f"> {harmless(one.text)}")
            elif self._screen.interactive:
                self._screen.say(one.text)

    def run(self) -> int:
        """Run until the user leaves. Returns the exit code."""
        self._converses = self._screen.interactive
        try:
            for line in self._lines:
                name, rest = self._read(line)
                if name == "quit":
                    break
                if not name and not rest:
                    continue
                if not self._act(name, rest) and not self._screen.interactive:
                    return _FAILED
        except LinesEnd as ended:
            self._screen.complain(str(ended))
            return _FAILED
        return 0

    def once(self, question: str) -> int:
        """
        Ask one question. Returns the exit code.

        Raises:
            KeyboardInterrupt: Ctrl-C stopped the answer.
        """
        return 0 if self._turn(self._conversation.asking(question)) else _FAILED

    def choices(self, command: str) -> list[str]:
        """What may follow a command, for completion."""
        with contextlib.suppress(TurnFailed):
            match command:
                case "set":
                    return [f"{name} " for name in PARAMETERS]
                case "model":
                    served = [one.id for one in self._turns.agents.models()]
                    return list(dict.fromkeys([*served, *self._startable()]))
                case "resume" | "delete":
                    return [one.agent_id for one in self._stored()]
                case _:
                    pass
        return []

    # --- lines ------------------------------------------------------------------------------------

    def _read(self, line: str) -> tuple[str, str]:
        """See ``read_line``. On a terminal, a number before the first message is an opening."""
        name, rest = read_line(line)
        if not self._screen.interactive or name:
            return name, rest
        if rest.lower() in _LEAVE_WORDS:
            return "quit", ""
        openings = openings_of(self._server.model)
        if not self._conversation.said and rest in map(str, range(1, len(openings) + 1)):
            rest = openings[int(rest) - 1]
            self._screen.note(f"> {rest}")
        return name, rest

    def _act(self, name: str, rest: str) -> bool:
        """Run a line. Returns whether that succeeded."""
        command = self._commands.get(name)
        if name and command is None:
            near = get_close_matches(name, self._commands, n=1)
            more = f". Did you mean /{near[0]}?" if near else "; /help lists the commands."
            return self._complain(f"There is no command /{printable(name)}{more}")
        try:
            if command is None:
                return self._turn(self._conversation.asking(rest))
            return command(rest)
        except KeyboardInterrupt:
            if not self._converses or not isinstance(self._server, OwnServer):
                raise
            self._stop(self._server)  # it was being started; the next message tries again
            return False
        except (TurnFailed, Unreadable) as failed:
            words = failed.format_message() if isinstance(failed, Unreadable) else str(failed)
            return self._complain(words)

    def _complain(self, text: str) -> bool:
        self._screen.complain(text)
        return False

    def _note(self, text: str) -> bool:
        self._screen.note(text)
        return True

    # --- the conversation -------------------------------------------------------------------------

    def _turn(self, asked: Conversation) -> bool:
        """Show a new answer as it arrives. If there is none, the conversation is unchanged."""
        try:
            self.start()
            turn = self._turns.ask(self._conversation, asked)
        except TurnFailed as failed:
            # A server that refused the request has not ended, so there is no wait for its end.
            ended = self._server.end_words() if isinstance(failed, ServerGone) else None
            words = ended or str(failed)
            return self._complain(f"{words}\nThe conversation is unchanged.")
        except Unreadable as failed:
            return self._complain(f"{failed.format_message()}\nThe conversation is unchanged.")
        self._conversation = turn.conversation
        if turn.stopped and not turn.answer.text:
            self._screen.note("Stopped before the first word; the conversation is unchanged.")
        else:
            cairn = turn.answer.cairn
            self._explanation = cairn.explanation if cairn is not None else None
            self._screen.result(turn.answer, stopped=turn.stopped)
        if turn.stopped and not self._converses:
            raise KeyboardInterrupt
        return True

    def _help(self, _: str) -> bool:
        return self._note(help_text())

    def _new(self, _: str) -> bool:
        self._conversation = Conversation(self._conversation.system)
        self._explanation = None
        return self._note("New conversation.")

    def _again(self, _: str) -> bool:
        question = self._question()
        return question is not None and self._turn(self._conversation.edited(question))

    def _edit(self, text: str) -> bool:
        if not text and not self._screen.interactive:
            return self._complain("/edit needs the new text of your last message.")
        question = self._question()
        if question is None:
            return False
        edited = text or self._lines.ask("edit> ", question)
        if not edited or not edited.strip():
            return self._note("Nothing was edited.")
        return self._turn(self._conversation.edited(edited.strip()))

    def _question(self) -> str | None:
        question = self._conversation.question
        if question is None:
            self._complain("There is no message yet.")
        return question

    def _system(self, text: str) -> bool:
        self._conversation = self._conversation.with_system(text or None)
        what = "set" if text else "removed"
        return self._note(f"System message {what}; it takes effect with the next message.")

    def _why(self, _: str) -> bool:
        if self._explanation is None:
            self._screen.complain("There is no answer yet to explain.")
            return True  # nothing that comes through a pipe after this depends on it
        return self._note(harmless(self._explanation))

    def _save(self, text: str) -> bool:
        if not self._conversation.said:
            return self._complain("There is no message yet.")
        now = datetime.now(UTC)
        try:
            path = Path(text or f"chat-{now:%Y%m%d-%H%M%S}.md").expanduser()
        except RuntimeError:
            return self._complain(f"{text} names a user that there is not. Nothing was written.")
        if path.suffix == ".json":
            written = json.dumps(as_messages(self._conversation), ensure_ascii=False, indent=1)
            written += "\n"
        else:
            written = as_markdown(self._conversation)
        try:
            # What was said is for this user alone, as it is in the data directory.
            with os.fdopen(
                os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8"
            ) as file:
                file.write(written)
        except FileExistsError:
            return self._complain(f"{path} exists. Nothing was written; choose another name.")
        except OSError as error:
            return self._complain(f"{path} cannot be written: {error.strerror}.")
        return self._note(f"Written to {path}.")

    # --- the model --------------------------------------------------------------------------------

    def _toggle(self, _: str) -> bool:
        self._turns.think = not self._turns.think
        what = "on" if self._turns.think else "off"
        return self._note(f"Thinking {what} from the next message on, if the model supports it.")

    def _set(self, text: str) -> bool:
        settings = self._turns.settings
        if not text:
            return self._note(settings_shown(settings))
        if text == "system" or text.startswith("system "):
            return self._system(text.removeprefix("system").strip())
        try:
            name, value = parsed(text)
        except click.UsageError as error:
            return self._complain(f"{error.message} Nothing was changed.")
        if value is None:
            settings.pop(name, None)
            return self._note(f"{name} has its default again.")
        settings[name] = value
        return self._note(f"{name} is {value} from the next message on.")

    def _model(self, name: str) -> bool:
        self.start()
        models = self._turns.agents.models()
        current = self._turns.model or self._server.model
        if not name:
            for one in models:
                mark = "*" if current in (one.id, *one.cairn.aliases) else " "
                state = one.cairn.state.replace("_", " ")
                self._screen.note(f"{mark} {printable(one.id)}  {state}")
            others = [one for one in self._startable() if one != short_name(current)]
            if others:
                self._screen.note(f"Also on this machine: {', '.join(map(printable, others))}.")
            return True
        known = known_model(name)
        asked = {name, *(() if known is None else (known.hub_name,))}
        found = [one for one in models if asked & {one.id, *one.cairn.aliases}]
        if found:
            self._turns.model = found[0].id
            loads = "" if found[0].cairn.state == "loaded" else ", which is loaded first"
            return self._note(f"{printable(found[0].id)} answers from the next message on{loads}.")
        if isinstance(self._server, OwnServer):
            return self._restart(self._server, name)
        return self._complain(
            f"{printable(name)} is not served at {self._server.url}; /model lists what is. "
            "For another model, restart the server with it, or leave and use `cairn chat --model`."
        )

    def _restart(self, server: OwnServer, model: str) -> bool:
        """Restart the chat's own server with another model. If that fails, with the one before."""
        with self._screen.until_interrupt(interrupt):
            ready_model(model, until_then="the chat goes on after that")
        before, server.chosen = server.chosen, model
        self._stop(server)
        try:
            self.start()
        except KeyboardInterrupt:
            server.chosen = before
            raise
        except Unreadable:
            server.chosen = before
            self._screen.complain(f"{printable(model)} cannot be served; the model stays.")
            raise
        self._turns.model = None
        return True

    def _startable(self) -> list[str]:
        """The models on this machine with which a server of the chat can be restarted."""
        if not isinstance(self._server, OwnServer):
            return []
        models = (one for one in all_found().models if not one.is_incomplete)
        return [short_name(one.name) for one in models]

    def _stop(self, server: OwnServer) -> None:
        server.end()
        with self._screen.until_interrupt(server.end), self._screen.waiting("stopping the server"):
            server.wait()

    # --- stored chats -----------------------------------------------------------------------------

    def _sessions(self, _: str) -> bool:
        self.start()
        self._show(self._stored())
        return True

    def _resume(self, name: str) -> bool:
        self.start()
        self.resume(name or None)
        return True

    def _delete(self, name: str) -> bool:
        if not name:
            return self._complain("/delete needs the id of a chat; /sessions lists them.")
        found = self._found(name)
        if name != found and not (self._listed and name.isdecimal() and found in self._listed):
            return self._complain(f"/delete needs a whole id: {found}, or its number in /sessions.")
        self._turns.deleted(found)
        if found == self._conversation.agent:
            self._conversation = Conversation(self._conversation.system)
            return self._note(f"{found} was deleted. New conversation.")
        return self._note(f"{found} was deleted.")

    def _stored(self) -> list[Agent]:
        """The stored conversations that are not empty, the last used one first."""
        return [one for one in self._turns.agents.all() if one.turns]

    def _show(self, agents: Sequence[Agent]) -> None:
        if not agents:
            self._screen.note("No chat is stored yet.")
            return
        self._listed = [one.agent_id for one in agents[:_LISTED]]
        for number, one in enumerate(agents[:_LISTED], 1):
            mark = "*" if one.agent_id == self._conversation.agent else " "
            self._screen.note(
                f"{mark}{number:>3}  {printable(one.agent_id):<14}  {_ago(one.last_accessed):>10}  "
                f"{counted(one.turns, 'turn'):>8}  {self._first_words(one)}"
            )
        if (more := len(agents) - _LISTED) > 0:
            self._screen.note(f"and {more} older ones.")

    def _first_words(self, agent: Agent) -> str:
        said = [
            message.content
            for turn in self._turns.agents.turns(agent.agent_id)[:1]
            for message in turn.messages
            if message.role == "user"
        ]
        text = " ".join(said[0].split()) if said else ""
        return printable(text if len(text) <= _FIRST_WORDS else f"{text[: _FIRST_WORDS - 1]}…")

    def _found(self, name: str | None) -> str:
        """
        The stored chat with an id, a beginning of one, or a number of the last list.

        Args:
            name: None for the last chat.

        Raises:
            Unreadable: there is none, or there are several.
        """
        stored = [one.agent_id for one in self._stored()]
        if name is None:
            others = (one for one in stored if _is_chat(one, PREFIX))
            last = next((one for one in others if one != self._conversation.agent), None)
            if last is None:
                raise Unreadable("There is no earlier chat on this server.")
            return last
        if name in stored:
            return name
        numbers = list(map(str, range(1, len(self._listed) + 1)))
        if name in numbers:
            return self._listed[numbers.index(name)]
        near = [one for one in stored if one.startswith(name) or _is_chat(one, f"{PREFIX}{name}")]
        if len(near) == 1:
            return near[0]
        if near:
            raise Unreadable(f"{printable(name)} may be any of {', '.join(near[:_LISTED])}.")
        if node_named(name) is not None:
            return name  # on another node, which the list does not have
        raise Unreadable(f"There is no chat {printable(name)}; /sessions lists them.")

    # --- the tour ---------------------------------------------------------------------------------

    def _tour(self, _: str) -> bool:
        from cairn.ops.chat.tour import Tour, TourFailed

        tour = Tour(self._screen, self._lines)
        try:
            try:
                with self._screen.until_interrupt(interrupt):
                    tour.run()
            finally:
                with (
                    self._screen.until_interrupt(lambda: None),
                    self._screen.waiting("stopping the tour's server"),
                ):
                    tour.close()
        except TourFailed as failed:
            return self._complain(str(failed))
        except KeyboardInterrupt:
            if not self._screen.interactive:
                raise
            self._screen.note("The tour has ended. Your chat is as it was.")
        return True

    def _model_and_url(self) -> str:
        return f"{printable(self._server.model)} at {self._server.url}"


def _ago(time: str) -> str:
    """How long ago a time in ISO 8601 was; empty if it is none."""
    moment = time_of(time)
    if moment is None:
        return ""
    seconds = int((datetime.now(UTC) - moment).total_seconds())
    for unit, name in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= unit:
            return f"{seconds // unit} {name} ago"
    return "now"


def _is_chat(agent: str, beginning: str) -> bool:
    """Whether an agent's name begins so, after the name of its node perhaps."""
    return agent.startswith(beginning) or agent.partition(".")[2].startswith(beginning)
