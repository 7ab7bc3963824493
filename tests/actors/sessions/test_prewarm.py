"""
Prewarming in a running server: what the next prompt begins with is computed before it comes, and
requests go first. Observed in the journal, never by the clock.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
import trio.testing

from cairn.actors.requests.limits import Limits
from cairn.actors.server import Server
from cairn.actors.sessions import next_prompt as prewarm
from cairn.actors.sessions.next_prompt import Unrendered
from cairn.actors.threads.engine import EngineThread
from cairn.engine.answer.parts import Called
from cairn.engine.prompt import template as prompts
from cairn.engine.prompt.template import Conversation, Message, TemplateError
from cairn.journal import events as ev
from cairn.journal.lifecycle import SessionState
from cairn.journal.replay import replay
from cairn.journal.rows.codec import decode
from tests.gate.conversation import words
from tests.support.fake_engine import FakeEngine
from tests.support.held_engine import Hold, hold_prewarm
from tests.support.in_process_server import MIB, Said, ask, generate, local, wait_idle
from tests.support.prewarm_conversation import (
    NEW,
    C,
    Journaled,
    found_wrong,
    new_tokens,
    onward,
    prefilled,
    thinking,
)

pytestmark = pytest.mark.trio

TOOLS = ({"type": "function", "function": {"name": "weigh_stone"}},)


@pytest.fixture(name="gated")
def gated_() -> Iterator[Callable[[Server], Hold]]:
    """Holds a server's engine while it prewarms; all are released at the end."""
    gates: list[Hold] = []

    def make(server: Server) -> Hold:
        gates.append(hold_prewarm(server))
        return gates[-1]

    yield make
    for gate in gates:
        gate.go.set()


@pytest.mark.parametrize("tenant", ["local", "alice"])
async def test_the_next_turn_prefills_its_own_tokens_and_at_most_a_block(
    setup: Journaled, tenant: str
) -> None:
    """
    The template drops 200 tokens of thinking from the middle, and everything after them was
    computed before the user's next message. The journal records that, and how much of it was used.
    The same holds for any tenant.
    """
    async with setup.serving() as server:
        first = await ask(server, thinking(), tenant)
        await wait_idle(server)
        second = await ask(server, onward(thinking(), first), tenant)
        new = new_tokens(server)
        await wait_idle(server)

    assert "continuation" == second.accepted.path
    assert prefilled(second) < new + C
    begun = setup.events(ev.PrewarmStarted)[0]
    done = setup.events(ev.PrewarmFinished)[0]
    assert "user" == begun.next_role
    assert begun.tokens == done.tokens == second.finished.cached_tokens
    assert (
        done.computed_tokens
        == begun.tokens - C * (begun.blocks_from_slab + begun.blocks_from_pool)
        > C
    )
    chosen = setup.events(ev.PathSelected)[1]
    assert done.computed_tokens == chosen.prewarmed_tokens
    assert chosen.rerendered_tokens > 200
    assert setup.is_valid()


async def test_switched_off_the_next_turn_prefills_what_was_dropped(setup: Journaled) -> None:
    """The control: what was generated is settled, and the next prompt reuses little of it."""
    async with setup.serving(prewarm=False) as server:
        first = await ask(server, thinking(max_tokens=80))
        await wait_idle(server)
        second = await ask(server, onward(thinking(max_tokens=80), first))
        new = new_tokens(server)

    assert prefilled(second) > new + 3 * C
    steps = [event.step for event in setup.events(ev.CacheExtended)]
    assert "settle" in steps
    assert [] == setup.events(ev.PrewarmStarted, ev.PrewarmFinished, ev.PrewarmAbandoned)
    assert [0, 0] == [event.prewarmed_tokens for event in setup.events(ev.PathSelected)]
    assert setup.is_valid()


async def test_an_empty_thought_is_dropped_too(setup: Journaled) -> None:
    """
    With thinking switched off the prompt has an empty thought, which the next prompt does not have:
    the whole answer is computed again before the user's next message.
    """
    talk = Conversation(
        messages=(Message(role="user", content=words(1, 20)),), template={"enable_thinking": False}
    )
    command = generate(talk, max_tokens=150)
    async with setup.serving() as server:
        first = await ask(server, command)
        await wait_idle(server)
        messages = (*talk.messages, Message(role="assistant", content=first.text), NEW)
        second = await ask(
            server,
            attrs.evolve(command, conversation=attrs.evolve(talk, messages=messages), max_tokens=2),
        )
        new = new_tokens(server) + 8  # the empty thought of the new turn
    assert second.finished.prompt_tokens > 3 * C
    assert prefilled(second) < new + C
    assert setup.is_valid()


