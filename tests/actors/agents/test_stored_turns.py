"""
Stored turns on a running server: on record before their answer is complete, found again after a
restart, and visible to their tenant alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
import trio.testing

from cairn.actors.clock import clock
from cairn.actors.errors import CannotRecord
from cairn.actors.requests.messages import Generate, Keep
from cairn.actors.sequencer import Sequencer
from cairn.actors.threads.writer import JournalWriter, WriterDied
from cairn.engine.prompt.template import Conversation, Message, message_of
from cairn.journal import events as ev
from cairn.journal.errors import StoreError
from cairn.journal.ledger import Ledger
from cairn.journal.replay import replay
from cairn.journal.rows.codec import decode
from cairn.journal.rows.store import MemoryStore
from tests.support.full_disk import FullDisk
from tests.support.in_process_server import ask, generate, local, serving

pytestmark = pytest.mark.trio

HELLO = Message(role="user", content="The stone lies on the path.")
MORE = Message(role="user", content="And the hill?")


def command(*messages: Message, previous: str | None = None, **changes: Any) -> Generate:
    """A request whose turn is to be stored."""
    keep = Keep(previous=previous, asked=messages[-1:], note="nöte")
    talk = Conversation(messages=messages)
    return generate(talk, max_tokens=4, **{"keep": keep, **changes})


async def test_a_turn_outlives_a_restart(model_directory: Path):
    """
    It reads back as it was sent, and a request can continue from it; a different tenant cannot find
    it. A request that is not to be stored leaves no turn.
    """
    store = MemoryStore()
    async with serving(model_directory, store) as server:
        first = await ask(server, command(HELLO))
        named = first.accepted.request
        one = await local(server).turn(named)
        unkept = await ask(server, command(MORE, keep=None))
        assert await local(server).turn(unkept.accepted.request) is None
        assert await local(server).turn("no such request") is None
    async with serving(model_directory, store) as server:
        turn = await local(server).turn(named)
        assert turn == one
        assert turn is not None
        assert (None, (HELLO,), "nöte") == (turn.previous, turn.asked, turn.note)
        assert message_of(first.parts) == message_of(turn.parts)
        assert first.finished.completion_tokens == turn.finished.completion_tokens
        assert first.accepted.created_s == turn.created_s
        assert (None, None) == (
            await server.for_tenant("bob").turn(named),
            await server.for_tenant("bob").history(named),
        )

        second = await ask(server, command(*turn.messages, MORE, previous=named))
        assert first.accepted.session == second.accepted.session
        assert "continuation" == second.accepted.path
        history = await local(server).history(second.accepted.request)
        assert history is not None
        assert [named, second.accepted.request] == [turn.request for turn in history]
        assert [(HELLO,), (MORE,)] == [turn.asked for turn in history]
    assert () == replay(store.read()).findings


async def test_a_forgotten_turn(model_directory: Path):
    """Only its tenant can delete it. Afterwards it is not found, also after a restart."""
    store = MemoryStore()
    async with serving(model_directory, store) as server:
        first = await ask(server, command(HELLO))
        named = first.accepted.request
        second = await ask(server, command(HELLO, previous=named))
        assert await local(server).history(second.accepted.request) is not None
        assert not await server.for_tenant("bob").forget(named)
        assert await local(server).turn(named) is not None
        assert await local(server).forget(named)
        assert not await local(server).forget(named)
        assert await local(server).history(second.accepted.request) is None
        assert await local(server).turn(second.accepted.request) is not None
        assert await local(server).forget(second.accepted.request)
        assert 0 == server.loaded.agents.stored_turns.text_cache.bytes
    async with serving(model_directory, store) as server:
        assert await local(server).turn(named) is None
        assert await local(server).history(second.accepted.request) is None


async def test_a_turn_that_is_forgotten_while_it_is_read(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch
):
    """The caller that was reading it gets it, and none of it stays in the cache."""
    async with serving(model_directory) as server:
        named = (await ask(server, command(HELLO))).accepted.request
        rows, found, go_on = server.loaded.writer.rows, trio.Event(), trio.Event()

        async def late(positions: Any) -> Any:
            there = await rows(positions)
            found.set()
            await go_on.wait()
            return there

        monkeypatch.setattr(server.loaded.writer, "rows", late)

        async def asks() -> None:
            turn = await local(server).turn(named)
            assert turn is not None
            assert named == turn.request

        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(asks)
                await found.wait()
                assert await local(server).forget(named)
                go_on.set()
        assert 0 == server.loaded.agents.stored_turns.text_cache.bytes


async def test_a_turn_is_committed_before_its_answer_is_sent(model_directory: Path):
    """The turn's row comes before the row of the request's end, for which the client waits."""
    store = MemoryStore()
    async with serving(model_directory, store) as server:
        said = await ask(server, command(HELLO))
        kinds = [row.kind for row in store.rows if row.stream.endswith(said.accepted.session)]
    at = kinds.index("turn_stored")
    assert "request_finished" == kinds[at + 1]
    (stored,) = (decode(row).event for row in store.rows if row.kind == "turn_stored")
    assert isinstance(stored, ev.TurnStored)
    assert said.accepted.request == stored.request


async def test_a_pruned_text(model_directory: Path):
    """A row without its private part is no longer a turn."""
    store = MemoryStore()
    async with serving(model_directory, store) as server:
        said = await ask(server, command(HELLO))
        for index, row in enumerate(store.rows):
            if row.kind == "turn_stored":
                store.rows[index] = attrs.evolve(row, private=None)
        assert await local(server).turn(said.accepted.request) is None


class Unreadable(MemoryStore):
    """A store whose rows cannot be read."""

    def row(self, position: int) -> Any:
        """Fail."""
        raise StoreError("the disk failed")


async def test_a_row_that_cannot_be_read_is_reported_to_its_caller(nursery: Any):
    """
    The caller gets the error and the writer continues. Once it is closed, no caller can read rows.
    """
    writer = JournalWriter(Unreadable())
    await nursery.start(writer.run)
    with pytest.raises(StoreError):
        await writer.rows([1])
    with pytest.raises(StoreError):
        await writer.rows([2])
    writer.close()
    with pytest.raises(WriterDied):
        await writer.rows([1])


async def test_a_full_journal_refuses_look_ups(nursery: Any):
    """A look-up is refused like a request for an answer, and does not wait."""
    store = FullDisk()
    writer = JournalWriter(store)
    await nursery.start(writer.run)
    store.full = True
    receipt = Sequencer(Ledger(clock()), writer).append(
        ev.ServerStarted(boot="one", cairn_version="0", settings={})
    )
    with pytest.raises(CannotRecord):
        await writer.wait_committed(receipt)
    with pytest.raises(CannotRecord):
        await writer.rows([1])
    store.full = False
    while writer.stalled:
        await trio.testing.wait_all_tasks_blocked(0.01)
    (row,) = await writer.rows([1])
    assert row is not None
    writer.close()
