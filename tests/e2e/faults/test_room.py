"""Two requests that need the same room at the same moment, arranged in the test's own process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from cairn.engine.prompt.template import Conversation, Message
from cairn.journal import events as ev
from cairn.journal.rows.codec import decode
from cairn.journal.rows.store import MemoryStore
from tests.support.held_engine import Hold
from tests.support.in_process_server import Said, ask, generate, serving, wait_idle

pytestmark = pytest.mark.trio

STORY = "The stone lies on the path, and the path goes over the hill. "


def said(*texts: str) -> Conversation:
    """User and assistant messages in turn."""
    roles = ("user", "assistant")
    messages = (Message(role=roles[n % 2], content=text) for n, text in enumerate(texts))
    return Conversation(messages=tuple(messages))


async def until(fact: Callable[[], object]) -> None:
    """Wait until a condition holds that no event reports."""
    while not fact():  # noqa: ASYNC110 - the internals of other tasks set no event
        await trio.sleep(0.001)


def waiters(lock: trio.Lock) -> int:
    """How many tasks wait for a lock."""
    return lock.statistics().tasks_waiting


@pytest.mark.long
async def test_a_session_that_waits_for_a_slab_does_not_wait_for_its_holder(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch
):
    """
    A session that is asked to give up its slab takes a request first, and this request needs a
    larger slab: it must not wait for the request that waits for it.
    """
    ends: list[Any] = []

    async def outcome(server: Any, conversation: Conversation, **changes: Any) -> None:
        try:
            ends.append(await ask(server, generate(conversation, **changes)))
        except Exception as error:
            ends.append(error)

    async with serving(model_directory, pool_slabs=1) as server:
        memory = server.loaded.memory
        first = await ask(server, generate(said("Hello"), max_tokens=2))
        await until(lambda: server.statistics().sessions == {"idle": 1})
        holder: Any = server.loaded.sessions.actors[first.accepted.session]
        open_slab, asked, go = memory.open_slab, trio.Event(), trio.Event()

        async def slowly(*given: Any) -> bool:
            asked.set()
            await go.wait()
            return await open_slab(*given)

        monkeypatch.setattr(memory, "open_slab", slowly)
        with trio.fail_after(200):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(partial(outcome, server, said("Another"), max_tokens=2))
                await asked.wait()
                await memory.eviction_lock.acquire()
                more = said("Hello", first.text, "More")
                nursery.start_soon(partial(outcome, server, more, max_tokens=600))
                await until(lambda: waiters(memory.eviction_lock))
                go.set()
                await until(lambda: holder.inbox.slab_requests)
                memory.eviction_lock.release()
    assert any(isinstance(end, Said) for end in ends)
    assert 2 == len(ends)


async def test_a_block_that_is_being_evicted_is_not_shared(model_directory: Path):
    """
    A request that comes after blocks were chosen for eviction and before they are removed does not
    build on them.
    """
    store = MemoryStore()
    async with serving(model_directory, store, blocks_bytes=1024 * 1024) as server:
        leaving = Hold(server, "evict")
        old, new = said(f"0 {STORY * 20}"), said(f"1 {STORY * 20}")
        await ask(server, generate(old, max_tokens=1))
        await wait_idle(server)
        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask, server, generate(new, max_tokens=1))
                await leaving.wait()
                nursery.start_soon(ask, server, generate(old, max_tokens=1))
                memory: Any = server.loaded.memory
                # It waits; without waiting, it would have decided by now.
                await until(
                    lambda: waiters(memory.eviction_lock) or server.statistics().running > 1
                )
                leaving.go.set()
    events = [decode(row).event for row in store.rows]
    assert [] == [event for event in events if isinstance(event, ev.InvariantViolated)]
    assert [] != [event for event in events if isinstance(event, ev.BlockEvicted)]
