"""
What leaves the room: replies of sessions, in order, once what explains them is on disk.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence

import trio

from cairn.actors.messages import Broken, Finished, RefusalError, Reply, Stopping, TimeOver, Waiting
from cairn.actors.ticket import Ticket
from cairn.actors.writer import JournalWriter, WriterDied


class Replies:
    """
    What sessions say to one client, each reply once it is committed.
    """

    def __init__(
        self,
        tickets: Sequence[Ticket],
        writer: JournalWriter,
        *,
        heartbeat_s: float,
        request_s: float,
        deadline: float,
    ) -> None:
        """
        Args:
            tickets: one for each answer that was asked for, the first one first.
            heartbeat_s: how often a client that waits hears that it still does.
            request_s: how long a request may take, for people.
            deadline: on trio's clock. Behind it nothing more comes.
        """
        self._tickets = tickets
        self._writer = writer
        self._heartbeat_s = heartbeat_s
        self._request_s = request_s
        self._deadline = deadline
        self._left = len(tickets)

    def __aiter__(self) -> Replies:
        return self

    async def __anext__(self) -> Reply:
        if not self._left:
            raise StopAsyncIteration
        first = self._tickets[0]
        beat = trio.current_time() + self._heartbeat_s
        with trio.move_on_at(min(beat, self._deadline)) as waited:
            item = await first.replies.receive()
        if waited.cancelled_caught:
            if trio.current_time() >= self._deadline:
                self._left = 0
                for ticket in self._tickets:
                    ticket.leave("time_over")
                raise TimeOver(self._request_s)
            return Waiting(queued=not first.accepted, prefilled_tokens=first.prefilled_tokens)
        left, self._left = self._left, 0  # nothing comes behind a failure
        if isinstance(item, RefusalError):
            if isinstance(item, Broken):
                await unless_dead(self._writer.wait_all_committed())
            raise item
        await unless_dead(self._writer.wait_committed(item.receipt))
        self._left = left - isinstance(item.reply, Finished)
        return item.reply


async def unless_dead(committed: Awaitable[None]) -> None:
    """
    Wait for a commit. Where the writer has died the server stops, and so do its answers.
    """
    try:
        await committed
    except WriterDied as died:
        raise Stopping("the server stops, since its journal cannot be written") from died
