"""
Bounds the live streams: answers without an end, each of which keeps a descriptor of the process.
They end when the server stops, which waits for the other answers.

Without a bound, one tenant's key could take all descriptors, and no other client could connect.
Streams of answers need none here: the queue bounds how many requests are in flight.
"""

from __future__ import annotations

import collections
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

import attrs
import trio

from cairn.http.wire.checks import ClientError

STREAMS_MAX = 256
"""How many may be open at most, however many descriptors there are."""

RETRY_AFTER_S = 15


@attrs.frozen
class StreamLimits:
    """
    How many live streams may be open.

    Attributes:
        total: at most at the same time.
        each: at most of one tenant.
    """

    total: int
    each: int

    @classmethod
    def of(cls, descriptors: int) -> StreamLimits:
        """The limits of a process that may open this many descriptors: a quarter of them."""
        total = max(1, min(STREAMS_MAX, descriptors // 4))
        return cls(total=total, each=max(1, total // 4))


class LiveStreams:
    """The live streams that are open."""

    def __init__(self, limits: StreamLimits) -> None:
        self.limits = limits
        self._open: collections.Counter[str] = collections.Counter()
        self._waits: set[trio.CancelScope] = set()
        self._is_stopped = False

    def stop(self) -> None:
        """End all streams, those that are opened later as well."""
        self._is_stopped = True
        for wait in self._waits:
            wait.cancel()

    async def until_stopped(self, pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """The pieces of a stream until it ends or the server stops."""
        while not self._is_stopped:
            piece = b""
            with trio.CancelScope() as wait:
                self._waits.add(wait)
                try:
                    piece = await anext(pieces, b"")
                finally:
                    self._waits.remove(wait)
            if not piece:
                return
            yield piece

    @contextmanager
    def one_of(self, tenant: str) -> Iterator[None]:
        """
        One stream, open while the context lasts.

        Raises:
            ClientError: the tenant has too many, or all tenants together do.
        """
        held, total = self._open[tenant], self._open.total()
        if held >= self.limits.each:
            raise _refused(f"this key has {held} live streams open, the most that one may have")
        if total >= self.limits.total:
            raise _refused(f"the server has {total} live streams open, the most that it may have")
        self._open[tenant] += 1
        try:
            yield
        finally:
            self._open[tenant] -= 1


def _refused(why: str) -> ClientError:
    return ClientError(
        f"{why}; close one, or try again later",
        code="too_many_streams",
        status=429,
        # Otherwise its connection would rest, and refused ones would take the descriptors.
        headers={"retry-after": str(RETRY_AFTER_S), "connection": "close"},
    )
