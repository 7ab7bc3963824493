"""Agents that a running server releases to another node of its fleet, or adopts from one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest

from cairn.actors.agents.messages import NewAgent
from cairn.actors.errors import (
    AgentBusy,
    AgentExists,
    AgentReleased,
    CannotHandOver,
    JournalUnread,
    NotReleasedYet,
    RefusalError,
)
from cairn.journal import events as ev
from cairn.journal.errors import StoreError
from cairn.journal.handover import Released, released_agent
from cairn.journal.replay import replay
from cairn.journal.rows.codec import decode
from cairn.journal.rows.store import MemoryStore
from tests.actors.agents.test_agents import command, go_on, history
from tests.support.in_process_server import ask, local, serving, serving_fake, wait_idle

pytestmark = pytest.mark.trio


@attrs.define
class OtherJournals:
    """The journals of a fleet of n1 and n2, in memory."""

    node: str
    stores: dict[str, MemoryStore]
    fault: str | None = None

    def has(self, node: str) -> bool:
        """Whether there is a node of this name."""
        if self.fault is not None:
            raise StoreError(self.fault)
        return node in self.stores

    def released(self, node: str, agent: str, tenant: str) -> Released:
        """An agent that another node released."""
        return released_agent(self.stores[node], node, agent, tenant)


def fleet() -> tuple[OtherJournals, OtherJournals]:
    """The journals of n1 and n2, as each reads them."""
    stores = {"n1": MemoryStore(), "n2": MemoryStore()}
    return OtherJournals("n1", stores), OtherJournals("n2", stores)


async def refused(kind: type[RefusalError], call: Any) -> str:
    """The message with which a call is refused."""
    with pytest.raises(kind) as caught:
        await call
    return caught.value.message


async def test_an_agent_moves_with_its_turns(model_directory: Path):
    """
    The other node has its history, and renders the prompt from it that the old one would have. A
    request that was read before it was released does not serve it.
    """
    one, two = fleet()
    async with serving(model_directory, one.stores["n1"], fleet=one) as server:
        agents = local(server).agents
        await agents.create(NewAgent(name="n1.notes", system="Be brief.", max_context=900))
        await go_on(server, "n1.notes", "The stone lies on the path.")
        await go_on(server, "n1.notes", "And then?")
        await wait_idle(server)
        await agents.fork("n1.notes", "n1.copy", None)
        before = await history(server, "n1.notes")
        late = await command(server, "n1.notes", "Late")
        assert await agents.release("n1.notes", "n2.notes", "n2")
        assert agents.one("n1.notes") is None
        calls: tuple[Any, ...] = (
            agents.release("n1.notes", "n2.notes", "n2"),
            agents.create(NewAgent(name="n1.notes")),
            agents.fork("n1.copy", "n1.notes", None),
        )
        for call in calls:
            assert "'n2.notes'" in await refused(AgentReleased, call)
        await refused(AgentBusy, ask(server, late))
        due = await go_on(server, "n1.copy", "Bye")
    async with serving(model_directory, two.stores["n2"], fleet=two) as server:
        agents = local(server).agents
        made = await agents.adopt("n2.notes", "n1.notes", "n1")
        assert made is not None
        assert made == await agents.adopt("n2.notes", "n1.notes", "n1")
        assert ("n1.notes", 2, "cold") == (made.adopted_from, made.turns, made.status)
        held = await history(server, "n2.notes")
        assert before.messages == held.messages
        assert attrs.evolve(before.agent, name="n2.notes") == held.agent
        said = await go_on(server, "n2.notes", "Bye")
        assert due.tokens == said.tokens
        assert 0 == said.accepted.cached_tokens
        await wait_idle(server)
    async with serving(model_directory, two.stores["n2"], fleet=two) as server:
        held = await history(server, "n2.notes")
        assert 3 == len(held.turns)
        assert await local(server).agents.delete("n2.notes")
        words = await refused(
            CannotHandOver, local(server).agents.adopt("n2.notes", "n1.notes", "n1")
        )
        assert "was adopted before, and deleted since" in words
    for store in one.stores.values():
        assert () == tuple(replay(store.read(), base=store.base()).findings)
    events = [decode(row).event for row in one.stores["n1"].read()]
    place = next(at for at, one in enumerate(events) if isinstance(one, ev.SessionReleased))
    assert "its agent was handed over" in {
        one.reason for one in events[place:] if isinstance(one, ev.SessionClosed)
    }


async def test_what_is_not_handed_over():
    """Each refusal changes nothing, and says why."""
    one, two = fleet()
    async with serving_fake(one.stores["n1"], fleet=one) as server:
        agents = local(server).agents
        await agents.create(NewAgent(name="n1.notes"))
        await agents.create(NewAgent(name="n1.short", persist=False))
        rows = one.stores["n1"].head()
        assert not await agents.release("n1.none", "n2.none", "n2")
        assert not await server.for_tenant("bob").agents.release("n1.notes", "n2.notes", "n2")
        for node in ("n1", "n9"):
            words = await refused(CannotHandOver, agents.release("n1.notes", f"{node}.a", node))
            assert f"no other node {node!r}" in words
        words = await refused(CannotHandOver, agents.release("n1.short", "n2.short", "n2"))
        assert "ends with its server" in words
        one.fault = "The database is down."
        words = await refused(JournalUnread, agents.release("n1.notes", "n2.notes", "n2"))
        assert "The database is down" == words
        one.fault = None
        assert rows == one.stores["n1"].head()
    async with serving_fake(two.stores["n2"], fleet=two) as server:
        agents = local(server).agents
        await agents.create(NewAgent(name="n2.mine"))
        rows = two.stores["n2"].head()
        words = await refused(NotReleasedYet, agents.adopt("n2.notes", "n1.notes", "n1"))
        assert "served by n1" in words
        await refused(AgentExists, agents.adopt("n2.mine", "n1.notes", "n1"))
        assert await agents.adopt("n2.notes", "n1.none", "n1") is None
        assert await server.for_tenant("bob").agents.adopt("n2.notes", "n1.notes", "n1") is None
        await refused(CannotHandOver, agents.adopt("n2.notes", "n9.notes", "n9"))
        assert rows == two.stores["n2"].head()
    async with serving_fake(one.stores["n1"], fleet=one) as server:
        assert await local(server).agents.release("n1.notes", "n2.other", "n2")
    async with serving_fake(two.stores["n2"], fleet=two) as server:
        agents = local(server).agents
        rows = two.stores["n2"].head()
        words = await refused(AgentReleased, agents.adopt("n2.notes", "n1.notes", "n1"))
        assert "'n2.other'" in words
        assert rows == two.stores["n2"].head()


async def test_a_server_in_no_fleet():
    """It has no node to hand over to, or to adopt from."""
    async with serving_fake() as server:
        agents = local(server).agents
        await agents.create(NewAgent(name="notes"))
        for call in (
            agents.release("notes", "n2.notes", "n2"),
            agents.adopt("notes2", "n1.notes", "n1"),
        ):
            assert "in no fleet" in await refused(CannotHandOver, call)
