"""What the HTTP layer asks and hears of agents. Plain values, as in ``messages.py``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import attrs

from cairn.actors.requests.messages import StoredTurn
from cairn.engine.prompt.template import Message
from cairn.journal.agents import Status
from cairn.journal.events import FinishReason


@attrs.frozen(kw_only=True)
class NewAgent:
    """
    An agent as its client wants it.

    Attributes:
        model: the model that it asks for; empty for the one that is served.
        system: its system prompt, if any.
        tools: as the template takes them.
        max_context: the tokens that prompt and answer may have together; None for the model's.
        persist: whether it is there after the server was stopped.
    """

    name: str
    model: str = ""
    system: str | None = None
    tools: tuple[Mapping[str, Any], ...] = ()
    max_context: int | None = None
    persist: bool = True


@attrs.frozen(kw_only=True)
class AgentFacts:
    """
    An agent at this moment.

    Attributes:
        turns: how many its history has.
        context_tokens: of its last prompt and answer together; 0 before the first.
        context_left: what the context has beside them: its own limit, or the model's.
        finish_reason: how its last answer ended; None before the first.
        used_us: when its last turn ended, or it was created: microseconds since 1970.
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


@attrs.frozen(kw_only=True)
class AgentHistory:
    """
    An agent with all that was said.

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
        """What its next prompt begins with."""
        system = self.agent.system
        first = () if system is None else (Message(role="system", content=system),)
        return (*first, *(message for turn in self.turns for message in turn.messages))


class AgentService(Protocol):
    """The agents of one tenant. An agent of another tenant is not found."""

    def all(self) -> tuple[AgentFacts, ...]:
        """The tenant's agents, the last used one first. Changes nothing."""

    def one(self, name: str) -> AgentFacts | None:
        """An agent, if there is one. Changes nothing."""

    async def created(self, name: str) -> NewAgent | None:
        """
        An agent as it was created, if there is one. No turn of it is read. Raises as ``history``.
        """

    async def history(self, name: str) -> AgentHistory | None:
        """
        An agent with all that was said, if there is one.

        Raises:
            RefusalError: the journal cannot be read now.
        """

    async def create(self, new: NewAgent) -> AgentFacts:
        """
        Have an agent.

        Raises:
            AgentExists: there is one of that name.
            TooManyAgents: there are as many as there may be.
            RefusalError: that cannot be put on record now.
        """

    async def fork(self, name: str, new_name: str, turn: int | None) -> AgentFacts | None:
        """
        Have another agent, which begins with the history of one up to a turn; None where there is
        none of that name. Raises as ``create``.

        Args:
            turn: its number, from 1; 0 for none of them, None for the last.

        Raises:
            IndexError: it has no such turn.
        """

    async def delete(self, name: str) -> bool:
        """
        Have an agent no longer. False where there is none.

        Raises:
            AgentBusy: it is at work.
            RefusalError: that cannot be put on record now.
        """
