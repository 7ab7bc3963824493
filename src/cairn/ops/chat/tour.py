"""
The tour of a chat: in two minutes, what Cairn does that other servers do not.

It has a server of its own with Pebble, in a temporary directory, which it stops and damages. The
chat, its server and its data are not touched.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
from pathlib import Path

from cairn.engine.model.builtin import builtin_directory, builtin_fault
from cairn.ops.chat.client import TurnFailed
from cairn.ops.chat.conversation import Conversation
from cairn.ops.chat.server import OwnServer
from cairn.ops.chat.terminal.keyboard import Lines
from cairn.ops.chat.terminal.screen import Screen
from cairn.ops.chat.terminal.signals import signals_later
from cairn.ops.chat.transcript import Answer
from cairn.ops.chat.turns import Turns
from cairn.ops.cli import Unreadable
from cairn.ops.common.program import as_called
from cairn.ops.drills.files import bit_flipped

SYSTEM = (
    "You are a friendly assistant. Answer in short sentences. The path goes past the old bridge. "
    "The lake lies behind the forest. The road to the pass starts at the station, and the wind "
    "sings about the sea."
)
FACT = "Hello! My name is Jordis. Please remember that I live in Zanport."
QUESTION = "What is my name?"
EDITED = "Where do I live?"

# Small blocks, so that a short conversation has several.
_OPTIONS = ("--block-tokens", "16")
_SETTINGS = {"temperature": 0.0, "seed": 1, "max_tokens": 48}
_BROKEN = "broken:"


class TourFailed(Exception):
    """The tour cannot go on. The message says why."""


class Tour:
    """
    A tour.

    Args:
        lines: where the user presses Enter, if there is a terminal.
    """

    def __init__(self, screen: Screen, lines: Lines) -> None:
        self._screen = screen
        self._lines = lines
        self._folder = tempfile.TemporaryDirectory(prefix="cairn-tour-")
        self._data_dir = Path(self._folder.name)
        self._server = OwnServer(self._data_dir, str(builtin_directory()), *_OPTIONS, is_apart=True)
        self._turns = Turns(self._server, screen, dict(_SETTINGS))
        self._conversation = Conversation(SYSTEM)

    def run(self) -> None:
        """
        Show all of it.

        Raises:
            TourFailed: something went differently from what the tour says.
            KeyboardInterrupt: the user ended it.
        """
        if fault := builtin_fault():
            raise TourFailed(fault)
        try:
            self._show()
        except (TurnFailed, Unreadable) as failed:
            words = failed.format_message() if isinstance(failed, Unreadable) else str(failed)
            raise TourFailed(f"The tour cannot go on. {words}") from failed

    def close(self) -> None:
        """Stop the server, and delete the directory. May be called again."""
        self._server.end()
        self._server.wait()
        with contextlib.suppress(OSError):
            self._folder.cleanup()

    def _show(self) -> None:
        self._explain(
            "The tour has a server of its own, with Pebble, in a temporary directory. Your chat "
            "waits. The bar below each answer is the prompt: full blocks were reused, light ones "
            "computed."
        )
        self._start("starting the tour's server")
        self._step(1, "Tell it something. Nothing can be reused yet.")
        self._say(FACT)
        self._step(2, "Ask for it. The prompt is the whole conversation; only its end is new.")
        asked = self._say(QUESTION)
        self._require_reuse(asked)
        self._step(3, "Edit the question. What comes before the edit is reused.")
        self._require_reuse(self._say(EDITED, edits=True))
        self._step(4, "Stop the server and start another. The conversation comes from disk.")
        self._restart()
        before = self._say(QUESTION)
        self._require_reuse(before)
        self._step(5, "Stop it again, and flip one bit of a file with stored KV.")
        file = self._restart(damages=True)
        self._screen.note(f"One bit of {file} is flipped. The same question again:")
        after = self._say(QUESTION, edits=True)
        self._caught(before, after)
        self._finish()

    # --- the steps --------------------------------------------------------------------------------

    def _explain(self, text: str) -> None:
        self._screen.note(text)

    def _step(self, number: int, text: str) -> None:
        if self._screen.interactive and self._lines.ask("Press Enter to go on ") is None:
            raise KeyboardInterrupt
        self._screen.note(f"\n{number}/5  {text}")

    def _say(self, text: str, *, edits: bool = False) -> Answer:
        """Ask, and show the answer with its bar."""
        self._screen.note(f"> {'/edit ' if edits else ''}{text}")
        before = self._conversation
        asked = before.edited(text) if edits else before.asking(text)
        turn = self._turns.ask(before, asked)
        if turn.stopped:
            raise KeyboardInterrupt
        self._conversation = turn.conversation
        self._screen.result(turn.answer, always_bar=True)
        return turn.answer

    def _start(self, words: str) -> None:
        with self._screen.waiting(words) as waiting:
            with signals_later():
                self._server.start()
            self._server.wait_ready(lambda what: waiting.update(f"{words}: {what}"))

    def _restart(self, *, damages: bool = False) -> str:
        """
        Stop the server and start it again.

        Args:
            damages: flip a bit of a file in between.

        Returns:
            The name of that file; empty without damage.
        """
        with self._screen.waiting("stopping the server"):
            self._server.end()
            self._server.wait()
        name = ""
        if damages:
            file = self._stored_block()
            bit_flipped(file)
            name = file.name
        self._start("starting another")
        return name

    def _stored_block(self) -> Path:
        """The file of a block in the middle of the conversation."""
        from cairn.journal.agents import session_of
        from cairn.journal.replay import replay
        from cairn.journal.state import SessionId
        from cairn.ops.drills.server.private_server import stored_rows

        assert self._conversation.agent is not None
        session = SessionId(session_of(self._conversation.agent))
        last = replay(stored_rows(self._data_dir)).state.session(session).last
        keys = last.prompt_keys if last is not None else ()
        if not keys:
            raise TourFailed("The tour found no stored block of its conversation.")
        name = f"{keys[len(keys) // 2]}.safetensors"
        found = list((self._data_dir / "blocks").rglob(name))
        if not found:
            raise TourFailed(f"The tour's server did not write the block {name}.")
        return found[0]

    # --- what must be so --------------------------------------------------------------------------

    def _require_reuse(self, answer: Answer) -> None:
        if answer.cairn is None or not answer.cairn.reused_tokens:
            raise TourFailed(
                as_called(
                    "Nothing was reused here, which is not as it should be. If `ops doctor` says "
                    "that reuse is in whole blocks on this machine, its advice helps the tour, too."
                )
            )

    def _caught(self, before: Answer, after: Answer) -> None:
        """Show the row of the damage, and that the answer did not change."""
        from cairn.journal.events import BlockFileRejected
        from cairn.journal.rows.codec import decode
        from cairn.ops.drills.server.private_server import stored_rows

        events = map(decode, stored_rows(self._data_dir))
        found = [one for one in events if isinstance(one.event, BlockFileRejected)]
        if not found:
            raise TourFailed("The flipped bit was not caught, which is a bug of Cairn.")
        for one in found:
            assert isinstance(one.event, BlockFileRejected)
            self._screen.note(
                f"Caught: row {one.position} of the journal is {one.event.kind}, because the "
                f"file's {one.event.reason} is not the one on record. Nothing of it was used."
            )
        if after.text != before.text:
            raise TourFailed("The answer is not the one before, which is a bug of Cairn.")
        self._screen.note("The answer is the same: what the file held was computed again.")

    def _finish(self) -> None:
        with self._screen.waiting("checking the journal"):
            self._server.end()
            self._server.wait()
            command = (sys.executable, "-P", "-m", "cairn.ops", "verify", "--data-dir")
            done = subprocess.run(
                (*command, str(self._data_dir)), capture_output=True, text=True, check=False
            )
        lines = [line for line in done.stdout.splitlines() if line.startswith(_BROKEN)]
        if done.returncode or not lines:
            raise TourFailed(f"The tour's journal failed its check:\n{done.stdout}{done.stderr}")
        self._screen.note(
            as_called(
                f"\nEvery decision of this tour is in a journal; `ops verify` checked it: "
                f"{lines[0]}. `ops drill` damages more. The tour has ended; your chat goes on."
            )
        )
