"""
A long history is copied into a slab in parts. Other answers decode between two parts, no prefill
pass comes in, and a client that disconnects meanwhile leaves a session that continues.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import attrs
import pytest
import trio
import trio.testing

from cairn.actors.errors import Broken
from cairn.actors.requests.limits import Limits
from cairn.actors.requests.messages import Generate
from cairn.actors.server import Server
from cairn.actors.threads.engine import EngineThread
from cairn.actors.threads.scheduling import COPIES_PER_PREFILL
from cairn.engine import schedule
from cairn.engine.contract import Engine
from cairn.engine.prompt.template import Conversation, Message
from cairn.engine.reports import DecodeRow, Drawn, DrawSpec, PassReport, RowReport
from cairn.engine.sampling import Sampling
from cairn.journal import events as ev
from cairn.journal.replay import replay
from tests.gate.conversation import words
from tests.support.fake_engine import TOKEN_BYTES, FakeEngine
from tests.support.held_engine import Hold, hold_in_copy
from tests.support.in_process_server import Said, ask, generate, wait_idle, without_slabs
from tests.support.prewarm_conversation import Journaled, found_wrong, onward

pytestmark = pytest.mark.trio

BLOCK = 64 * TOKEN_BYTES
DECODE = "decode"


# --- the engine's thread -------------------------------------------------------------------------


class LoggingEngine(FakeEngine):
    """Records the order of calls."""

    decode_rows = 1

    def __init__(self) -> None:
        super().__init__()
        self.did: list[str] = []

    def decode(self, rows: Sequence[DecodeRow | None]) -> list[RowReport]:
        """Decode one token."""
        self.did.append(DECODE)
        drawn = Drawn(token=7, logprob=-1.0)
        return [
            PassReport(start=0, end=1, ran=(7,), coverage=(), drawn=drawn, duration_us=1)
            for _ in rows
        ]


@attrs.frozen
class HeldThread:
    """A thread that is held in its first job, and then runs what was requested meanwhile."""

    thread: EngineThread
    device: LoggingEngine
    go: threading.Event = attrs.field(factory=threading.Event)
    recorded: list[str] = attrs.field(factory=list)

    def part(self, name: str) -> tuple[Callable[[Engine], str], Callable[[str], None]]:
        """A part of a copy."""

        def run(_: Engine) -> str:
            self.device.did.append(name)
            return name

        return run, self.recorded.append

    def decodes(self, passes: int) -> None:
        """Start an answer of a number of decode passes."""
        row = DecodeRow(slab=1, token=1, draw=DrawSpec(sampling=Sampling(), seed=0))
        self.thread.decode(lambda token: row, token=1, left=passes, ends=frozenset())


@contextlib.asynccontextmanager
async def held_thread() -> AsyncIterator[HeldThread]:
    """A thread that is held in its first job."""
    thread, device = EngineThread(), LoggingEngine()
    made = HeldThread(thread, device)
    async with trio.open_nursery() as nursery:
        await nursery.start(thread.run)
        thread.install(device)
        begun = threading.Event()

        def held(_: Any) -> None:
            begun.set()
            made.go.wait(60)

        nursery.start_soon(thread.call, held, lambda _: None)
        # What is requested from here on is taken in together, after that job.
        assert await trio.to_thread.run_sync(begun.wait, 60)
        try:
            yield made
        finally:
            made.go.set()
            thread.close()


async def test_decode_passes_run_between_two_parts_and_no_prefill() -> None:
    """One part at a time; a prefill pass that was requested earlier waits for a few of them."""
    async with held_thread() as made:
        made.decodes(6)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(made.thread.prefill, *made.part("chunk"))
            await trio.testing.wait_all_tasks_blocked()
            parts = [made.part(name) for name in ("one", "two", "three")]
            nursery.start_soon(made.thread.copy, parts, lambda: True)
            await trio.testing.wait_all_tasks_blocked()
            made.go.set()

        due = [DECODE, "one", DECODE, "two", DECODE, "three", DECODE, "chunk"]
        assert due == made.device.did[: len(due)]
        assert ["one", "two", "three", "chunk"] == made.recorded


async def test_a_long_copy_lets_prefill_passes_in() -> None:
    """The first token of another request does not wait for all of a long history."""
    async with held_thread() as made:
        names = [str(number) for number in range(2 * COPIES_PER_PREFILL + 1)]
        async with trio.open_nursery() as nursery:
            for chunk in ("first chunk", "second chunk"):
                nursery.start_soon(made.thread.prefill, *made.part(chunk))
                await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(made.thread.copy, [made.part(name) for name in names], lambda: True)
            await trio.testing.wait_all_tasks_blocked()
            made.go.set()

        first, second = (names[n : n + COPIES_PER_PREFILL] for n in (0, COPIES_PER_PREFILL))
        due = [*first, "first chunk", *second]
        assert [*due, "second chunk", names[-1]] == made.device.did


async def test_a_copy_that_is_no_longer_needed_is_dropped_at_once() -> None:
    """Its parts are dropped at once, not one after each decode pass."""
    async with held_thread() as made:
        made.decodes(50)
        async with trio.open_nursery() as nursery:
            parts = [made.part(str(number)) for number in range(20)]
            nursery.start_soon(made.thread.copy, parts, lambda: made.device.did[-1:] != ["1"])
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(made.thread.prefill, *made.part("chunk"))
            await trio.testing.wait_all_tasks_blocked()
            made.go.set()

        assert [DECODE, "0", DECODE, "1", DECODE, "chunk"] == made.device.did[:6]


async def test_copies_run_one_after_the_other() -> None:
    """Two copies do not alternate between passes."""
    async with held_thread() as made:
        made.decodes(8)
        async with trio.open_nursery() as nursery:
            for copy in ("a", "b"):
                parts = [made.part(f"{copy}{number}") for number in (1, 2)]
                nursery.start_soon(made.thread.copy, parts, lambda: True)
                await trio.testing.wait_all_tasks_blocked()
            made.go.set()

        due = [DECODE, "a1", DECODE, "a2", DECODE, "b1", DECODE, "b2"]
        assert due == made.device.did[: len(due)]


async def test_a_load_does_not_wait_for_the_copy_of_another() -> None:
    """
    Its caller holds locks. It runs before the parts that wait already, and answers decode between.
    """
    async with held_thread() as made:
        made.decodes(6)
        async with trio.open_nursery() as nursery:
            parts = [made.part(name) for name in ("one", "two", "three")]
            nursery.start_soon(made.thread.copy, parts, lambda: True)
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(made.thread.copy_one, *made.part("load"))
            await trio.testing.wait_all_tasks_blocked()
            made.go.set()

        due = [DECODE, "load", DECODE, "one", DECODE, "two", DECODE, "three"]
        assert due == made.device.did[: len(due)]


async def test_a_copy_ends_once_it_is_no_longer_needed() -> None:
    """
    A part that has begun is recorded, and no further one begins, even if the predicate changes
    back.
    """
    async with held_thread() as made:
        done = list[bool]()
        parts = [made.part(name) for name in ("one", "two", "three", "four")]

        async def copies() -> None:
            done.append(await made.thread.copy(parts, lambda: made.device.did != ["one", "two"]))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(copies)
            made.go.set()

        assert [False] == done
        assert ["one", "two"] == made.device.did == made.recorded


@pytest.mark.parametrize("where", ["run", "record"])
async def test_a_failed_part_ends_the_copy(where: str) -> None:
    """
    After a part that fails no part runs, or none that ran is recorded, because the first failure is
    on record already. The caller gets that failure.
    """

    def fails(_: Any) -> Any:
        raise RuntimeError("a part went wrong")

    async with held_thread() as made:
        first, (run, record), last = (made.part(name) for name in ("one", "two", "three"))
        second = (fails, record) if where == "run" else (run, fails)
        made.go.set()
        with pytest.raises(RuntimeError, match="a part went wrong"):
            await made.thread.copy([first, second, last], lambda: True)

        assert ["one"] == made.recorded
        assert where == "record" or ["one"] == made.device.did


async def test_a_cancelled_copy_ends_after_the_running_part() -> None:
    """The running part is recorded, and none begins after it."""
    async with held_thread() as made:
        held, reached = threading.Event(), threading.Event()

        def waits(_: Engine) -> str:
            reached.set()
            assert held.wait(60)
            return "one"

        parts = [(waits, made.recorded.append), made.part("two")]
        made.go.set()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(made.thread.copy, parts, lambda: True)
            assert await trio.to_thread.run_sync(reached.wait, 60)
            nursery.cancel_scope.cancel()
            nursery.start_soon(_set_later, held)

        assert ["one"] == made.recorded
        assert [] == made.device.did


async def test_a_copy_that_is_cancelled_before_its_first_part() -> None:
    """
    No part begins afterwards, even if the engine's thread is notified that the copy is needed.
    """
    async with held_thread() as made:
        held, reached = threading.Event(), threading.Event()

        def still_needed() -> bool:
            reached.set()
            assert held.wait(60)
            return True

        made.go.set()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(made.thread.copy, [made.part("one"), made.part("two")], still_needed)
            assert await trio.to_thread.run_sync(reached.wait, 60)
            nursery.cancel_scope.cancel()
            nursery.start_soon(_set_later, held)

        assert [] == made.device.did == made.recorded


async def _set_later(held: threading.Event) -> None:
    with trio.CancelScope(shield=True):
        await trio.testing.wait_all_tasks_blocked(0.01)
        held.set()


# --- sessions ------------------------------------------------------------------------------------


@pytest.fixture(name="setup")
def setup_(monkeypatch: pytest.MonkeyPatch) -> Journaled:
    """Servers without a model, in which a part is two blocks."""
    monkeypatch.setattr(schedule, "COPIED_AT_ONCE_BYTES", 2 * BLOCK)
    return Journaled()


def question(place: int = 1, count: int = 150, **changes: Any) -> Generate:
    """A conversation's first request, several chunks long."""
    message = Message(role="user", content=words(place, count))
    return generate(Conversation(messages=(message,)), **changes)


