"""
The server as the HTTP layer sees it: commands go in, replies come out.

The actors implement it. The HTTP layer uses nothing else of them, so that every adapter can be
tested against a scripted fake.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from cairn.actors.agents.messages import AgentService
from cairn.actors.looking import Looking
from cairn.actors.models.size import ModelSize
from cairn.actors.requests.messages import (
    ContextUse,
    Embed,
    Embedded,
    ForgottenSession,
    Generate,
    ListedModel,
    PromptTokens,
    Reply,
    ServerFacts,
    Statistics,
    StoredTurn,
)
from cairn.journal.events import Recorded


class Server(Protocol):
    """
    The server that the protocols call. ``for_tenant`` has everything that belongs to a tenant.
    """

    @property
    def facts(self) -> ServerFacts:
        """Facts about the server and the model that is loaded."""

    @property
    def models(self) -> tuple[ListedModel, ...]:
        """The models that a request may name."""

    def for_tenant(self, tenant: str) -> Service:
        """The server as one tenant sees it."""

    def load_model(self, name: str) -> None:
        """
        Have a model loaded in its turn, as if a request waited for it.

        Args:
            name: of it, or an alias.

        Raises:
            LookupError: there is none of this name.
            RefusalError: it cannot wait now.
        """

    def unload_model(self) -> None:
        """
        Have the loaded model unloaded.

        Raises:
            RefusalError: requests are in flight or wait for a model.
        """

    async def model_sizes(self) -> Mapping[str, ModelSize]:
        """What each model takes of the memory, by its name. Reads files."""

    def statistics(self) -> Statistics:
        """The server at this moment. Changes nothing."""

    def observe(self, observer: Callable[[Recorded], None]) -> None:
        """Pass every event on to ``observer`` once it is committed, in order."""


class SessionService(Protocol):
    """The sessions that one caller may close and have forgotten."""

    def find(self, name: str) -> str | None:
        """The id of the session that the caller calls by a name; None if there is none."""

    async def close(self, session: str) -> None:
        """
        Close a session. Does nothing if it is closed.

        Raises:
            RefusalError: it is answering, or that cannot be journaled now.
        """

    async def forget(self, session: str, *, with_agent: bool) -> ForgottenSession:
        """
        Make the texts of a session unreadable, in all copies of the journal.

        Args:
            with_agent: if it is an agent's session, delete the agent too.

        Raises:
            RefusalError: it cannot be forgotten now, or not at all. The message says what to do.
        """


class Service(Protocol):
    """The server as one tenant sees it. Adapters hold this, so they cannot choose the tenant."""

    @property
    def facts(self) -> ServerFacts:
        """Facts about the server and the model that is loaded."""

    @property
    def models(self) -> tuple[ListedModel, ...]:
        """The models that a request may name."""

    @property
    def agents(self) -> AgentService:
        """The tenant's agents."""

    def looking(self, *, of_all: bool, texts: bool) -> Looking:
        """
        What the tenant may look at. Changes nothing.

        Args:
            of_all: whether it may see the sessions of all tenants.
            texts: whether it asks for their texts, which is journaled before it reads them.
        """

    def sessions(self, *, of_all: bool) -> SessionService:
        """
        The sessions that the tenant may close and have forgotten.

        Args:
            of_all: whether these are those of all tenants.
        """

    def facts_of(self, requested_model: str) -> ServerFacts:
        """Facts about the model that answers a request for this name, whatever the name is."""

    def contexts(self, most: int) -> tuple[ContextUse, ...]:
        """
        How much of the context the tenant's conversations have filled, the most recently used
        first, at most ``most`` of them.
        """

    def generate(self, command: Generate) -> AbstractAsyncContextManager[AsyncIterator[Reply]]:
        """
        Serve a request: ``Waiting``*, ``Accepted``, ``Delta``*, ``Finished``.

        ``Waiting`` may also come between the others. Leaving the context early cancels the request.

        Raises:
            RefusalError: on entering, if the request is refused; from the iteration, if it ends
                before its answer is complete. ``wire/errors.py`` turns it into an HTTP error.
        """

    async def embed(self, command: Embed) -> Embedded:
        """
        The vectors of texts. Leaving early cancels the request.

        Raises:
            LookupError: there is no embedding model of this name.
            RefusalError: the request is refused, or ended without an answer.
        """

    async def count(self, command: Generate) -> int:
        """
        The number of tokens of a prompt, also of one that is too long to be answered.
        Journals nothing.

        Raises:
            RefusalError: the prompt cannot be rendered or tokenised, or too many requests wait.
        """

    async def tokens(self, command: Generate) -> PromptTokens:
        """The tokens of a prompt. As ``count``."""

    async def turn(self, request: str) -> StoredTurn | None:
        """
        The stored turn of a request, or None if the tenant has none.

        Raises:
            RefusalError: the journal cannot be read now.
        """

    async def history(self, request: str) -> tuple[StoredTurn, ...] | None:
        """
        The stored turns up to and including a request's, the oldest first; None if one of them is
        missing. Raises as ``turn``.
        """

    async def forget(self, request: str) -> bool:
        """
        Delete the stored turn of a request. False if the tenant has none.

        Raises:
            RefusalError: the deletion cannot be journaled now.
        """
