"""A scripted stand-in for the agents of a server: what is there is written down beforehand."""

from __future__ import annotations

from typing import Any

import attrs
import trio

from cairn.actors.agents.messages import AgentFacts, AgentHistory, NewAgent
from cairn.actors.requests.messages import AgentBusy, AgentExists, Finished, StoredTurn
from cairn.engine.answer.parts import Called, Said, Thought
from cairn.engine.prompt.template import Message
from cairn.journal.tenants import LOCAL

TURN = StoredTurn(
    request="req-0",
    previous=None,
    created_s=1_700_000_000,
    asked=(
        Message(role="user", content="The stone lies on the path."),
        Message(role="tool", content="Rain.", tool_call_id="c1"),
    ),
    parts=(
        Thought("Hm."),
        Said("So it does."),
        Called(index=0, id="c2", name="look", arguments='{"far":true}'),
    ),
    note="",
    finished=Finished(finish_reason="stop", prompt_tokens=40, cached_tokens=0, completion_tokens=5),
)


class FakeAgents:
    """
    Agents as they were set.

    Attributes:
        held: by tenant and name.
        busy: those that are at work.
        made: the facts of those that were created or forked, by name.
    """

    def __init__(self) -> None:
        self.held: dict[tuple[str, str], AgentHistory] = {}
        self.busy: set[str] = set()
        self.made: dict[str, AgentFacts] = {}

    def have(
        self, name: str = "notes", *turns: StoredTurn, tenant: str = LOCAL, **fields: Any
    ) -> None:
        """Have an agent with these turns."""
        head = turns[-1].request if turns else None
        new = NewAgent(name=name, **fields)
        self.held[tenant, name] = AgentHistory(agent=new, created=1, head=head, turns=turns)

    def all(self, tenant: str = LOCAL) -> tuple[AgentFacts, ...]:
        """Those of a tenant."""
        return tuple(self._facts(key) for key in self.held if key[0] == tenant)

    def one(self, name: str, tenant: str = LOCAL) -> AgentFacts | None:
        """One of them."""
        return self._facts((tenant, name)) if (tenant, name) in self.held else None

    async def created(self, name: str, tenant: str = LOCAL) -> NewAgent | None:
        """One of them as it was created."""
        await trio.lowlevel.checkpoint()
        held = self.held.get((tenant, name))
        return held.agent if held is not None else None

    async def history(self, name: str, tenant: str = LOCAL) -> AgentHistory | None:
        """One of them with its turns."""
        await trio.lowlevel.checkpoint()
        return self.held.get((tenant, name))

    async def create(self, new: NewAgent, tenant: str = LOCAL) -> AgentFacts:
        """Have one more."""
        await trio.lowlevel.checkpoint()
        if (tenant, new.name) in self.held:
            raise AgentExists(new.name)
        self.held[tenant, new.name] = AgentHistory(agent=new, created=1, head=None, turns=())
        return self._facts((tenant, new.name))

    async def fork(
        self, name: str, new_name: str, turn: int | None, tenant: str = LOCAL
    ) -> AgentFacts | None:
        """Have one more with the first turns of another."""
        await trio.lowlevel.checkpoint()
        source = self.held.get((tenant, name))
        if source is None:
            return None
        if (tenant, new_name) in self.held:
            raise AgentExists(new_name)
        if turn is not None and turn > len(source.turns):
            raise IndexError(turn)
        agent = attrs.evolve(source.agent, name=new_name)
        turns = source.turns[:turn]
        head = turns[-1].request if turns else None
        self.held[tenant, new_name] = AgentHistory(agent=agent, created=1, head=head, turns=turns)
        return attrs.evolve(self._facts((tenant, new_name)), forked_from=name)

    async def delete(self, name: str, tenant: str = LOCAL) -> bool:
        """Have it no longer."""
        await trio.lowlevel.checkpoint()
        if name in self.busy:
            raise AgentBusy(name, "is answering another request")
        return self.held.pop((tenant, name), None) is not None

    def _facts(self, key: tuple[str, str]) -> AgentFacts:
        held = self.held[key]
        agent = held.agent
        return AgentFacts(
            name=agent.name,
            model=agent.model,
            max_context=agent.max_context,
            persist=agent.persist,
            status="warm",
            turns=len(held.turns),
            context_tokens=45 if held.turns else 0,
            context_left=955,
            finish_reason=held.turns[-1].finished.finish_reason if held.turns else None,
            created_s=1_700_000_000,
            used_us=1_700_000_100_999_999,
            forked_from=None,
        )
