"""
The queue of requests whose model is not loaded.

``requests/admission.py`` lists all places where a request can wait.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import attrs
import trio

from cairn.actors.errors import PromptRefused, QueueFull, RefusalError, TimedOut
from cairn.actors.models.choice import Choice
from cairn.actors.requests.admission import check_model_queue
from cairn.actors.requests.context import RequestContext
from cairn.actors.requests.limits import Limits
from cairn.actors.requests.messages import Generate, Reply, Waiting
from cairn.actors.requests.replies import unless_dead
from cairn.actors.requests.ticket import Ticket, leave_together

if TYPE_CHECKING:
    from cairn.actors.models.model_server import ModelServer

Taken = tuple[Sequence[Ticket], AsyncIterator[Reply]]
"""The tickets of a request that a model's server has admitted, and its replies."""


@attrs.define(eq=False)
class Waiter:
    """
    A request that waits for its model.

    Attributes:
        take: has the server over the model admit it.
        rejected: records why the request was refused, by a key of ``admission.REJECTIONS``.
        places: how many answers it asks for.
        ready: set when there is a result or a failure.
        gone: whether the client has gone.
    """

    choice: Choice
    take: Callable[[ModelServer], Awaitable[Taken]]
    rejected: Callable[[str], None]
    places: int
    ready: trio.Event = attrs.field(factory=trio.Event)
    result: Taken | None = None
    failure: Exception | None = None
    gone: bool = False


class ModelQueue:
    """
    Requests that wait for a model, in the order of arrival, and their admission to its server.

    Attributes:
        entering: how many are being admitted at the moment.
    """

    def __init__(self, limits: Limits, changed: Callable[[], None]) -> None:
        """
        Args:
            changed: called when the queue or ``entering`` has changed.
        """
        self.entering = 0
        self._limits = limits
        self._changed = changed
        self._waiters: list[Waiter] = []
        self._nursery: trio.Nursery | None = None

    def __len__(self) -> int:
        return len(self._waiters)

    @property
    def target(self) -> Choice:
        """The model that the first request waits for. The queue must not be empty."""
        return self._waiters[0].choice

    def all_for(self, choice: Choice | None) -> list[Waiter]:
        """The requests that wait for a model."""
        return [waiter for waiter in self._waiters if waiter.choice is choice]

    def first_for(self, choice: Choice | None) -> list[Waiter]:
        """
        The requests at the head of the queue that wait for a model, up to the first one that waits
        for another.
        """
        return list(itertools.takewhile(lambda waiter: waiter.choice is choice, self._waiters))

    def begin_in(self, nursery: trio.Nursery) -> None:
        """Set the nursery in which requests are admitted."""
        self._nursery = nursery

    def join(self, waiter: Waiter, rows: int) -> None:
        """
        Wait for a model.

        Args:
            rows: how many of its requests run at a time; 0 if that is not known yet.

        Raises:
            RefusalError: too many wait, or there never is room for this one.
        """
        waiting = sum(waiter.places for waiter in self._waiters)
        try:
            check_model_queue(waiter.places, queue=self._limits.queue, rows=rows, waiting=waiting)
        except QueueFull:
            waiter.rejected("queue_full")
            raise
        self._waiters.append(waiter)
        self._changed()

    def leave(self, waiter: Waiter) -> None:
        """The client has gone, or its request has ended."""
        waiter.gone = True
        if waiter in self._waiters:
            self._waiters.remove(waiter)
            waiter.rejected("client")
            self._changed()
        elif waiter.result is not None:
            leave_together(waiter.result[0])

    def refuse(self, waiter: Waiter, refusal: RefusalError, why: str) -> None:
        """
        Refuse a request that waits.

        Args:
            why: a key of ``admission.REJECTIONS``.
        """
        self._waiters.remove(waiter)
        waiter.rejected(why)
        waiter.failure = refusal
        waiter.ready.set()

    def refuse_all(self, why: str, refusal: Callable[[], RefusalError]) -> None:
        """
        Refuse all requests that wait.

        Args:
            why: as for ``refuse``.
        """
        for waiter in list(self._waiters):
            self.refuse(waiter, refusal(), why)
        self._changed()

    def timed_out(self, waiter: Waiter) -> RefusalError:
        """Refuse a request that has waited too long, and return the refusal."""
        refusal = TimedOut(self._limits.request_s)
        if waiter in self._waiters:
            self.refuse(waiter, refusal, "timed_out")
            self._changed()
        return refusal

    def admit(self, waiters: Iterable[Waiter], server: ModelServer) -> None:
        """Take these requests out of the queue and pass them to their model's server."""
        assert self._nursery is not None
        entering = list(waiters)
        for waiter in entering:
            self._waiters.remove(waiter)
        self.entering += len(entering)
        if entering:
            self._nursery.start_soon(self._admit_all, entering, server)

    async def _admit_all(self, waiters: list[Waiter], server: ModelServer) -> None:
        # One after the other, in the order of arrival: tasks started together run in no order.
        assert self._nursery is not None
        for waiter in waiters:
            await self._nursery.start(self._admit_one, waiter, server)

    async def _admit_one(
        self,
        waiter: Waiter,
        server: ModelServer,
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        task_status.started()
        try:
            waiter.result = await waiter.take(server)
        except Exception as error:  # raised again in the request's own task
            waiter.failure = error
        finally:
            self.entering -= 1
            self._changed()
        waiter.ready.set()
        if waiter.gone and waiter.result is not None:
            leave_together(waiter.result[0])


class WaitingReplies:
    """The replies to a request that waits for its model, and then those of its answer."""

    def __init__(
        self,
        waiter: Waiter,
        context: RequestContext,
        timed_out: Callable[[Waiter], RefusalError],
    ) -> None:
        """
        Args:
            timed_out: called when the request's time is over; returns the refusal to raise.
        """
        self._waiter = waiter
        self._context = context
        self._timed_out = timed_out

    def __aiter__(self) -> WaitingReplies:
        return self

    async def __anext__(self) -> Reply:
        waiter = self._waiter
        if not waiter.ready.is_set():
            with self._context.until_beat():
                await waiter.ready.wait()
        if not waiter.ready.is_set():
            if self._context.is_over:
                raise self._timed_out(waiter)
            return Waiting(queued=True, prefilled_tokens=0)
        if waiter.failure is not None:
            raise waiter.failure
        assert waiter.result is not None
        _, replies = waiter.result
        return await anext(replies)


async def take(command: Generate, context: RequestContext, server: ModelServer) -> Taken:
    """Have a server take a request that waited for it: its tickets and replies."""
    known = server.facts.vocabulary_tokens
    if isinstance(command.prompt, tuple) and max(command.prompt, default=0) >= known:
        raise PromptRefused(
            f"the prompt has unknown token ids; those of this model are 0 to {known - 1}"
        )
    strange = [token for token, _ in command.sampling.logit_bias if token >= known]
    if strange:  # not known when the request was read, before the model was ever loaded
        raise PromptRefused(
            f"logit_bias has {strange[0]}, which is not a token id of this model; its ids are 0 "
            f"to {known - 1}"
        )
    tickets = await unless_dead(server.take(command, context))
    return tickets, server.replies(tickets, context)
