"""
Logins of browsers: a cookie in the place of an API key.

Rules of this module:

1. The cookie is a random token. Only its digest is kept, in memory: a restart ends all logins.
2. A cookie is accepted only from the server's own pages. Browsers send it from pages on other ports
   of the same host, too, so ``SameSite`` alone does not keep those out.
3. Keys in headers come first: a request that has one is never served for a cookie's tenant.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections import defaultdict
from collections.abc import Callable

from cachetools import TTLCache
from quart.wrappers import Request

from cairn.http.access.pages import is_own

COOKIE = "cairn_login"
LOGIN_S = 12 * 60 * 60
LOGINS_MAX = 100
"""How many browsers of a tenant may be logged in; its oldest login ends for another."""


class Logins:
    """The tenants of the browsers that are logged in."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        # By tenant, so that none can log out another's browsers.
        self._of: defaultdict[str, TTLCache[bytes, None]] = defaultdict(
            lambda: TTLCache(LOGINS_MAX, LOGIN_S, timer=clock)
        )

    def begin(self, tenant: str) -> str:
        """Log a browser in; returns the value of its cookie."""
        token = secrets.token_urlsafe(32)
        self._of[tenant][_digest(token)] = None
        return token

    def end(self, request: Request) -> None:
        """Log the browser out that sent a request."""
        digest = _digest(request.cookies.get(COOKIE, ""))
        for logins in self._of.values():
            logins.pop(digest, None)

    def tenant_of(self, request: Request) -> str | None:
        """The tenant of a request by its cookie; None if it has none, or came from another page."""
        if has_key(request) or not is_own(request):
            return None
        digest = _digest(request.cookies.get(COOKIE, ""))
        return next((tenant for tenant, logins in self._of.items() if digest in logins), None)


def has_key(request: Request) -> bool:
    """Whether a request has an API key in a header, be it a valid one or not."""
    return "authorization" in request.headers or "x-api-key" in request.headers


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
