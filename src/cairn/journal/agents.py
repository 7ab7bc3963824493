"""
Which agents exist, and where in the journal their histories are: a fold of the journal next to that
of the stored turns, which include the turns of agents. No path decision reads it.

An agent is a name for a line of turns: its *head* is the last turn, and each turn names the one
before. A fork is another head on the same line, so the two share their common turns without a copy.
A turn is added to an agent when its request has finished, and only if it continues from the head.

A base keeps the rows of existing agents that have texts (``needed``), because a client that knows
only an agent's name could not send them again. An agent that was released to another node is not
found here, but its history stays until it is forgotten: the other node may not have adopted it yet.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final, Literal

import attrs

from cairn.journal import events as ev
from cairn.journal.state import SessionId, State
from cairn.journal.tenants import AGENT_SESSIONS, agent_session
from cairn.journal.turns import Place, Turns, broke

NAME_MAX: Final = 64

Status = Literal["hot", "warm", "cold"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def is_agent_name(name: str) -> bool:
    """
    Whether an agent may have this name, which becomes part of URLs and of the name of a session.
    """
    return len(name) <= NAME_MAX and _NAME.fullmatch(name) is not None


def session_of(agent: str) -> str:
    """The name, within its tenant, of an agent's session."""
    return f"{AGENT_SESSIONS}{agent}"


@attrs.frozen(kw_only=True)
class Agent:
    """
    An agent, without its texts.

    Attributes:
        created: the row of ``agent_created`` or ``session_adopted``, which has its system prompt
            and its tools.
        head: the request of its last turn; None before the first.
        turns: how many turns it has, including those that it was created with.
        used_us: when the last turn ended, or the agent was created: microseconds since 1970, for
            people.
        adopted_from: its name on the node that it came from; None if it was created here.
        released: the row of ``session_released``; 0 if it was not handed over to another node.
        released_to: its name there.
    """

    name: str
    tenant: str
    model: str
    max_context: int | None
    persist: bool
    created_s: int
    forked_from: str | None
    created: int
    head: str | None
    turns: int
    used_us: int
    adopted_from: str | None = None
    released: int = 0
    released_to: str | None = None

    @property
    def session(self) -> str:
        """The id of the agent's session."""
        return agent_session(self.tenant, self.name)

    def context(self, model_tokens: int) -> int:
        """
        How many tokens a prompt and its answer may have together.

        Args:
            model_tokens: the context of the model that is served.
        """
        return model_tokens if self.max_context is None else min(self.max_context, model_tokens)


_Key = tuple[str, str]  # (tenant, name)


@attrs.frozen(kw_only=True)
class AgentsContents:
    """
    All that a fold of the agents holds at one row, without their turns.

    Attributes:
        agents: in the order in which the fold has them.
        last: the last row that made or changed an agent: (row, request whose turn was added; empty
            if none was), (tenant, name), and the agent before it; None if there was none.
    """

    agents: tuple[Agent, ...] = ()
    last: tuple[tuple[int, str], _Key, Agent | None] | None = None


