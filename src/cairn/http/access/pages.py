"""Which page sent a request, by what browsers say of it."""

from __future__ import annotations

from urllib.parse import urlsplit

from quart.wrappers import Request

from cairn.http.wire.checks import ClientError

_SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
_OWN = frozenset({"same-origin", "none"})


def is_own(request: Request) -> bool:
    """Whether a request came from the server's own pages, or by an address that a person typed."""
    if request.headers.get("sec-fetch-site", "none") not in _OWN:
        return False
    return request.method in _SAFE or _has_own_origin(request)


def _has_own_origin(request: Request) -> bool:
    """Whether the page that sent a request has the host and port that it was sent to."""
    try:
        host = urlsplit(request.headers.get("origin", "")).netloc
    except ValueError:
        return False
    return bool(host) and host.lower() == request.headers.get("host", "").lower()


def forged() -> ClientError:
    """The error for a request that only the server's own pages may send."""
    return ClientError(
        "this form may only be sent from the server's own pages",
        code="origin_not_allowed",
        status=403,
    )
