"""What goes between the HTTP layer and the agents: plain values, as in requests/messages.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import attrs

from cairn.actors.requests.messages import StoredTurn
from cairn.engine.prompt.template import Message
from cairn.journal.agents import Status
from cairn.journal.events import FinishReason


@attrs.frozen(kw_only=True)
class NewAgent:
    """
    An agent to create.

    Attributes:
        model: the model that answers; empty for the default.
        system: its system prompt, if any.
        tools: as the template takes them.
        max_context: the limit of prompt and answer together, in tokens; None for the model's.
        persist: whether it outlives the server.
    """

    name: str
    model: str = ""
    system: str | None = None
    tools: tuple[Mapping[str, object], ...] = ()
    max_context: int | None = None
    persist: bool = True


@attrs.frozen(kw_only=True)
class AgentFacts:
    """
    An agent at this moment.

    Attributes:
        turns: how many its history has.
        context_tokens: of its last prompt and answer together; 0 before the first.
        context_left: how many more its context holds, or the model's.
        finish_reason: how its last answer ended; None before the first.
        used_us: when its last turn ended, or it was created: microseconds since 1970.
        adopted_from: its name on the node that handed it over; None if none did.
    """

    name: str
    model: str
    max_context: int | None
    persist: bool
    status: Status
    turns: int
    context_tokens: int
    context_left: int
    finish_reason: FinishReason | None
    created_s: int
    used_us: int
    forked_from: str | None
    adopted_from: str | None = None


@attrs.frozen(kw_only=True)
class AgentHistory:
    """
    An agent with its turns.

    Attributes:
        head: the request of its last turn; None before the first.
        created: the row in which it was created.
    """

    agent: NewAgent
    created: int
    head: str | None
    turns: tuple[StoredTurn, ...]

    @property
    def messages(self) -> tuple[Message, ...]:
        """The messages with which its next prompt begins."""
        system = self.agent.system
        first = () if system is None else (Message(role="system", content=system),)
        return (*first, *(message for turn in self.turns for message in turn.messages))


class AgentService(Protocol):
    """The agents of one tenant. An agent of another tenant is not found."""

    def all(self) -> tuple[AgentFacts, ...]:
        """The tenant's agents, the last used one first. Changes nothing."""

    def require_here(self, name: str) -> None:
        """
        Raises:
            AgentReleased: the tenant had an agent of this name, which another node has now.
        """

    def one(self, name: str) -> AgentFacts | None:
        """An agent, if it exists. Changes nothing."""

    async def created(self, name: str) -> NewAgent | None:
        """
        An agent as it was created, if it exists. Reads no turns. Raises as ``history``.
        """

    async def history(self, name: str) -> AgentHistory | None:
        """
        An agent with its turns, if it exists.

        Raises:
            RefusalError: the journal cannot be read now.
        """

    async def last_turns(
        self, name: str, before: int | None, most: int
    ) -> tuple[tuple[int, StoredTurn], ...] | None:
        """
        Some turns of an agent with their numbers, in order; None if there is no such agent. Raises
        as ``history``.

        Args:
            before: only those with a smaller number, counted from 1; None for all.
            most: how many to give at most: the last ones.
        """

    async def create(self, new: NewAgent) -> AgentFacts:
        """
        Create an agent.

        Raises:
            AgentExists: the tenant has one of this name.
            TooManyAgents: the tenant has as many as it may have.
            RefusalError: that cannot be recorded now.
        """

    async def fork(self, name: str, new_name: str, turn: int | None) -> AgentFacts | None:
        """
        Create an agent with the history of another one up to a turn; None if there is no agent
        ``name``. Raises as ``create``.

        Args:
            turn: the number of the last turn, from 1; 0 for no turns, None for all.

        Raises:
            IndexError: the agent has no such turn.
        """

    async def delete(self, name: str) -> bool:
        """
        Delete an agent, or what is still here of one that was released. False if there is none.

        Raises:
            AgentBusy: the agent is busy.
            RefusalError: that cannot be recorded now.
        """

    async def release(self, name: str, to: str, node: str) -> bool:
        """
        Hand an agent over to another node, which can adopt it from then on. False if there is none.

        Args:
            to: the name of the agent there.

        Raises:
            AgentBusy: the agent is busy; a turn in progress is not cut.
            AgentReleased: it was released before.
            CannotHandOver: it does not outlive the server, or there is no such node.
            RefusalError: that cannot be recorded now.
        """

    async def adopt(self, name: str, of: str, node: str) -> AgentFacts | None:
        """
        Adopt an agent that another node released for this one. Does nothing if that was done. None
        if the tenant has no such agent there.

        Args:
            name: of the agent from then on; that of the release, or another one.
            of: its name there.

        Raises:
            AgentExists, TooManyAgents: as ``create``.
            AgentReleased: it was released to another node, or this name was.
            NotReleasedYet: it was not released.
            CannotHandOver: it was adopted before, under another name or as one that was deleted
                since; or there is no such node.
            JournalUnread: the other journal cannot be read, or is not sound.
            RefusalError: that cannot be recorded now.
        """
