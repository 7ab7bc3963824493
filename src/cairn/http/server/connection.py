"""
Who owns what a request holds while its response is on its way, and when a request ends.

A handler returns its response before it is sent, and a client may go away between the two: then
neither the handler nor the body of the response runs again. What must be let go of in every case is
entered into a stack that belongs to the task of the request itself.
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
    """A request with the contexts that last as long as it does."""

    resources: AsyncExitStack


class OwningConnection(TrioASGIHTTPConnection):
    """Leaves a request's contexts when its response was sent, or when its client has gone."""

    async def __call__(self, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        """
        Serve one request.

        Hypercorn tells of a disconnect also at the end of a good response, from within the sending
        of its last piece, and then puts the connection to rest. Quart-trio would cancel that: the
        connection would never time out, and a server that stops would wait for it in vain.
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
    The scope with a path that Quart can take: it fails on an empty one, and on an address in the
    place of a path that is none. There is nothing at either, which it then says itself.
    """
    fields = cast(dict[str, Any], scope)
    path: str = fields.get("path", "/")
    try:
        is_readable = path.startswith("/") or bool(urlsplit(path).path)
    except ValueError:
        is_readable = False
    return scope if is_readable else cast(Scope, {**fields, "path": f"/{path}"})
