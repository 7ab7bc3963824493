"""
The running server: what the HTTP layer and ``ops`` hold.

There is one kind of server, over one model or several. Everything that belongs to a tenant is
reached through ``Server.for_tenant``, so that no caller can forget whose data it asks for.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING

import attrs
import trio

from cairn.actors.agents.agents import TenantAgents
from cairn.actors.looking import Looking
from cairn.actors.request_log import Follower
from cairn.actors.requests.messages import (
    ContextUse,
    Embed,
    Embedded,
    Generate,
    ListedModel,
    PromptTokens,
    Reply,
    ServerFacts,
    Statistics,
    StoredTurn,
)
from cairn.actors.sessions.forgetting import Forgetting, TenantSessions
from cairn.actors.statistics import contexts
from cairn.journal.events import Recorded

if TYPE_CHECKING:
    from cairn.actors.models.embeddings import Embeddings
    from cairn.actors.models.load import Run
    from cairn.actors.models.model_server import ModelServer
    from cairn.actors.models.size import ModelSize
    from cairn.actors.models.swap import Models


class Server:
    """A server over its models. Runs until it is drained."""

    def __init__(self, run: Run, models: Models, embeddings: Embeddings) -> None:
        self._run = run
        self._models = models
        self._embeddings = embeddings
        self._forgetting = Forgetting(run, models)

    def for_tenant(self, tenant: str) -> TenantServer:
        """The server as one tenant sees it."""
        return TenantServer(self._run, self._models, self._embeddings, self._forgetting, tenant)

    @property
    def facts(self) -> ServerFacts:
        """Facts about the model that is loaded; about the default model while none is."""
        return self._models.facts

    @property
    def models(self) -> tuple[ListedModel, ...]:
        """The models that a request may name."""
        return (*self._models.listed, *self._embeddings.listed)

    @property
    def loaded(self) -> ModelServer:
        """
        The server over the model that is loaded.

        Raises:
            LookupError: no model is loaded.
        """
        return self._models.loaded

    def load_model(self, name: str) -> None:
        """Have a model loaded. See ``Models.ask_load``."""
        self._models.ask_load(name)

    def unload_model(self) -> None:
        """Have the loaded model unloaded. See ``Models.ask_unload``."""
        self._models.ask_unload()

    async def model_sizes(self) -> Mapping[str, ModelSize]:
        """What each model takes of the memory, by its name."""
        return await self._models.sizes()

    def statistics(self) -> Statistics:
        """The server at this moment. Changes nothing."""
        return self._models.statistics()

    def observe(self, observer: Callable[[Recorded], None]) -> None:
        """Pass every event on to ``observer`` once it is committed, in order."""
        self._run.writer.observe(observer)

    def follow_requests(self, follower: Follower) -> None:
        """Pass every request and every prewarm on to ``follower``, once it ended."""
        self._run.request_log.follow(follower)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until ``drain`` has ended the last request."""
        await self._models.run(task_status=task_status)

    async def drain(self) -> None:
        """
        Refuse new requests, end those that wait for a model, and let running requests finish within
        the limit. On return all of it is in the journal, and the blocks in memory are in files.
        """
        self._forgetting.close()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._embeddings.drain)
            await self._models.drain()


@attrs.frozen
class TenantServer:
    """The server as one tenant sees it, as ``http.service.Service`` says."""

    _run: Run
    _models: Models
    _embeddings: Embeddings
    _forgetting: Forgetting
    _tenant: str

    @property
    def facts(self) -> ServerFacts:
        """Facts about the model that is loaded; about the default model while none is."""
        return self._models.facts

    @property
    def models(self) -> tuple[ListedModel, ...]:
        """The models that a request may name."""
        return (*self._models.listed, *self._embeddings.listed)

    @property
    def agents(self) -> TenantAgents:
        """The tenant's agents."""
        models = self._models
        return TenantAgents(self._run.agents, self._tenant, models.context_of, models.close_session)

    def looking(self, *, of_all: bool, texts: bool) -> Looking:
        """
        What the tenant may look at.

        Args:
            of_all: whether it may see the sessions of all tenants.
            texts: whether it asks for their texts.
        """
        run = self._run
        return Looking(
            tenant=self._tenant,
            of_all=of_all,
            texts=texts,
            summaries=run.summaries,
            sequencer=run.sequencer,
            writer=run.writer,
            pages=run.pages,
        )

    def sessions(self, *, of_all: bool) -> TenantSessions:
        """
        The sessions that the tenant may close and have forgotten.

        Args:
            of_all: whether these are those of all tenants.
        """
        return TenantSessions(self._forgetting, self._tenant, of_all)

    def facts_of(self, requested_model: str) -> ServerFacts:
        """Facts about the model that answers a request for this name."""
        return self._models.facts_of(requested_model)

    def contexts(self, most: int) -> tuple[ContextUse, ...]:
        """
        How much of the context the tenant's last used conversations have filled, the last used one
        first. Conversations whose texts the journal no longer has are left out.

        Args:
            most: how many to give at most.
        """
        return contexts(
            self._run.sequencer.state,
            self._run.agents.agents.of(self._tenant),
            self._models.context_of,
            most,
            self._tenant,
        )

    def generate(self, command: Generate) -> AbstractAsyncContextManager[AsyncIterator[Reply]]:
        """
        Answer a request. Leaving the context early cancels it.

        Raises:
            RefusalError: on entering, if the request is refused; from the iteration, if it ends
                without an answer.
        """
        return self._models.generate(command, self._tenant)

    async def embed(self, command: Embed) -> Embedded:
        """
        The vectors of texts, by an embedding model. Leaving early cancels the request.

        Raises:
            LookupError: there is no embedding model of this name.
            RefusalError: the request is refused, or ended without an answer.
        """
        return await self._embeddings.embed(command, self._tenant)

    async def count(self, command: Generate) -> int:
        """The number of tokens of a prompt. As ``tokens``."""
        return len((await self.tokens(command)).ids)

    async def tokens(self, command: Generate) -> PromptTokens:
        """
        The tokens of a prompt, also of one that is too long to be answered.
        Puts nothing on record.

        Raises:
            RefusalError: the prompt cannot be rendered or tokenised, or too many requests wait.
        """
        return await self._models.tokens(command, self._tenant)

    async def turn(self, request: str) -> StoredTurn | None:
        """
        The stored turn of a request, or None if the tenant has none.

        Raises:
            RefusalError: the journal cannot be read now.
        """
        return await self._run.agents.stored_turns.turn(request, self._tenant)

    async def history(self, request: str) -> tuple[StoredTurn, ...] | None:
        """
        The stored turns up to and including a request's, the oldest first; None if one of them is
        missing. Raises as ``turn``.
        """
        return await self._run.agents.stored_turns.history(request, self._tenant)

    async def forget(self, request: str) -> bool:
        """
        Delete the stored turn of a request. False if the tenant has none.

        Raises:
            RefusalError: that cannot be put on record now.
        """
        return await self._run.agents.stored_turns.forget(request, self._tenant)
