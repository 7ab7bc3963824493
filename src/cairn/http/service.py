"""
What the HTTP layer is given: one object that takes commands and gives replies.

The real one is made by the actors. Nothing else of them is used here, so that every adapter can be
tried against a scripted stand-in.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from cairn.actors.agents.messages import AgentService
from cairn.actors.requests.messages import (
    ContextUse,
    Generate,
    ListedModel,
    Reply,
    ServerFacts,
    Statistics,
    StoredTurn,
)
from cairn.journal.events import Recorded
from cairn.journal.tenants import LOCAL


class Service(Protocol):
    """The server behind the protocols."""

    @property
    def facts(self) -> ServerFacts:
        """What the server tells of itself; the model is the one that is loaded."""

    def facts_of(self, requested_model: str) -> ServerFacts:
        """
        What it tells of the model that would answer who asks for one of this name: any name will
        do.
        """

    @property
    def models(self) -> tuple[ListedModel, ...]:
        """The models that may be asked for."""

    @property
    def agents(self) -> AgentService:
        """The agents that are kept here."""

    def statistics(self) -> Statistics:
        """The server at this moment. Changes nothing."""

    def contexts(self, most: int, tenant: str = LOCAL) -> tuple[ContextUse, ...]:
        """
        How much of the context the tenant's conversations have filled, at most so many, the last
        used one first. Adapters leave the tenant alone, as in ``Generate``.
        """

    def generate(self, command: Generate) -> AbstractAsyncContextManager[AsyncIterator[Reply]]:
        """
        Serve a request: ``Waiting``*, ``Accepted``, ``Delta``*, ``Finished``.

        ``Waiting`` may also come between the others. Leaving the context early cancels the request.

        Raises:
            RefusalError: on entering, where the request is not served; from the iteration, where it
                ended before its answer did. ``errors.py`` tells the client.
        """

    async def count(self, command: Generate) -> int:
        """
        The tokens of the prompt that a request makes, however many. Nothing is on record of it.

        Raises:
            RefusalError: there is no such prompt.
        """

    async def turn(self, request: str, tenant: str = LOCAL) -> StoredTurn | None:
        """
        The kept turn of a request, if there is one of the tenant's. Adapters leave the tenant
        alone, as in ``Generate``.

        Raises:
            RefusalError: the journal cannot be read now.
        """

    async def history(self, request: str, tenant: str = LOCAL) -> tuple[StoredTurn, ...] | None:
        """
        The kept turns up to that of a request and with it, the oldest first; None where one of them
        is not there. Raises as ``turn``.
        """

    async def forget(self, request: str, tenant: str = LOCAL) -> bool:
        """
        Keep the turn of a request no longer. False where there is none of the tenant's.

        Raises:
            RefusalError: that cannot be put on record now.
        """

    def observe(self, observer: Callable[[Recorded], None]) -> None:
        """Have each event told to ``observer`` once it is committed, in order."""
