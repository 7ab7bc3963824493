"""
Requests that start together share: what one computes, the others wait for and reuse, whatever
becomes of it. The engine runs no model.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
import trio.testing

from cairn.actors.errors import RefusalError
from cairn.actors.requests.limits import Limits
from cairn.actors.requests.messages import Generate
from cairn.actors.server import Server
from cairn.engine.prompt.template import Conversation, Message
from cairn.journal import events as ev
from cairn.journal.tenants import LOCAL
from tests.gate.conversation import words
from tests.support.fake_engine import ROWS
from tests.support.held_engine import Hold
from tests.support.in_process_server import Said, ask, generate, wait_idle
from tests.support.prewarm_conversation import Journaled, found_wrong

pytestmark = pytest.mark.trio

C = 64
SYSTEM = words(1, 100)
LENGTH = 3


def sharing(place: int, system: str = SYSTEM, **changes: Any) -> Generate:
    """A request under the prompt that all of them have."""
    messages = (
        Message(role="system", content=system),
        Message(role="user", content=f"Stone {place:03}."),
    )
    return generate(Conversation(messages=messages), **{"max_tokens": LENGTH, **changes})


def prefilled(setup: Journaled) -> int:
    """How many tokens of prompts were computed, in all."""
    passes = [one for one in setup.events(ev.CacheExtended) if one.step == "prefill"]
    return sum(one.end - one.start for one in passes)


async def _until(setup: Journaled, kind: type[ev.Event], count: int) -> None:
    """Wait until the journal has so many events of a kind."""
    with trio.fail_after(60):
        while len(setup.events(kind)) < count:  # noqa: ASYNC110  # another thread writes them
            await trio.sleep(0.001)


async def _asked(server: Server, command: Generate, said: list[Said | RefusalError]) -> None:
    try:
        said.append(await ask(server, command))
    except RefusalError as refusal:
        said.append(refusal)


@asynccontextmanager
async def led(
    setup: Journaled, followers: int, **changes: Any
) -> AsyncIterator[tuple[Server, Hold, trio.CancelScope, list[Said | RefusalError]]]:
    """
    A server whose engine is held in the third pass of a prompt, while others wait for its blocks:
    the server, the hold, what cancels the leader's client, and the answers of all others.
    """
    said: list[Said | RefusalError] = []
    leader = trio.CancelScope()
    passes = 0

    def is_third(*_: Any) -> bool:
        nonlocal passes
        passes += 1
        return passes == 3

    async def lead() -> None:
        with leader:
            await _asked(server, sharing(0), [])

    async with setup.serving(prewarm=False, **changes) as server:
        hold = Hold(server, "run_chunk", is_third)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lead)
            await hold.wait()
            for place in range(1, followers + 1):
                nursery.start_soon(_asked, server, sharing(place), said)
            await _until(setup, ev.PrefixJoined, followers)
            try:
                yield server, hold, leader, said
            finally:
                hold.go.set()
        quarantined = [one for one in server.loaded.sequencer.state.sessions.values() if one.bug_id]
        if not quarantined:
            await wait_idle(server)


@pytest.mark.long_but("12")
@pytest.mark.parametrize("count", [12, 100])
async def test_at_once(setup: Journaled, count: int):
    """The prefix is computed once, however many need it."""
    said: list[Said | RefusalError] = []
    async with setup.serving(limits=Limits(queue=count), prewarm=False) as server:  # noqa: SIM117
        async with trio.open_nursery() as nursery:
            for place in range(count):
                nursery.start_soon(_asked, server, sharing(place), said)
    answers = [one for one in said if isinstance(one, Said)]
    prompt = answers[0].finished.prompt_tokens
    common = len(f"<system>{SYSTEM};<user>Stone ") // C * C
    assert len(answers) == count
    assert sorted(one.finished.cached_tokens for one in answers) == [0] + [common] * (count - 1)
    assert prefilled(setup) == prompt + (count - 1) * (prompt - common)
    assert len(setup.events(ev.PrefixJoined)) == ROWS - 1
    assert setup.is_valid()


async def test_those_that_wait_hold_no_slab(setup: Journaled):
    """They open theirs when their path is selected."""
    async with led(setup, 2) as (server, _, _, said):
        assert server.loaded.sequencer.state.pool.slabs == 1
        assert said == []
    assert setup.is_valid()


async def test_they_go_on_while_the_leader_answers(setup: Journaled):
    """A request waits for what the leader computes of the prompt, not for its answer."""
    async with led(setup, 1) as (server, hold, _, _):
        answering = Hold(server, "decode")
        hold.go.set()
        try:
            await answering.wait()
            await _until(setup, ev.PathSelected, 2)
        finally:
            answering.go.set()
    assert setup.is_valid()


@pytest.mark.parametrize("end", ["cancelled", "crashed", "quarantined"])
async def test_the_leader_ends(setup: Journaled, end: str):
    """Those that wait go on from what it sealed, and the rest is computed once for all."""
    async with led(setup, 3) as (server, _, leader, said):
        state = server.loaded.sequencer.state
        session = next(iter(state.requests.values()))
        by = setup.events(ev.PrefixJoined)[0].leader
        session = state.requests[by]
        sealed = len(state.sessions[session].slab_keys)
        assert sealed == 2
        if end == "cancelled":
            leader.cancel()
            await trio.testing.wait_all_tasks_blocked()
        elif end == "crashed":
            server.loaded.sequencer.crash(session, RuntimeError("it fell"))
        else:
            found_wrong(server, state.sessions[session].slab_keys[1])
    answers = [one for one in said if isinstance(one, Said)]
    assert len(answers) == 3
    reused = sorted(one.finished.cached_tokens for one in answers)
    if end == "quarantined":
        assert reused == [C, C, C]  # no block is sealed on a quarantined one
    else:
        common = len(f"<system>{SYSTEM};<user>Stone ") // C * C
        # The pass that ran when the leader's client left is sealed, too.
        assert reused == [(3 if end == "cancelled" else 2) * C, common, common]


async def test_one_that_waits_leaves(setup: Journaled):
    """Its request ends on record, and its session takes the next one."""
    said: list[Said | RefusalError] = []
    async with led(setup, 1) as (server, hold, _, others):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_asked, server, sharing(2), said)
            await _until(setup, ev.PrefixJoined, 2)
            nursery.cancel_scope.cancel()
        await _until(setup, ev.RequestCancelled, 1)
        assert not hold.go.is_set()
        assert setup.events(ev.RequestCancelled)[0].stage == "prefill"
    assert len(others) == 1
    assert setup.is_valid()


async def test_the_server_stops(setup: Journaled):
    """Those that wait end with it."""
    async with led(setup, 2, limits=Limits(drain_s=0.01)) as (server, hold, _, _):  # noqa: SIM117
        async with trio.open_nursery() as nursery:
            nursery.start_soon(server.loaded.drain)
            await _until(setup, ev.RequestCancelled, 2)
            hold.go.set()
    assert {one.stage for one in setup.events(ev.RequestCancelled)} == {"server_stopped"}
    assert setup.is_valid()


async def test_several_answers_of_one_request_follow_with_it(setup: Journaled):
    """The first one waits, and the others wait for the first one."""
    commands = sharing(1, choices=2), sharing(2)
    said: list[Said | RefusalError] = []
    async with setup.serving(prewarm=False) as server:
        hold = Hold(server, "run_chunk")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_asked, server, commands[1], said)
            await hold.wait()
            nursery.start_soon(_drained, server, commands[0], hold)
            await _until(setup, ev.PrefixJoined, 1)
            hold.go.set()
    assert len(setup.events(ev.RequestFinished)) == 3
    assert len(setup.events(ev.PrefixJoined)) == 1
    assert setup.is_valid()


async def _drained(server: Server, command: Generate, hold: Hold) -> None:
    try:
        async with server.for_tenant(LOCAL).generate(command) as replies:
            async for _ in replies:
                pass
    finally:
        hold.go.set()
