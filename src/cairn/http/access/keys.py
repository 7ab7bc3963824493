"""
API keys, and the tenants that they belong to.

Rules of this module:

1. The tenant of a request is determined here, before any adapter and in the same way for every
   address.
2. Only a key's digest is kept. It is compared with all known keys in the same time, whether or not
   one matches, and a key is never written to the log or the journal, or sent back.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Iterator

from quart import g
from werkzeug.datastructures import Headers

from cairn.http.service import Server, Service
from cairn.http.wire.checks import ClientError
from cairn.journal.tenants import LOCAL

_SEND_IT = "send it as `Authorization: Bearer KEY` or as `x-api-key: KEY`"
_SCHEME = "bearer"


class Keys:
    """
    API keys and their tenants.

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
        """The tenants whose keys are among these."""
        # All keys are compared, so that the time reveals nothing.
        matches = [
            (tenant, hmac.compare_digest(digest, known))
            for digest in map(_digest, given)
            for tenant, known in self._digests
        ]
        return frozenset(tenant for tenant, is_same in matches if is_same)


def sees_all(tenant: str, keys: Keys | None) -> bool:
    """
    Whether a tenant may see the figures of all: on a server without other tenants, and ``LOCAL``,
    which is the operator's own.
    """
    return keys is None or tenant == LOCAL or len(keys.tenants) == 1


def tenant_of(headers: Headers, keys: Keys | None) -> str:
    """
    The tenant of a request. On a server without keys it is ``LOCAL``, whatever key the request has:
    official clients always send one.

    Raises:
        ClientError: the server has keys, and the request does not have exactly one tenant's.
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
    """The keys of a request. A client may send one in each of the two headers."""
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


def service_of_caller(server: Server) -> Service:
    """The server as the tenant sees it whose request is being handled; fails outside of one."""
    return server.for_tenant(g.tenant)
