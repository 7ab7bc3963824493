"""
HTTP/1.1 alone, and without requests whose end two programs may see at different places.

Hypercorn also serves HTTP/2 to a client that asks for it on a plain connection. That would be a
second parser for the same server, and a way past the rules of a proxy that forwards such requests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import h11
import hypercorn.protocol
from hypercorn.events import Closed
from hypercorn.protocol.h11 import H11Protocol

_VERSIONS = (b"1.0", b"1.1")


class RequestRefused(Exception):
    """A request was answered before it was read; its connection ends."""


class _Requests(h11.Connection):
    """
    h11's side of a server.

    Attributes:
        when_read: called when a request was read to its end.
    """

    when_read: Callable[[], object] = staticmethod(lambda: None)

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.EndOfMessage):
            self.when_read()
        return event


class Http1(H11Protocol):
    """Hypercorn's HTTP/1.1, with these rules."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._requests = _Requests(
            h11.SERVER, max_incomplete_event_size=self.config.h11_max_incomplete_size
        )
        self.connection = self._requests

    def tell_when_read(self, when_read: Callable[[], object]) -> None:
        """Have a function called whenever a request was read to its end."""
        self._requests.when_read = when_read

    async def _check_protocol(self, event: h11.Request) -> None:
        """
        Refuse what is not HTTP/1, and a request with two ways to find its end (RFC 9112, 6.1). A
        request to go on with HTTP/2 is answered with HTTP/1.1, as RFC 9110, 7.8 allows: Java's
        client sends one with each of its requests.

        Raises:
            RequestRefused: the client has its answer.
        """
        names = {name for name, _ in event.headers}  # in lower case
        if event.http_version not in _VERSIONS:
            status = 505
        elif {b"content-length", b"transfer-encoding"} <= names:
            status = 400
        else:
            return
        await self._send_error_response(status)
        await self.send(Closed())
        raise RequestRefused


# The one place from which Hypercorn takes the class.
assert hypercorn.protocol.H11Protocol is H11Protocol, (  # type: ignore[attr-defined]
    "This version of Hypercorn creates protocols in another place; see its protocol/__init__.py."
)
hypercorn.protocol.H11Protocol = Http1  # type: ignore[attr-defined]