async def test_existing_blocks_are_not_computed_again(setup: Journaled) -> None:
    """
    A different session has had the same conversation: its blocks are shared, and the beginning that
    both expect is computed once.
    """
    async with setup.serving() as server:
        first = await ask(server, thinking(session_name="one"))
        await wait_idle(server)
        again = await ask(server, thinking(session_name="other"))
        await wait_idle(server)
        longer = await ask(server, thinking(session_name="third", max_tokens=100))
        await wait_idle(server)

    assert first.text == again.text
    assert longer.text.startswith(first.text)
    one, third = setup.events(ev.PrewarmStarted)
    assert ("one", "third") == (one.session, third.session)
    assert third.blocks_from_pool >= 2
    shared = [event for event in setup.events(ev.BlocksRestored) if event.request is None]
    assert [("third", third.blocks_from_pool)] == [(e.session, len(e.keys)) for e in shared]
    sealed = [event.key for event in setup.events(ev.BlockSealed)]
    assert len(sealed) == len(set(sealed))
    assert setup.is_valid()


async def test_a_request_goes_first(setup: Journaled, gated: Callable[[Server], Hold]) -> None:
    """
    A request that comes in the middle of a pass is served after that pass, and the rest is
    abandoned. What was computed stays, and is used.
    """
    answers: list[Said] = []
    async with setup.serving() as server:
        gate = gated(server)
        first = await ask(server, thinking())
        await gate.wait()
        actor = server.loaded.sessions.actors[first.accepted.session]

        async def next_turn() -> None:
            answers.append(await ask(server, onward(thinking(), first, max_tokens=2)))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(next_turn)
            with trio.fail_after(120):
                while not actor.inbox.requests_waiting:
                    await trio.testing.wait_all_tasks_blocked()
            gate.go.set()
        begun = setup.events(ev.PrewarmStarted)[0]
    missing = begun.tokens // C - begun.blocks_from_slab - begun.blocks_from_pool
    assert missing >= 3
    given_up = setup.events(ev.PrewarmAbandoned)[0]
    assert ("request", C) == (given_up.reason, given_up.computed_tokens)
    # Up to the next request there was one pass, and no second one.
    kinds = [decode(row).event for row in setup.store.rows]
    at = [i for i, event in enumerate(kinds) if isinstance(event, ev.RequestReceived)][1]
    before = [e for e in kinds[:at] if isinstance(e, ev.CacheExtended) and e.step == "settle"]
    assert 1 == len(before)
    (settled,) = (e for e in kinds[:at] if isinstance(e, ev.SessionSettled))
    assert not settled.complete
    assert C == setup.events(ev.PathSelected)[1].prewarmed_tokens
    assert 2 == answers[0].finished.completion_tokens
    assert setup.is_valid()


async def test_other_sessions_go_first(setup: Journaled, gated: Callable[[Server], Hold]) -> None:
    """
    Between a request of a different session and its end no prewarming pass runs except the one that
    is running. Afterwards prewarming continues and completes.
    """
    async with setup.serving() as server:
        gate = gated(server)
        first = await ask(server, thinking())
        await gate.wait()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, server, thinking(50, max_tokens=4))
            with trio.fail_after(120):
                while len(server.loaded.sequencer.state.requests) < 1:
                    await trio.testing.wait_all_tasks_blocked()
                await trio.testing.wait_all_tasks_blocked()
            gate.go.set()
        await wait_idle(server)
    session = first.accepted.session
    events = [decode(row).event for row in setup.store.rows]
    came = next(
        i for i, e in enumerate(events) if isinstance(e, ev.PathSelected) and e.session != session
    )
    ended = next(
        i
        for i, e in enumerate(events)
        if isinstance(e, ev.RequestFinished) and e.session != session
    )
    between = [
        e for e in events[came:ended] if isinstance(e, ev.CacheExtended) and e.session == session
    ]
    assert len(between) <= 1
    done = [e.session for e in setup.events(ev.PrewarmFinished)]
    assert session in done
    assert setup.is_valid()


