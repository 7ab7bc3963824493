"""
One chat completion, from request to response.

A stream's headers wait for its first reply, so that a refusal has a status of its own and the
session stands in the headers. Thus the service's context is entered before the response exists and
is left after it was sent; ``connection.py`` says who owns it in between.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

from quart import Response

from cairn.actors.messages import Reply

from .errors import describe
from .openai import ChatRequest
from .openai_answers import Chunks, Completion, UnfinishedAnswer, accepted_headers, event
from .service import Service
from .wire import encode

_STREAM_HEADERS = {
    "cache-control": "no-cache",
    "content-type": "text/event-stream; charset=utf-8",
    # A proxy that buffers would turn the stream into one late answer.
    "x-accel-buffering": "no",
}


async def whole_answer(service: Service, request: ChatRequest) -> Response:
    """
    Answer with one JSON object.

    Raises:
        RefusalError: the request is not served, or its answer ended early.
    """
    command = request.command
    completion = Completion(
        service.facts, logprobs=command.top_logprobs is not None, ignored=request.ignored
    )
    async with service.generate(command) as replies:
        async for reply in replies:
            completion.take(reply)
    body = encode(completion.body())
    return Response(body, headers=completion.headers(), content_type="application/json")


async def streamed_answer(
    service: Service, request: ChatRequest, resources: AsyncExitStack
) -> Response:
    """
    Answer with server-sent events, beginning with the first reply.

    Args:
        resources: where the request is entered; whoever closes it cancels the request.

    Raises:
        RefusalError: the request is not served, or ended before there was a reply.
    """
    command = request.command
    replies = aiter(await resources.enter_async_context(service.generate(command)))
    first = await anext(replies, None)
    if first is None:
        raise UnfinishedAnswer("there was no reply at all")
    chunks = Chunks(
        service.facts,
        logprobs=command.top_logprobs is not None,
        include_usage=request.include_usage,
        ignored=request.ignored,
    )
    headers = {**_STREAM_HEADERS, **accepted_headers(first)}
    response = Response(_events(first, replies, chunks, resources), headers=headers)
    # Quart would cut the stream after a minute, and the client would not know.
    response.timeout = None
    return response


async def _events(
    first: Reply, replies: AsyncIterator[Reply], chunks: Chunks, resources: AsyncExitStack
) -> AsyncIterator[bytes]:
    # Yields only what is to be sent. Holds no scope: it may be closed from outside at any yield.
    try:
        yield chunks.take(first)
        async for reply in replies:
            if piece := chunks.take(reply):
                yield piece
        done = chunks.done()
        # Before the last piece is sent, so that a failure here is still told to the client.
        await resources.aclose()
    except Exception as error:
        # The status is long sent; without this event the client would take the rest for complete.
        yield event(describe(error).envelope())
    else:
        yield done
