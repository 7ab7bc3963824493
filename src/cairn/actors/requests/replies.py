"""What leaves the room: replies of sessions, in order, once what explains them is on disk."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence

from cairn.actors.errors import Broken, RefusalError, Stopping, TimedOut
from cairn.actors.requests.context import RequestContext
from cairn.actors.requests.messages import Finished, Reply, Waiting
from cairn.actors.requests.ticket import Ticket
from cairn.actors.threads.writer import JournalWriter, WriterDied


class Replies:
    """What sessions say to one client, each reply once it is committed."""

    def __init__(
        self, tickets: Sequence[Ticket], writer: JournalWriter, arrival: RequestContext
    ) -> None:
        """
        Args:
            tickets: one for each answer that was asked for, the first one first.
            arrival: of the request.
        """
        self._tickets = tickets
        self._writer = writer
        self._arrival = arrival
        self._left = len(tickets)

    def __aiter__(self) -> Replies:
        return self

    async def __anext__(self) -> Reply:
        if not self._left:
            raise StopAsyncIteration
        first = self._tickets[0]
        with self._arrival.until_beat() as waited:
            item = await first.replies.receive()
        if waited.cancelled_caught:
            if self._arrival.is_over:
                self._left = 0
                for ticket in self._tickets:
                    ticket.leave("timed_out")
                raise TimedOut(self._arrival.limits.request_s)
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
    """Wait for a commit. Where the writer has died the server stops, and so do its answers."""
    try:
        await committed
    except WriterDied as died:
        raise Stopping("the server stops, since its journal cannot be written") from died