async def test_a_session_that_needs_the_slab_gets_it(
    setup: Journaled, gated: Callable[[Server], Hold]
) -> None:
    """
    With one slab, prewarming is abandoned for a request of a different session; the blocks stay.
    """
    async with setup.serving(pool_slabs=1) as server:
        gate = gated(server)
        first = await ask(server, thinking())
        await gate.wait()
        actor = server.loaded.sessions.actors[first.accepted.session]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, server, thinking(50, max_tokens=2))
            with trio.fail_after(120):
                while not actor.inbox.slab_requests:
                    await trio.testing.wait_all_tasks_blocked()
            gate.go.set()
        await wait_idle(server)
    given_up = setup.events(ev.PrewarmAbandoned)[0]
    assert ("slab_needed", C) == (given_up.reason, given_up.computed_tokens)
    assert setup.is_valid()


async def test_a_rendering_does_not_delay_the_release_of_a_slab(
    setup: Journaled, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session releases its slab while its conversation is being rendered."""
    rendering, go = threading.Event(), threading.Event()
    render = prompts.render

    def slow(tokenizer: Any, conversation: Conversation) -> Any:
        # The request itself ends with a tool's result.
        if [m.role for m in conversation.messages[-2:]] == ["assistant", "user"]:
            rendering.set()
            assert go.wait(120)
        return render(tokenizer, conversation)

    monkeypatch.setattr(prompts, "render", slow)
    try:
        async with setup.serving() as server:
            first = await ask(server, thinking())
            assert await trio.to_thread.run_sync(rendering.wait, 120)
            assert (
                SessionState.SETTLING
                == server.loaded.sequencer.session(first.accepted.session).state
            )
            with trio.fail_after(60):
                await server.loaded.sessions.give_up_slab(first.accepted.session, "room")
                await server.loaded.writer.wait_committed(server.loaded.sequencer.state.position)
            assert not go.is_set()
            assert 1 == len(setup.events(ev.SlabReleased))
            go.set()
            await wait_idle(server)
    finally:
        go.set()
    assert [False] == [event.complete for event in setup.events(ev.SessionSettled)]
    assert [] == setup.events(ev.PrewarmStarted)
    assert setup.is_valid()


async def test_patience_ends_under_a_load_that_never_pauses(setup: Journaled) -> None:
    """
    A session whose patience ends becomes idle with what it has and unpins its blocks, although a
    request of a different session is in flight. Its next turn has the same bits.
    """
    async with setup.serving(limits=Limits(patience_s=2.0)) as server:
        with server.loaded.activity.preparing():
            first = await ask(server, thinking())
            raw = attrs.evolve(thinking(max_tokens=80), conversation=None, prompt=words(1, 20))
            second = await ask(server, raw)
            await wait_idle(server)
            for said in (first, second):
                assert said.accepted.session not in server.loaded.sequencer.state.pins
    assert [False, False] == [event.complete for event in setup.events(ev.SessionSettled)]
    assert "settle" not in [event.step for event in setup.events(ev.CacheExtended)]
    assert setup.is_valid()


async def test_prewarming_is_abandoned_under_a_load_that_does_not_end(
    setup: Journaled, gated: Callable[[Server], Hold]
) -> None:
    """
    When it is abandoned half-way, the reason is ``busy``. A request that is still being tokenised
    counts as load.
    """
    async with setup.serving(limits=Limits(patience_s=2.0)) as server:
        gate = gated(server)
        await ask(server, thinking())
        await gate.wait()
        with server.loaded.activity.preparing():
            gate.go.set()
            await wait_idle(server)
    (given_up,) = setup.events(ev.PrewarmAbandoned)
    assert ("busy", C) == (given_up.reason, given_up.computed_tokens)
    assert setup.is_valid()


async def test_a_quarantined_block_ends_prewarming(
    setup: Journaled, gated: Callable[[Server], Hold]
) -> None:
    """
    A block that it is built on is quarantined during a pass. Nothing is sealed on top of it, and
    the pass is trimmed. The session becomes idle, and serves.
    """
    async with setup.serving() as server:
        gate = gated(server)
        first = await ask(server, thinking())
        await gate.wait()
        session = server.loaded.sequencer.session(first.accepted.session)
        spoilt = session.slab_keys[-1]
        found_wrong(server, spoilt)
        gate.go.set()
        await wait_idle(server)
        sealed = server.loaded.sequencer.session(first.accepted.session).slab_keys
        second = await ask(server, onward(thinking(), first))
        await wait_idle(server)
    assert session.slab_keys == sealed
    (given_up, *_) = setup.events(ev.PrewarmAbandoned)
    assert ("quarantined", C) == (given_up.reason, given_up.computed_tokens)
    assert len(sealed) * C - C >= second.finished.cached_tokens
    assert {"INV-3"} == {f.invariant for f in replay(setup.store.read()).findings}


async def test_a_failure_ends_prewarming_on_record(
    setup: Journaled, gated: Callable[[Server], Hold], monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    The measured bytes of blocks do not add up: prewarming ends on record, and the session becomes
    idle without a slab.
    """
    async with setup.serving() as server:
        gate = gated(server)
        first = await ask(server, thinking())
        await gate.wait()
        device = server.loaded.engine.device
        seal = device.seal

        def other(*args: Any, **kwargs: Any) -> Any:
            report = seal(*args, **kwargs)
            return attrs.evolve(report, memory_bytes=report.memory_bytes + 1)

        monkeypatch.setattr(device, "seal", other)
        gate.go.set()
        await wait_idle(server)
        monkeypatch.undo()
        held = server.loaded.sequencer.session(first.accepted.session)
        assert not server.loaded.sequencer.state.pins
    (given_up,) = setup.events(ev.PrewarmAbandoned)
    assert ("bug", C) == (given_up.reason, given_up.computed_tokens)
    assert (None, None) == (held.prewarm, held.slab)


async def test_the_next_role_is_a_guess(setup: Journaled) -> None:
    """
    The answer calls a tool, and before a tool's result the template would keep the thinking. The
    user speaks instead: that costs reuse, and nothing else.
    """
    asked = thinking(max_tokens=80)
    assert asked.conversation is not None
    conversation = attrs.evolve(asked.conversation, tools=TOOLS)
    asked = attrs.evolve(asked, conversation=conversation)
    async with setup.serving() as server:
        first = await ask(server, asked)
        await wait_idle(server)
        second = await ask(server, onward(asked, first, max_tokens=2))
    (begun, *_) = setup.events(ev.PrewarmStarted)
    assert ["xy"] * 3 == [one.name for one in first.parts if isinstance(one, Called)]
    assert "tool" == begun.next_role
    assert begun.tokens > second.finished.cached_tokens
    assert "continuation" == second.accepted.path
    assert setup.is_valid()


async def test_a_stop_goes_first(setup: Journaled, gated: Callable[[Server], Hold]) -> None:
    """A server that stops computes nothing for a request that will not come."""
    async with setup.serving() as server:
        gate = gated(server)
        await ask(server, thinking())
        await gate.wait()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(server.drain)
            with trio.fail_after(120):
                while not server.loaded.activity.draining:
                    await trio.testing.wait_all_tasks_blocked()
                await trio.testing.wait_all_tasks_blocked()
            gate.go.set()
    (given_up,) = setup.events(ev.PrewarmAbandoned)
    assert ("closing", C) == (given_up.reason, given_up.computed_tokens)
    assert setup.is_valid()


async def test_several_sessions_at_once(setup: Journaled) -> None:
    """Four conversations, each with its own thinking, at the same time."""
    second: dict[int, Said] = {}

    async def talk(server: Server, place: int, first: dict[int, Said]) -> None:
        command = thinking(10 * place, max_tokens=10 + 5 * place)
        if place not in first:
            first[place] = await ask(server, command)
        else:
            second[place] = await ask(server, onward(command, first[place]))

    async with setup.serving() as server:
        first: dict[int, Said] = {}
        for _ in range(2):
            async with trio.open_nursery() as nursery:
                for place in range(4):
                    nursery.start_soon(talk, server, place, first)
            await wait_idle(server)
        new = new_tokens(server)
    assert 4 == len(second)
    assert all(prefilled(said) < new + C for said in second.values())
    assert setup.is_valid()


async def test_prewarmed_blocks_outlive_a_restart(model_directory: Path, tmp_path: Path) -> None:
    """
    Prewarmed blocks are in files; after a restart the server reuses and counts them. What fills no
    block is lost. This test uses a model.
    """
    setup = Journaled(model=model_directory)
    files = {"blocks_folder": tmp_path / "blocks", "disk_bytes": 64 * MIB}
    async with setup.serving(**files) as server:
        first = await ask(server, thinking())
        await wait_idle(server)
    async with setup.serving(**files) as server:
        second = await ask(server, onward(thinking(), first))
        new = new_tokens(server)
    assert prefilled(second) < new + C
    computed = setup.events(ev.PrewarmFinished)[0].computed_tokens
    assert computed - C < setup.events(ev.PathSelected)[1].prewarmed_tokens <= computed
    assert setup.is_valid()


async def test_prewarming_evicts_no_block_in_use(setup: Journaled) -> None:
    """
    Memory has room for little more than two prompts. What one session prewarms evicts no block that
    a different session also holds in its slab; the session itself keeps its own in its slab.
    """
    room = 28
    block = C * 4 * 2 * 4 * 32 * 4
    async with setup.serving(blocks_bytes=room * block, pool_slabs=4) as server:
        message = Message(role="user", content=words(70, 40))
        other = await ask(server, generate(Conversation(messages=(message,)), max_tokens=2))
        await wait_idle(server)
        ready = server.loaded.sequencer.session(other.accepted.session).slab_keys
        first = await ask(server, thinking())
        await wait_idle(server)
        blocks = server.loaded.sequencer.state.blocks
        assert all(blocks[key].present for key in ready)
        second = await ask(server, onward(thinking(), first))
        new = new_tokens(server)
    begun = setup.events(ev.PrewarmStarted)[0]
    missing = begun.tokens // C - begun.blocks_from_slab - begun.blocks_from_pool
    prompts_take = first.accepted.prompt_tokens // C + len(ready)
    assert len(ready) >= 2
    assert prompts_take <= room < prompts_take + missing
    sealed = [event for event in setup.events(ev.BlockSealed) if event.key in begun.new_keys]
    assert any(not event.stored for event in sealed)
    assert prefilled(second) < new + C
    assert setup.is_valid()


async def test_a_raw_prompt_is_settled_as_it_is(setup: Journaled) -> None:
    """
    There is no template between a raw prompt and the next one, so prompt and answer are settled.
    """
    command = attrs.evolve(thinking(max_tokens=80), conversation=None, prompt=words(1, 20))
    async with setup.serving() as server:
        await ask(server, command)
        await wait_idle(server)
    assert [] == setup.events(ev.PrewarmStarted)
    assert "settle" in [event.step for event in setup.events(ev.CacheExtended)]
    assert setup.is_valid()


async def test_a_conversation_that_cannot_be_rendered_is_not_prewarmed(
    setup: Journaled, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    If the template cannot render a conversation with an answer in it, that is logged, and prompt
    and answer are settled.
    """

    async def refuse(*_: object) -> None:
        raise Unrendered("no") from TemplateError("no")

    monkeypatch.setattr(prewarm.NextPrompt, "beginning", refuse)
    async with setup.serving() as server:
        await ask(server, thinking(max_tokens=80))
        await wait_idle(server)
    (given_up,) = setup.events(ev.PrewarmAbandoned)
    assert ("render_failed", 0) == (given_up.reason, given_up.computed_tokens)
    assert "settle" in [event.step for event in setup.events(ev.CacheExtended)]
    assert setup.is_valid()


async def test_nothing_follows_an_answer_that_was_cut_off(
    setup: Journaled, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a disconnect the next prompt is unknown, so nothing is computed for it."""
    stopped, passes = threading.Event(), itertools.count()
    run, stop = FakeEngine.decode, EngineThread.stop

    def slow(self: FakeEngine, rows: Any) -> Any:
        # The session must notice at its next pass that the client disconnected, before the answer
        # ends. So passes continue, four a second.
        if next(passes) >= 20:
            stopped.wait(0.25)
        return run(self, rows)

    def noted(self: EngineThread, decoding: Any) -> None:
        stop(self, decoding)
        stopped.set()

    monkeypatch.setattr(FakeEngine, "decode", slow)
    monkeypatch.setattr(EngineThread, "stop", noted)
    async with setup.serving() as server:
        async with local(server).generate(thinking(max_tokens=500)) as replies:
            with trio.fail_after(120):
                async for reply in replies:
                    if type(reply).__name__ == "Delta":
                        break
        await wait_idle(server)
    assert setup.events(ev.RequestCancelled)
    assert [] == setup.events(ev.PrewarmStarted, ev.PrewarmAbandoned)
    assert "settle" not in [event.step for event in setup.events(ev.CacheExtended)]
    assert setup.is_valid()