@attrs.define
class Order:
    """
    The order of decode passes and of parts of copies in a server. As long as only one answer has
    begun to decode, each of its passes waits until a job is queued for the engine or another answer
    begins: so it does not end before other requests have queued theirs, however slow they are.

    Attributes:
        asked: jobs that wait for the engine or run.
        answers: answers that have begun to decode.
        decodes: set in the first pass.
        free: set it to let passes run without waiting.
    """

    server: Server
    did: list[str] = attrs.field(factory=list)
    asked: int = 0
    answers: int = 0
    decodes: threading.Event = attrs.field(factory=threading.Event)
    free: threading.Event = attrs.field(factory=threading.Event)

    def __attrs_post_init__(self) -> None:
        device: Any = self.server.loaded.engine.device
        thread: Any = self.server.loaded.engine
        share, decode, begin = device.share, device.decode, thread.decode

        def shared(*given: Any, **named: Any) -> Any:
            self.did.append("part")
            return share(*given, **named)

        def decoded(rows: Any) -> Any:
            self.did.append(DECODE)
            self.decodes.set()
            # The other answer is not yet among the rows when it begins during this pass.
            while self.answers < 2 and not self.asked and not self.free.wait(0.001):
                pass
            return decode(rows)

        def begun(*given: Any, **named: Any) -> Any:
            self.answers += 1
            return begin(*given, **named)

        device.share, device.decode, thread.decode = shared, decoded, begun
        for name in ("call", "copy", "copy_one", "prefill", "settle"):
            setattr(thread, name, partial(self._ask, getattr(thread, name)))

    async def _ask(self, job: Callable[..., Awaitable[Any]], *given: Any) -> Any:
        self.asked += 1
        try:
            return await job(*given)
        finally:
            self.asked -= 1


