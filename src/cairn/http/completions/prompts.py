"""Requests with several prompts, and the texts of prompts that are repeated in their answers."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence

import attrs

from cairn.actors.requests.messages import Generate, Reply, Waiting
from cairn.http.completions.request import TextRequest
from cairn.http.metrics.latencies import Generating
from cairn.http.service import Service


async def with_echoes(read: TextRequest, service: Service) -> TextRequest:
    """
    The request with the text of each prompt that is repeated, also of one of token ids.

    Raises:
        RefusalError: token ids cannot be decoded now.
    """
    if not read.echo:
        return read
    commands = (read.command, *read.more)
    found = [
        (await service.tokens(command)).text if text is None else text
        for command, text in zip(commands, read.echoes, strict=True)
    ]
    return attrs.evolve(read, echoes=tuple(found))


class InTurn:
    """A service that answers several prompts one after the other, as one request."""

    def __init__(self, service: Generating, more: Sequence[Generate]) -> None:
        """
        Args:
            more: the requests after the first one.
        """
        self._service = service
        self._more = more

    @contextlib.asynccontextmanager
    async def generate(self, command: Generate) -> AsyncIterator[AsyncIterator[Reply]]:
        """As that of the service. Answers are numbered through all prompts."""
        async with contextlib.AsyncExitStack() as current:
            yield self._replies((command, *self._more), current)

    async def _replies(
        self, commands: Sequence[Generate], current: contextlib.AsyncExitStack
    ) -> AsyncIterator[Reply]:
        """
        Args:
            current: holds the request that is answered.
        """
        first = 0
        for command in commands:
            await current.aclose()
            replies = await current.enter_async_context(self._service.generate(command))
            async for reply in replies:
                if not isinstance(reply, Waiting):
                    reply = attrs.evolve(reply, choice=first + reply.choice)
                yield reply
            first += command.choices
