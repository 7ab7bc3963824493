"""
Who owns what a request holds while its response is on its way, and when a request ends.

A handler returns its response before it is sent, and a client may go away between the two: then
neither the handler nor the body of the response runs again. What must be let go of in every case is
entered into a stack that belongs to the task of the request itself.
"""

from __future__ import annotations

from contextlib import AsyncExitStack

import trio
from hypercorn.typing import ASGIReceiveCallable, ASGISendCallable, ASGISendEvent
from quart.asgi import ASGIHTTPConnection
from quart.wrappers import Request
from quart_trio.asgi import TrioASGIHTTPConnection
from quart_trio.wrappers import TrioRequest


class OwningRequest(TrioRequest):
    """
    A request with the contexts that last as long as it does.
    """

    resources: AsyncExitStack


class OwningConnection(TrioASGIHTTPConnection):
    """
    Leaves a request's contexts when its response was sent, or when its client has gone.
    """

    _is_complete = False

    async def handle_messages(  # type: ignore[override]
        self, nursery: trio.Nursery, request: Request, receive: ASGIReceiveCallable
    ) -> None:
        """
        Take in the body; cancel the request if its client goes before the response is complete.

        Hypercorn tells of a disconnect also at the end of a good response, from within the sending
        of its last piece, and then puts the connection to rest. Quart-trio would cancel that: the
        connection would never time out, and a server that stops would wait for it in vain.
        """
        await ASGIHTTPConnection.handle_messages(self, request, receive)
        if not self._is_complete:
            nursery.cancel_scope.cancel()

    async def handle_request(  # type: ignore[override]
        self, nursery: trio.Nursery, request: Request, send: ASGISendCallable
    ) -> None:
        """
        Handle the request and send its response, in one task.
        """

        async def send_and_note(message: ASGISendEvent) -> None:
            if message["type"] == "http.response.body" and not message["more_body"]:
                self._is_complete = True
            await send(message)

        assert isinstance(request, OwningRequest)
        async with AsyncExitStack() as resources:
            request.resources = resources
            await super().handle_request(nursery, request, send_and_note)
