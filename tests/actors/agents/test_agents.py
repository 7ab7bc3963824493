"""
Agents on a running server: their histories, across restarts and models; one thing at a time; forks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest
import trio

from cairn.actors.agents.messages import AgentHistory, NewAgent
from cairn.actors.agents.text_cache import TextCache
from cairn.actors.errors import AgentBusy, AgentExists, Broken, PromptRefused, PromptTooLong
from cairn.actors.requests.messages import ContextUse, Generate, Keep, Waiting
from cairn.actors.server import Server
from cairn.engine.prompt.template import Conversation, Message
from cairn.journal import events as ev
from cairn.journal.replay import replay
from cairn.journal.rows.codec import decode
from cairn.journal.rows.store import MemoryStore
from tests.gate.conversation import words
from tests.support.in_process_server import Said, ask, generate, local, serving, wait_idle

pytestmark = pytest.mark.trio

NOTES = NewAgent(name="notes", system="Be brief.")
LONG = "The stone lies on the path, and the path goes over the hill. "


def user(text: str) -> Message:
    """A user's message."""
    return Message(role="user", content=text)


async def history(server: Server, name: str, tenant: str = "local") -> AgentHistory:
    """An agent that must exist, with its whole history."""
    found = await server.for_tenant(tenant).agents.history(name)
    assert found is not None
    return found


async def command(
    server: Server, name: str, text: str, tenant: str = "local", **changes: Any
) -> Generate:
    """A request that continues an agent's history."""
    held = await history(server, name, tenant)
    asked = (user(text),)
    talk = Conversation(messages=(*held.messages, *asked), tools=held.agent.tools)
    return generate(
        **{
            "conversation": talk,
            "max_tokens": 4,
            "session_name": f"agent/{name}",
            "keep": Keep(
                previous=held.head, asked=asked, note="", agent=name, created=held.created
            ),
            "context_max": held.agent.max_context,
            **changes,
        },
    )


async def go_on(
    server: Server, name: str, text: str, tenant: str = "local", **changes: Any
) -> Said:
    """Send an agent the next message."""
    return await ask(server, await command(server, name, text, tenant, **changes), tenant)


def asked(held: AgentHistory) -> list[str]:
    """What the client asked an agent, turn by turn."""
    return [message.content for turn in held.turns for message in turn.asked]


@pytest.mark.long
async def test_an_agent_outlives_a_restart(model_directory: Path):
    """It keeps its history and its tools, and continues in its session, for its tenant alone."""
    store = MemoryStore()
    tools = ({"type": "function", "function": {"name": "look"}},)
    new = NewAgent(name="notes", system="Be brief.", tools=tools, max_context=900, model="m")
    async with serving(model_directory, store) as server:
        made = await local(server).agents.create(new)
        assert made.finish_reason is None
        assert ("cold", 0, 0, 900) == (
            made.status,
            made.turns,
            made.context_tokens,
            made.context_left,
        )
        await local(server).agents.create(NewAgent(name="brief", persist=False))
        first = await go_on(server, "notes", LONG)
        await wait_idle(server)
        facts = local(server).agents.one("notes")
        assert facts is not None
        used = first.finished.prompt_tokens + first.finished.completion_tokens
        assert "length" == first.finished.finish_reason == facts.finish_reason
        assert ("hot", 1, used, 900 - used) == (
            facts.status,
            facts.turns,
            facts.context_tokens,
            facts.context_left,
        )
        # The limit is the agent's own context, not the model's.
        assert 900 - first.finished.prompt_tokens == first.accepted.context_left
        due = ContextUse(session="agent/notes", tokens=used, left=900 - used)
        assert ((due,), (), ()) == (
            local(server).contexts(10),
            local(server).contexts(0),
            server.for_tenant("bob").contexts(10),
        )
    async with serving(model_directory, store) as server:
        # This agent was not to outlive its server.
        assert local(server).agents.one("brief") is None
        held = await history(server, "notes")
        assert (new, first.accepted.request) == (held.agent, held.head)
        assert ["system", "user", "assistant"] == [message.role for message in held.messages]
        second = await go_on(server, "notes", "And then?")
        assert ("agent/notes", 0) == (second.accepted.session, second.accepted.cached_tokens)
        await wait_idle(server)
        third = await go_on(server, "notes", "And then?")
        assert "continuation" == third.accepted.path
        assert third.accepted.cached_tokens > 0
        assert [LONG, "And then?", "And then?"] == asked(await history(server, "notes"))
        assert await server.for_tenant("bob").agents.history("notes") is None
        assert (None, ()) == (
            server.for_tenant("bob").agents.one("notes"),
            server.for_tenant("bob").agents.all(),
        )
        assert not await server.for_tenant("bob").agents.delete("notes")
        await server.for_tenant("bob").agents.create(NOTES)
        assert [0, 3] == [
            server.for_tenant(whose).agents.all()[0].turns for whose in ("bob", "local")
        ]
        # An agent's turns are no responses: no client can look one up by its request, or delete it.
        request = third.accepted.request
        assert (None, None, False) == (
            await local(server).turn(request),
            await local(server).history(request),
            await local(server).forget(request),
        )
    # A different fingerprint, as a different model would have.
    async with serving(model_directory, store, block_tokens=16) as server:
        assert third.accepted.request == (await history(server, "notes")).head
        assert "cold" == local(server).agents.all()[0].status
        said = await go_on(server, "notes", "And then?")
        assert ("agent/notes", "fingerprint_changed", 0) == (
            said.accepted.session,
            said.accepted.reason,
            said.accepted.cached_tokens,
        )
        assert [LONG, *["And then?"] * 3] == asked(await history(server, "notes"))
        assert ["notes"] == [agent.name for agent in local(server).agents.all()]
    assert () == replay(store.read()).findings


