"""
From a request that was read to its response, in every protocol.

The headers of a stream wait for its first reply, so that a refusal can still have its own status
and the headers can name the session. So the service's context is entered before the response exists
and is left after it was sent; ``server/connection.py`` owns it in between.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from types import MappingProxyType
from typing import Protocol

from quart import Response

from cairn.actors.requests.messages import Generate, Reply
from cairn.http.metrics.latencies import Generating
from cairn.http.wire.answers import UnfinishedAnswer
from cairn.http.wire.json import encode
from cairn.http.wire.sent import Sent

STREAM_HEADERS = {
    "cache-control": "no-cache",
    "content-type": "text/event-stream; charset=utf-8",
    # A proxy that buffers would turn the stream into one late answer.
    "x-accel-buffering": "no",
}


class AnswerBuilder(Protocol):
    """Builds an answer that is sent as a whole. Takes each reply once and in order."""

    def take(self, reply: Reply) -> None:
        """Add a reply."""

    def headers(self) -> dict[str, str]:
        """The response headers that describe the request."""

    def body(self) -> Sent:
        """
        The whole answer.

        Raises:
            UnfinishedAnswer: the replies were not complete.
        """


class StreamBuilder(Protocol):
    """Builds an answer that is sent as server-sent events. Takes each reply once and in order."""

    def take(self, reply: Reply) -> bytes:
        """What to send for a reply; may be nothing."""

    def headers(self, first: Reply) -> dict[str, str]:
        """The response headers that describe the request, by its first reply."""

    def done(self) -> bytes:
        """
        The end of a complete stream.

        Raises:
            UnfinishedAnswer: the stream is not complete.
        """

    def failed(self, error: Exception) -> bytes:
        """The end of a stream that broke off, so that the client sees it is incomplete."""


async def whole_answer(service: Generating, command: Generate, whole: AnswerBuilder) -> Response:
    """
    Answer with one JSON object.

    Raises:
        RefusalError: the request is refused, or its answer ended early.
    """
    async with service.generate(command) as replies:
        async for reply in replies:
            whole.take(reply)
    return json_response(whole.body(), headers=whole.headers())


def json_response(
    body: object, status: int = 200, headers: Mapping[str, str] = MappingProxyType({})
) -> Response:
    """A response of a JSON object."""
    return Response(
        encode(body), status=status, headers=dict(headers), content_type="application/json"
    )


async def streamed_answer(
    service: Generating, command: Generate, stream: StreamBuilder, resources: AsyncExitStack
) -> Response:
    """
    Answer with server-sent events, beginning with the first reply.

    Args:
        resources: holds the request; closing it cancels the request.

    Raises:
        RefusalError: the request is refused, or ended before its first reply.
    """
    replies = aiter(await resources.enter_async_context(service.generate(command)))
    first = await anext(replies, None)
    if first is None:
        raise UnfinishedAnswer("there was no reply")
    headers = {**STREAM_HEADERS, **stream.headers(first)}
    response = Response(_events(first, replies, stream, resources), headers=headers)
    # Quart would cut the stream after a minute, and the client would not know.
    response.timeout = None
    return response


async def _events(
    first: Reply, replies: AsyncIterator[Reply], stream: StreamBuilder, resources: AsyncExitStack
) -> AsyncIterator[bytes]:
    # Holds no cancel scope, because it may be closed from outside at any yield.
    try:
        yield stream.take(first)
        async for reply in replies:
            if piece := stream.take(reply):
                yield piece
        done = stream.done()
        # Before the last piece is sent, so that a failure here still reaches the client.
        await resources.aclose()
    except Exception as error:
        # The status is already sent; without this event the answer would look complete.
        yield stream.failed(error)
    else:
        yield done
