"""The journal's writer: order, receipts, and what happens when it dies."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import attrs
import pytest
import structlog.testing
import trio
import trio.lowlevel
import trio.testing
from structlog.testing import capture_logs

from cairn.actors.clock import clock
from cairn.actors.errors import CannotRecord
from cairn.actors.requests.messages import Generate
from cairn.actors.sequencer import Sequencer
from cairn.actors.server import Server
from cairn.actors.threads import writer as writer_module
from cairn.actors.threads.writer import (
    LOG_WARNING_BYTES,
    RECENT_ROWS,
    JournalWriter,
    Stall,
    WriterDied,
)
from cairn.engine.prompt.template import Conversation, Message
from cairn.journal import events as ev
from cairn.journal.errors import HeadMoved, StoreError, StoreFull, StoreLocked, StoreLost
from cairn.journal.ledger import Ledger
from cairn.journal.replay import replay
from cairn.journal.rows.base import base_of
from cairn.journal.rows.codec import Row, decode
from cairn.journal.rows.store import MemoryStore
from tests.support.full_disk import FullDisk
from tests.support.in_process_server import Said, ask, generate, serving
from tests.support.journals import healthy


def started(boot: str) -> ev.ServerStarted:
    """An event."""
    return ev.ServerStarted(boot=boot, cairn_version="0", settings={})


def rejected(request: str) -> ev.RequestRejected:
    """Another event."""
    return ev.RequestRejected(request=request, tenant="local", status=429, code="queue_full")


def leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    """The errors in a group of groups."""
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from leaves(error)
        else:
            yield error


class BrokenDisk(MemoryStore):
    """A store that takes some rows and then always fails."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room = room

    def append(self, rows: object) -> None:
        """See ``Store.append``."""
        if len(self.rows) >= self.room:
            raise StoreError("the disk failed")
        super().append(rows)  # type: ignore[arg-type]


@pytest.mark.trio
async def test_observers_see_committed_events_in_order(nursery: trio.Nursery) -> None:
    """An observer gets each event once, in the journal's order, and not before its commit."""
    store, seen = MemoryStore(), []
    writer = JournalWriter(store)
    sequencer = Sequencer(Ledger(clock()), writer)

    def observe(recorded: ev.Recorded) -> None:
        assert len(store.rows) >= recorded.position
        seen.append(recorded.position)

    writer.observe(observe)
    await nursery.start(writer.run)
    sequencer.append(started("one"))
    receipt = 0
    for number in range(50):
        receipt = sequencer.append(rejected(str(number)))
    await writer.wait_committed(receipt)
    writer.close()

    assert list(range(1, 52)) == seen
    assert writer.committed == receipt == 51


@pytest.mark.trio
async def test_the_last_rows_are_held_while_they_are_followed(nursery: trio.Nursery) -> None:
    """They are read from the store once there is no follower, and if they are no longer held."""
    store, asked = MemoryStore(), []
    writer = JournalWriter(store)
    sequencer = Sequencer(Ledger(clock()), writer)
    read = store.row

    def row(position: int) -> Row | None:
        asked.append(position)
        return read(position)

    store.row = row  # type: ignore[method-assign]
    await nursery.start(writer.run)
    await writer.wait_committed(sequencer.append(started("one")))
    with writer.followed(), writer.followed():
        receipt = 0
        for number in range(RECENT_ROWS + 3):
            receipt = sequencer.append(rejected(str(number)))
        await writer.wait_committed(receipt)
        last = [receipt - 1, receipt]
        assert [store.rows[-2], store.rows[-1]] == await writer.rows(last)
        assert [] == asked
        old = receipt - RECENT_ROWS
        assert [store.rows[old - 1]] == await writer.rows([old])
        assert [old] == asked
    assert [store.rows[-2], store.rows[-1]] == await writer.rows(last)
    assert [old, *last] == asked
    writer.close()


