"""A bug quarantines what it concerns and nothing else; no reply is sent before its commit."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
import trio.testing

from cairn.actors.errors import Broken
from cairn.actors.requests.limits import Limits
from cairn.actors.requests.messages import Delta, Generate
from cairn.actors.requests.ticket import Ticket
from cairn.actors.server import Server
from cairn.actors.sessions.answer import runs
from cairn.actors.sessions.session import SessionActor
from cairn.engine.mlx.cache import SlabPool
from cairn.engine.mlx.engine import MlxEngine
from cairn.engine.prompt.template import Conversation, Message
from cairn.engine.reports import Drawn, PassReport
from cairn.journal.replay import replay
from cairn.journal.rows.codec import Row, decode
from cairn.journal.rows.store import MemoryStore
from tests.support.in_process_server import Said, ask, generate, local, serving, wait_idle
from tests.support.journals import released

LONG = "Stone on stone on stone, and then the wind that takes none of them. " * 6


def command(text: str, **changes: Any) -> Generate:
    """A request of one message."""
    return generate(Conversation(messages=(Message(role="user", content=text),)), **changes)


class HeldStore(MemoryStore):
    """A store whose commits wait while it is held."""

    def __init__(self) -> None:
        super().__init__()
        self.open = threading.Event()
        self.open.set()

    def append(self, rows: Sequence[Row]) -> None:
        """See ``Store.append``."""
        self.open.wait(30)
        super().append(rows)


def test_no_token_leaves_before_its_commit(model_directory: Path) -> None:
    """
    P2: while the journal cannot commit, the engine may run ahead but no token is sent. Once it can,
    every token is sent, each after its commit.
    """
    store = HeldStore()
    received: list[str] = []

    async def main() -> None:
        async with serving(model_directory, store) as server:

            async def listen() -> None:
                sent = 0
                async with local(server).generate(command(LONG, max_tokens=8)) as replies:
                    async for reply in replies:
                        received.append(type(reply).__name__)
                        if isinstance(reply, Delta):
                            _, tokens = released(decode(r).event for r in store.rows)
                            sent += len(reply.tokens)
                            assert tokens >= sent

            await server.loaded.writer.wait_committed(server.loaded.sequencer.state.position)
            store.open.clear()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(listen)
                # The whole answer is computed and in the fold; none of its rows is in the store.
                with trio.fail_after(60):
                    while server.statistics().sessions.get("idle") != 1:
                        await trio.testing.wait_all_tasks_blocked(0.01)
                assert received == []
                store.open.set()

    trio.run(main)

    assert received[0] == "Accepted"
    assert received[-1] == "Finished"
    assert "Delta" in received


@pytest.mark.parametrize("name", [None, "named"])
def test_a_request_in_an_inbox_ends_with_its_server(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch, name: str | None
) -> None:
    """
    If a server dies before a session takes up a request in its inbox, the request ends. It does not
    look for a different session among those that die too, for ever.
    """
    served: list[str] = []
    serve = SessionActor.serve

    life = trio.CancelScope()

    async def dies(actor: SessionActor, ticket: Ticket) -> None:
        served.append(actor.id)
        assert len(served) < 20
        life.cancel()
        await serve(actor, ticket)

    async def main() -> None:
        with life:
            async with serving(model_directory) as server:
                await ask(server, command("Hello", session_name=name))

    monkeypatch.setattr(SessionActor, "serve", dies)
    trio.run(main)

    assert life.cancelled_caught
    assert 1 == len(served)


def test_a_bug_id_is_sent_once_it_can_be_looked_up(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    P3: while the journal cannot commit, no client gets a bug id, neither the one whose request met
    the bug nor one that names the session later. Both get it once the violation is on record.
    """
    store = HeldStore()
    received: list[str] = []

    async def main() -> None:
        async with serving(model_directory, store) as server:

            def fails(*args: object, **named: object) -> None:
                store.open.clear()
                raise RuntimeError("the device gave up")

            monkeypatch.setattr(server.loaded.engine.device, "run_chunk", fails)

            async def listen() -> None:
                with pytest.raises(Broken) as caught:
                    await ask(server, command(LONG, session_name="broken"))
                violations = [row for row in store.rows if row.kind == "invariant_violated"]
                assert 1 == len(violations)
                received.append(caught.value.bug_id)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(listen)
                with trio.fail_after(60):
                    while not server.loaded.sequencer.state.faults:
                        await trio.testing.wait_all_tasks_blocked(0.01)
                nursery.start_soon(listen)
                await trio.testing.wait_all_tasks_blocked(0.05)
                assert [] == received
                store.open.set()

    trio.run(main)

    assert 2 == len(received)
    assert 1 == len(set(received))


