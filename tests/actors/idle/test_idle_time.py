"""
A session's own time: everybody else goes first, and nobody waits for ever.

There is no model here: the engine's thread is the real one, what runs on it is numbers.
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
from cairn.actors.idle.idle_time import IdleTime
from cairn.actors.requests.ticket import Ticket
from cairn.actors.sessions.cache import SessionCache
from cairn.actors.sessions.context import SessionContext
from cairn.actors.sessions.inbox import Inbox
from cairn.actors.sessions.next_prompt import Beginning, NextPrompt
from cairn.actors.threads.engine import EngineThread
from cairn.engine.prompt.encoder import Encoder
from cairn.engine.prompt.template import Conversation, Message

pytestmark = pytest.mark.trio


def in_flight(answers: int) -> Activity:
    """A server that has these requests in flight."""
    activity = Activity()
    activity.arrive(answers)
    return activity


@attrs.define
class Hall:
    """
    What a session's own time asks of the house.

    Attributes:
        activity: the requests in flight.
    """

    activity: Activity = attrs.field(factory=Activity)
    patience_s: float = 1000.0


@attrs.define
class Cache:
    """
    A cache that tells what is done to it.

    Attributes:
        doubt: whether the next chunk is in doubt.
        doubt_after: whether it comes to be while its pass runs.
    """

    did: list[str] = attrs.field(factory=list)
    doubt: bool = False
    doubt_after: bool = False
    chunk: int = 4

    def can_seal(self, key: str, start: int) -> bool:
        """Asked before a pass and after it."""
        return not self.doubt

    async def settle(self, ids: Sequence[int], wanted: Callable[[], bool]) -> bool:
        """A pass."""
        self.did.append(f"pass over {list(ids)}")
        self.doubt = self.doubt or self.doubt_after
        return True

    async def trim(self, end: int, reason: str) -> None:
        """A cut."""
        self.did.append(f"trim to {end}")

    async def seal(self, key: str, start: int, end: int, *, prewarmed: bool) -> None:
        """A block."""
        self.did.append(f"seal {key} of {start} to {end}")


def idle_time(hall: Hall, inbox: Inbox | None = None, cache: Cache | None = None) -> IdleTime:
    """That of a session."""
    return IdleTime(
        cast("SessionContext", hall), cast("SessionCache", cache or Cache()), inbox or Inbox()
    )


async def test_it_waits_for_all_requests() -> None:
    """A step begins when the last of them has left, and not before."""
    hall, did = Hall(in_flight(2)), list[str]()

    async def step(wanted: Callable[[], bool]) -> bool:
        did.append("step")
        return wanted()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(idle_time(hall).run, step)
        for _ in range(2):
            await trio.testing.wait_all_tasks_blocked()
            assert [] == did
            hall.activity.leave()
    assert ["step"] == did


async def test_what_was_not_its_time_is_done_later() -> None:
    """
    A request that comes between the question and the step's turn goes first; then the step is done.
    """
    hall, asked = Hall(), list[bool]()
    time = idle_time(hall)

    async def step(wanted: Callable[[], bool]) -> str | None:
        if not asked:
            hall.activity.arrive(1)
        asked.append(wanted())
        return "done" if asked[-1] else None

    found: list[str | None] = []

    async def run() -> None:
        found.append(await time.run(step))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run)
        await trio.testing.wait_all_tasks_blocked()
        assert ([False], []) == (asked, found)
        hall.activity.leave()
    assert ([False, True], ["done"]) == (asked, found)


async def test_sessions_that_wait_together_do_not_go_together() -> None:
    """
    Three sessions have asked for a pass when a request comes. The one in hand ends; the two others
    run behind the request, and not between its chunks.
    """
    hall, thread, ran = Hall(), EngineThread(), list[str]()
    reached, go = threading.Event(), threading.Event()

    async def settles(name: str) -> None:
        def run(_: Any) -> bool:
            reached.set()
            assert go.wait(60)
            ran.append(name)
            return True

        await idle_time(hall).run(lambda wanted: thread.settle(run, lambda done: done, wanted))

    async with trio.open_nursery() as nursery:
        await nursery.start(thread.run)
        async with trio.open_nursery() as sessions:
            for _ in range(3):
                sessions.start_soon(settles, "settling")
            assert await trio.to_thread.run_sync(reached.wait, 60)
            await trio.testing.wait_all_tasks_blocked()
            hall.activity.arrive(1)
            go.set()
            for _ in range(3):
                await thread.prefill(lambda _: ran.append("prefill"), lambda done: done)
                await trio.testing.wait_all_tasks_blocked()
            hall.activity.leave()
        thread.close()
    assert ["settling", "prefill", "prefill", "prefill", "settling", "settling"] == ran


async def test_under_a_load_that_never_pauses_it_ends() -> None:
    """Its patience is for all steps together: the waiting of one is missing in the next."""
    hall = Hall(patience_s=0.0)
    time = idle_time(hall)

    async def step(wanted: Callable[[], bool]) -> bool:
        return True

    assert await time.run(step)
    assert time.lasts()
    hall.activity.arrive(1)
    with trio.fail_after(60):
        assert await time.run(step) is None
    assert not time.lasts()
    assert "busy" == time.ended_by
    hall.activity.leave()
    assert await time.run(step) is None


@pytest.mark.parametrize("by", ["request", "slab_needed", "bug", "closing"])
async def test_who_wants_the_session_ends_it(by: str) -> None:
    """Even in the wait for others; and it says who it was."""
    hall, inbox = Hall(in_flight(1)), Inbox()
    time = idle_time(hall, inbox)

    async def step(wanted: Callable[[], bool]) -> bool:
        raise AssertionError("there is no time")

    async def disturb() -> None:
        await trio.testing.wait_all_tasks_blocked()
        match by:
            case "request":
                with trio.move_on_after(0):
                    await inbox.serve(Ticket("r", cast("Any", None), 0))
            case "slab_needed":
                with trio.move_on_after(0):
                    await inbox.give_up_slab("room for another session")
            case "bug":
                inbox.leave_service()
            case _:
                inbox.close()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(disturb)
        with trio.fail_after(60):
            assert await time.run(step) is None
    assert by == time.ended_by


async def test_a_command_that_is_of_no_concern_any_more_disturbs_nobody() -> None:
    """
    Who asked for the slab has heard that a request needs it. The command lies in the inbox still.
    """
    inbox = Inbox()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(inbox.give_up_slab, "room for another session")
        await trio.testing.wait_all_tasks_blocked()
        assert (False, "slab_needed") == (inbox.undisturbed, inbox.wanted_by)
        inbox.keep_slab()
    assert inbox.undisturbed
    assert 1 == len(inbox.left_over())


async def test_who_leaves_service_is_disturbed_until_it_has_heard() -> None:
    """
    Like any other command, this one counts until it is taken out; one that comes behind the end is
    of no concern.
    """
    inbox = Inbox()
    inbox.leave_service()
    assert (False, "bug") == (inbox.undisturbed, inbox.wanted_by)
    assert 1 == len(inbox.left_over())
    assert inbox.undisturbed
    inbox.close()
    inbox.leave_service()
    assert [] == inbox.left_over()


async def test_a_chunk_is_run_and_sealed() -> None:
    """The one at its place in the sequence."""
    cache = Cache()
    found = await idle_time(Hall(), cache=cache).settle_chunk(range(12), "key", 1)
    assert "sealed" == found
    assert ["pass over [4, 5, 6, 7]", "seal key of 4 to 8"] == cache.did


async def test_a_chunk_that_comes_into_doubt_in_the_wait_is_not_run() -> None:
    """It is looked at behind the wait, in which others found it wrong."""
    hall, cache, found = Hall(in_flight(1)), Cache(), list[str | None]()

    async def settle() -> None:
        found.append(await idle_time(hall, cache=cache).settle_chunk(range(12), "key", 1))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(settle)
        await trio.testing.wait_all_tasks_blocked()
        cache.doubt = True
        hall.activity.leave()
    assert (["doubt"], []) == (found, cache.did)


async def test_a_chunk_that_comes_into_doubt_in_its_pass_is_not_sealed() -> None:
    """Nothing of it stays in the slab: a session rests on sealed blocks alone."""
    cache = Cache(doubt_after=True)
    found = await idle_time(Hall(), cache=cache).settle_chunk(range(12), "key", 1)
    assert "doubt" == found
    assert ["pass over [4, 5, 6, 7]", "trim to 4"] == cache.did


class Tokenizer:
    """Takes its time for each rendering, until it is let go."""

    def __init__(self) -> None:
        self.reached, self.go = threading.Event(), threading.Event()
        self.did: list[str] = []

    def apply_chat_template(self, messages: list[dict[str, Any]], **settings: Any) -> str:
        """What is said last."""
        return str(messages[-1]["content"])

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """One token a character."""
        self.reached.set()
        assert self.go.wait(60)
        self.did.append("rendering")
        return [ord(character) for character in text]

    def decode(self, ids: Sequence[int]) -> str:
        """Not needed here."""
        raise NotImplementedError


async def test_a_request_waits_for_one_rendering_at_most() -> None:
    """
    Three sessions have something to render when a request comes that is to be tokenised, behind one
    tokenizer. The rendering in hand ends, then it is the request's turn, then theirs.
    """
    hall, tokenizer, tokenizing = Hall(), Tokenizer(), trio.CapacityLimiter(1)
    next_prompt = NextPrompt(tokenizer, Encoder(tokenizer), tokenizing)
    conversation = Conversation(messages=(Message(role="user", content="Hello"),))
    said = Message(role="assistant", content="Hi")
    found: list[Beginning | None] = []

    async def renders() -> None:
        found.append(await next_prompt.beginning(conversation, said, "local", idle_time(hall).run))

    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(renders)
        assert await trio.to_thread.run_sync(tokenizer.reached.wait, 60)
        await trio.testing.wait_all_tasks_blocked()
        hall.activity.arrive(1)

        async def request() -> None:
            await trio.to_thread.run_sync(tokenizer.did.append, "request", limiter=tokenizing)
            hall.activity.leave()

        nursery.start_soon(request)
        await trio.testing.wait_all_tasks_blocked()
        tokenizer.go.set()
    assert ["rendering", "request", *["rendering"] * 5] == tokenizer.did
    assert [()] * 3 == [beginning and beginning.ids for beginning in found]
