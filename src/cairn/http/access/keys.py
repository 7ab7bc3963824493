"""
Who asks: API keys, and the tenant that each of them is.

Rules of this module:

1. The tenant of a request is settled here, before any adapter runs, for all addresses alike.
   Adapters are given the server as this tenant sees it, and have no way to name another.
2. A key is kept as its digest, compared with all keys that there are in the same time whether and
   where one fits, and told to nobody: not to the log, the journal, or who sent it.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Iterator

from quart import g
from werkzeug.datastructures import Headers

from cairn.http.service import Server, Service
from cairn.http.wire.errors import ClientError
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
        raise _refused(f"this server requires an API key; {_SEND_IT}")
    if not owners:
        raise _refused("unknown API key; ask the server's operator for a valid one")
    if len(owners) > 1:
        raise _refused("the request has API keys of two tenants; send only one")
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


def service_of_caller(server: Server) -> Service:
    """The server as the tenant sees it whose request is being handled; fails outside of one."""
    return server.for_tenant(g.tenant)
