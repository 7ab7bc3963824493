"""The journal cannot be written any more: requests that come in meanwhile are refused."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import trio
import trio.testing

from cairn.actors.errors import Stopping
from cairn.actors.threads.writer import WriterDied
from cairn.engine.prompt.template import Conversation, Message
from cairn.journal.errors import StoreError
from cairn.journal.rows.codec import Row
from cairn.journal.rows.store import MemoryStore
from tests.support.in_process_server import ask, generate, serving_fake, wait_idle

pytestmark = pytest.mark.trio

HELLO = generate(Conversation(messages=(Message(role="user", content="Hello"),)))


class Removed(MemoryStore):
    """A store whose file is gone once ``removed`` is set."""

    removed = False

    def append(self, rows: Sequence[Row]) -> None:
        """See ``Store.append``."""
        if self.removed:
            raise StoreError("the file was removed")
        super().append(rows)


async def test_a_request_is_prepared_when_the_journal_dies() -> None:
    """It is refused after its preparation, because no task can serve it any more."""
    ended = list[type[BaseException]]()
    with pytest.raises(BaseExceptionGroup) as died:
        await _prepare_while_it_dies(ended)
    assert died.group_contains(WriterDied)
    assert [Stopping] == ended


async def _prepare_while_it_dies(ended: list[type[BaseException]]) -> None:
    store, prepares, may_go_on = Removed(), threading.Event(), threading.Event()
    async with serving_fake(store) as server:
        first = await ask(server, HELLO)
        await wait_idle(server)
        encoder: Any = server.loaded.preparer.encoder
        encode = encoder.encode

        def waits(*given: Any, **named: Any) -> Any:
            prepares.set()
            assert may_go_on.wait(60)
            return encode(*given, **named)

        async def prepared() -> None:
            try:
                await ask(server, HELLO)
            except BaseException as error:
                ended.append(type(error))
                raise

        async def let_go_on() -> None:
            with trio.CancelScope(shield=True):
                await trio.testing.wait_all_tasks_blocked(0.05)
                may_go_on.set()

        encoder.encode = waits
        async with trio.open_nursery() as nursery:
            nursery.start_soon(prepared)
            assert await trio.to_thread.run_sync(prepares.wait, 60)
            store.removed = True
            nursery.start_soon(let_go_on)
            actor = server.loaded.sessions.actors[first.accepted.session]
            await actor.give_up_slab("room for another session")
