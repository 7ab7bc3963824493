"""
Which pages from other origins may read the server's answers (CORS). None, unless the operator
names them.

A browser first sends a *preflight* request, and never sends a key with it. So preflights are
answered before keys are checked, and reveal nothing but what may be requested. ``quart-cors`` is
not used: it only adds headers after a request, so admitting origins and answering preflights ahead
of the keys would remain here.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final
from urllib.parse import urlsplit

ANY: Final = "*"

_METHODS = "GET, POST, DELETE"
_SEEN = (
    "x-request-id, request-id, x-cairn-session, x-cairn-path, x-cairn-context-left, retry-after, "
    "x-should-retry"
)
_PREFLIGHT_S = 600
_HEADERS_MAX = 4096
_PORTS = {"http": 80, "https": 443}


def read_origin(text: str) -> str:
    """
    An origin as browsers write it, or ``*``.

    Raises:
        ValueError: the text is not an origin; the message shows a valid one.
    """
    if text == ANY:
        return text
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        raise _not_an_origin(text) from None
    extra = parts.path.strip("/") or parts.query or parts.fragment or parts.username
    if parts.scheme not in _PORTS or not parts.hostname or extra or not text.isascii():
        raise _not_an_origin(text)
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    named = "" if port in (None, _PORTS[parts.scheme]) else f":{port}"
    return f"{parts.scheme}://{host}{named}"


def _not_an_origin(text: str) -> ValueError:
    return ValueError(
        f"{text!r} is not an origin; pass one such as https://chat.example or "
        "http://localhost:3000, without a path, or * for any."
    )


class Cors:
    """The origins that the operator allows."""

    def __init__(self, origins: Collection[str] = ()) -> None:
        """
        Args:
            origins: as ``read_origin`` returns them.
        """
        self._origins = frozenset(origins)

    def admits(self, origin: str | None) -> bool:
        """Whether pages from this origin may call the server and read its answers."""
        return origin is not None and (ANY in self._origins or origin in self._origins)

    def headers(self, origin: str | None) -> dict[str, str]:
        """The headers that let a page read an answer."""
        if not self._origins:
            return {}
        if ANY in self._origins:
            return {"access-control-allow-origin": ANY, "access-control-expose-headers": _SEEN}
        # A cache must not serve one page's answer to another.
        vary = {"vary": "Origin"}
        if origin is None or not self.admits(origin):
            return vary
        allowed = {"access-control-allow-origin": origin, "access-control-expose-headers": _SEEN}
        return {**allowed, **vary}

    def preflight(self, requested: str | None) -> dict[str, str]:
        """
        The headers that tell a browser what an admitted page may send.

        Args:
            requested: the headers that the page asks to send. All are allowed: clients have many
                of their own, and the server ignores those that it does not know.
        """
        allowed = {
            "access-control-allow-methods": _METHODS,
            "access-control-max-age": str(_PREFLIGHT_S),
        }
        if requested and len(requested) <= _HEADERS_MAX:
            allowed["access-control-allow-headers"] = requested
        return allowed
