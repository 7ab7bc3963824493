"""
The journal's writer: order, receipts, and what happens when it dies.
"""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest
import trio
import trio.testing

from cairn.actors.sequencer import Sequencer, outside
from cairn.actors.writer import JournalWriter, WriterDied
from cairn.engine.prompt import Conversation, Message
from cairn.journal import events as ev
from cairn.journal.codec import Row
from cairn.journal.errors import HeadMoved, StoreError
from cairn.journal.ledger import Ledger
from cairn.journal.store import MemoryStore
from tests.running import ask, generate, serving


def started(boot: str) -> ev.ServerStarted:
    """
    An event.
    """
    return ev.ServerStarted(boot=boot, cairn_version="0", settings={})


def rejected(request: str) -> ev.RequestRejected:
    """
    Another event.
    """
    return ev.RequestRejected(request=request, status=429, code="queue_full")


class FullDisk(MemoryStore):
    """
    A store that has room for some rows and no more.
    """

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room = room

    def append(self, rows: object) -> None:
        """
        See ``Store.append``.
        """
        if len(self.rows) >= self.room:
            raise StoreError("the disk is full")
        super().append(rows)  # type: ignore[arg-type]


@pytest.mark.trio
async def test_observers_see_committed_events_in_order(nursery: trio.Nursery) -> None:
    """
    An observer is told of each event once, in the journal's order, and not before its commit.
    """
    store, seen = MemoryStore(), []
    writer = JournalWriter(store)
    sequencer = Sequencer(Ledger(outside()), writer)

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
async def test_nobody_gets_a_receipt_for_what_is_not_stored() -> None:
    """
    Where the store cannot write, who waits for a receipt is told, and so is whoever comes later.
    """
    writer = JournalWriter(FullDisk(room=1))
    sequencer = Sequencer(Ledger(outside()), writer)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            await nursery.start(writer.run)
            await writer.wait_committed(sequencer.append(started("one")))
            receipt = sequencer.append(rejected("lost"))
            with pytest.raises(WriterDied):
                await writer.wait_committed(receipt)
            with pytest.raises(WriterDied):
                sequencer.append(rejected("later"))

    with pytest.raises(ExceptionGroup) as died:
        await main()

    assert died.group_contains(WriterDied)
    assert writer.committed == 1


def test_a_chain_that_was_cut_stops_the_server(model_directory: Path) -> None:
    """
    INV-8: when the stored head is not what the server wrote, nothing is appended behind it, no
    token leaves any more, and the server stops.
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
    found: BaseException | None = died.value
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    assert isinstance(found, WriterDied)
    assert isinstance(found.__cause__, HeadMoved)
    assert len(said) == 1
