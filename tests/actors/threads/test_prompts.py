"""Threads for prompts: kinds, shares of tenants, and what takes too long."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

import pytest
import trio
import trio.testing

from cairn.actors.threads.prompts import (
    GIVEN_UP_MAX,
    LONG_CHARACTERS,
    THREADS,
    GivenUp,
    Kind,
    PromptThreads,
    kind_of,
)

pytestmark = pytest.mark.trio


class Held:
    """Work that begins, and ends when the test lets it."""

    def __init__(self) -> None:
        self.began: list[str] = []
        self.go = threading.Event()

    def work(self, name: str) -> Callable[[], str]:
        """One piece of it."""

        def run() -> str:
            self.began.append(name)
            assert self.go.wait(120)
            return name

        return run


async def _settled() -> None:
    """Wait until all tasks wait and all threads that may begin have."""
    for _ in range(50):
        await trio.testing.wait_all_tasks_blocked(0.001)


async def test_many_long_prompts_of_a_tenant_delay_no_other() -> None:
    """
    Of alice's five one is at work. Another tenant's prompts, short and long, end meanwhile, and so
    does alice's own short one.
    """
    threads, held, ended = PromptThreads(), Held(), list[str]()

    async def one(kind: Kind, tenant: str, work: Callable[[], str]) -> None:
        ended.append(await threads.run(kind, tenant, work))

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            for place in range(5):
                nursery.start_soon(one, "long", "alice", held.work(f"alice {place}"))
                await _settled()
            assert ["alice 0"] == held.began
            await one("short", "bob", lambda: "bob, short")
            await one("long", "bob", lambda: "bob, long")
            await one("grammar", "bob", lambda: "bob, grammar")
            await one("short", "alice", lambda: "alice, short")
            assert ["bob, short", "bob, long", "bob, grammar", "alice, short"] == ended
            held.go.set()
    assert [f"alice {place}" for place in range(5)] == held.began == ended[4:]


async def test_tenants_get_a_thread_in_the_order_in_which_they_came() -> None:
    """A tenant that came later waits for one prompt of each, and not for all."""
    threads, began = PromptThreads(), list[str]()
    gates = {name: threading.Event() for name in ("a1", "a2", "b1", "b2", "c1")}

    def work(name: str) -> None:
        began.append(name)
        assert gates[name].wait(60)

    async with trio.open_nursery() as nursery:
        for name in gates:
            nursery.start_soon(partial(threads.run, "long", name[0], partial(work, name)))
            await _settled()
        assert ["a1", "b1"] == began
        gates["a1"].set()
        await _settled()
        assert ["a1", "b1", "c1"] == began
        for gate in gates.values():
            gate.set()
    assert {"a1", "a2", "b1", "b2", "c1"} == set(began)


async def test_work_that_never_ends_is_given_up(autojump_clock: trio.testing.MockClock) -> None:
    """
    Its tenant waits for its thread to end, and no other tenant does until too many run on. The
    ended threads are counted out, and everything runs again.
    """
    threads, held = PromptThreads(limit_s=60.0), Held()
    tenants = [f"tenant {place}" for place in range(GIVEN_UP_MAX)]
    for tenant in tenants:
        before = trio.current_time()
        with pytest.raises(GivenUp):
            await threads.run("long", tenant, held.work(tenant))
        assert 60 == round(trio.current_time() - before)
    assert GIVEN_UP_MAX == threads.given_up
    with trio.move_on_after(3600) as waited:
        await threads.run("long", tenants[0], held.work("again"))
    assert waited.cancelled_caught
    for extra in range(THREADS["long"]):
        with pytest.raises(GivenUp):
            await threads.run("long", f"extra {extra}", held.work(f"extra {extra}"))
    with trio.move_on_after(3600) as waited:
        await threads.run("long", "last", held.work("last"))
    assert waited.cancelled_caught
    held.go.set()
    autojump_clock.autojump_threshold = float("inf")
    autojump_clock.rate = 1.0
    with trio.fail_after(60):
        while threads.given_up:  # noqa: ASYNC110  # nothing reports that a thread has ended
            await trio.sleep(0.01)
    assert {*tenants, "extra 0", "extra 1"} == set(held.began)
    for tenant in (*tenants, "last"):
        assert "done" == await threads.run("long", tenant, lambda: "done")


async def test_a_wait_that_is_cancelled_leaves_no_trace() -> None:
    """Neither for a share nor for a place; a cancelled thread keeps them until it ends."""
    threads, held = PromptThreads(), Held()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(threads.run, "long", "alice", held.work("alice"))
        nursery.start_soon(threads.run, "long", "bob", held.work("bob"))
        await _settled()
        for tenant in ("alice", "carol"):
            with trio.CancelScope() as scope:
                scope.cancel()
                await threads.run("long", tenant, held.work("never"))
            with trio.move_on_after(0.01):
                await threads.run("long", tenant, held.work("never"))
        nursery.cancel_scope.cancel()
    assert 2 == threads.given_up
    assert {"alice", "bob"} == set(held.began)
    assert "carol" == await threads.run("long", "carol", lambda: "carol")
    held.go.set()
    with trio.fail_after(60):
        assert "alice" == await threads.run("long", "alice", lambda: "alice")


async def test_what_fails_in_a_thread_raises() -> None:
    """And its thread is free."""
    threads = PromptThreads()
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            await threads.run("short", "alice", lambda: 1 // 0)
    assert 0 == threads.given_up


async def test_a_prompt_is_long_from_so_many_characters_on() -> None:
    """One character fewer is short."""
    assert ["short", "long"] == [kind_of(LONG_CHARACTERS - 1), kind_of(LONG_CHARACTERS)]
