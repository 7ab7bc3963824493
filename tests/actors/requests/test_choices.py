"""
Several answers to one request: one prompt, one prefill, and each as if it had been asked for alone.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
import trio.lowlevel
import trio.testing

from cairn.actors.errors import (
    FormatRefused,
    QueueFull,
    Stopping,
    TimedOut,
    TooManyAnswers,
)
from cairn.actors.requests.limits import Limits
from cairn.actors.requests.messages import Accepted, Delta, Finished, Generate
from cairn.actors.server import Server
from cairn.actors.sessions.generate import Generation
from cairn.actors.sessions.prewarm import Prewarm
from cairn.engine.errors import GrammarDeadEnd
from cairn.engine.prompt.template import Conversation, Message
from cairn.engine.reports import DecodeRow, RowReport
from cairn.engine.sampling import Sampling
from cairn.journal import events as ev
from cairn.journal.replay import replay
from cairn.journal.rows.store import MemoryStore
from tests.support.fake_engine import FakeEngine
from tests.support.held_engine import Hold
from tests.support.in_process_server import (
    ask,
    events_of,
    generate,
    local,
    serving,
    serving_fake,
    wait_idle,
)

pytestmark = pytest.mark.trio

WORDS = "Take the lower path, and count the cairns on the way. " * 8
TALK = Conversation(messages=(Message(role="user", content=WORDS),))
# A session takes up a request a step after it gets a row, so the state of the three varies.
BUSY = r"running: [012], waiting: [123]\) and has no room for 1 more; try again"
HOT = generate(TALK, sampling=Sampling(temperature=1.0), seed=7, max_tokens=8)


@pytest.mark.parametrize("given", [None, 2**64 - 1])
async def test_a_drawn_seed_can_be_sent_back(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch, given: int | None
) -> None:
    """
    JavaScript reads every drawn seed exactly, even the largest one. A seed from a client is kept.
    """
    monkeypatch.setattr("cairn.actors.requests.prepare.secrets.randbits", lambda bits: 2**bits - 1)
    store = MemoryStore()
    async with (
        serving(model_directory, store, prewarm=False) as server,
        local(server).generate(attrs.evolve(HOT, choices=16, max_tokens=1, seed=given)) as replies,
    ):
        seeds = [reply.seed async for reply in replies if isinstance(reply, Accepted)]
    assert 16 == len(set(seeds))
    assert {one.seed for one in events_of(store, ev.RequestReceived)} == set(seeds)
    if given is None:
        assert max(seeds) <= 2**53 - 1
    else:
        assert given in seeds


async def test_each_answer_is_that_of_its_seed(model_directory: Path) -> None:
    """
    Three answers have the tokens and log-probabilities of three requests with consecutive seeds.
    The prompt's full chunks are prefilled once, and each answer is a request on record.
    """
    store = MemoryStore()
    tokens: dict[int, list[Any]] = {0: [], 1: [], 2: []}
    accepted: dict[int, Accepted] = {}
    ends: dict[int, Finished] = {}
    async with serving(model_directory, store, prewarm=False) as server:
        async with local(server).generate(
            attrs.evolve(HOT, choices=3, session_name="mine")
        ) as replies:
            async for reply in replies:
                match reply:
                    case Accepted():
                        accepted[reply.choice] = reply
                    case Delta():
                        tokens[reply.choice] += reply.tokens
                    case Finished():
                        ends[reply.choice] = reply
                    case _:
                        pass
        await wait_idle(server)
        asked = events_of(store, ev.RequestReceived)
        prefilled = [
            (one.start, one.end)
            for one in events_of(store, ev.CacheExtended)
            if one.step == "prefill"
        ]
        alone = [
            await ask(server, attrs.evolve(HOT, seed=7 + choice, cache_prompt=False))
            for choice in range(3)
        ]

    assert [7, 8, 9] == [accepted[choice].seed for choice in range(3)]
    assert [tuple(tokens[choice]) for choice in range(3)] == [said.tokens for said in alone]
    assert len({tuple(texts) for texts in map(str, tokens.values())}) == 3
    assert [8, 8, 8] == [ends[choice].completion_tokens for choice in range(3)]
    full = accepted[0].prompt_tokens // 64 * 64
    assert full > 0
    assert [0, full, full] == [accepted[choice].cached_tokens for choice in range(3)]
    assert len(prefilled) == full // 64 + 3 == len(set(prefilled)) + 2
    assert {one.request for one in accepted.values()} == {one.request for one in asked}
    assert "mine" == accepted[0].session
    assert 3 == len({one.session for one in asked})


@pytest.mark.long
async def test_each_answer_takes_a_place_and_all_leave_together(model_directory: Path) -> None:
    """
    A request for more answers than there are free places is refused as a whole, and a client that
    disconnects ends all of its answers. More answers than an idle server has places for are the
    client's mistake.
    """
    limits = Limits(queue=1)
    async with serving(model_directory, limits=limits, decode_rows=2) as server:
        with pytest.raises(TooManyAnswers, match="n is 4; at most 3 answers"):
            await ask(server, attrs.evolve(HOT, choices=4))
        async with local(server).generate(attrs.evolve(HOT, choices=3, max_tokens=400)) as replies:
            async for reply in replies:
                if isinstance(reply, Delta):
                    break
            with pytest.raises(QueueFull, match=BUSY):
                await ask(server, HOT)
        await server.loaded.activity.wait_idle()
        await ask(server, HOT)


async def test_a_failure_after_an_answer_ends_no_other_answer(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first answer is complete when its session breaks; the second one is still completed."""
    next_turn = Prewarm.next_turn

    async def breaks(self: Prewarm, ticket: Any, message: Any) -> bool:
        if not ticket.choice:
            raise ArithmeticError("after the answer")
        return await next_turn(self, ticket, message)

    monkeypatch.setattr(Prewarm, "next_turn", breaks)
    store = MemoryStore()
    two = attrs.evolve(HOT, choices=2)
    async with serving(model_directory, store) as server, local(server).generate(two) as replies:
        ends = [reply.choice async for reply in replies if isinstance(reply, Finished)]
    assert [0, 1] == sorted(ends)
    (broken,) = events_of(store, ev.InvariantViolated)
    assert ("CRASH", None) == (broken.invariant, broken.request)


