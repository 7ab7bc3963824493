"""
One answer, from request to response, in whatever protocol it was asked for.

A stream's headers wait for its first reply, so that a refusal has a status of its own and the
session stands in the headers. Thus the service's context is entered before the response exists and
is left after it was sent; ``connection.py`` says who owns it in between.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Protocol

from quart import Response

from cairn.actors.requests.messages import Generate, Reply
from cairn.http.service import Service
from cairn.http.wire.answers import UnfinishedAnswer
from cairn.http.wire.json import encode
from cairn.http.wire.sent import Sent

_STREAM_HEADERS = {
    "cache-control": "no-cache",
    "content-type": "text/event-stream; charset=utf-8",
    # A proxy that buffers would turn the stream into one late answer.
    "x-accel-buffering": "no",
}


class Whole(Protocol):
    """An adapter's answer that is sent as a whole; takes each reply once and in order."""

    def take(self, reply: Reply) -> None:
        """Add a reply."""

    def headers(self) -> dict[str, str]:
        """What is known of the request, for the response's headers."""

    def body(self) -> Sent:
        """
        The answer.

        Raises:
            UnfinishedAnswer: the replies were not complete.
        """


class Streamed(Protocol):
    """
    An adapter's answer that is sent as server-sent events; takes each reply once and in order.
    """

    def take(self, reply: Reply) -> bytes:
        """What to send for a reply; may be nothing."""

    def headers(self, first: Reply) -> dict[str, str]:
        """What is known of the request with its first reply, for the response's headers."""

    def done(self) -> bytes:
        """
        The end of a complete stream.

        Raises:
            UnfinishedAnswer: it is not complete.
        """

    def failed(self, error: Exception) -> bytes:
        """The end of a stream that broke off."""


class Asked(Protocol):
    """What an adapter has read: a command, and how its answer is to be sent."""

    @property
    def command(self) -> Generate:
        """What is asked of the service."""

    @property
    def stream(self) -> bool:
        """Whether the client wants a stream."""

    def whole(self) -> Whole:
        """What builds the answer as one object."""

    def streamed(self) -> Streamed:
        """What builds the answer as a stream."""


async def whole_answer(service: Service, asked: Asked) -> Response:
    """
    Answer with one JSON object.

    Raises:
        RefusalError: the request is not served, or its answer ended early.
    """
    whole = asked.whole()
    async with service.generate(asked.command) as replies:
        async for reply in replies:
            whole.take(reply)
    body = encode(whole.body())
    return Response(body, headers=whole.headers(), content_type="application/json")


async def streamed_answer(service: Service, asked: Asked, resources: AsyncExitStack) -> Response:
    """
    Answer with server-sent events, beginning with the first reply.

    Args:
        resources: where the request is entered; whoever closes it cancels the request.

    Raises:
        RefusalError: the request is not served, or ended before there was a reply.
    """
    replies = aiter(await resources.enter_async_context(service.generate(asked.command)))
    first = await anext(replies, None)
    if first is None:
        raise UnfinishedAnswer("there was no reply at all")
    stream = asked.streamed()
    headers = {**_STREAM_HEADERS, **stream.headers(first)}
    response = Response(_events(first, replies, stream, resources), headers=headers)
    # Quart would cut the stream after a minute, and the client would not know.
    response.timeout = None
    return response


async def _events(
    first: Reply, replies: AsyncIterator[Reply], stream: Streamed, resources: AsyncExitStack
) -> AsyncIterator[bytes]:
    # Yields only what is to be sent. Holds no scope: it may be closed from outside at any yield.
    try:
        yield stream.take(first)
        async for reply in replies:
            if piece := stream.take(reply):
                yield piece
        done = stream.done()
        # Before the last piece is sent, so that a failure here is still told to the client.
        await resources.aclose()
    except Exception as error:
        # The status is long sent; without this event the client would take the rest for complete.
        yield stream.failed(error)
    else:
        yield done