async def test_others_decode_while_a_history_is_copied(setup: Journaled) -> None:
    """Between any two parts there is a decode pass for the answers in progress."""
    async with setup.serving(limits=Limits(slab_idle_s=0.0)) as server:
        first = await ask(server, question())
        await without_slabs(server)
        order, leaving = Order(server), trio.CancelScope()

        async def other() -> None:
            with leaving:
                await ask(server, question(7, 2, max_tokens=7000))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(other)
            assert await trio.to_thread.run_sync(order.decodes.wait, 60)
            try:
                second = await ask(server, onward(question(), first))
            finally:
                order.free.set()
                leaving.cancel()
        await wait_idle(server)

    (copied,) = [one for one in setup.events(ev.PathSelected) if one.blocks_from_pool]
    parts = setup.events(ev.BlocksRestored)
    assert copied.blocks_from_pool == second.finished.cached_tokens // 64 > 6
    assert {copied.request} == {part.request for part in parts}
    assert {2} == {len(part.keys) for part in parts[:-1]}
    places = [place for place, what in enumerate(order.did) if what == "part"]
    assert len(places) == len(parts) == -(-copied.blocks_from_pool // 2)
    assert all(later - one > 1 for one, later in itertools.pairwise(places))
    assert setup.is_valid()


async def test_a_client_that_disconnects_between_two_parts_leaves_the_first_ones(
    setup: Journaled,
) -> None:
    """The request is cancelled, the session keeps the copied parts, and continues from there."""
    async with setup.serving() as server:
        first = await ask(server, question())
        await wait_idle(server)
        await server.loaded.sessions.actors[first.accepted.session].give_up_slab(
            "room for another session"
        )
        between, leaving = hold_in_copy(server), trio.CancelScope()

        async def leave() -> None:
            with leaving:
                await ask(server, onward(question(), first))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(leave)
            await between.wait()
            leaving.cancel()
            await trio.testing.wait_all_tasks_blocked()
            between.go.set()
        await wait_idle(server)
        second = await ask(server, onward(question(), first))
        await wait_idle(server)

    (cancelled,) = setup.events(ev.RequestCancelled)
    parts = [one for one in setup.events(ev.BlocksRestored) if one.request == cancelled.request]
    settled = setup.events(ev.SessionSettled)[1]
    chosen = setup.events(ev.PathSelected)[-1]
    assert ("prefill", 2, 4 * 64) == (cancelled.stage, len(parts), settled.canonical_tokens)
    assert ("continuation", 4) == (chosen.path, chosen.blocks_from_slab)
    assert second.finished.cached_tokens == (4 + chosen.blocks_from_pool) * 64
    assert setup.is_valid()


async def test_a_block_that_is_quarantined_during_its_copy(setup: Journaled) -> None:
    """
    No further part of it is copied: the request ends with the bug, as does any other that meets it,
    and the session continues. The next request does not reuse the block.
    """
    async with setup.serving() as server:
        first = await ask(server, question())
        await wait_idle(server)
        await server.loaded.sessions.actors[first.accepted.session].give_up_slab(
            "room for another session"
        )
        between, bug_ids = hold_in_copy(server), list[str]()

        async def ask_and_fail() -> None:
            with pytest.raises(Broken) as bug:
                await ask(server, onward(question(), first))
            bug_ids.append(bug.value.bug_id)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask_and_fail)
            await between.wait()
            request = server.loaded.sequencer.session(first.accepted.session).request
            assert request is not None
            found_wrong(server, request.prompt_keys[5])
            between.go.set()
        await wait_idle(server)
        second = await ask(server, onward(question(), first))
        await wait_idle(server)

    (bug,) = setup.events(ev.InvariantViolated)
    (ended,) = setup.events(ev.RequestCancelled)
    parts = [one for one in setup.events(ev.BlocksRestored) if one.request == ended.request]
    assert ([bug.bug_id], "bug", 2) == (bug_ids, ended.stage, len(parts))
    assert 5 * 64 == second.finished.cached_tokens
    assert {"INV-3"} == {found.invariant for found in replay(setup.store.read()).findings}