async def ask_all(server: Server, command: Generate) -> dict[int, list[Any]]:
    """The replies of each answer. All of them must complete."""
    tokens: dict[int, list[Any]] = {choice: [] for choice in range(command.choices)}
    ends: set[int] = set()
    with trio.fail_after(300):
        async with local(server).generate(command) as replies:
            async for reply in replies:
                match reply:
                    case Delta():
                        assert reply.choice not in ends
                        tokens[reply.choice] += reply.tokens
                    case Finished():
                        ends.add(reply.choice)
                    case _:
                        pass
    assert tokens.keys() == ends
    return tokens


@pytest.mark.parametrize("slabs", [1, 2])
async def test_answers_wait_for_each_others_slabs(model_directory: Path, slabs: int) -> None:
    """
    If the pool has fewer slabs than there are answers, they run one after the other, each with the
    bits of its seed alone, and the prompt's chunks are prefilled once.
    """
    store = MemoryStore()
    async with serving(model_directory, store, pool_slabs=slabs, decode_rows=4) as server:
        tokens = await ask_all(server, attrs.evolve(HOT, choices=4))
        await wait_idle(server)
        prefilled = [one for one in events_of(store, ev.CacheExtended) if one.step == "prefill"]
        alone = [
            await ask(server, attrs.evolve(HOT, seed=7 + choice, cache_prompt=False))
            for choice in range(4)
        ]
    assert [said.tokens for said in alone] == [tuple(tokens[choice]) for choice in range(4)]
    assert slabs == max(one.pool_slabs for one in events_of(store, ev.SlabAcquired))
    assert [] == events_of(store, ev.RequestCancelled)
    assert prefilled[-1].end // 64 + 4 == len(prefilled)
    assert () == replay(store.read()).findings


