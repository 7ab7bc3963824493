"""Replies to a client, in order, each once the events that explain it are on disk."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import attrs

from cairn.actors.errors import Broken, RefusalError, Stopping, TimedOut
from cairn.actors.requests.context import RequestContext
from cairn.actors.requests.messages import Finished, Reply, Waiting
from cairn.actors.requests.ticket import Ticket
from cairn.actors.threads.writer import JournalWriter, WriterDied
from cairn.journal.summaries import TurnCounts

T = TypeVar("T")


class Replies:
    """The replies to one client, each once its events are committed."""

    def __init__(
        self,
        tickets: Sequence[Ticket],
        writer: JournalWriter,
        context: RequestContext,
        turn_ended_at: Callable[[str, int], TurnCounts | None],
    ) -> None:
        """
        Args:
            tickets: one for each answer of the request, in order.
            turn_ended_at: see ``Summaries.turn_ended_at``.
        """
        self._tickets = tickets
        self._writer = writer
        self._context = context
        self._turn_ended_at = turn_ended_at
        self._left = len(tickets)

    def __aiter__(self) -> Replies:
        return self

    async def __anext__(self) -> Reply:
        if not self._left:
            raise StopAsyncIteration
        first = self._tickets[0]
        with self._context.until_beat() as waited:
            item = await first.replies.receive()
        if waited.cancelled_caught:
            if self._context.is_over:
                self._left = 0
                for ticket in self._tickets:
                    ticket.leave("timed_out")
                raise TimedOut(self._context.limits.request_s)
            return Waiting(queued=not first.accepted, prefilled_tokens=first.prefilled_tokens)
        left, self._left = self._left, 0  # nothing comes after a failure
        if isinstance(item, RefusalError):
            if isinstance(item, Broken):
                await unless_dead(self._writer.wait_all_committed())
            raise item
        await unless_dead(self._writer.wait_committed(item.receipt))
        if not isinstance(item.reply, Finished):
            self._left = left
            return item.reply
        self._left = left - 1
        session = self._tickets[item.reply.choice].session
        return attrs.evolve(item.reply, turn=self._turn_ended_at(session, item.receipt))


async def unless_dead(step: Awaitable[T]) -> T:
    """
    Wait for a step that needs the journal.

    Raises:
        Stopping: the writer has died, so the server stops and its answers end.
    """
    try:
        return await step
    except WriterDied as died:
        raise Stopping("the server stops because its journal cannot be written") from died