class Commits(MemoryStore):
    """A store that counts its commits, beside a log whose size the test sets."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []
        self.committed = threading.Event()
        self.log = 0

    def append(self, rows: Sequence[Row]) -> None:
        """See ``Store.append``."""
        self.sizes.append(len(rows))
        self.committed.set()
        super().append(rows)

    def log_bytes(self) -> int:
        """See ``Store.log_bytes``."""
        return self.log


@pytest.mark.trio
async def test_rows_of_one_step_are_one_commit(nursery: trio.Nursery) -> None:
    """Rows that several tasks append before trio looks for events are committed together."""
    store = Commits()
    writer = JournalWriter(store)
    sequencer = Sequencer(Ledger(clock()), writer)
    await nursery.start(writer.run)
    go = trio.Event()
    early: list[bool] = []

    async def append(name: str) -> None:
        await go.wait()
        receipt = sequencer.append(rejected(name))
        early.append(store.committed.wait(0.02))
        await writer.wait_committed(receipt)

    async with trio.open_nursery() as tasks:
        for number in range(3):
            tasks.start_soon(append, str(number))
        await trio.testing.wait_all_tasks_blocked()
        go.set()
    sequencer.append(rejected("the last one, before the end"))
    writer.close()
    await writer.wait_all_committed()
    assert [False] * 3 == early
    assert [3, 1] == store.sizes


def pruned_store(kind: type[MemoryStore] = MemoryStore) -> MemoryStore:
    """A store in which a base has replaced eight rows that are there still."""
    rows = healthy()
    store = kind(rows)
    store.cut(base_of(replay(rows, until=8).state, rows[7].hash), [])
    return store


class Steps(MemoryStore):
    """
    A store that removes a row at a time, and stops at each until the test allows it.

    Attributes:
        steps: the position of the head at each step.
        go: one permit for each step.
        fails: how many of the next steps fail.
    """

    def __init__(self, rows: Sequence[Row] = ()) -> None:
        super().__init__(rows)
        self.steps: list[int] = []
        self.go = threading.Semaphore(0)
        self.fails = 0

    def removal(self, most: int = 1) -> Iterator[int]:
        """See ``Store.removal``."""
        for count in super().removal(1):
            if count:
                assert self.go.acquire(timeout=60)
                self.steps.append(self.head()[0])
                if self.fails:
                    self.fails -= 1
                    raise StoreLocked("another program writes to it")
            yield count


async def until(is_so: Callable[[], bool]) -> None:
    """Wait until something is so."""
    with trio.fail_after(60):
        while not is_so():
            await trio.to_thread.run_sync(time.sleep, 0.001)


@pytest.mark.trio
async def test_pruned_rows_are_removed_between_commits(nursery: trio.Nursery) -> None:
    """Those that an earlier run has left, too. A commit waits for one step at most."""
    store = pruned_store(Steps)
    assert isinstance(store, Steps)
    report = replay(store.read(), base=store.base())
    writer = JournalWriter(store)
    sequencer = Sequencer(Ledger(clock(), state=report.state, head=report.head), writer)
    await nursery.start(writer.run)
    for step in range(8):
        receipt = sequencer.append(rejected(str(step)))
        await trio.testing.wait_all_tasks_blocked()  # the thread has it
        store.go.release()
        with trio.fail_after(60):
            await writer.wait_committed(receipt)
    await until(lambda: store.rows[0].position == 9)
    assert store.steps[-1] >= 31 + 7
    with capture_logs() as logged:
        last = store.head()[0]
        base = base_of(replay(healthy(), until=20).state, healthy()[19].hash)
        rows = Ledger(clock(), state=sequencer.state, head=store.head()[1])
        outcome = rows.propose([rejected("the last")])
        writer.submit(outcome.rows, outcome.recorded, base)
        for _ in range(12):
            store.go.release()
        await until(lambda: store.rows[0].position == 21)
        await until(lambda: bool(logged))
    assert [("pruned rows are removed", 12)] == [(one["event"], one["rows"]) for one in logged]
    assert last + 1 == store.head()[0]
    writer.close()


@pytest.mark.trio
async def test_a_removal_that_fails_is_tried_again(
    nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The journal is written meanwhile, and a stop does not wait for it."""
    monkeypatch.setattr(writer_module, "REMOVAL_PROBE_S", 0.02)
    store = pruned_store(Steps)
    assert isinstance(store, Steps)
    store.fails = 2
    for _ in range(10):
        store.go.release()
    with capture_logs() as logged:
        writer = JournalWriter(store)
        await nursery.start(writer.run)
        await until(lambda: store.rows[0].position == 9)
        await until(lambda: len(logged) == 3)
    assert ["warning", "warning", "info"] == [one["log_level"] for one in logged]
    monkeypatch.setattr(writer_module, "REMOVAL_PROBE_S", 60.0)
    writer.close()


