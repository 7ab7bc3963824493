"""
Who waits for a model, and what is told to those who do.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, Generic, TypeVar

import attrs
import trio

from cairn.actors.messages import (
    Generate,
    ModelNotLoaded,
    PromptRefused,
    RefusalError,
    Reply,
    ServerFacts,
    Waiting,
)
from cairn.actors.server import Arrival, Server
from cairn.actors.settings import Settings
from cairn.actors.ticket import Ticket, leave_together
from cairn.engine.models_file import ModelEntry, Told

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
        """
        What clients see.
        """
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
    work: Callable[[Server], Awaitable[T]]
    undo: Callable[[T], None]
    rejected: Callable[[int, str], None]
    places: int = 1
    ready: trio.Event = attrs.field(factory=trio.Event)
    result: tuple[T] | None = None
    failure: Exception | None = None
    gone: bool = False


class Patient:
    """
    What a request hears that waits for its model, and then of its answer.
    """

    def __init__(
        self,
        waiter: Waiter[tuple[Sequence[Ticket], AsyncIterator[Reply]]],
        arrival: Arrival,
        heartbeat_s: float,
        time_over: Callable[[Waiter[Any]], RefusalError],
    ) -> None:
        """
        Args:
            heartbeat_s: how often it hears that it waits still.
            time_over: is told when its time is over, and gives the refusal.
        """
        self._waiter = waiter
        self._arrival = arrival
        self._heartbeat_s = heartbeat_s
        self._time_over = time_over

    def __aiter__(self) -> Patient:
        return self

    async def __anext__(self) -> Reply:
        waiter = self._waiter
        if not waiter.ready.is_set():
            beat = trio.current_time() + self._heartbeat_s
            with trio.move_on_at(min(beat, self._arrival.deadline)):
                await waiter.ready.wait()
        if not waiter.ready.is_set():
            if trio.current_time() >= self._arrival.deadline:
                raise self._time_over(waiter)
            return Waiting(queued=True, prefilled_tokens=0)
        _, replies = result_of(waiter)
        return await anext(replies)


async def taken(
    command: Generate, arrival: Arrival, server: Server
) -> tuple[Sequence[Ticket], AsyncIterator[Reply]]:
    """
    A request that was taken, and its replies.
    """
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
    """
    Nobody waits any more for the answers of a request.
    """
    leave_together(found[0])


def result_of(waiter: Waiter[T]) -> T:
    if waiter.failure is not None:
        raise waiter.failure
    assert waiter.result is not None
    return waiter.result[0]


def first_for(choice: Choice | None, line: list[Waiter[Any]]) -> list[Waiter[Any]]:
    """
    Those at the beginning of the line who wait for a model, before the first who waits for another.
    """
    first = next((n for n, waiter in enumerate(line) if waiter.choice is not choice), len(line))
    return line[:first]


def not_loaded(choice: Choice, pause_s: float) -> ModelNotLoaded:
    return ModelNotLoaded(
        f"the model {choice.name!r} could not be loaded; the server's log says why. Ask for "
        "another one, or try again later",
        retry_after_s=math.ceil(pause_s),
    )


def first_facts(choice: Choice, started_s: int) -> ServerFacts:
    """
    What can be told of a model that was not loaded yet.
    """
    settings, told = choice.settings, choice.told
    return ServerFacts(
        model=choice.name,
        fingerprint="",
        context_tokens=told.context_tokens,
        chunk_tokens=settings.chunk_tokens or 0,
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