class Counted(MemoryStore):
    """A store that counts row look-ups."""

    looks = 0

    def row(self, position: int) -> Any:
        """Count the look-up."""
        self.looks += 1
        return super().row(position)

    def since(self) -> int:
        """The number of look-ups since the last call."""
        found, self.looks = self.looks, 0
        return found


async def test_a_turn_reads_what_is_new(model_directory: Path):
    """
    A turn reads two rows, those of the turn before. A fork reads no turn that it shares. After a
    restart the whole history is read once, or every time if the cache may not hold it.
    """
    store = Counted()
    async with serving(model_directory, store) as server:
        await local(server).agents.create(NOTES)
        reads = []
        for number in range(5):
            await go_on(server, "notes", f"Number {number}")
            reads.append(store.since())
        assert [1, 2, 2, 2, 2] == reads
        assert 5 == len((await history(server, "notes")).turns)
        assert 2 == store.since()
        await local(server).agents.created("notes")
        assert 0 == store.since()
        assert await local(server).agents.fork("notes", "aside", 3) is not None
        await go_on(server, "aside", "And aside?")
        assert 1 == store.since()
        assert ["Number 2", "And aside?"] == asked(await history(server, "aside"))[-2:]
        assert ["Number 3", "Number 4"] == asked(await history(server, "notes"))[-2:]
        assert await server.for_tenant("bob").agents.history("notes") is None
    store.since()
    async with serving(model_directory, store) as server:
        all_of_it = await history(server, "notes")
        assert 11 == store.since()
        assert all_of_it == await history(server, "notes")
        assert 0 == store.since()
        agents = server.loaded.agents
        held = agents.stored_turns.text_cache
        assert server.statistics().text_cache_bytes >= held.bytes > 0
        # The cache has room for half of it: the rest is read every time.
        half = TextCache(held.bytes // 2)
        agents.stored_turns = attrs.evolve(agents.stored_turns, text_cache=half)
        for _ in range(2):
            assert all_of_it == await history(server, "notes")
        store.since()
        assert all_of_it == await history(server, "notes")
        assert 0 < store.since() < 11
        assert 0 < half.bytes <= held.bytes // 2
        agents.stored_turns = attrs.evolve(agents.stored_turns, text_cache=TextCache(0))
        for _ in range(2):
            assert all_of_it == await history(server, "notes")
        store.since()
        assert all_of_it == await history(server, "notes")
        assert 11 == store.since()


async def test_a_new_agent_has_nothing_of_an_earlier_one(model_directory: Path):
    """
    An agent that is created again under the same name, or by a different tenant, has nothing of the
    earlier one, and texts that only the earlier one had leave memory. A failed answer leaves no
    text.
    """
    async with serving(model_directory) as server:
        agents, held = local(server).agents, server.loaded.agents.stored_turns.text_cache
        await agents.create(NewAgent(name="notes", system="Old.", max_context=100))
        await go_on(server, "notes", "One")
        await agents.fork("notes", "aside", None)
        await go_on(server, "notes", "Two")
        with pytest.raises(PromptTooLong):
            await go_on(server, "notes", LONG * 20)
        assert ["One", "Two"] == asked(await history(server, "notes"))
        both = held.bytes
        assert await agents.delete("notes")
        assert 0 < held.bytes < both
        assert ["One"] == asked(await history(server, "aside"))
        for tenant, system in (("local", "New."), ("bob", "His.")):
            new_one = NewAgent(name="notes", system=system)
            await server.for_tenant(tenant).agents.create(new_one)
            new = await history(server, "notes", tenant)
            assert (system, ()) == (new.agent.system, new.turns)
            await go_on(server, "notes", f"Of {tenant}", tenant=tenant)
        for tenant in ("local", "bob"):
            assert [f"Of {tenant}"] == asked(await history(server, "notes", tenant))
        for name, tenant in (("notes", "local"), ("notes", "bob"), ("aside", "local")):
            assert await server.for_tenant(tenant).agents.delete(name)
        assert 0 == held.bytes


async def test_a_fork_reuses_the_blocks_of_its_agent(model_directory: Path):
    """
    A fork at an earlier turn, at the last one and before the first reuses the tokens that the
    agent itself would reuse, and its answer equals the one on the cold path. Afterwards the two
    diverge.
    """
    async with serving(model_directory, block_tokens=16) as server:
        agents = local(server).agents
        await agents.create(NOTES)
        for text in (LONG * 2, "And the hill? " * 8, "And the sea?"):
            third = await go_on(server, "notes", text)
            await wait_idle(server)
        for turn, name in ((2, "two"), (None, "last"), (0, "none")):
            forked = await agents.fork("notes", name, turn)
            assert forked is not None
            assert ("notes", 3 if turn is None else turn) == (forked.forked_from, forked.turns)
        two = agents.one("two")
        assert two is not None
        assert ("hot", (await history(server, "notes")).turns[:2]) == (
            two.status,
            (await history(server, "two")).turns,
        )

        request = await command(server, "two", "And the wood?")
        said = await ask(server, request)
        # It reuses what the agent's own third turn reused, whose prompt is as long, and the first
        # words that both questions have.
        assert third.accepted.prompt_tokens == said.accepted.prompt_tokens
        assert third.accepted.cached_tokens <= said.accepted.cached_tokens
        assert said.accepted.cached_tokens > 96
        assert ("agent/two", "cold_start") == (said.accepted.session, said.accepted.reason)
        plain: Any = {"keep": None, "session_name": None, "cache_prompt": False}
        cold = await ask(server, attrs.evolve(request, **plain))
        assert cold.tokens == said.tokens
        last = await go_on(server, "last", "And the wood?")
        next_turn = await go_on(server, "notes", "And the wood?")
        assert last.accepted.cached_tokens >= said.accepted.cached_tokens
        assert next_turn.tokens == last.tokens
        first = await go_on(server, "none", "Who?")
        assert first.accepted.prompt_tokens < 40
        assert [3, 4, 4, 1] == [
            len((await history(server, name)).turns) for name in ("two", "last", "notes", "none")
        ]

        assert await agents.fork("nobody", "x", None) is None
        assert await server.for_tenant("bob").agents.fork("notes", "x", None) is None
        with pytest.raises(IndexError):
            await agents.fork("notes", "x", 5)
        with pytest.raises(AgentExists):
            await agents.fork("notes", "two", 1)
        assert await agents.delete("notes")
        assert 3 == len((await history(server, "two")).turns)
        await go_on(server, "two", "And the lake?")
        assert "And the lake?" == asked(await history(server, "two"))[-1]


async def test_a_fork_of_an_agent_that_is_deleted_meanwhile(model_directory: Path):
    """
    Closing the session that had the fork's name may take as long as loading a model. An agent that
    is deleted meanwhile is not forked, because its turns are gone.
    """
    async with serving(model_directory) as server:
        agents = local(server).agents
        await agents.create(NOTES)
        await go_on(server, "notes", "One")

        async def deleted_meanwhile(session: str, reason: str) -> None:
            assert await agents.delete("notes")

        slow = attrs.evolve(agents, close_session=deleted_meanwhile)
        assert await slow.fork("notes", "aside", None) is None
        assert (None, ()) == (agents.one("aside"), agents.all())
        # Both names are free.
        await agents.create(NOTES)
        assert await agents.fork("notes", "aside", None) is not None


async def test_one_thing_at_a_time(model_directory: Path):
    """
    While an agent is busy, a second request is refused and changes nothing, and the agent cannot be
    deleted, but it can be forked. It is free as soon as its answer is complete.
    """
    async with serving(model_directory) as server:
        agents = local(server).agents
        await agents.create(NOTES)
        first = await command(server, "notes", "One", max_tokens=24)
        second = await command(server, "notes", "Two")
        async with local(server).generate(first) as replies:
            await anext(replies)
            with pytest.raises(AgentBusy):
                await ask(server, second)
            with pytest.raises(AgentBusy):
                await agents.delete("notes")
            forked = await agents.fork("notes", "aside", None)
            assert forked is not None
            assert 0 == forked.turns
            async for _ in replies:
                pass
            # Its answer is sent, and the fork continues from the history before it.
            with pytest.raises(AgentBusy):
                await ask(server, second)
            await go_on(server, "notes", "Three")
        assert ["One", "Three"] == asked(await history(server, "notes"))


async def test_a_name_can_be_used_again_after_a_bug(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch
):
    """
    A bug takes an agent's session out of service. An agent that is created again under the same
    name has a new session, and the bug stays on record.
    """
    async with serving(model_directory) as server:
        await local(server).agents.create(NOTES)

        def fails(*_: object, **named: object) -> None:
            raise RuntimeError("the device gave up")

        with monkeypatch.context() as broken:
            broken.setattr(server.loaded.engine.device, "run_chunk", fails)
            with pytest.raises(Broken):
                await go_on(server, "notes", words(1, 40))
        with pytest.raises(Broken) as caught:
            await go_on(server, "notes", "Two")
        assert await local(server).agents.delete("notes")
        await local(server).agents.create(NOTES)
        assert "cold_start" == (await go_on(server, "notes", "Three")).accepted.reason
        assert caught.value.bug_id in server.loaded.sequencer.state.faults
        assert ["Three"] == asked(await history(server, "notes"))


async def test_a_request_does_not_continue_a_new_agent_of_the_same_name(model_directory: Path):
    """
    The request was prepared for an agent that was deleted; the new agent of that name ignores it.
    """
    async with serving(model_directory) as server:
        await local(server).agents.create(NOTES)
        late = await command(server, "notes", "One")
        await local(server).agents.delete("notes")
        await local(server).agents.create(NOTES)
        with pytest.raises(AgentBusy):
            await ask(server, late)
        assert [] == asked(await history(server, "notes"))


async def test_a_failed_request_changes_no_history(model_directory: Path):
    """After a refused, a cancelled and a queued request that left, the history is unchanged."""
    store = MemoryStore()
    async with serving(model_directory, store) as server:
        await local(server).agents.create(NewAgent(name="notes", max_context=100))
        await go_on(server, "notes", "One")
        before = await history(server, "notes")
        with pytest.raises(PromptTooLong, match=r"agent's context is 100 tokens"):
            await go_on(server, "notes", LONG * 20)
        with pytest.raises(PromptRefused):
            await go_on(server, "notes", "Two", conversation=None, prompt="")
        ended = trio.Event()
        server.observe(lambda one: ended.set() if one.event.kind == "request_cancelled" else None)
        async with local(server).generate(
            await command(server, "notes", "Two", max_tokens=60)
        ) as replies:
            async for reply in replies:
                if not isinstance(reply, Waiting):
                    break
        with trio.fail_after(60):
            await ended.wait()
        assert before == await history(server, "notes")
        await wait_idle(server)
        await go_on(server, "notes", "Three")
        assert ["One", "Three"] == asked(await history(server, "notes"))
    stored = [decode(row).event for row in store.rows if row.kind == "turn_stored"]
    assert 2 == len(stored)
    assert () == replay(store.read()).findings


async def test_a_deleted_agent_is_gone(model_directory: Path):
    """
    Its session is closed, and a new agent of that name starts empty, also after a restart. An agent
    whose text was pruned can still be deleted, but not used.
    """
    store = MemoryStore()
    async with serving(model_directory, store) as server:
        agents = local(server).agents
        await agents.create(NOTES)
        with pytest.raises(AgentExists):
            await agents.create(NOTES)
        await go_on(server, "notes", LONG)
        # The session is settling, or idle with a slab.
        assert await agents.delete("notes")
        assert not await agents.delete("notes")
        assert (None, None) == (
            agents.one("notes"),
            await agents.history("notes"),
        )
        assert {} == server.statistics().sessions
        await agents.create(NOTES)
        assert () == (await history(server, "notes")).turns
        said = await go_on(server, "notes", LONG)
        assert "cold_start" == said.accepted.reason
        # An agent without a turn has no session.
        await agents.create(NewAgent(name="mute"))
        assert await agents.delete("mute")
        with pytest.raises(AgentBusy):
            await ask(server, await orphan(server, "mute"))
        await agents.create(NewAgent(name="brief", persist=False))
        lost = store.rows[:]
    assert () == replay(store.read()).findings
    # A lost server has recorded no stop; agents that did not persist have ended all the same.
    store = MemoryStore(lost)
    async with serving(model_directory, store) as server:
        assert [("notes", 1)] == [(one.name, one.turns) for one in local(server).agents.all()]
        for index, row in enumerate(store.rows):
            if row.kind == ev.AgentCreated.kind:
                store.rows[index] = attrs.evolve(row, private=None)
        assert await local(server).agents.history("notes") is None
        assert await local(server).agents.fork("notes", "aside", None) is None
        assert await local(server).agents.delete("notes")
        assert {} == server.statistics().sessions


async def orphan(server: Server, name: str) -> Generate:
    """A request for an agent that no longer exists."""
    return generate(
        Conversation(messages=(user("Who?"),)),
        session_name=f"agent/{name}",
        keep=Keep(previous=None, asked=(user("Who?"),), note="", agent=name),
    )
