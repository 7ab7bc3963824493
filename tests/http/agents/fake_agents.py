"""A scripted fake of a server's agents: a test sets in advance which agents exist."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import trio

from cairn.actors.agents.messages import AgentFacts, AgentHistory, NewAgent
from cairn.actors.errors import AgentBusy, AgentExists, AgentReleased, NotReleasedYet
from cairn.actors.requests.messages import Finished, Keep, StoredTurn
from cairn.engine.answer.parts import AnswerPart, Called, Said, Thought
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
    The agents that a test set.

    Attributes:
        held: all agents, by tenant and name.
        busy: the names of agents with a request in progress.
        made: the facts of agents that were created or forked, by name.
        on_store: called with the name of an agent whose turn was stored.
        released: the names on other nodes of agents that were handed over, by tenant and name.
        elsewhere: the agents that other nodes released for this one, by tenant and name.
        not_released: the names of agents that another node serves.
    """

    def __init__(self) -> None:
        self.held: dict[tuple[str, str], AgentHistory] = {}
        self.busy: set[str] = set()
        self.made: dict[str, AgentFacts] = {}
        self.on_store: Callable[[str], object] | None = None
        self.released: dict[tuple[str, str], str] = {}
        self.elsewhere: dict[tuple[str, str], AgentHistory] = {}
        self.not_released: set[str] = set()

    def have(
        self, name: str = "notes", *turns: StoredTurn, tenant: str = LOCAL, **fields: Any
    ) -> None:
        """Add an agent with these turns."""
        head = turns[-1].request if turns else None
        new = NewAgent(name=name, **fields)
        self.held[tenant, name] = AgentHistory(agent=new, created=1, head=head, turns=turns)

    def store(
        self, tenant: str, keep: Keep, parts: tuple[AnswerPart, ...], finished: Finished
    ) -> None:
        """Add the turn of a request that has ended."""
        assert keep.agent is not None
        held = self.held[tenant, keep.agent]
        turn = StoredTurn(
            request=f"req-{len(held.turns) + 1}",
            previous=held.head,
            created_s=1_700_000_000,
            asked=keep.asked,
            parts=parts,
            note="",
            finished=finished,
        )
        turns = (*held.turns, turn)
        self.held[tenant, keep.agent] = attrs.evolve(held, head=turn.request, turns=turns)
        if self.on_store is not None:
            self.on_store(keep.agent)

    def for_tenant(self, tenant: str) -> FakeTenantAgents:
        """The agents of a tenant."""
        return FakeTenantAgents(self, tenant)

    def facts(self, key: tuple[str, str]) -> AgentFacts:
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


@attrs.frozen
class FakeTenantAgents:
    """The agents of one tenant."""

    _agents: FakeAgents
    _tenant: str

    def all(self) -> tuple[AgentFacts, ...]:
        """All agents."""
        return tuple(self._agents.facts(key) for key in self._agents.held if key[0] == self._tenant)

    def one(self, name: str) -> AgentFacts | None:
        """An agent."""
        key = self._tenant, name
        return self._agents.facts(key) if key in self._agents.held else None

    async def created(self, name: str) -> NewAgent | None:
        """An agent as it was created."""
        await trio.lowlevel.checkpoint()
        held = self._agents.held.get((self._tenant, name))
        return held.agent if held is not None else None

    async def history(self, name: str) -> AgentHistory | None:
        """An agent with its turns."""
        await trio.lowlevel.checkpoint()
        return self._agents.held.get((self._tenant, name))

    async def last_turns(
        self, name: str, before: int | None, most: int
    ) -> tuple[tuple[int, StoredTurn], ...] | None:
        """Some turns of an agent."""
        held = await self.history(name)
        if held is None:
            return None
        numbered = list(enumerate(held.turns, 1))
        return tuple(numbered[: None if before is None else max(0, before - 1)][-most:])

    async def create(self, new: NewAgent) -> AgentFacts:
        """Add an agent."""
        await trio.lowlevel.checkpoint()
        key, held = (self._tenant, new.name), self._agents.held
        if key in held:
            raise AgentExists(new.name)
        held[key] = AgentHistory(agent=new, created=1, head=None, turns=())
        return self._agents.facts(key)

    async def fork(self, name: str, new_name: str, turn: int | None) -> AgentFacts | None:
        """Add an agent with the first turns of another."""
        await trio.lowlevel.checkpoint()
        key, held = (self._tenant, new_name), self._agents.held
        source = held.get((self._tenant, name))
        if source is None:
            return None
        if key in held:
            raise AgentExists(new_name)
        if turn is not None and turn > len(source.turns):
            raise IndexError(turn)
        agent = attrs.evolve(source.agent, name=new_name)
        turns = source.turns[:turn]
        head = turns[-1].request if turns else None
        held[key] = AgentHistory(agent=agent, created=1, head=head, turns=turns)
        return attrs.evolve(self._agents.facts(key), forked_from=name)

    def require_here(self, name: str) -> None:
        """Refuse the name of an agent that was released."""
        if (to := self._agents.released.get((self._tenant, name))) is not None:
            raise AgentReleased(name, to)

    async def release(self, name: str, to: str, node: str) -> bool:
        """Hand an agent over."""
        await trio.lowlevel.checkpoint()
        self.require_here(name)
        if self._agents.held.pop((self._tenant, name), None) is None:
            return False
        self._agents.released[self._tenant, name] = to
        return True

    async def adopt(self, name: str, of: str, node: str) -> AgentFacts | None:
        """Adopt the agent that is on another node, if there is one."""
        await trio.lowlevel.checkpoint()
        if of in self._agents.not_released:
            raise NotReleasedYet(of, node, self._tenant)
        held = self._agents.elsewhere.get((self._tenant, of))
        if held is None:
            return None
        agent = attrs.evolve(held.agent, name=name)
        self._agents.held[self._tenant, name] = attrs.evolve(held, agent=agent)
        return attrs.evolve(self._agents.facts((self._tenant, name)), adopted_from=of)

    async def delete(self, name: str) -> bool:
        """Remove an agent."""
        await trio.lowlevel.checkpoint()
        if name in self._agents.busy:
            raise AgentBusy(name, "is answering another request")
        return self._agents.held.pop((self._tenant, name), None) is not None