async def copied_ahead(server: Server) -> tuple[Hold, Generate, Said]:
    """
    A session whose next prompt needs much copying: the hold on the engine during that copy, the
    request, and the answer.
    """
    request = question(max_tokens=400)
    await ask(server, attrs.evolve(request, session_name="one"))
    await wait_idle(server)
    between = hold_in_copy(server)
    # A longer answer: its existing blocks are copied, and the rest would be computed.
    command = attrs.evolve(request, session_name="two", cache_prompt=False, max_tokens=500)
    return between, command, await ask(server, command)


async def test_a_request_ends_a_prewarming_copy(setup: Journaled) -> None:
    """A prewarming copy ends after the running part, and the copied parts are used."""
    async with setup.serving() as server:
        between, command, second = await copied_ahead(server)
        answers = []
        async with trio.open_nursery() as nursery:
            await between.wait()

            async def next_turn() -> None:
                answers.append(
                    await ask(server, onward(command, second, cache_prompt=True, max_tokens=2))
                )

            nursery.start_soon(next_turn)
            await trio.testing.wait_all_tasks_blocked()
            between.go.set()
        await wait_idle(server)

    (given_up,) = setup.events(ev.PrewarmAbandoned)
    (begun,) = [one for one in setup.events(ev.PrewarmStarted) if one.blocks_from_pool]
    prewarm = [one for one in setup.events(ev.BlocksRestored) if one.request is None]
    assert ("two", "request", 0) == (given_up.session, given_up.reason, given_up.computed_tokens)
    assert 2 == len(prewarm) < begun.blocks_from_pool / 2
    chosen = setup.events(ev.PathSelected)[-1]
    assert prewarm[-1].end == chosen.blocks_from_slab * 64
    assert answers[0].finished.cached_tokens >= chosen.blocks_from_slab * 64
    assert setup.is_valid()


async def test_a_quarantined_block_ends_a_prewarming_copy(setup: Journaled) -> None:
    """No part after the running one is copied, and the session becomes idle with what it has."""
    async with setup.serving() as server:
        between, *_ = await copied_ahead(server)
        await between.wait()
        prewarm = server.loaded.sequencer.session("two").prewarm
        assert prewarm is not None
        found_wrong(server, prewarm.keys[prewarm.blocks_from_slab + 4])
        between.go.set()
        await wait_idle(server)

    (given_up,) = setup.events(ev.PrewarmAbandoned)
    copied = [one for one in setup.events(ev.BlocksRestored) if one.request is None]
    assert ("two", "quarantined", 2) == (given_up.session, given_up.reason, len(copied))
    assert [prewarm.blocks_from_slab * 64 + 4 * 64] == [
        one.canonical_tokens for one in setup.events(ev.SessionSettled) if one.session == "two"
    ]
