"""Decode passes gather: fewer rows and commits, and no token waits longer than 25 ms for that."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
import trio
import trio.testing

from cairn.actors.requests.messages import DELAYS_S, Delta, Finished
from cairn.actors.server import Server
from cairn.actors.sessions.gathering import GATHER_S, GatheredPasses, Gathering
from cairn.engine.reports import Drawn, PassReport
from cairn.journal import events as ev
from cairn.journal.replay import replay
from cairn.journal.rows.codec import Row
from cairn.journal.rows.store import MemoryStore
from tests.support.fake_engine import ROWS
from tests.support.in_process_server import chat, events_of, generate, local, serving_fake


def report(token: int = 1) -> PassReport:
    """A pass that drew a token."""
    drawn = Drawn(token=token, logprob=-1.0)
    return PassReport(start=0, end=1, ran=(1,), coverage=(), drawn=drawn, duration_us=1)


def appended(passes: GatheredPasses, every_s: float, until_s: float) -> list[tuple[float, int]]:
    """When an answer appends, with how many passes, if a pass comes at regular times."""
    found: list[tuple[float, int]] = []
    came = every_s
    while came <= until_s:
        # A task wakes at ``append_at`` if no pass comes before that.
        while passes.append_at < came:
            now = passes.append_at
            found.append((round(now, 6), len(passes.take(now))))
        passes.add([report()], came)
        if passes.append_at <= came:
            found.append((round(came, 6), len(passes.take(came))))
        came = round(came + every_s, 6)
    return found


def test_at_a_hundred_tokens_a_second():
    """Three passes are one row. The last one does not wait: no further one would come in time."""
    found = appended(GatheredPasses(Gathering(), 0.0), 0.01, 0.12)
    assert [(0.03, 3), (0.06, 3), (0.09, 3), (0.12, 3)] == found


def test_at_a_thousand_tokens_a_second():
    """More passes are one row if more come, and the first of them waits for no more than 25 ms."""
    gathering = Gathering()
    found = appended(GatheredPasses(gathering, 0.0), 0.001, 0.06)
    assert {25, 26} >= {passes for _, passes in found}
    in_time = gathering.delays.tokens[: DELAYS_S.index(GATHER_S) + 1]
    assert sum(passes for _, passes in found) == sum(in_time)


@pytest.mark.parametrize("every_s", [1.01 * GATHER_S, 0.04, 1.0])
def test_slow_tokens_do_not_wait(every_s: float):
    """A token that comes 25 ms or more after the last append is appended at once: a row a token."""
    gathering = Gathering()
    found = appended(GatheredPasses(gathering, 0.0), every_s, 10 * every_s)
    assert [1] * 10 == [passes for _, passes in found]
    assert [round(every_s * place, 6) for place in range(1, 11)] == [when for when, _ in found]
    assert (10, 0.0) == (gathering.delays.tokens[0], gathering.delays.sum_s)


def test_an_answer_that_pauses():
    """If the next pass does not come as expected, what gathered is appended after 25 ms."""
    passes = GatheredPasses(Gathering(), 0.0)
    passes.add([report()], 0.01)
    passes.add([report(), report()], 0.02)
    assert 0.035 == pytest.approx(passes.append_at)
    assert 3 == len(passes.take(passes.append_at))
    assert not passes.any
    assert float("inf") == passes.append_at


def test_answers_append_together():
    """The window of the first answer is that of all that gather while it is open."""
    gathering = Gathering()
    one, other = GatheredPasses(gathering, 0.0), GatheredPasses(gathering, 0.008)
    one.add([report()], 0.004)
    other.add([report()], 0.012)
    assert one.append_at == other.append_at == pytest.approx(0.029)
    one.add([report()], 0.02)
    one.take(one.append_at)
    other.take(other.append_at)
    one.add([report()], 0.0295)
    assert 0.0545 == pytest.approx(one.append_at)  # another window, with all its time


def test_delays_are_counted_by_token():
    """Each token counts in the class of its delay, also those that one pass drew together."""
    gathering = Gathering()
    passes = GatheredPasses(gathering, 0.0)
    first = Drawn(token=1, logprob=-1.0)
    both = PassReport(
        start=0, end=2, ran=(1, 1), coverage=(), drawn=first, duration_us=1, accepted=(first,)
    )
    passes.add([both], 0.01)
    passes.add([report()], 0.018)
    passes.take(0.018)
    found = {DELAYS_S[at]: count for at, count in enumerate(gathering.delays.tokens) if count}
    assert {0.0: 1, 0.01: 2} == found
    assert 0.016 == pytest.approx(gathering.delays.sum_s)


# --- in a server ---------------------------------------------------------------------------------


class Passes:
    """Decode passes that run when the test wants them, for one row each."""

    def __init__(self, server: Server) -> None:
        self._engine = server.loaded.engine
        self.answers: list[tuple[Any, list[int], trio.MemorySendChannel[Any]]] = []
        self._engine.decode = self._begin  # type: ignore[method-assign]
        self._engine.stop = self._stop  # type: ignore[method-assign, assignment]

    def _begin(self, row: Any, *, token: int, left: int, **_: Any) -> Any:
        send, receive = trio.open_memory_channel[Any](float("inf"))
        self.answers.append((row, [token, left], send))
        return len(self.answers) - 1, receive

    def _stop(self, answer: int) -> None:
        """End the reports of an answer, as the engine does, though it may be stopped twice."""
        self.answers[answer][2].send_nowait(None)

    async def begun(self, answers: int) -> None:
        """Wait until so many answers have their first token."""
        with trio.fail_after(3600):  # by a clock that stands still
            while len(self.answers) < answers:
                await trio.testing.wait_all_tasks_blocked(0.001)

    async def run(self, answer: int = 0) -> None:
        """Run a pass, and wait until its session has it."""
        row, held, send = self.answers[answer]
        made = row([held[0]])
        (done, *_) = await self._engine.call(
            lambda device: device.decode([made, *[None] * (ROWS - 1)]), lambda reports: reports
        )
        assert isinstance(done, PassReport)
        assert done.drawn is not None
        held[:] = done.drawn.token, held[1] - 1
        send.send_nowait(done)
        if held[1] == 0:
            send.send_nowait(None)
        await trio.testing.wait_all_tasks_blocked(0.01)


class Commits(MemoryStore):
    """A store that knows which rows were committed together."""

    def __init__(self) -> None:
        super().__init__()
        self.commits: list[list[str]] = []

    def append(self, rows: Sequence[Row]) -> None:
        """See ``Store.append``."""
        self.commits.append([row.kind for row in rows])
        super().append(rows)


@contextlib.asynccontextmanager
async def serving_held(
    store: MemoryStore, clock: trio.testing.MockClock
) -> AsyncIterator[tuple[Server, trio.Nursery]]:
    """A server whose clock stands still until the context is left."""
    async with serving_fake(store, prewarm=False) as server, trio.open_nursery() as nursery:
        try:
            yield server, nursery
        finally:
            clock.rate = 1000


@pytest.mark.trio
async def test_passes_of_an_answer(mock_clock: trio.testing.MockClock) -> None:
    """
    The first token is sent at once. Passes that come within 25 ms are one row, and sent after it;
    the end of the answer waits for nothing.
    """
    store, received = Commits(), []

    async def settled(server: Server) -> None:
        await trio.testing.wait_all_tasks_blocked(0.01)
        await server.loaded.writer.wait_all_committed()
        await trio.testing.wait_all_tasks_blocked(0.01)

    async def listen(server: Server) -> None:
        async with local(server).generate(generate(chat("Hello"), max_tokens=6)) as replies:
            async for reply in replies:
                if isinstance(reply, Delta):
                    received.append(len(reply.tokens))
                elif isinstance(reply, Finished):
                    received.append(reply.completion_tokens)

    async with serving_held(store, mock_clock) as (server, nursery):
        passes = Passes(server)
        nursery.start_soon(listen, server)
        await passes.begun(1)
        await settled(server)
        assert [1] == received

        mock_clock.jump(0.01)
        await passes.run()
        mock_clock.jump(0.004)
        await passes.run()
        await settled(server)
        assert [1] == received
        mock_clock.jump(0.020)
        await settled(server)
        assert [1] == received
        mock_clock.jump(0.002)
        await settled(server)
        assert [1, 2] == received

        mock_clock.jump(0.002)
        await passes.run()
        mock_clock.jump(0.001)
        await passes.run()
        await settled(server)
        assert [1, 2] == received
        mock_clock.jump(0.001)
        await passes.run()
        await settled(server)
        assert [1, 2, 3, 6] == received

    decoded = [one for one in events_of(store, ev.CacheExtended) if one.step == "decode"]
    assert [(2, 2), (3, 3)] == [(len(one.sampled), one.emitted) for one in decoded]
    assert all(len(one.text) == one.emitted for one in decoded)
    assert [1] == [len(one.ids) for one in events_of(store, ev.TokensEmitted)]
    assert () == replay(store.read()).findings


@pytest.mark.trio
async def test_a_stop_text_waits_for_nothing(mock_clock: trio.testing.MockClock) -> None:
    """An answer that ends by its text is at its client although the clock stands still."""
    store = Commits()
    ended = trio.Event()

    async def listen(server: Server) -> None:
        command = generate(chat("Hello"), max_tokens=60, stop=tuple("abcdefghijklm"))
        async with local(server).generate(command) as replies:
            async for reply in replies:
                if isinstance(reply, Finished):
                    ended.set()

    async with serving_held(store, mock_clock) as (server, nursery):
        passes = Passes(server)
        nursery.start_soon(listen, server)
        await passes.begun(1)
        for _ in range(26):  # it draws the letters of the alphabet in turn
            if ended.is_set():
                break
            mock_clock.jump(0.0001)
            await passes.run()
            await server.loaded.writer.wait_all_committed()
            await trio.testing.wait_all_tasks_blocked(0.01)
        assert ended.is_set()
        assert trio.current_time() < GATHER_S
    assert () == replay(store.read()).findings


@pytest.mark.trio
async def test_answers_of_several_sessions(mock_clock: trio.testing.MockClock) -> None:
    """Rows of sessions that answer at the same time are in one commit."""
    store = Commits()

    async def listen(server: Server, name: str) -> None:
        async with local(server).generate(generate(chat(name), max_tokens=3)) as replies:
            async for _ in replies:
                pass

    async with serving_held(store, mock_clock) as (server, nursery):
        passes = Passes(server)
        for name in ("one", "two", "three"):
            nursery.start_soon(listen, server, name)
        await passes.begun(3)
        for answer in range(3):
            mock_clock.jump(0.002)
            await passes.run(answer)
            await trio.testing.wait_all_tasks_blocked(0.01)
        before = len(store.commits)
        mock_clock.jump(0.025)
        await trio.testing.wait_all_tasks_blocked(0.01)
        await server.loaded.writer.wait_all_committed()
        assert [["cache_extended"] * 3] == store.commits[before:]
        for answer in range(3):
            await passes.run(answer)
    assert () == replay(store.read()).findings
