"""Agents that a running server releases to another node of its fleet, or adopts from one."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
import trio.testing

from cairn.actors.agents.messages import NewAgent
from cairn.actors.errors import (
    AgentBusy,
    AgentExists,
    AgentReleased,
    CannotHandOver,
    CannotRecord,
    JournalUnread,
    NotReleasedYet,
    RefusalError,
    TooManyAgents,
)
from cairn.journal import events as ev
from cairn.journal.errors import StoreError
from cairn.journal.handover import Released, released_agent
from cairn.journal.replay import replay
from cairn.journal.rows.codec import decode
from cairn.journal.rows.store import MemoryStore
from cairn.journal.tenants import LOCAL
from tests.actors.agents.test_agents import command, go_on, history
from tests.support.full_disk import FullDisk
from tests.support.in_process_server import ask, local, serving, serving_fake, wait_idle

pytestmark = pytest.mark.trio


@attrs.define
class OtherJournals:
    """The journals of a fleet of n1 and n2, in memory."""

    node: str
    stores: dict[str, MemoryStore]
    fault: str | None = None
    most: int = 0  # how many calls of ``has`` were in progress at once
    _now: int = 0

    def has(self, node: str) -> bool:
        """Whether there is a node of this name."""
        self._now += 1
        self.most = max(self.most, self._now)
        time.sleep(0.01)  # long enough that calls in other threads would begin
        self._now -= 1
        if self.fault is not None:
            raise StoreError(self.fault)
        return node in self.stores

    def released(self, node: str, agent: str, tenant: str, rest: Callable[[], None]) -> Released:
        """An agent that another node released."""
        return released_agent(self.stores[node], node, agent, tenant, rest=rest)


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
        assert "the database cannot be read now" in words
        assert "down" not in words  # an error may have the address and the user
        one.fault = None
        assert rows == one.stores["n1"].head()
    async with serving_fake(two.stores["n2"], fleet=two) as server:
        agents = local(server).agents
        await agents.create(NewAgent(name="n2.mine"))
        rows = two.stores["n2"].head()
        words = await refused(NotReleasedYet, agents.adopt("n2.notes", "n1.notes", "n1"))
        assert "served by n1" in words
        with pytest.raises(NotReleasedYet) as caught:
            await agents.adopt("n2.notes", "n1.notes", "n1")
        assert LOCAL == caught.value.tenant
        await refused(AgentExists, agents.adopt("n2.mine", "n1.notes", "n1"))
        assert await agents.adopt("n2.notes", "n1.none", "n1") is None
        assert await server.for_tenant("bob").agents.adopt("n2.notes", "n1.notes", "n1") is None
        await refused(CannotHandOver, agents.adopt("n2.notes", "n9.notes", "n9"))
        assert rows == two.stores["n2"].head()
    async with serving_fake(one.stores["n1"], fleet=one) as server:
        assert await local(server).agents.release("n1.notes", "n2.other", "n2")
    async with serving_fake(two.stores["n2"], fleet=two) as server:
        agents = local(server).agents
        await agents.create(NewAgent(name="n2.other"))
        rows = two.stores["n2"].head()
        await refused(AgentExists, agents.adopt("n2.other", "n1.notes", "n1"))
        assert rows == two.stores["n2"].head()
        made = await agents.adopt("n2.notes", "n1.notes", "n1")  # which is free
        assert made is not None
        assert "n1.notes" == made.adopted_from
        words = await refused(CannotHandOver, agents.adopt("n2.more", "n1.notes", "n1"))
        assert "adopted before: it is 'n2.notes' here" in words
    one.stores["n3"] = MemoryStore()
    async with serving_fake(one.stores["n3"], fleet=OtherJournals("n3", one.stores)) as server:
        words = await refused(
            AgentReleased, local(server).agents.adopt("n3.notes", "n1.notes", "n1")
        )
        assert "'n2.other'" in words


async def test_what_is_left_of_a_released_agent_is_deleted():
    """Once. Its name stays taken, and what begins with its turns no longer needs them."""
    one, _ = fleet()
    async with serving_fake(one.stores["n1"], fleet=one) as server:
        agents = local(server).agents
        await agents.create(NewAgent(name="n1.notes"))
        assert await agents.release("n1.notes", "n2.notes", "n2")
        assert await agents.delete("n1.notes")
        assert not await agents.delete("n1.notes")
        await refused(AgentReleased, agents.create(NewAgent(name="n1.notes")))
        assert not server.loaded.agents.agents.of(None, released=True)
    events = [decode(row).event for row in one.stores["n1"].read()]
    assert 1 == sum(isinstance(one, ev.AgentDeleted) for one in events)
    assert () == tuple(replay(one.stores["n1"].read()).findings)


async def test_released_agents_count_while_their_histories_are_here(
    monkeypatch: pytest.MonkeyPatch,
):
    """Or a tenant could create and release without end."""
    monkeypatch.setattr("cairn.actors.agents.agents.AGENTS_MAX", 1)
    one, _ = fleet()
    async with serving_fake(one.stores["n1"], fleet=one) as server:
        agents = local(server).agents
        await agents.create(NewAgent(name="n1.notes"))
        assert await agents.release("n1.notes", "n2.notes", "n2")
        await refused(TooManyAgents, agents.create(NewAgent(name="n1.more")))
        assert await agents.delete("n1.notes")
        await agents.create(NewAgent(name="n1.more"))


async def test_other_journals_are_read_one_at_a_time():
    """However many requests a tenant sends, they take one thread and one connection."""
    one, _ = fleet()
    async with serving_fake(one.stores["n1"], fleet=one) as server, trio.open_nursery() as nursery:
        agents = local(server).agents
        await agents.create(NewAgent(name="n1.notes"))
        for _ in range(8):
            nursery.start_soon(refused, CannotHandOver, agents.release("n1.notes", "n9.a", "n9"))
    assert 1 == one.most


async def test_an_adoption_that_waits_for_the_disk():
    """A second request of the same waits for the first one's rows, and finds the agent."""
    stores: dict[str, MemoryStore] = {"n1": MemoryStore(), "n2": (disk := FullDisk())}
    async with serving_fake(stores["n1"], fleet=OtherJournals("n1", stores)) as server:
        await local(server).agents.create(NewAgent(name="n1.notes"))
        assert await local(server).agents.release("n1.notes", "n2.notes", "n2")
    async with serving_fake(disk, fleet=OtherJournals("n2", stores)) as server:
        agents = local(server).agents
        disk.full = True
        for _ in range(2):
            await refused(CannotRecord, agents.adopt("n2.notes", "n1.notes", "n1"))
        disk.full = False
        while server.loaded.agents.writer.stalled:
            await trio.testing.wait_all_tasks_blocked(0.01)
        assert await agents.adopt("n2.notes", "n1.notes", "n1") is not None
    adopted = [row for row in disk.read() if row.kind == ev.SessionAdopted.kind]
    assert 1 == len(adopted)


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