@pytest.mark.trio
async def test_a_stop_leaves_rows_to_remove() -> None:
    """The next run removes them."""
    store = pruned_store(Steps)
    assert isinstance(store, Steps)
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            writer = JournalWriter(store)
            await nursery.start(writer.run)
            store.go.release()
            store.go.release()
            await until(lambda: bool(store.steps))
            writer.close()
            store.go.release()
    assert store.rows[0].position < 9
    assert 9 == next(store.read()).position
    again = MemoryStore(store.rows, store.base())
    async with trio.open_nursery() as nursery:
        writer = JournalWriter(again)
        await nursery.start(writer.run)
        await until(lambda: again.rows[0].position == 9)
        writer.close()


@pytest.mark.trio
async def test_a_log_that_grows_is_reported(nursery: trio.Nursery) -> None:
    """The operator is warned when the database's log is too large, once each time."""
    store = Commits()
    writer = JournalWriter(store)
    sequencer = Sequencer(Ledger(clock()), writer)
    await nursery.start(writer.run)
    with structlog.testing.capture_logs() as logs:
        for size in (1, LOG_WARNING_BYTES, LOG_WARNING_BYTES + 1, 2, LOG_WARNING_BYTES):
            store.log = size
            await writer.wait_committed(sequencer.append(rejected(str(size))))
            assert size == writer.log_bytes
    writer.close()
    assert ["warning", "info", "warning"] == [one["log_level"] for one in logs]
    assert 64 == logs[0]["mib"]
    assert "`lsof`" in logs[0]["event"]


@pytest.mark.trio
async def test_rows_that_are_not_stored_get_no_receipt() -> None:
    """If the store cannot write, tasks that wait for a receipt fail, and so do later ones."""
    writer = JournalWriter(BrokenDisk(room=1))
    sequencer = Sequencer(Ledger(clock()), writer)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            await nursery.start(writer.run)
            await writer.wait_committed(sequencer.append(started("one")))
            receipt = sequencer.append(rejected("lost"))
            with pytest.raises(WriterDied):
                await writer.wait_committed(receipt)
            later = sequencer.append(rejected("later"))
            with pytest.raises(WriterDied):
                await writer.wait_committed(later)

    with pytest.raises(ExceptionGroup) as died:
        await main()
    with pytest.raises(WriterDied):
        sequencer.append(rejected("after the end"))

    assert died.group_contains(WriterDied)
    assert writer.committed == 1


@pytest.mark.trio
async def test_a_full_disk_delays_rows_and_loses_none(nursery: trio.Nursery) -> None:
    """
    While there is no room, tasks that wait for a receipt are refused. Once there is room, the
    waiting rows are stored in their order, and the receipts are valid.
    """
    store = FullDisk()
    writer = JournalWriter(store)
    sequencer = Sequencer(Ledger(clock()), writer)
    stalls: list[Stall] = []
    has_room = trio.Event()

    class Observer:
        def stall_began(self) -> None:
            """Not used here."""

        def stall_ended(self, stall: Stall) -> None:
            stalls.append(stall)
            has_room.set()

    writer.observe_stalls(Observer())
    await nursery.start(writer.run)
    store.full = True
    first = sequencer.append(started("one"))
    with pytest.raises(CannotRecord):
        await writer.wait_committed(first)
    assert writer.stalled
    second = sequencer.append(rejected("waits"))
    with pytest.raises(CannotRecord):
        await writer.wait_committed(second)
    assert [] == store.rows

    store.full = False
    await has_room.wait()
    await writer.wait_committed(second)
    assert not writer.stalled
    assert [1, 2] == [row.position for row in store.rows]
    assert [(1, "disk_full", "no room")] == [
        (stall.rows_waiting, stall.reason, stall.error) for stall in stalls
    ]
    writer.close()


