"""
Tells a client's user which fields of a request have no effect: in a header of the answer, for
clients that do not show the body, and in the log, once a conversation.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from urllib.parse import quote

import structlog
from cachetools import LRUCache

from cairn.actors.requests.messages import Accepted, Generate, Reply
from cairn.http.metrics.latencies import Generating

log = structlog.get_logger(__name__)

HEADER = "x-cairn-warning"

_LETTERS_MAX = 1000
_CONVERSATIONS_MAX = 1024


def warning_of(ignored: Sequence[str]) -> dict[str, str]:
    """
    The header that names ignored fields; none if there are none. Names are percent-encoded, because
    a client may invent any.
    """
    if not ignored:
        return {}
    names = [quote(name, safe=" ._()?[]/") for name in ignored]
    words = f"ignored: {', '.join(names)}"
    return {HEADER: words if len(words) <= _LETTERS_MAX else f"{words[:_LETTERS_MAX]} ..."}


class Conversations:
    """Which ignored fields were logged, of the conversations that were used last."""

    def __init__(self, conversations_max: int = _CONVERSATIONS_MAX) -> None:
        self._logged: LRUCache[str, frozenset[str]] = LRUCache(conversations_max)

    def add(self, accepted: Accepted, ignored: Sequence[str], client: str | None) -> None:
        """Log the ignored fields of a request, unless its conversation's log has them."""
        known = self._logged.get(accepted.session, frozenset())
        fresh = [name for name in ignored if name not in known]
        self._logged[accepted.session] = known.union(fresh)
        if fresh:
            log.warning(
                "fields without effect",
                session=accepted.session,
                request=accepted.request,
                client=client,
                fields=fresh,
            )


class Warned:
    """A service that logs the ignored fields of a request once it is accepted."""

    def __init__(
        self, service: Generating, conversations: Conversations, ignored: Sequence[str]
    ) -> None:
        self._service = service
        self._conversations = conversations
        self._ignored = ignored

    @contextlib.asynccontextmanager
    async def generate(self, command: Generate) -> AsyncIterator[AsyncIterator[Reply]]:
        """As that of the service."""
        async with self._service.generate(command) as replies:
            yield self._watched(replies, command.client)

    async def _watched(
        self, replies: AsyncIterator[Reply], client: str | None
    ) -> AsyncIterator[Reply]:
        async for reply in replies:
            if isinstance(reply, Accepted) and reply.choice == 0:
                self._conversations.add(reply, self._ignored, client)
            yield reply