async def reached(hold: Hold, requests: int) -> None:
    """Wait until the engine is held and sessions serve a number of requests."""
    await hold.wait()
    with trio.fail_after(60):
        while requests != len(hold.server.loaded.sequencer.state.requests):
            await trio.testing.wait_all_tasks_blocked()


async def test_answers_of_several_requests_wait_for_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    """
    Two clients ask for three answers each on a pool of two slabs, and get all of them. The first
    answers hold the slabs and are running when the others come.
    """
    prefill = Generation.prefill

    async def both_have_slabs(self: Generation) -> Any:
        with trio.fail_after(60):
            while self.ticket.first is None and self.context.sequencer.state.pool.slabs < 2:
                await trio.testing.wait_all_tasks_blocked()
        return await prefill(self)

    monkeypatch.setattr(Generation, "prefill", both_have_slabs)
    store = MemoryStore()
    # Otherwise one would join the other, and open no slab until that has prefilled.
    alone = attrs.evolve(HOT, cache_prompt=False)
    both = [attrs.evolve(alone, choices=3, seed=seed) for seed in (1, 2)]
    async with (
        serving_fake(store, pool_slabs=2) as server,
        trio.open_nursery() as nursery,
    ):
        stuck = Hold(server, "decode")
        for command in both:
            nursery.start_soon(ask_all, server, command)
        await reached(stuck, 4)
        stuck.go.set()
    assert 6 == len(events_of(store, ev.RequestFinished))
    assert [] == events_of(store, ev.RequestCancelled)
    assert () == replay(store.read()).findings


async def test_the_first_answer_waits_for_a_slab_too() -> None:
    """If other requests hold all slabs, a request for several answers waits, and gets them all."""
    store = MemoryStore()
    async with (
        serving_fake(store, pool_slabs=1) as server,
        trio.open_nursery() as nursery,
    ):
        stuck = Hold(server, "decode")
        nursery.start_soon(ask_all, server, HOT)
        await reached(stuck, 1)
        nursery.start_soon(ask_all, server, attrs.evolve(HOT, choices=2, seed=7))
        await reached(stuck, 2)
        stuck.go.set()
    assert 3 == len(events_of(store, ev.RequestFinished))
    assert [] == events_of(store, ev.RequestCancelled)
    assert [] == events_of(store, ev.RequestRejected)