@pytest.mark.trio
async def test_a_lock_delays_rows_and_loses_none(nursery: trio.Nursery) -> None:
    """
    A lock of another program is waited for like room. If the disk is full then, that is reported in
    its place, and the stall on record has the reason with which it began. Rows are not looked up
    while another program has locked them.
    """
    store = FullDisk()
    writer = JournalWriter(store)
    sequencer = Sequencer(Ledger(clock()), writer)
    ended: list[Stall] = []

    class Observer:
        def stall_began(self) -> None:
            """Not used here."""

        def stall_ended(self, stall: Stall) -> None:
            ended.append(stall)

    writer.observe_stalls(Observer())
    await nursery.start(writer.run)
    store.error = StoreLocked("locked")
    with pytest.raises(CannotRecord, match="another program has locked") as refused:
        await writer.rows([1])
    assert "locked" == refused.value.reason
    assert not writer.stalled
    receipt = sequencer.append(started("one"))
    with pytest.raises(CannotRecord, match="another program has locked"):
        await writer.wait_committed(receipt)
    with pytest.raises(CannotRecord, match="another program has locked"):
        await writer.rows([1])
    store.full = True
    while writer.stall != "disk_full":
        await trio.testing.wait_all_tasks_blocked(0.01)
    with pytest.raises(CannotRecord, match="disk"):
        await writer.wait_committed(receipt)
    store.full = False
    while writer.stalled:
        await trio.testing.wait_all_tasks_blocked(0.01)
    assert ["locked"] == [stall.reason for stall in ended]
    assert [1] == [row.position for row in store.rows]
    writer.close()


