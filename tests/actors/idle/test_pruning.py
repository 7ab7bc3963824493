"""The journal is pruned while the server runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
import trio

from cairn.actors.agents.messages import NewAgent
from cairn.actors.idle.pruning import Pruning
from cairn.actors.requests.limits import Limits
from cairn.actors.requests.messages import Keep
from cairn.actors.server import Server
from cairn.actors.snapshots import SnapshotFile
from cairn.journal import events as ev
from cairn.journal.pruning import CutState
from cairn.journal.replay import Report, replay
from cairn.journal.rows.base import histories_of, state_of
from cairn.journal.rows.codec import Row, decode
from cairn.journal.rows.store import MemoryStore
from tests.actors.agents.test_agents import asked, go_on, history
from tests.actors.sessions.test_grain import serving_any_cut
from tests.support.in_process_server import (
    ask,
    chat,
    events_of,
    generate,
    local,
    serving_fake,
    turn_clock,
    wait_idle,
    without_slabs,
)

pytestmark = pytest.mark.trio

WEEK_S = 7 * 86_400
QUICK = Limits(slab_idle_s=0.0)


class ReadStore(MemoryStore):
    """The same rows as another store, read through a connection of its own."""

    def __init__(self, of: MemoryStore) -> None:
        super().__init__()
        self._of = of
        self.reading, self.go = threading.Event(), threading.Event()
        self.go.set()

    def base(self) -> Any:
        """See ``Store.base``."""
        return self._of.base()

    def head(self) -> tuple[int, str]:
        """See ``Store.head``."""
        return self._of.head()

    def read(self, after: int | None = None, *, stream: str | None = None) -> Iterator[Row]:
        """See ``Store.read``. Waits at the first row if the test has not allowed more."""
        for row in self._of.read(after, stream=stream):
            self.reading.set()
            assert self.go.wait(60)
            yield row


def pruning_of(server: Server, reader: ReadStore, keep_s: int = WEEK_S) -> Pruning:
    """What prunes over a server, as the server itself does it."""
    of = server.loaded
    return Pruning(
        keep_s=keep_s,
        reader=lambda: reader,
        sequencer=of.sequencer,
        writer=of.writer,
        activity=of.activity,
        agents=of.agents.agents,
    )


async def closed(server: Server, text: str) -> None:
    """A conversation that was served and closed, with a stored turn."""
    asked = chat(text)
    keep = Keep(previous=None, asked=asked.messages, note="")
    said = await ask(server, generate(asked, keep=keep))
    await wait_idle(server)
    await without_slabs(server)
    await server.loaded.sessions.close_expired(said.accepted.session)
    await wait_idle(server)


async def at_rest(server: Server) -> None:
    """Wait until the server is idle, and all that it appended is committed."""
    await wait_idle(server)
    of = server.loaded
    while of.sequencer.state.position != of.writer.committed:
        await of.writer.wait_all_committed()


async def until(is_so: Callable[[], object]) -> None:
    """Wait until something is so."""
    with trio.fail_after(60):
        while not is_so():
            await trio.to_thread.run_sync(time.sleep, 0.001)


def read(store: MemoryStore) -> Report:
    """The replay of what is left."""
    return replay(store.read(), base=store.base())


async def test_old_rows_go_while_the_server_runs(tmp_path: Path):
    """
    The rest reads as what the server holds, decisions go on, the event records it, and a snapshot
    of before is replaced.
    """
    store, file = MemoryStore(), SnapshotFile(tmp_path / "snapshot")
    text = "one two three four five six seven eight nine ten " * 10
    async with serving_any_cut(store, limits=QUICK, snapshot=file.path) as server:
        await closed(server, text)
        last = store.head()[0]
        file.path.write_bytes(b"texts of before")
        turn_clock(server, 2 * WEEK_S)
        await pruning_of(server, ReadStore(store)).prune()
        base = store.base()
        assert base is not None
        assert base.position == last == next(store.read()).position - 1
        state = server.loaded.sequencer.state
        assert state == read(store).state
        assert state.turns_pruned
        (pruned,) = events_of(store, ev.JournalPruned)
        assert base.digest == pruned.base_digest
        await until(lambda: file.path.exists())
        # Its blocks are in memory still, without the ids by which they would match in part.
        assert not any(block.ids for block in state.blocks.values())
        other = await ask(server, generate(chat(text[:90] + "another")))
        assert 0 == other.finished.cached_tokens % 64
        again = await ask(server, generate(chat(text)))
        assert again.finished.cached_tokens > 0
        await wait_idle(server)
    assert () == read(store).findings
    async with serving_fake(store, snapshot=file.path) as server:
        assert server.loaded.sequencer.state.boot is not None
    assert () == read(store).findings


async def test_an_agent_whose_first_turns_are_pruned(tmp_path: Path):
    """
    Its old rows go while its session is open. It is looked up, continued and forked as before, at
    once and after restarts, with a snapshot and without, and pruned again. What is left of the
    journal decides the same, and exports have the history.
    """
    store, file = MemoryStore(), SnapshotFile(tmp_path / "snapshot")
    said = ["The first words of an agent", "the second ones", "and the third", "the last"]
    async with serving_fake(store, limits=QUICK, snapshot=file.path) as server:
        await local(server).agents.create(NewAgent(name="notes", system="Be brief."))
        await local(server).agents.create(NewAgent(name="gone"))
        await go_on(server, "gone", "a secret of an agent that is deleted")
        for text in said[:2]:
            await go_on(server, "notes", text)
        await local(server).agents.delete("gone")
        await wait_idle(server)
        await without_slabs(server)
        before = await history(server, "notes")
        turn_clock(server, 2 * WEEK_S)
        await pruning_of(server, ReadStore(store)).prune()
        base = store.base()
        assert base is not None
        assert next(store.read()).position == base.position + 1
        assert {"session_closed", "journal_pruned"} >= {row.kind for row in store.read()}
        server.loaded.agents.stored_turns.text_cache.forget(lambda *_: True)
        assert before == await history(server, "notes")
        assert b"a secret" not in b"".join(
            [*(row.private or b"" for row in histories_of(base).rows), base.state or b""]
        )
        third = await go_on(server, "notes", said[2])
        assert third.accepted.cached_tokens > 0
        await at_rest(server)
        folds = server.loaded.agents.agents
        again = histories_of(base).fold()
        for row in store.read():
            again.see(decode(row))
        assert (folds.contents(), folds.turns.contents()) == (
            again.contents(),
            again.turns.contents(),
        )
        assert server.loaded.sequencer.state == read(store).state
    assert () == read(store).findings
    for snapshot in (file.path, None):
        async with serving_fake(store, limits=QUICK, snapshot=snapshot) as server:
            assert said[:3] == asked(await history(server, "notes"))
            name = f"aside-{snapshot is None}"
            assert await local(server).agents.fork("notes", name, 1) is not None
            await go_on(server, name, "another")
            assert [said[0], "another"] == asked(await history(server, name))
            await wait_idle(server)
    async with serving_fake(store, limits=QUICK) as server:
        turn_clock(server, 5 * WEEK_S)
        await pruning_of(server, ReadStore(store)).prune()
        second = store.base()
        assert second is not None
        assert second.position > base.position
        await go_on(server, "notes", said[3])
        assert said == asked(await history(server, "notes"))
        await at_rest(server)
        assert server.loaded.sequencer.state == read(store).state
    assert () == read(store).findings


async def test_nothing_goes_that_may_not():
    """Young rows, and those of an open session, stay; nothing is recorded."""
    store = MemoryStore()
    async with serving_fake(store, limits=QUICK) as server:
        await ask(server, generate(chat("Open")))
        await closed(server, "Hello")
        await pruning_of(server, ReadStore(store)).prune()
        turn_clock(server, 2 * WEEK_S)
        await pruning_of(server, ReadStore(store)).prune()
    assert (None, []) == (store.base(), events_of(store, ev.JournalPruned))
    assert 1 == store.rows[0].position


async def test_rows_that_come_meanwhile_are_kept_in_mind():
    """
    A conversation that is served while the journal is read reuses a part of a block of what goes.
    What is left still gives the same decision, because the base keeps the ids that it needs.
    """
    store = MemoryStore()
    async with serving_any_cut(store, limits=QUICK) as server, trio.open_nursery() as nursery:
        await closed(server, "x" * 200)
        turn_clock(server, 2 * WEEK_S)
        reader = ReadStore(store)
        reader.go.clear()
        nursery.start_soon(pruning_of(server, reader).prune)
        assert await trio.to_thread.run_sync(reader.reading.wait, 60)
        said = await ask(server, generate(chat("x" * 90 + "y" * 90)))
        reader.go.set()
        assert 0 < said.finished.cached_tokens % 64
        await wait_idle(server)
        await until(lambda: store.base() is not None)
        assert server.loaded.sequencer.state == read(store).state
        base = store.base()
        assert base is not None
        assert any(block.ids for block in state_of(base).blocks.values())
    assert () == read(store).findings


async def test_an_event_while_the_base_is_made(monkeypatch: pytest.MonkeyPatch):
    """The base is made again at once, though no request comes to wake it."""
    store, made = MemoryStore(), []
    make = CutState.later
    async with serving_fake(store, limits=QUICK) as server:
        await closed(server, "Hello")
        turn_clock(server, 2 * WEEK_S)

        def once_more(cut: CutState, events: Any, agents: Any) -> Any:
            made.append(list(events))
            if len(made) == 1:
                acted = ev.OperatorActed(action="evict", detail="")
                trio.from_thread.run_sync(server.loaded.sequencer.append, acted)
            return make(cut, events, agents)

        monkeypatch.setattr(CutState, "later", once_more)
        with trio.fail_after(60):
            await pruning_of(server, ReadStore(store)).prune()
        assert store.base() is not None
    # Only the rows that name blocks count for a base.
    assert [[], []] == made
    assert () == read(store).findings


async def test_a_request_goes_first():
    """While a request is in flight, neither is the journal read nor anything cut."""
    store = MemoryStore()
    async with serving_fake(store, limits=QUICK) as server, trio.open_nursery() as nursery:
        await closed(server, "Hello")
        turn_clock(server, 2 * WEEK_S)
        reader = ReadStore(store)
        with server.loaded.activity.preparing():
            nursery.start_soon(pruning_of(server, reader).prune)
            async with local(server).generate(generate(chat("Now"))) as replies:
                async for _ in replies:
                    pass
            assert not reader.reading.is_set()
        await until(lambda: store.base() is not None)
    assert () == read(store).findings


async def test_a_server_that_stops_does_not_wait():
    """The next row is not read, nothing is cut, and the stop is recorded."""
    store = MemoryStore()
    async with serving_fake(store, limits=QUICK) as server:
        await closed(server, "Hello")
    reader = ReadStore(store)
    reader.go.clear()
    with trio.fail_after(60):
        async with serving_fake(store, keep_s=0, reader=lambda: reader):
            assert await trio.to_thread.run_sync(reader.reading.wait, 60)
            reader.go.set()
    assert store.base() is None
    assert "server_stopped" == store.rows[-1].kind


async def test_a_server_prunes_at_its_start():
    """With ``keep_s`` it prunes by itself; what is wrong with the journal is a line in the log."""
    store = MemoryStore()
    async with serving_fake(store, limits=QUICK) as server:
        await closed(server, "Hello")
    async with serving_fake(store, keep_s=0, reader=lambda: ReadStore(store)):
        await until(lambda: store.base() is not None)
    assert 1 == events_of(store, ev.JournalPruned)[0].sessions
    broken = MemoryStore([store.rows[0]] * 2)
    with structlog.testing.capture_logs() as logged:
        async with serving_fake(store, keep_s=0, reader=lambda: ReadStore(broken)):
            await until(lambda: "the journal was not pruned" in [line["event"] for line in logged])
