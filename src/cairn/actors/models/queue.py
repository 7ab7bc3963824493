"""Who waits for a model, and what is told to those who do."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

import attrs
import trio

from cairn.actors.errors import (
    ModelNotLoaded,
    PromptRefused,
    QueueFull,
    RefusalError,
    TimedOut,
    TooManyAnswers,
)
from cairn.actors.models.model_server import REJECTED, ModelServer
from cairn.actors.requests.context import RequestContext
from cairn.actors.requests.limits import Limits
from cairn.actors.requests.messages import Generate, Reply, ServerFacts, Waiting
from cairn.actors.requests.ticket import Ticket, leave_together
from cairn.actors.settings import Settings
from cairn.engine.model.models_file import ModelEntry, Told

T = TypeVar("T")

_ANY_TOKEN = 1 << 31


@attrs.frozen(kw_only=True)
class Choice:
    """
    A model that may be loaded.

    Attributes:
        settings: of the server, with what is this model's own.
        told: what its directory told at the start.
    """

    entry: ModelEntry
    settings: Settings
    told: Told

    @property
    def name(self) -> str:
        """What clients see."""
        return self.entry.name


@attrs.define(eq=False)
class Waiter(Generic[T]):
    """
    Who waits until a model has its turn.

    Attributes:
        work: what is then to be done.
        undo: takes back what came of it, where nobody wants it any more.
        rejected: puts on record why it came to nothing.
        places: how many answers it wants.
        ready: set when there is a result or a failure.
        gone: nobody waits any more.
    """

    choice: Choice
    work: Callable[[ModelServer], Awaitable[T]]
    undo: Callable[[T], None]
    rejected: Callable[[int, str], None]
    places: int = 1
    ready: trio.Event = attrs.field(factory=trio.Event)
    result: tuple[T] | None = None
    failure: Exception | None = None
    gone: bool = False


class ModelQueue:
    """
    Those who wait until a model has its turn, in the order of coming, and their going in.

    Attributes:
        entering: how many go in at the moment.
    """

    def __init__(self, limits: Limits, stir: Callable[[], None]) -> None:
        """
        Args:
            stir: is called when who waits, or goes in, has changed.
        """
        self.entering = 0
        self._limits = limits
        self._stir = stir
        self._waiters: list[Waiter[Any]] = []
        self._nursery: trio.Nursery | None = None

    def __len__(self) -> int:
        return len(self._waiters)

    @property
    def target(self) -> Choice:
        """The model that the first of them waits for. There is one."""
        return self._waiters[0].choice

    def all_for(self, choice: Choice | None) -> list[Waiter[Any]]:
        """Those who wait for a model."""
        return [waiter for waiter in self._waiters if waiter.choice is choice]

    def first_for(self, choice: Choice | None) -> list[Waiter[Any]]:
        """
        Those at the beginning of the line who wait for a model, before the first who waits for
        another.
        """
        line = self._waiters
        first = next((n for n, waiter in enumerate(line) if waiter.choice is not choice), len(line))
        return line[:first]

    def begin_in(self, nursery: trio.Nursery) -> None:
        """Have the tasks that bring them in begin there. Before the first goes in."""
        self._nursery = nursery

    def join(self, waiter: Waiter[Any], rows: int) -> None:
        """
        Wait for a model.

        Args:
            rows: so many of its requests run at a time; 0 where that is not known yet.

        Raises:
            RefusalError: too many wait, or there never is room for this one.
        """
        waiting = sum(waiter.places for waiter in self._waiters)
        if rows and waiter.places > self._limits.queue + rows:
            raise TooManyAnswers(waiter.places, self._limits.queue + rows)
        # As many as go in together when it is there: nobody waits beside who runs. How many of one
        # request can, is seen when it is there.
        is_full = waiting + waiter.places > self._limits.queue + max(1, rows)
        if is_full and (rows or waiting):
            waiter.rejected(429, "queue_full")
            raise QueueFull(
                f"{waiting} requests wait for a model already; try again in a few seconds",
                retry_after_s=5,
            )
        self._waiters.append(waiter)
        self._stir()

    def leave(self, waiter: Waiter[Any]) -> None:
        """Nobody waits any more, for the model or for the end of an answer."""
        waiter.gone = True
        if waiter in self._waiters:
            self._waiters.remove(waiter)
            waiter.rejected(*REJECTED["client"])
            self._stir()
        elif waiter.result is not None:
            waiter.undo(waiter.result[0])

    def refuse(self, waiter: Waiter[Any], refusal: RefusalError, status: int, code: str) -> None:
        """Tell one in the line that nothing comes of it."""
        self._waiters.remove(waiter)
        waiter.rejected(status, code)
        waiter.failure = refusal
        waiter.ready.set()

    def refuse_all(self, why: str, refusal: Callable[[], RefusalError]) -> None:
        """
        Tell all of them that nothing comes of it.

        Args:
            why: as ``REJECTED`` has it.
        """
        for waiter in list(self._waiters):
            self.refuse(waiter, refusal(), *REJECTED[why])
        self._stir()

    def timed_out(self, waiter: Waiter[Any]) -> RefusalError:
        """A request's time is over while it waits."""
        refusal = TimedOut(self._limits.request_s)
        if waiter in self._waiters:
            self.refuse(waiter, refusal, *REJECTED["timed_out"])
            self._stir()
        return refusal

    def go_in(self, waiters: Iterable[Waiter[Any]], server: ModelServer) -> None:
        """Let some of the line go in to the server over their model."""
        assert self._nursery is not None
        going = list(waiters)
        for waiter in going:
            self._waiters.remove(waiter)
        self.entering += len(going)
        if going:
            self._nursery.start_soon(self._bring_all, going, server)

    async def _bring_all(self, waiters: list[Waiter[Any]], server: ModelServer) -> None:
        """
        Begin one after the other, as they came: tasks that are started at once begin in no order.
        """
        assert self._nursery is not None
        for waiter in waiters:
            await self._nursery.start(self._bring, waiter, server)

    async def _bring(
        self,
        waiter: Waiter[Any],
        server: ModelServer,
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        task_status.started()
        try:
            waiter.result = (await waiter.work(server),)
        except Exception as error:  # it is told to who waits
            waiter.failure = error
        finally:
            self.entering -= 1
            self._stir()
        waiter.ready.set()
        if waiter.gone and waiter.result is not None:
            waiter.undo(waiter.result[0])


class Patient:
    """What a request hears that waits for its model, and then of its answer."""

    def __init__(
        self,
        waiter: Waiter[tuple[Sequence[Ticket], AsyncIterator[Reply]]],
        arrival: RequestContext,
        timed_out: Callable[[Waiter[Any]], RefusalError],
    ) -> None:
        """
        Args:
            timed_out: is told when its time is over, and gives the refusal.
        """
        self._waiter = waiter
        self._arrival = arrival
        self._time_over = timed_out

    def __aiter__(self) -> Patient:
        return self

    async def __anext__(self) -> Reply:
        waiter = self._waiter
        if not waiter.ready.is_set():
            with self._arrival.until_beat():
                await waiter.ready.wait()
        if not waiter.ready.is_set():
            if self._arrival.is_over:
                raise self._time_over(waiter)
            return Waiting(queued=True, prefilled_tokens=0)
        _, replies = result_of(waiter)
        return await anext(replies)


async def taken(
    command: Generate, arrival: RequestContext, server: ModelServer
) -> tuple[Sequence[Ticket], AsyncIterator[Reply]]:
    """A request that was taken, and its replies."""
    known = server.facts.vocabulary_tokens
    if isinstance(command.prompt, tuple) and max(command.prompt, default=0) >= known:
        raise PromptRefused(
            f"the prompt has ids of no token: those of this model are 0 to {known - 1}"
        )
    strange = [token for token, _ in command.sampling.logit_bias if token >= known]
    if strange:  # read before the model was loaded for the first time
        raise PromptRefused(
            f"logit_bias names {strange[0]}, which is no token of this model: its ids are 0 to "
            f"{known - 1}"
        )
    tickets = await server.take(command, arrival)
    return tickets, server.replies(tickets, arrival)


def leave_all(found: tuple[Sequence[Ticket], AsyncIterator[Reply]]) -> None:
    """Nobody waits any more for the answers of a request."""
    leave_together(found[0])


def result_of(waiter: Waiter[T]) -> T:
    if waiter.failure is not None:
        raise waiter.failure
    assert waiter.result is not None
    return waiter.result[0]


def not_loaded(choice: Choice, pause_s: float) -> ModelNotLoaded:
    return ModelNotLoaded(
        f"the model {choice.name!r} could not be loaded; the server's log says why. Ask for "
        "another one, or try again later",
        retry_after_s=math.ceil(pause_s),
    )


def first_facts(choice: Choice, started_s: int) -> ServerFacts:
    """What can be told of a model that was not loaded yet."""
    settings, told = choice.settings, choice.told
    return ServerFacts(
        model=choice.name,
        fingerprint="",
        context_tokens=told.context_tokens,
        block_tokens=settings.block_tokens or 0,
        decode_rows=settings.decode_rows or 0,
        kv_cache=settings.kv_cache,
        started_s=started_s,
        default_max_tokens=settings.limits.max_tokens,
        vocabulary_tokens=told.vocabulary_tokens or _ANY_TOKEN,
        defaults=told.defaults,
        template=told.template,
        switches=told.switches,
        min_cache_tokens=settings.min_cache_tokens,
    )
