"""
Who owns what a request holds while its response is on its way.

A handler returns its response before it is sent, and a client may go away between the two: then
neither the handler nor the body of the response runs again. What must be let go of in every case is
entered into a stack that belongs to the task of the request itself.
"""

from __future__ import annotations

from contextlib import AsyncExitStack

import trio
from hypercorn.typing import ASGISendCallable
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

    async def handle_request(  # type: ignore[override]
        self, nursery: trio.Nursery, request: Request, send: ASGISendCallable
    ) -> None:
        """
        Handle the request and send its response, in one task.
        """
        async with AsyncExitStack() as resources:
            assert isinstance(request, OwningRequest)
            request.resources = resources
            await super().handle_request(nursery, request, send)
