"""
Who asks: API keys, and the tenant that each of them is.

Rules of this module:

1. Whose a request is, is settled here, ahead of every adapter, for all addresses alike. What an
   adapter writes into a command as its tenant is written over.
2. A key is kept as its digest, compared with all keys that there are in the same time whether and
   where one fits, and told to nobody: not to the log, the journal, or who sent it.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import AbstractAsyncContextManager

import attrs
from quart import g
from werkzeug.datastructures import Headers

from cairn.actors.agents.messages import AgentFacts, AgentHistory, AgentService, NewAgent
from cairn.actors.requests.messages import (
    ContextUse,
    Generate,
    ListedModel,
    Reply,
    ServerFacts,
    Statistics,
    StoredTurn,
)
from cairn.http.service import Service
from cairn.http.wire.errors import ClientError
from cairn.journal.events import Recorded
from cairn.journal.tenants import LOCAL

_SEND_IT = "send it as `Authorization: Bearer KEY` or as `x-api-key: KEY`"
_SCHEME = "bearer"


class Keys:
    """
    API keys and whose they are.

    Attributes:
        tenants: their names, sorted.
    """

    def __init__(self, keys: Iterable[tuple[str, str]]) -> None:
        """
        Args:
            keys: (tenant, key). A tenant may have several.
        """
        self._digests = tuple((tenant, _digest(key)) for tenant, key in keys)
        self.tenants = tuple(sorted({tenant for tenant, _ in self._digests}))

    def owners(self, given: Iterable[str]) -> frozenset[str]:
        """The tenants whose keys are among those that were given."""
        return frozenset(
            tenant
            for digest in map(_digest, given)
            # No end at the first that fits: how long this takes says nothing.
            for tenant in [name for name, known in self._digests if _same(digest, known)]
        )


def tenant_of(headers: Headers, keys: Keys | None) -> str:
    """
    Whose a request is. Without keys it is ``LOCAL``'s, whatever it carries: official clients always
    send some key.

    Raises:
        ClientError: there are keys, and the request does not carry exactly one tenant's.
    """
    if keys is None:
        return LOCAL
    given = tuple(_given(headers))
    owners = keys.owners(given)
    if not given:
        raise _refused(f"this server wants an API key: {_SEND_IT}")
    if not owners:
        raise _refused("this API key is none of this server's; ask its operator for one")
    if len(owners) > 1:
        raise _refused("the request carries API keys of two tenants; send one of them")
    (tenant,) = owners
    return tenant


def _given(headers: Headers) -> Iterator[str]:
    """The keys that a request carries. A client may have one set for each of the two headers."""
    for value in headers.getlist("authorization"):
        scheme, _, key = value.strip().partition(" ")
        if scheme.lower() == _SCHEME and key.strip():
            yield key.strip()
    for value in headers.getlist("x-api-key"):
        if value.strip():
            yield value.strip()


def _refused(message: str) -> ClientError:
    return ClientError(
        message, code="invalid_api_key", status=401, headers={"www-authenticate": "Bearer"}
    )


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def _same(one: bytes, other: bytes) -> bool:
    return hmac.compare_digest(one, other)


@attrs.frozen
class CallersService:
    """
    The service as who asks may use it: every command goes out as the tenant's whose request is in
    hand.
    """

    _service: Service

    @property
    def facts(self) -> ServerFacts:
        """See ``Service.facts``."""
        return self._service.facts

    @property
    def agents(self) -> CallersAgents:
        """See ``Service.agents``. As ``generate``, for who asks."""
        return CallersAgents(self._service.agents)

    def facts_of(self, requested_model: str) -> ServerFacts:
        """See ``Service.facts_of``."""
        return self._service.facts_of(requested_model)

    @property
    def models(self) -> tuple[ListedModel, ...]:
        """See ``Service.models``."""
        return self._service.models

    def statistics(self) -> Statistics:
        """See ``Service.statistics``."""
        return self._service.statistics()

    def contexts(self, most: int, tenant: str = LOCAL) -> tuple[ContextUse, ...]:
        """See ``Service.contexts``. As ``generate``, for who asks."""
        return self._service.contexts(most, g.tenant)

    def generate(self, command: Generate) -> AbstractAsyncContextManager[AsyncIterator[Reply]]:
        """See ``Service.generate``. Outside of a request nobody asks, and it fails."""
        return self._service.generate(attrs.evolve(command, tenant=g.tenant))

    async def count(self, command: Generate) -> int:
        """See ``Service.count``. As ``generate``, for who asks."""
        return await self._service.count(attrs.evolve(command, tenant=g.tenant))

    async def turn(self, request: str, tenant: str = LOCAL) -> StoredTurn | None:
        """See ``Service.turn``. As ``generate``, for who asks."""
        return await self._service.turn(request, g.tenant)

    async def history(self, request: str, tenant: str = LOCAL) -> tuple[StoredTurn, ...] | None:
        """See ``Service.history``. As ``generate``, for who asks."""
        return await self._service.history(request, g.tenant)

    async def forget(self, request: str, tenant: str = LOCAL) -> bool:
        """See ``Service.forget``. As ``generate``, for who asks."""
        return await self._service.forget(request, g.tenant)

    def observe(self, observer: Callable[[Recorded], None]) -> None:
        """See ``Service.observe``."""
        self._service.observe(observer)


@attrs.frozen
class CallersAgents:
    """The agents of who asks: see ``AgentService``, each method as there."""

    _agents: AgentService

    def all(self, tenant: str = LOCAL) -> tuple[AgentFacts, ...]:
        """See ``AgentService.all``."""
        return self._agents.all(g.tenant)

    def one(self, name: str, tenant: str = LOCAL) -> AgentFacts | None:
        """See ``AgentService.one``."""
        return self._agents.one(name, g.tenant)

    async def created(self, name: str, tenant: str = LOCAL) -> NewAgent | None:
        """See ``AgentService.created``."""
        return await self._agents.created(name, g.tenant)

    async def history(self, name: str, tenant: str = LOCAL) -> AgentHistory | None:
        """See ``AgentService.history``."""
        return await self._agents.history(name, g.tenant)

    async def create(self, new: NewAgent, tenant: str = LOCAL) -> AgentFacts:
        """See ``AgentService.create``."""
        return await self._agents.create(new, g.tenant)

    async def fork(
        self, name: str, new_name: str, turn: int | None, tenant: str = LOCAL
    ) -> AgentFacts | None:
        """See ``AgentService.fork``."""
        return await self._agents.fork(name, new_name, turn, g.tenant)

    async def delete(self, name: str, tenant: str = LOCAL) -> bool:
        """See ``AgentService.delete``."""
        return await self._agents.delete(name, g.tenant)