@pytest.mark.trio
async def test_a_lost_connection_is_not_waited_for_without_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After its time the writer dies of it, with what the database said; until then it waits."""
    store = FullDisk()
    writer = JournalWriter(store)
    sequencer = Sequencer(Ledger(clock()), writer)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            await nursery.start(writer.run)
            store.error = StoreLost("no answer")
            with pytest.raises(CannotRecord, match="lost the connection"):
                await writer.wait_committed(sequencer.append(started("one")))
            store.error = None
            while writer.stalled:
                await trio.testing.wait_all_tasks_blocked(0.01)
            assert 1 == writer.committed
            monkeypatch.setattr(StoreLost, "patience_s", 0.0)
            store.error = StoreLost("no answer")
            with pytest.raises((CannotRecord, WriterDied)):
                await writer.wait_committed(sequencer.append(rejected("lost")))
            await trio.sleep_forever()

    with trio.fail_after(60), pytest.raises(ExceptionGroup) as died:
        await main()
    assert died.group_contains(WriterDied, match="no answer")


@pytest.mark.trio
async def test_room_before_the_end_is_used(nursery: trio.Nursery) -> None:
    """A writer that is closed during a stall tries once more and stores what there is room for."""
    store = FullDisk()
    writer = JournalWriter(store)
    sequencer = Sequencer(Ledger(clock()), writer)
    await nursery.start(writer.run)
    store.full = True
    receipt = sequencer.append(started("one"))
    with pytest.raises(CannotRecord):
        await writer.wait_committed(receipt)
    store.full = False
    writer.close()
    while writer.committed < receipt:
        await trio.testing.wait_all_tasks_blocked(0.01)
    assert [1] == [row.position for row in store.rows]


@pytest.mark.trio
async def test_a_writer_that_is_closed_while_a_try_fails_tries_once_more() -> None:
    """The try in progress when the writer is closed does not count as the last one."""

    class ClosedMeanwhile(FullDisk):
        def append(self, rows: Sequence[Row]) -> None:
            try:
                super().append(rows)
            except StoreFull:
                self.full = False
                writer.close()
                raise

    store = ClosedMeanwhile()
    writer = JournalWriter(store)
    async with trio.open_nursery() as nursery:
        await nursery.start(writer.run)
        store.full = True
        Sequencer(Ledger(clock()), writer).append(started("one"))

    assert [1] == [row.position for row in store.rows]


@pytest.mark.trio
async def test_a_writer_that_is_closed_without_room_dies() -> None:
    """
    Closing does not wait for room: rows that are not stored are lost, and the writer raises that.
    """
    store = FullDisk()
    writer = JournalWriter(store)
    sequencer = Sequencer(Ledger(clock()), writer)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            await nursery.start(writer.run)
            store.full = True
            with pytest.raises(CannotRecord):
                await writer.wait_committed(sequencer.append(started("one")))
            writer.close()

    with pytest.raises(ExceptionGroup) as died:
        await main()

    assert died.group_contains(WriterDied)


def test_requests_are_refused_until_there_is_room_again(model_directory: Path) -> None:
    """
    Without room a request in decode, a waiting one and a new one are refused, each at its place.
    With room everything is on record, the sessions continue, and their bits are the same.
    """
    store = FullDisk()
    answers: list[Said] = []

    def hello(name: str) -> Generate:
        text = f"Hello from {name}. " * 20
        talk = Conversation(messages=(Message(role="user", content=text),))
        return generate(talk, session_name=name, max_tokens=60)

    async def refused(server: Server, name: str) -> None:
        with pytest.raises(CannotRecord):
            await ask(server, hello(name))

    async def main() -> None:
        async with serving(model_directory, decode_rows=2) as server:
            answers.append(await ask(server, hello("one")))
        async with serving(model_directory, store, decode_rows=2) as server:
            with trio.fail_after(120):
                async with trio.open_nursery() as nursery:
                    for name in ("one", "two", "three", "four"):
                        nursery.start_soon(refused, server, name)
                    while server.statistics().sessions.get("decoding") != 2:
                        await trio.lowlevel.checkpoint()
                    store.full = True
                await refused(server, "five")
                assert server.statistics().journal_stall
                stored = len(store.rows)
                with pytest.raises(CannotRecord):
                    await ask(server, hello("six"))
                assert stored == len(store.rows)
                store.full = False
                while server.statistics().journal_stall:
                    await trio.testing.wait_all_tasks_blocked(0.01)
                answers.append(await ask(server, hello("one")))

    trio.run(main)

    assert answers[0].tokens == answers[1].tokens
    events = [decode(row).event for row in store.rows]
    stalled = [event for event in events if isinstance(event, ev.JournalStalled)]
    assert [2] == [event.requests_refused for event in stalled]
    cancelled = [event.stage for event in events if isinstance(event, ev.RequestCancelled)]
    assert ["journal_stalled"] * 2 == cancelled
    rejections = [event.code for event in events if isinstance(event, ev.RequestRejected)]
    assert ["journal_stalled"] * 2 == rejections
    assert () == replay(store.read()).findings


def test_a_cut_chain_stops_the_server(model_directory: Path) -> None:
    """
    INV-8: if the stored head is not the one that the server wrote, nothing is appended after it, no
    further token is sent, and the server stops.
    """
    store = MemoryStore()
    said: list[str] = []

    def tampered(row: Row) -> Row:
        return attrs.evolve(row, hash="0" * 64)

    async def main() -> None:
        async with serving(model_directory, store) as server:
            hello = Conversation(messages=(Message(role="user", content="Hello"),))
            said.append((await ask(server, generate(hello))).text)
            await trio.testing.wait_all_tasks_blocked()
            store.rows[-1] = tampered(store.rows[-1])
            said.append((await ask(server, generate(hello))).text)

    with pytest.raises(ExceptionGroup) as died:
        trio.run(main)

    assert died.group_contains(WriterDied)
    (found,) = [error for error in leaves(died.value) if isinstance(error, WriterDied)]
    assert isinstance(found.__cause__, HeadMoved)
    assert len(said) == 1
