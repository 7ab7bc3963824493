"""
Idle time of a session: requests go first, and the wait for it is bounded.

There is no model here. The engine's thread is the real one; its jobs are plain functions.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, cast

import attrs
import pytest
import trio
import trio.testing

from cairn.actors.idle.activity import Activity
from cairn.actors.requests.ticket import Ticket
from cairn.actors.sessions.cache import SessionCache
from cairn.actors.sessions.idle_time import IdleTime
from cairn.actors.sessions.inbox import Inbox
from cairn.actors.sessions.next_prompt import Beginning, NextPrompt
from cairn.actors.sessions.prewarm import compute
from cairn.actors.threads.engine import EngineThread
from cairn.actors.threads.prompts import PromptThreads
from cairn.engine.prompt.encoder import Encoder
from cairn.engine.prompt.template import Conversation, Message

pytestmark = pytest.mark.trio


def in_flight(answers: int) -> Activity:
    """A server that has these requests in flight."""
    activity = Activity()
    activity.arrive(answers)
    return activity


@attrs.define
class Cache:
    """
    A cache that records the calls.

    Attributes:
        quarantined: whether the next block is.
        quarantined_after: whether its pass quarantines it.
    """

    did: list[str] = attrs.field(factory=list)
    quarantined: bool = False
    quarantined_after: bool = False
    block_tokens: int = 4
    cached_tokens: int = 4

    @property
    def session(self) -> Cache:
        """What the journal knows of it."""
        return self

    def can_seal(self, key: str, start: int) -> bool:
        """Called before a pass and after it."""
        return not self.quarantined

    async def settle(self, ids: Sequence[int], still_needed: Callable[[], bool]) -> bool:
        """A pass."""
        self.did.append(f"pass over {list(ids)}")
        self.cached_tokens += len(ids)
        self.quarantined = self.quarantined or self.quarantined_after
        return True

    async def trim(self, end: int, reason: str) -> None:
        """Remove tokens."""
        self.did.append(f"trim to {end}")

    async def seal(self, key: str, start: int, end: int, *, prewarmed: bool) -> None:
        """Seal a block."""
        self.did.append(f"seal {key} of {start} to {end}")


def idle_time(
    activity: Activity, inbox: Inbox | None = None, patience_s: float = 1000.0
) -> IdleTime:
    """The idle time of a session."""
    return IdleTime(activity, inbox or Inbox(), patience_s)


async def computed(activity: Activity, cache: Cache) -> str | None:
    """The result of computing the last block of a sequence."""
    time = idle_time(activity)
    return await compute(cast("SessionCache", cache), time, range(8), ["first", "key"])


async def test_a_step_waits_for_all_requests() -> None:
    """A step begins when the last of them has left, and not before."""
    activity, did = in_flight(2), list[str]()

    async def step(still_needed: Callable[[], bool]) -> bool:
        did.append("step")
        return still_needed()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(idle_time(activity).run, step)
        for _ in range(2):
            await trio.testing.wait_all_tasks_blocked()
            assert [] == did
            activity.leave()
    assert ["step"] == did


async def test_a_step_that_was_not_run_is_run_later() -> None:
    """
    A request that comes between the check and the turn of the step goes first; then the step runs.
    """
    activity, asked = Activity(), list[bool]()
    time = idle_time(activity)

    async def step(still_needed: Callable[[], bool]) -> str | None:
        if not asked:
            activity.arrive(1)
        asked.append(still_needed())
        return "done" if asked[-1] else None

    found: list[str | None] = []

    async def run() -> None:
        found.append(await time.run(step))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run)
        await trio.testing.wait_all_tasks_blocked()
        assert ([False], []) == (asked, found)
        activity.leave()
    assert ([False, True], ["done"]) == (asked, found)


async def test_sessions_that_wait_together_check_again() -> None:
    """
    Three sessions have asked for a pass when a request comes. The running pass ends; the two others
    run after the request, and not between its passes.
    """
    activity, thread, ran = Activity(), EngineThread(), list[str]()
    reached, go = threading.Event(), threading.Event()

    async def settles(name: str) -> None:
        def run(_: Any) -> bool:
            reached.set()
            assert go.wait(60)
            ran.append(name)
            return True

        await idle_time(activity).run(lambda needed: thread.settle(run, lambda done: done, needed))

    async with trio.open_nursery() as nursery:
        await nursery.start(thread.run)
        async with trio.open_nursery() as sessions:
            for _ in range(3):
                sessions.start_soon(settles, "settling")
            assert await trio.to_thread.run_sync(reached.wait, 60)
            await trio.testing.wait_all_tasks_blocked()
            activity.arrive(1)
            go.set()
            for _ in range(3):
                await thread.prefill(lambda _: ran.append("prefill"), lambda done: done)
                await trio.testing.wait_all_tasks_blocked()
            activity.leave()
        thread.close()
    assert ["settling", "prefill", "prefill", "prefill", "settling", "settling"] == ran


async def test_idle_time_ends_under_a_load_that_never_pauses() -> None:
    """The wait is bounded for all steps together."""
    activity = Activity()
    time = idle_time(activity, patience_s=0.0)

    async def step(still_needed: Callable[[], bool]) -> bool:
        return True

    assert await time.run(step)
    assert time.lasts()
    activity.arrive(1)
    with trio.fail_after(60):
        assert await time.run(step) is None
    assert not time.lasts()
    assert "busy" == time.ended_by
    activity.leave()
    assert await time.run(step) is None


@pytest.mark.parametrize("by", ["request", "slab_needed", "bug", "closing"])
async def test_a_command_ends_idle_time(by: str) -> None:
    """Even while it waits for requests of other sessions; it names the command."""
    activity, inbox = in_flight(1), Inbox()
    time = idle_time(activity, inbox)

    async def step(still_needed: Callable[[], bool]) -> bool:
        raise AssertionError("a command is in the inbox")

    async def command() -> None:
        await trio.testing.wait_all_tasks_blocked()
        match by:
            case "request":
                with trio.move_on_after(0):
                    await inbox.serve(Ticket("r", cast("Any", None), 0, arrived=0.0))
            case "slab_needed":
                with trio.move_on_after(0):
                    await inbox.give_up_slab("room for another session")
            case "bug":
                inbox.leave_service()
            case _:
                inbox.close()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(command)
        with trio.fail_after(60):
            assert await time.run(step) is None
    assert by == time.ended_by


async def test_an_obsolete_command_ends_no_idle_time() -> None:
    """
    The task that asked for the slab waits no more, because a request needs it. The command is still
    in the inbox.
    """
    inbox = Inbox()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(inbox.give_up_slab, "room for another session")
        await trio.testing.wait_all_tasks_blocked()
        assert (False, "slab_needed") == (inbox.is_empty, inbox.waiting_for)
        inbox.keep_slab()
    assert inbox.is_empty
    assert 1 == len(inbox.left_over())


async def test_leaving_service_ends_idle_time_until_it_is_taken_out() -> None:
    """
    Like any other command, this one counts until it is taken out. After the end of the session it
    is ignored.
    """
    inbox = Inbox()
    inbox.leave_service()
    assert (False, "bug") == (inbox.is_empty, inbox.waiting_for)
    assert 1 == len(inbox.left_over())
    assert inbox.is_empty
    inbox.close()
    inbox.leave_service()
    assert [] == inbox.left_over()


async def test_a_block_is_computed_and_sealed() -> None:
    """It is the block at its place in the sequence."""
    cache = Cache()
    found = await computed(Activity(), cache)
    assert "done" == found
    assert ["pass over [4, 5, 6, 7]", "seal key of 4 to 8"] == cache.did


async def test_a_block_quarantined_during_the_wait_is_not_computed() -> None:
    """It is checked after the wait, during which a different session found it wrong."""
    activity, cache, found = in_flight(1), Cache(), list[str | None]()

    async def settle() -> None:
        found.append(await computed(activity, cache))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(settle)
        await trio.testing.wait_all_tasks_blocked()
        cache.quarantined = True
        activity.leave()
    assert (["quarantined"], []) == (found, cache.did)


async def test_a_block_quarantined_during_its_pass_is_not_sealed() -> None:
    """Nothing of it stays in the slab: after settling it holds sealed blocks alone."""
    cache = Cache(quarantined_after=True)
    found = await computed(Activity(), cache)
    assert "quarantined" == found
    assert ["pass over [4, 5, 6, 7]", "trim to 4"] == cache.did


class Tokenizer:
    """Blocks in each rendering until ``go`` is set."""

    def __init__(self) -> None:
        self.reached, self.go = threading.Event(), threading.Event()
        self.did: list[str] = []

    def apply_chat_template(self, messages: list[dict[str, Any]], **settings: Any) -> str:
        """The last message."""
        return str(messages[-1]["content"])

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """One token a character."""
        self.reached.set()
        assert self.go.wait(60)
        self.did.append("rendering")
        return [ord(character) for character in text]

    def decode(self, ids: Sequence[int]) -> str:
        """Not used here."""
        raise NotImplementedError


async def test_a_request_waits_for_one_rendering_at_most() -> None:
    """
    Three sessions render with one tokenizer when a request comes that is to be tokenised. The
    running rendering ends, then the request is tokenised, then the other two.
    """
    activity, tokenizer, threads = Activity(), Tokenizer(), PromptThreads()
    next_prompt = NextPrompt(Encoder(tokenizer), threads)
    conversation = Conversation(messages=(Message(role="user", content="Hello"),))
    answer = Message(role="assistant", content="Hi")
    found: list[Beginning | None] = []

    async def renders() -> None:
        found.append(
            await next_prompt.beginning(conversation, answer, "local", idle_time(activity).run)
        )

    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(renders)
        assert await trio.to_thread.run_sync(tokenizer.reached.wait, 60)
        await trio.testing.wait_all_tasks_blocked()
        activity.arrive(1)

        async def request() -> None:
            await threads.run("short", "local", lambda: tokenizer.did.append("request"))
            activity.leave()

        nursery.start_soon(request)
        await trio.testing.wait_all_tasks_blocked()
        tokenizer.go.set()
    assert ["rendering", "request", *["rendering"] * 5] == tokenizer.did
    assert [()] * 3 == [beginning and beginning.ids for beginning in found]
