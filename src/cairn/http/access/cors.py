"""
Which pages of other origins may read what the server answers (CORS). None, unless the operator
names them.

A browser asks first (a *preflight*), and never sends a key with that question. So it is answered
before keys are looked at, and tells nothing but what may be asked.
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
        ValueError: it is none; the message says what one is.
    """
    if text == ANY:
        return text
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        raise _no_origin(text) from None
    extra = parts.path.strip("/") or parts.query or parts.fragment or parts.username
    if parts.scheme not in _PORTS or not parts.hostname or extra or not text.isascii():
        raise _no_origin(text)
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    named = "" if port in (None, _PORTS[parts.scheme]) else f":{port}"
    return f"{parts.scheme}://{host}{named}"


def _no_origin(text: str) -> ValueError:
    return ValueError(
        f"{text!r} is not an origin; pass one such as https://chat.example or "
        "http://localhost:3000, without a path, or * for any."
    )


class Cors:
    """The origins that were named."""

    def __init__(self, origins: Collection[str] = ()) -> None:
        """
        Args:
            origins: as ``read_origin`` gives them.
        """
        self._origins = frozenset(origins)

    def admits(self, origin: str | None) -> bool:
        """Whether pages of this origin may call the server and read its answers."""
        return origin is not None and (ANY in self._origins or origin in self._origins)

    def headers(self, origin: str | None) -> dict[str, str]:
        """What an answer carries so that the page may read it."""
        if not self._origins:
            return {}
        if ANY in self._origins:
            return {"access-control-allow-origin": ANY, "access-control-expose-headers": _SEEN}
        # Whoever keeps answers must not hand one page's to another.
        vary = {"vary": "Origin"}
        if origin is None or not self.admits(origin):
            return vary
        allowed = {"access-control-allow-origin": origin, "access-control-expose-headers": _SEEN}
        return {**allowed, **vary}

    def preflight(self, wanted: str | None) -> dict[str, str]:
        """
        What an admitted page may send.

        Args:
            wanted: the headers that it asks for. Clients have many of their own, and at what the
                server does not know it does not look.
        """
        allowed = {
            "access-control-allow-methods": _METHODS,
            "access-control-max-age": str(_PREFLIGHT_S),
        }
        if wanted and len(wanted) <= _HEADERS_MAX:
            allowed["access-control-allow-headers"] = wanted
        return allowed
