"""
What a base keeps of existing agents: how they were created and the turns of their histories, with
the rows that have the texts. A client that knows only an agent's name could not send them again.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs
from immutables import Map

from cairn.journal import events as ev
from cairn.journal.agents import Agent, Agents, AgentsContents
from cairn.journal.rows.codec import Row, chain_fault, decode
from cairn.journal.turns import Place, Turns, TurnsContents


@attrs.frozen(kw_only=True)
class Histories:
    """
    The agents of the rows that a base replaces.

    Attributes:
        agents: as they were at the cut.
        places: of their turns, by request.
        rows: those that created or released them, and those of the turns, as they are stored.
    """

    agents: tuple[Agent, ...] = ()
    places: Map[str, Place] = Map()
    rows: tuple[Row, ...] = ()

    def check(self, position: int) -> None:
        """
        Check that agents and turns are those of the rows, and that each row has its hash.

        Args:
            position: of the base.

        Raises:
            ValueError: they are not.
        """
        rows = self.by_position()
        of_agents = {row for one in self.agents for row in (one.created, one.released) if row}
        if {*rows} != of_agents | rows_of(self.places):
            raise ValueError("the rows are not those of its agents")
        events: dict[int, ev.Event] = {}
        for row in self.rows:
            fault = chain_fault(row, row.previous_hash)
            if fault is not None or not 0 < row.position <= position:
                raise ValueError(f"row {row.position} of an agent was changed")
            events[row.position] = decode(row).event
        for agent in self.agents:
            match events[agent.created]:
                case ev.AgentCreated(agent=agent.name, tenant=agent.tenant):
                    pass
                case ev.SessionAdopted(
                    agent=agent.name, tenant=agent.tenant, of_agent=agent.adopted_from
                ):
                    pass
                case _:
                    raise ValueError(f"row {agent.created} did not create {agent.name}")
            match events.get(agent.released):
                case None:
                    pass
                case ev.SessionReleased(
                    agent=agent.name, tenant=agent.tenant, to=agent.released_to
                ):
                    pass
                case _:
                    raise ValueError(f"row {agent.released} did not release {agent.name}")
        for request, place in self.places.items():
            match events[place.stored], events[place.finished]:
                case (
                    ev.TurnStored(
                        request=stored,
                        agent=place.agent,
                        tenant=place.tenant,
                        previous=place.previous,
                    ),
                    ev.RequestFinished(request=finished),
                ) if stored == finished == request:
                    pass
                case (
                    ev.TurnAdopted(
                        request=stored,
                        agent=place.agent,
                        tenant=place.tenant,
                        previous=place.previous,
                    ),
                    _,
                ) if stored == request and place.stored == place.finished:
                    pass
                case _:
                    raise ValueError(f"rows {place.stored} and {place.finished} are not a turn")

    def fold(self) -> Agents:
        """The agents and their turns, for a reader of the rows after the base."""
        turns = Turns(TurnsContents(places=dict(self.places)))
        return Agents(turns, AgentsContents(agents=self.agents))

    def by_position(self) -> Mapping[int, Row]:
        """The rows by their positions."""
        return {row.position: row for row in self.rows}

    def limited_to(self, needed: tuple[set[int], set[str]]) -> Histories:
        """
        Without agents and turns that are needed no more.

        Args:
            needed: the result of ``Agents.needed``.
        """
        created, requests = needed
        places = {name: place for name, place in self.places.items() if name in requests}
        kept_rows = created | rows_of(places)
        return Histories(
            agents=tuple(agent for agent in self.agents if agent.created in created),
            places=Map(places),
            rows=tuple(row for row in self.rows if row.position in kept_rows),
        )


NO_HISTORIES = Histories()


def rows_of(places: Mapping[str, Place]) -> set[int]:
    """The positions of the rows that turns are in."""
    return {row for place in places.values() for row in (place.stored, place.finished)}


def histories_at(
    agents: Agents, needed: tuple[set[int], set[str]], rows: Mapping[int, Row]
) -> Histories:
    """
    What a base keeps of agents.

    Args:
        agents: the fold up to the cut.
        needed: what the agents that exist at the end need.
        rows: the rows up to the cut by their positions, as far as any agent may need them.
    """
    everything = Histories(
        agents=agents.contents().agents,
        places=Map(agents.turns.contents().places),
        # What was opened to be read is no part of a base, or forgetting would not reach it.
        rows=tuple(attrs.evolve(rows[position], opened=None) for position in sorted(rows)),
    )
    return everything.limited_to(needed)
