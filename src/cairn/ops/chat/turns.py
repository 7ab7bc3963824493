"""
The turns of a chat: asks the server, which stores what was said in an agent.

An agent is created for the first message of a conversation, and forked where the conversation goes
on from an earlier point than the agent does. What the server has is looked up before each turn:
another program may have continued the agent, and a server that was killed may not have the last
turn. So an answer always follows the messages that the user sees.
"""

from __future__ import annotations

import time
import uuid
from typing import Any

import attrs

from cairn.ops.chat.agents import BUSY, NOT_FOUND, Agents, CallStopped, path_of
from cairn.ops.chat.client import Stream, TurnFailed
from cairn.ops.chat.conversation import Conversation
from cairn.ops.chat.server import Server
from cairn.ops.chat.terminal.screen import Screen
from cairn.ops.chat.transcript import Answer

PREFIX = "chat-"
"""Begins the names of the agents of chats."""

_BUSY_TRIES = 40
_BUSY_S = 0.25


@attrs.frozen
class Turn:
    """
    The end of a turn.

    Attributes:
        conversation: with the answer; as it was if there is none.
        answer: what arrived of it.
        stopped: whether the user stopped it.
    """

    conversation: Conversation
    answer: Answer
    stopped: bool


class Turns:
    """
    Asks a server.

    Args:
        stores: whether the server keeps the chats after ``close``.

    Attributes:
        settings: sampling parameters of each request.
        model: that answers, if it is not the default one.
        think: whether the model thinks before it answers, if it can.
    """

    def __init__(
        self,
        server: Server,
        screen: Screen,
        settings: dict[str, Any],
        *,
        think: bool = False,
        stores: bool = True,
    ) -> None:
        self._server = server
        self._screen = screen
        self._stores = stores
        self._made: dict[str, int] = {}  # agents of this chat, and the turns they have
        self.agents = Agents(server)
        self.settings = settings
        self.model: str | None = None
        self.think = think

    def ask(self, before: Conversation, asked: Conversation) -> Turn:
        """
        Show an answer as it arrives.

        Args:
            before: the conversation so far.
            asked: with the new message.

        Raises:
            TurnFailed: there is no answer. The conversation is as it was.
        """
        for attempt in range(_BUSY_TRIES):
            try:
                with (
                    self.agents.cuttable() as cut,
                    self._screen.until_interrupt(cut),
                    self._screen.waiting("waiting for the answer"),
                ):
                    ready = self._prepared(asked)
            except CallStopped:
                return Turn(before, Answer(), stopped=True)
            assert ready.agent is not None
            path = f"{path_of(ready.agent)}/generate"
            server = self._server
            stream = Stream(server.url, path, self._body(ready), server.options, server.key)
            try:
                answer = self._screen.answer(stream)
            except TurnFailed as failed:
                # The server has not noticed yet that the last answer was stopped.
                if failed.code != BUSY or attempt == _BUSY_TRIES - 1:
                    raise
                with self._screen.waiting("waiting until the last answer has ended"):
                    time.sleep(_BUSY_S)
                continue
            break
        if stream.stopped and not answer.text:
            return Turn(before, answer, stopped=True)
        ended = ready.answered(answer.text, answer.thoughts, stored=not stream.stopped)
        if ready.agent in self._made:
            self._made[ready.agent] = ended.agent_turns
        return Turn(ended, answer, stream.stopped)

    def resumed(self, name: str) -> Conversation:
        """
        A stored conversation.

        Raises:
            TurnFailed: there is none of this name, or it calls tools.
        """
        found = self.agents.find(name)
        if found.tools:
            raise TurnFailed(
                f"{name} calls tools, which a chat on a terminal cannot answer. Choose another."
            )
        return Conversation.stored(name, found.system_prompt, self.agents.turns(name))

    def deleted(self, name: str) -> None:
        """
        Delete a stored conversation.

        Raises:
            TurnFailed: it cannot be deleted.
        """
        self.agents.delete(name)
        self._made.pop(name, None)

    def close(self) -> None:
        """Delete the agents of this chat that are empty, or that are not to be stored."""
        for name, turns in self._made.items():
            if self._stores and turns:
                continue
            for _ in range(_BUSY_TRIES):
                try:
                    self.agents.delete(name)
                except TurnFailed as failed:
                    if failed.code == BUSY:
                        time.sleep(_BUSY_S)
                        continue
                break
        self._made.clear()

    def _prepared(self, asked: Conversation) -> Conversation:
        """The conversation with an agent that has exactly the turns that it begins with."""
        if asked.agent is not None:
            try:
                asked = asked.with_turns(self.agents.find(asked.agent).turns)
            except TurnFailed as failed:
                if failed.code != NOT_FOUND:
                    raise
                self._screen.note(
                    f"{asked.agent} was deleted on the server. This chat gets another name."
                )
                asked = asked.in_no_agent()
        if asked.agent is not None and not asked.must_fork:
            return asked
        name = f"{PREFIX}{uuid.uuid4().hex[:8]}"
        self._made[name] = 0  # before it exists: a call that is stopped may have created it
        if asked.agent is None:
            made = self.agents.create(name, asked.system, persist=self._stores)
        else:
            made = self.agents.fork(asked.agent, name, len(asked.ends))
        self._made[made] = self._made.pop(name)
        return asked.in_agent(made)

    def _body(self, asked: Conversation) -> dict[str, Any]:
        return {
            "model": self.model or self._server.model,
            "messages": asked.unsent(),
            "stream": True,
            "stream_options": {"include_usage": True},
            "enable_thinking": self.think,
            "explain": True,
            **self.settings,
        }