def test_a_wrong_block_does_not_quarantine_its_prefix(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    INV-3: when a second digest appears under a key, that request ends with a bug. From then on the
    prefix is computed and not reused, and requests for it are answered, also after a restart.
    """
    store = MemoryStore()
    answers: list[Said] = []

    def damaged_first(engine: MlxEngine, slab: int, *args: Any, **kwargs: Any) -> Any:
        cache = engine.pool.get(slab).caches[0]
        cache.keys[0, 0, 5, 5] = cache.keys[0, 0, 5, 5] + 1e-6
        return seal(engine, slab, *args, **kwargs)

    seal = MlxEngine.seal

    async def main() -> None:
        async with serving(model_directory) as clean:
            answers.append(await ask(clean, command(LONG)))
        async with serving(model_directory, store) as server:
            with monkeypatch.context() as patch:
                patch.setattr(MlxEngine, "seal", damaged_first)
                await ask(server, command(LONG, max_tokens=1))
            with pytest.raises(Broken):
                await ask(server, command(LONG, cache_prompt=False))
            for _ in range(2):
                answers.append(await ask(server, command(LONG)))
                answers.append(await ask(server, command(LONG, cache_prompt=False)))
            assert server.statistics().bugs == 1
        async with serving(model_directory, store) as again:
            answers.append(await ask(again, command(LONG)))
            assert again.statistics().bugs == 1

    trio.run(main)

    assert {0} == {said.accepted.cached_tokens for said in answers}
    assert all(answers[0].tokens == said.tokens for said in answers)
    assert ["INV-3"] == [found.invariant for found in replay(store.read()).findings]


def test_wrong_totals_are_one_bug_for_all_waiting_requests(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    INV-5: one wrong measurement is one bug. Waiting requests are refused with its id and leave
    neither session nor actor.
    """
    store = MemoryStore()
    bugs: list[str] = []
    answered: list[Said] = []

    async def one(server: Server, place: int) -> None:
        try:
            answered.append(await ask(server, command(f"{place} {LONG}", max_tokens=30)))
        except Broken as error:
            bugs.append(error.bug_id)

    async def main() -> None:
        async with serving(model_directory, store, decode_rows=2) as server:
            measure, wrong = SlabPool.measure, [2]

            def measured(pool: SlabPool) -> tuple[int, int]:
                slabs, size = measure(pool)
                wrong[0] -= 1
                return (slabs + 1, size) if wrong[0] == 0 else (slabs, size)

            monkeypatch.setattr(SlabPool, "measure", measured)
            async with trio.open_nursery() as nursery:
                for place in range(8):
                    nursery.start_soon(one, server, place)
            assert len(server.loaded.sequencer.state.faults) == 1
            assert set(bugs) == {server.statistics().admission_bug}
            rejected = [decode(row).event for row in store.rows if row.kind == "request_rejected"]
            assert [] == rejected  # a client that got a bug did not disconnect
            assert set(server.statistics().sessions) <= {"idle", "settling"}
            assert all(actor.opened for actor in server.loaded.sessions.actors.values())

    trio.run(main)

    assert len(bugs) + len(answered) == 8
    assert ["INV-5"] == [found.invariant for found in replay(store.read()).findings]


def test_a_wrong_eviction_ends_the_request_that_needed_the_room(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    INV-5 on an eviction, which belongs to no session: the request that needed the room ends with
    the bug, its session releases its slab and becomes idle, and engine and journal agree.
    """
    store = MemoryStore()

    async def main() -> None:
        blocks = 4 * 64 * 4 * 2 * 4 * 32 * 4
        async with serving(model_directory, store, blocks_bytes=blocks) as server:
            await ask(server, command(LONG))
            await wait_idle(server)
            evict = MlxEngine.evict

            def wrong(engine: MlxEngine, key: str) -> Any:
                return attrs.evolve(evict(engine, key), memory_blocks=99)

            monkeypatch.setattr(MlxEngine, "evict", wrong)
            with pytest.raises(Broken) as caught:
                await ask(server, command("Other. " + LONG * 2))
            assert caught.value.bug_id == server.statistics().admission_bug
            with trio.fail_after(30):
                while set(server.statistics().sessions) != {"idle"}:
                    await trio.testing.wait_all_tasks_blocked(0.01)
            assert server.statistics().bugs == 1
            engine: Any = server.loaded.engine.device
            assert engine.pool.measure()[0] == server.statistics().slabs

    trio.run(main)

    assert ["INV-5"] == [found.invariant for found in replay(store.read()).findings]


def test_a_quarantined_session_is_not_closed(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that names a quarantined session gets its bug, however many sessions came since."""

    async def main() -> None:
        async with serving(model_directory, limits=Limits(sessions=2)) as server:
            broken = command("Break. " + LONG, session_name="broken")
            with monkeypatch.context() as patch:

                def fails(*args: object, **named: object) -> None:
                    raise RuntimeError("the device gave up")

                patch.setattr(server.loaded.engine.device, "run_chunk", fails)
                with pytest.raises(Broken) as first:
                    await ask(server, broken)
            for place in range(5):
                await ask(server, command(f"{place} hello", max_tokens=2))
            with pytest.raises(Broken) as again:
                await ask(server, broken)
            assert first.value.bug_id == again.value.bug_id

    trio.run(main)


@pytest.mark.long
def test_a_row_that_fails_ends_its_own_session(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    A failure of one row of a decode pass is a bug of that session. The other rows of the pass
    continue with the bits that they have alone.
    """
    answers: dict[str, Said] = {}
    bugs: list[str] = []

    async def one(server: Server, name: str) -> None:
        try:
            answers[name] = await ask(
                server, command(f"{name} {LONG}", session_name=name, max_tokens=60)
            )
        except Broken as error:
            bugs.append(error.bug_id)

    async def main() -> None:
        async with serving(model_directory) as server:
            decode = MlxEngine.decode

            def without(engine: MlxEngine, rows: Any) -> Any:
                lost = server.loaded.sequencer.state.sessions.get("lost")  # type: ignore[call-overload]
                slab = lost.slab.id if lost is not None and lost.slab is not None else None
                return decode(
                    engine,
                    [
                        attrs.evolve(row, slab=10_000)
                        if row is not None and row.slab == slab
                        else row
                        for row in rows
                    ],
                )

            monkeypatch.setattr(MlxEngine, "decode", without)
            async with trio.open_nursery() as nursery:
                for name in ("lost", "one", "two", "three"):
                    nursery.start_soon(one, server, name)
            assert server.statistics().bugs == 1
        monkeypatch.undo()
        async with serving(model_directory) as server:
            for name in ("one", "two", "three"):
                alone = await ask(server, command(f"{name} {LONG}", max_tokens=60))
                assert answers[name].tokens == alone.tokens

    trio.run(main)

    assert len(bugs) == 1


def test_a_client_that_disconnects_in_the_queue_leaves_nothing(
    model_directory: Path,
) -> None:
    """A request that is cancelled before a session takes it leaves no actor and no ticket."""

    async def main() -> None:
        async with serving(model_directory) as server:
            await server.loaded.memory.eviction_lock.acquire()
            for place in range(4):
                with trio.move_on_after(0.05):
                    await ask(server, command(f"{place} {LONG}"))
            server.loaded.memory.eviction_lock.release()
            with trio.fail_after(30):
                while not server.loaded.activity.is_idle:
                    await trio.testing.wait_all_tasks_blocked(0.01)
                while server.loaded.sessions.actors:
                    await trio.testing.wait_all_tasks_blocked(0.01)
            assert server.statistics().running == 0

    trio.run(main)


def passed(start: int, *ends: int) -> PassReport:
    """A decode pass that measured these ends of its layers."""
    return PassReport(
        start=start,
        end=ends[0],
        ran=(7,),
        coverage=tuple((1, 0, end) for end in ends),
        drawn=Drawn(token=7, logprob=-1.0),
        duration_us=1,
    )


def test_passes_are_one_event_only_if_their_measurements_follow() -> None:
    """
    Decode passes that arrive together are one event if each adds one token to every layer. One that
    measured something else is an event of its own, so that the checks see it.
    """
    fine = [passed(8, 9, 9), passed(9, 10, 10), passed(10, 11, 11)]
    short = [passed(8, 9, 9), passed(9, 10, 9), passed(10, 11, 11)]
    moved = [passed(8, 9, 9), passed(12, 13, 13)]

    assert [fine] == runs(fine)
    assert [[one] for one in short] == runs(short)
    assert [[one] for one in moved] == runs(moved)
    assert [] == runs([])


def test_as_many_requests_are_admitted_as_there_are_rows(model_directory: Path) -> None:
    """
    Without a queue there is a place for each row, in whatever order the tasks of requests run.
    """
    answers: list[Said] = []

    async def one(server: Server, name: str) -> None:
        answers.append(await ask(server, command(name, max_tokens=1)))

    async def main() -> None:
        async with serving(model_directory, limits=Limits(queue=0)) as server:
            for round_ in range(12):
                async with trio.open_nursery() as nursery:
                    for place in range(4):
                        nursery.start_soon(one, server, f"{round_} {place}")

    trio.run(main)

    assert 48 == len(answers)
