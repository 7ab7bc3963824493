"""
Bounds the connections that have no whole request in progress, which cost their clients nothing.

A client that opens connections and says nothing, or never ends what it says, would otherwise use up
the descriptors of the process, and no other client could connect. A connection is never closed here
once its request was read.
"""

from __future__ import annotations

from typing import Protocol

import attrs
import structlog
import trio

WAITING_MAX = 4096
"""How many connections may wait at most, however many descriptors there are."""
_WARN_EVERY_S = 60.0

log = structlog.get_logger(__name__)


class Closable(Protocol):
    """A connection that can be closed at any time."""

    def cut(self) -> None:
        """Close the connection at once."""


@attrs.frozen
class WaitingLimits:
    """
    How many connections may wait for a request.

    Attributes:
        total: at most at the same time.
        each: at most from one address.
        silent_s: how long a connection may take to send the head of its first request.
    """

    total: int
    each: int
    silent_s: float = 15.0

    @classmethod
    def of(cls, descriptors: int) -> WaitingLimits:
        """The limits of a process that may open this many descriptors: half of them may wait."""
        total = max(1, min(WAITING_MAX, descriptors // 2))
        return cls(total=total, each=max(1, total * 3 // 4))


class Waiting:
    """
    The connections that wait for a whole request. Where there are too many, one is closed: the one
    that has not ended its first request for the longest time, or if all have, that has rested for
    the longest time. An address that has too many loses one of its own.
    """

    def __init__(self, limits: WaitingLimits) -> None:
        self.limits = limits
        # By connection its address, in the order in which they began to wait.
        self._unread: dict[Closable, str] = {}
        self._resting: dict[Closable, str] = {}
        self._begun: set[Closable] = set()  # of those that are unread
        self._last_warning = -_WARN_EVERY_S

    def arrive(self, connection: Closable, address: str) -> None:
        """A client has connected, and has sent nothing yet."""
        self._unread[connection] = address
        self._bound(address)

    def begin(self, connection: Closable, address: str) -> None:
        """The head of a request has come, and its body may still be missing."""
        self._resting.pop(connection, None)
        self._unread.setdefault(connection, address)
        self._begun.add(connection)

    def rest(self, connection: Closable, address: str) -> None:
        """A request was answered, and the client may send another."""
        self.leave(connection)
        self._resting[connection] = address
        self._bound(address)

    def leave(self, connection: Closable) -> None:
        """A request was read to its end, or the connection was closed."""
        self._unread.pop(connection, None)
        self._resting.pop(connection, None)
        self._begun.discard(connection)

    def is_silent(self, connection: Closable) -> bool:
        """Whether a connection has not sent the head of a request."""
        return connection in self._unread and connection not in self._begun

    def _bound(self, address: str) -> None:
        own = [*self._of(self._unread, address), *self._of(self._resting, address)]
        if len(own) > self.limits.each:
            self._cut(own[0], address)
        elif len(self._unread) + len(self._resting) > self.limits.total:
            self._cut(next(iter(self._unread or self._resting)), address)

    def _of(self, connections: dict[Closable, str], address: str) -> list[Closable]:
        return [one for one, of in connections.items() if of == address]

    def _cut(self, connection: Closable, address: str) -> None:
        self.leave(connection)
        connection.cut()
        now = trio.current_time()
        if now - self._last_warning >= _WARN_EVERY_S:
            self._last_warning = now
            log.warning("too many connections wait; the oldest are closed", address=address)
