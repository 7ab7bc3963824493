"""Requests that find no slab wait for one, in order of arrival, and all of them end."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import attrs
import pytest
import trio
import trio.testing
from structlog.testing import capture_logs

from cairn.actors.errors import NoMemory, RefusalError
from cairn.actors.requests.limits import Limits
from cairn.actors.requests.messages import Delta, Generate
from cairn.actors.server import Server
from cairn.engine.errors import EngineFault
from cairn.engine.prompt.template import Conversation, Message
from cairn.journal import events as ev
from cairn.journal.replay import replay
from cairn.journal.rows.store import MemoryStore
from tests.support.fake_engine import TOKEN_BYTES
from tests.support.held_engine import Hold
from tests.support.in_process_server import ask, events_of, generate, serving_fake

pytestmark = pytest.mark.trio


def command(text: str, **changes: Any) -> Generate:
    """A request with one message."""
    talk = Conversation(messages=(Message(role="user", content=text),))
    return generate(talk, **{"max_tokens": 4, **changes})


async def waiting(server: Server, requests: int) -> None:
    """Wait until so many requests are in progress, and all tasks wait."""
    with trio.fail_after(60):
        while len(server.loaded.sequencer.state.requests) < requests:
            await trio.testing.wait_all_tasks_blocked()
        for _ in range(5):
            await trio.testing.wait_all_tasks_blocked(0.001)


async def test_requests_get_a_slab_in_the_order_in_which_they_came() -> None:
    """One slab and four requests: none is refused, and each is served when the one before ends."""
    store = MemoryStore()
    async with serving_fake(store, pool_slabs=1, prewarm=False) as server:
        stuck = Hold(server, "decode")
        async with trio.open_nursery() as nursery:
            for place in range(4):
                nursery.start_soon(ask, server, command(f"{place} is mine"))
                await waiting(server, place + 1)
            stuck.go.set()
    received = [one.session for one in events_of(store, ev.RequestReceived)]
    acquired = [one.session for one in events_of(store, ev.SlabAcquired)]
    assert 4 == len(set(received))
    assert received == acquired
    assert [] == events_of(store, ev.RequestCancelled)
    assert () == replay(store.read()).findings


async def test_a_slab_that_never_fits_is_refused_at_once() -> None:
    """Also while others wait, and they are served."""
    store = MemoryStore()
    async with serving_fake(
        store, pool_slabs=1, prewarm=False, pool_bytes=1024 * TOKEN_BYTES
    ) as server:
        stuck = Hold(server, "decode")
        async with trio.open_nursery() as nursery:
            for place in range(2):
                nursery.start_soon(ask, server, command(f"{place} is mine"))
                await waiting(server, place + 1)
            with pytest.raises(NoMemory):
                await ask(server, command("x" * 2000))
            stuck.go.set()
    assert ["no_memory"] == [one.stage for one in events_of(store, ev.RequestCancelled)]
    assert 2 == len(events_of(store, ev.RequestFinished))


async def test_one_that_leaves_the_line_lets_the_next_one_go() -> None:
    """Its client disconnects while it is the first that waits."""
    store = MemoryStore()
    async with serving_fake(store, pool_slabs=1, prewarm=False) as server:
        stuck = Hold(server, "decode")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, server, command("first"))
            await waiting(server, 1)
            async with server.for_tenant("local").generate(command("second")):
                await waiting(server, 2)
                nursery.start_soon(ask, server, command("third"))
                await waiting(server, 3)
            stuck.go.set()
    assert ["prefill"] == [one.stage for one in events_of(store, ev.RequestCancelled)]
    assert 2 == len(events_of(store, ev.RequestFinished))


@pytest.mark.parametrize("released", [True, False])
async def test_the_slab_of_a_quarantined_session(
    released: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    A request waits while it is being released. If that fails, no slab will come, and the request is
    refused.
    """
    store, ends = MemoryStore(), []
    async with serving_fake(store, pool_slabs=1, prewarm=False) as server:
        device: Any = server.loaded.engine.device
        decode, close_slab = device.decode, device.close_slab
        stuck = Hold(server, "run_chunk")

        def breaks(*_: Any) -> Any:
            monkeypatch.setattr(device, "decode", decode)
            raise RuntimeError("the device gave up")

        def is_kept(slab: int) -> Any:
            raise EngineFault("the slab cannot be closed")

        monkeypatch.setattr(device, "decode", breaks)
        monkeypatch.setattr(device, "close_slab", close_slab if released else is_kept)
        closing = Hold(server, "close_slab")

        async def one(text: str) -> None:
            try:
                await ask(server, command(text))
                ends.append("answered")
            except RefusalError as refusal:
                ends.append(type(refusal).__name__)

        with capture_logs(), trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(one, "first")
                await waiting(server, 1)
                nursery.start_soon(one, "second")
                await waiting(server, 2)
                stuck.go.set()
                await closing.wait()
                for _ in range(10):
                    await trio.testing.wait_all_tasks_blocked(0.001)
                assert ["Broken"] == ends
                closing.go.set()
    assert ["Broken", "answered" if released else "NoMemory"] == ends
    assert ["CRASH"] == [found.invariant for found in replay(store.read()).findings]


@pytest.mark.long_but("0", "1", "2")
@pytest.mark.parametrize("seed", range(12))
async def test_every_request_ends_whatever_comes(seed: int) -> None:
    """
    Random requests, with common beginnings, names, several answers and clients that leave, on pools
    of one to three slabs: each ends, the journal holds, and nothing waits in the line.
    """
    draws = random.Random(seed)
    beginnings = [f"{one} " * 40 for one in ("cairn", "stone", "path")]
    store, ends = MemoryStore(), Counter[str]()
    slabs = 1 + seed % 3

    async def one(server: Server, asked: Generate, leaves: int | None) -> None:
        try:
            async with server.for_tenant("local").generate(asked) as replies:
                pieces = 0
                async for reply in replies:
                    pieces += isinstance(reply, Delta)
                    if leaves is not None and pieces >= leaves:
                        ends["left"] += 1
                        return
            ends["answered"] += 1
        except RefusalError as refusal:
            ends[type(refusal).__name__] += 1

    settings: dict[str, Any] = {"pool_slabs": slabs, "pool_bytes": slabs * 1500 * TOKEN_BYTES}
    async with serving_fake(store, limits=Limits(queue=64), **settings) as server:
        with trio.fail_after(120):
            async with trio.open_nursery() as nursery:
                for _ in range(30):
                    text = draws.choice(beginnings) * draws.randint(1, 3) + str(draws.randint(0, 4))
                    asked = command(
                        text,
                        max_tokens=draws.choice([1, 5, 200]),
                        session_name=draws.choice([None, None, "a", "b"]),
                        choices=draws.choice([1, 1, 1, 2]),
                        cache_prompt=draws.random() < 0.9,
                    )
                    asked = attrs.evolve(asked, session_name=None) if asked.choices > 1 else asked
                    leaves = draws.choice([None, None, None, 0, 1])
                    nursery.start_soon(one, server, asked, leaves)
                    if draws.random() < 0.5:
                        await trio.sleep(0.002)
        assert not server.loaded.memory.slab_is_awaited
    assert 30 == sum(ends.values())
    assert ends["answered"] > 10
    assert {"answered", "left", "NoMemory"} >= set(ends)
    assert max(one.pool_slabs for one in events_of(store, ev.SlabAcquired)) <= slabs
    assert () == replay(store.read()).findings