async def test_a_client_that_disconnects_ends_its_waiting_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Some wait for a slab, in the middle of their session, and some for a row: all of them end."""
    store = MemoryStore()
    decode = FakeEngine.decode

    def slow(engine: FakeEngine, rows: Sequence[DecodeRow | None]) -> list[RowReport]:
        time.sleep(0.002)  # or on a busy machine all 4,000 passes are done before the next check
        return decode(engine, rows)

    monkeypatch.setattr(FakeEngine, "decode", slow)
    async with serving_fake(store, pool_slabs=1) as server:
        stuck = Hold(server, "decode")
        async with local(server).generate(attrs.evolve(HOT, choices=6, max_tokens=4000)):
            await reached(stuck, 4)
        await reached(stuck, 1)
        stuck.go.set()
        await server.loaded.activity.wait_idle()
        await ask_all(server, attrs.evolve(HOT, choices=2))
    stages = [one.stage for one in events_of(store, ev.RequestCancelled)]
    assert ["decode", "prefill", "prefill", "prefill"] == sorted(stages)
    rejected = [(one.status, one.code) for one in events_of(store, ev.RequestRejected)]
    assert [(499, "client_gone")] * 2 == rejected
    assert () == replay(store.read()).findings


async def test_answers_that_end_with_a_sibling_record_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """
    The first answer fails after its prompt: the answers that wait for its slab, and those that wait
    for a row, end with it. The journal records that no client disconnected.
    """

    async def fails(self: Generation, first: Any) -> Any:
        with trio.fail_after(60):
            while len(self.context.sequencer.state.requests) < 4:
                await trio.testing.wait_all_tasks_blocked()
        raise self._not_held(GrammarDeadEnd("the library takes no more"))

    monkeypatch.setattr(Generation, "decode", fails)
    store = MemoryStore()
    async with serving_fake(store, pool_slabs=1) as server:
        with pytest.raises(FormatRefused):
            await ask_all(server, attrs.evolve(HOT, choices=6))
        await server.loaded.activity.wait_idle()
    stages = [one.stage for one in events_of(store, ev.RequestCancelled)]
    assert ["grammar_failed", *["sibling_failed"] * 3] == sorted(stages)
    rejected = [(one.status, one.code) for one in events_of(store, ev.RequestRejected)]
    assert [(424, "sibling_failed")] * 2 == rejected
    assert () == replay(store.read()).findings


async def test_an_answer_that_waits_for_a_slab_ends_with_the_server() -> None:
    """A server that stops does not wait for an answer that waits for a slab."""
    store = MemoryStore()

    async def asks(server: Server) -> None:
        with pytest.raises(Stopping):
            await ask_all(server, attrs.evolve(HOT, choices=3, max_tokens=4000))

    limits = Limits(drain_s=0)
    async with (
        serving_fake(store, pool_slabs=1, limits=limits) as server,
        trio.open_nursery() as nursery,
    ):
        stuck = Hold(server, "decode")
        nursery.start_soon(asks, server)
        await reached(stuck, 3)
        nursery.start_soon(server.drain)
        await reached(stuck, 1)
        stuck.go.set()
    stages = [one.stage for one in events_of(store, ev.RequestCancelled)]
    # The first answer may have been complete by the time that the stop was noticed.
    complete = len(events_of(store, ev.RequestFinished))
    assert complete in (0, 1)
    assert ["server_stopped"] * (3 - complete) == stages


class Slow:
    """Keeps a tokenizer's thread busy until it is released."""

    def __init__(self, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go = threading.Event()
        self._read = server.loaded.preparer.read
        monkeypatch.setattr(server.loaded.preparer, "read", self._wait)

    def _wait(self, *given: Any) -> Any:
        self.go.wait(60)
        return self._read(*given)


@pytest.mark.long
async def test_requests_in_preparation_count_as_waiting(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    Requests and counts whose prompts are not tokenised yet take places, too. Once all places are
    taken, the next one is refused, and a refused count is not recorded.
    """
    store = MemoryStore()
    async with serving(model_directory, store, limits=Limits(queue=1), decode_rows=1) as server:
        slow = Slow(server, monkeypatch)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, server, HOT)
            nursery.start_soon(local(server).count, HOT)
            await trio.testing.wait_all_tasks_blocked()
            with trio.fail_after(60), pytest.raises(QueueFull):
                await local(server).count(HOT)
            with trio.fail_after(60), pytest.raises(QueueFull):
                await ask(server, HOT)
            slow.go.set()
    assert [429] == [one.status for one in events_of(store, ev.RequestRejected)]


async def test_preparation_times_out(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    A request or count that is not tokenised in time is refused. A thread that has begun finishes
    first.
    """
    store = MemoryStore()
    async with serving(model_directory, store, limits=Limits(request_s=0.05)) as server:
        slow = Slow(server, monkeypatch)
        async with trio.open_nursery() as nursery:

            async def first() -> None:
                with pytest.raises(TimedOut):
                    await ask(server, HOT)

            nursery.start_soon(first)
            await trio.testing.wait_all_tasks_blocked()
            with pytest.raises(TimedOut):
                await local(server).count(HOT)
            with pytest.raises(TimedOut):
                await ask(server, HOT)
            slow.go.set()
    rejected = events_of(store, ev.RequestRejected)
    assert {(504, "timed_out")} == {(one.status, one.code) for one in rejected}
