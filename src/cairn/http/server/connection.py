"""
Owns what a request holds until its response is sent or its client disconnects.

A handler returns its response before it is sent. If the client disconnects in between, neither the
handler nor the response's body runs again. So whatever must be released in every case is entered
into a stack that belongs to the request's own task. The module depends on private parts of Quart
and quart-trio, which offer no hook for this; see ``listen.py``.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Any, cast
from urllib.parse import urlsplit

import trio
from hypercorn.typing import (
    ASGIReceiveCallable,
    ASGIReceiveEvent,
    ASGISendCallable,
    ASGISendEvent,
    Scope,
)
from quart.wrappers import Request
from quart_trio.asgi import TrioASGIHTTPConnection
from quart_trio.wrappers import TrioRequest


class OwningRequest(TrioRequest):
    """A request with the contexts that are left when it ends."""

    resources: AsyncExitStack


class OwningConnection(TrioASGIHTTPConnection):
    """Leaves a request's contexts once its response was sent, or its client disconnected."""

    async def __call__(self, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        """
        Serve one request.

        Hypercorn also reports a disconnect at the end of a complete response, while its last piece
        is being sent, and then starts the connection's idle timeout. Quart-trio would cancel that:
        the connection would never time out, and a stopping server would wait for it forever.
        """
        is_complete = False

        async def send_and_note(message: ASGISendEvent) -> None:
            nonlocal is_complete
            if message["type"] == "http.response.body" and not message["more_body"]:
                is_complete = True
            await send(message)

        async def receive_while_incomplete() -> ASGIReceiveEvent:
            message = await receive()
            while is_complete:
                message = await receive()  # ends with the sending
            return message

        await super().__call__(receive_while_incomplete, send_and_note)

    async def handle_request(  # type: ignore[override]
        self, nursery: trio.Nursery, request: Request, send: ASGISendCallable
    ) -> None:
        """Handle the request and send its response, in one task."""
        assert isinstance(request, OwningRequest)
        async with AsyncExitStack() as resources:
            request.resources = resources
            await super().handle_request(nursery, request, send)


def with_readable_path(scope: Scope) -> Scope:
    """
    The scope with a path that Quart can parse. It fails on an empty path, and on an invalid URL in
    place of a path; both are then answered with 404.
    """
    fields = cast(dict[str, Any], scope)
    path: str = fields.get("path", "/")
    try:
        is_readable = path.startswith("/") or bool(urlsplit(path).path)
    except ValueError:
        is_readable = False
    return scope if is_readable else cast(Scope, {**fields, "path": f"/{path}"})