class Agents:
    """
    The agents of a journal and their turns: call ``see`` with each of its events.

    Attributes:
        turns: the stored turns.
    """

    def __init__(self, turns: Turns, begins: AgentsContents = AgentsContents()) -> None:
        """
        Args:
            begins: what an earlier fold held, to go on from there.
        """
        self.turns = turns
        self._agents: dict[_Key, Agent] = {(one.tenant, one.name): one for one in begins.agents}
        self._last = begins.last

    def __len__(self) -> int:
        return len(self._agents)

    def see(self, recorded: ev.Recorded) -> None:
        """Apply the next event, to the turns first."""
        self.turns.see(recorded)
        match recorded.event:
            case ev.AgentCreated() as new:
                made = Agent(
                    name=new.agent,
                    tenant=new.tenant,
                    model=new.model,
                    max_context=new.max_context,
                    persist=new.persist,
                    created_s=new.created_s,
                    forked_from=new.forked_from,
                    created=recorded.position,
                    head=new.head,
                    turns=sum(1 for _ in self.turns.back_from(new.head)),
                    used_us=recorded.time_us,
                )
                self._set(made, (recorded.position, ""))
            case ev.SessionAdopted() as come:
                made = Agent(
                    name=come.agent,
                    tenant=come.tenant,
                    model=come.model,
                    max_context=come.max_context,
                    persist=True,
                    created_s=come.created_s,
                    forked_from=None,
                    created=recorded.position,
                    head=None,
                    turns=0,
                    used_us=recorded.time_us,
                    adopted_from=come.of_agent,
                )
                self._set(made, (recorded.position, ""))
            case ev.TurnAdopted(request=request):
                self._go_on(request, recorded)
            case ev.SessionReleased(agent=name, tenant=tenant, to=to):
                agent = self._agents.get((tenant, name))
                if agent is not None:
                    gone = attrs.evolve(agent, released=recorded.position, released_to=to)
                    self._set(gone, (recorded.position, ""))
            case ev.AgentDeleted(agent=name, tenant=tenant):
                self._forget([(tenant, name)])
            case ev.RequestFinished(request=request):
                self._go_on(request, recorded)
            case ev.InvariantViolated(invariant=invariant, at_position=at, request=named):
                if self._last is not None and broke(self._last[0], at, named, invariant):
                    self._undo()
            case ev.JournalPruned(cut=cut):
                self.turns.drop(self.turns.of_agents(cut) - self._reached(self._agents.values()))
            case ev.ServerStopped() | ev.ServerLost():
                self._forget([key for key, agent in self._agents.items() if not agent.persist])
            case _:
                pass

    def contents(self) -> AgentsContents:
        """All that it holds now, without the turns."""
        return AgentsContents(agents=tuple(self._agents.values()), last=self._last)

    def find(self, name: str, tenant: str, *, released: bool = False) -> Agent | None:
        """
        A tenant's agent by its name, or None.

        Args:
            released: find also one that was released, whose history is still here.
        """
        found = self._agents.get((tenant, name))
        return found if found is not None and (released or not found.released) else None

    def of(self, tenant: str | None, *, released: bool = False) -> tuple[Agent, ...]:
        """
        The agents of a tenant, or of all tenants, the most recently used first.

        Args:
            released: include those that were released, whose history is still here.
        """
        found = [
            agent
            for agent in self._agents.values()
            if tenant in (None, agent.tenant) and (released or not agent.released)
        ]
        return tuple(sorted(found, key=lambda agent: agent.used_us, reverse=True))

    def history(self, agent: Agent) -> tuple[Place, ...]:
        """The turns of an agent, the oldest first."""
        return tuple(place for _, place in self.turns.back_from(agent.head))[::-1]

    def head_after(self, agent: Agent, turn: int) -> str | None:
        """
        The request of an agent's turn by its number, counted from 1; None for 0, which means before
        the first turn.

        Raises:
            IndexError: it has no such turn.
        """
        if not 0 <= turn <= agent.turns:
            raise IndexError(f"{agent.name} has {agent.turns} turns, none of them is {turn}")
        heads = [request for request, _ in self.turns.back_from(agent.head)]
        return heads[agent.turns - turn] if turn else None

    def tokens(self, agent: Agent) -> int:
        """
        The tokens of an agent's history: prompt and answer of its last turn; 0 before the first.
        """
        head = self.turns.held(agent.head)
        return head.tokens if head is not None else 0

    def finish_reason(self, agent: Agent) -> ev.FinishReason | None:
        """How the last answer of an agent ended; None before the first."""
        head = self.turns.held(agent.head)
        return head.finish_reason if head is not None else None

    def status(self, agent: Agent, state: State) -> Status:
        """
        Where the KV of an agent's history is. ``hot``: its session holds a slab, or the beginning
        of the history is in memory. ``warm``: it is in a file. ``cold``: it would be computed
        again, for example after another model was loaded. A fork without turns of its own has the
        status of the agent that it was forked from.
        """
        head = self.turns.held(agent.head)
        named = (agent.session, head.session) if head is not None else (agent.session,)
        for name in named:
            session = state.sessions.get(SessionId(name))
            if session is None:
                continue
            if session.slab is not None:
                return "hot"
            model, last = state.model, session.last
            if last is None or model is None or last.fingerprint != model.fingerprint:
                continue
            front = state.blocks.get(last.prompt_keys[0]) if last.prompt_keys else None
            if front is not None and front.usable:
                return "hot"
            if front is not None and front.loadable:
                return "warm"
        return "cold"

    def needed(self) -> tuple[set[int], set[str]]:
        """
        What the agents need, released or not: the rows that created or released them, and the
        requests of their turns.
        """
        agents = self._agents.values()
        rows = {row for agent in agents for row in (agent.created, agent.released) if row}
        return rows, self._reached(agents)

    def _go_on(self, request: str, recorded: ev.Recorded) -> None:
        """Make a turn that has ended the head of its agent."""
        place = self.turns.held(request)
        if place is None or place.agent is None:
            return
        agent = self._agents.get((place.tenant, place.agent))
        if agent is None or agent.head != place.previous:
            return
        further = attrs.evolve(agent, head=request, turns=agent.turns + 1, used_us=recorded.time_us)
        self._set(further, (recorded.position, request))

    def _set(self, agent: Agent, by: tuple[int, str]) -> None:
        """Add or change an agent, and note what was before in case the row broke an invariant."""
        key = agent.tenant, agent.name
        self._last = by, key, self._agents.get(key)
        self._agents[key] = agent

    def _undo(self) -> None:
        """Take back what the last ``_set`` did."""
        assert self._last is not None
        _, key, before = self._last
        if before is None:
            self._agents.pop(key, None)
        else:
            self._agents[key] = before

    def _forget(self, keys: Iterable[_Key]) -> None:
        """
        Forget agents, and those of their turns that are not in the history of another agent. All
        other turns stay, even if they belong to no agent: in a journal that was pruned, a later
        agent may begin with a turn whose own agent no longer has a row.
        """
        gone = [agent for key in keys if (agent := self._agents.pop(key, None)) is not None]
        if not gone:
            return
        wanted = self._reached(self._agents.values())
        self.turns.drop(self._reached(gone) - wanted)

    def _reached(self, agents: Iterable[Agent]) -> set[str]:
        """The requests of all turns in the histories of these agents."""
        found: set[str] = set()
        for agent in agents:
            for request, _ in self.turns.back_from(agent.head):
                if request in found:
                    break
                found.add(request)
        return found
