"""
Bounds the connections that have no request in progress, which cost their clients nothing.

A client that opens connections and says nothing would otherwise use up the descriptors of the
process, and no other client could connect. A connection that serves a request is never closed here.
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
    The connections that wait for a request. Where there are too many, one is closed: the one that
    has been silent for the longest time, or if all have sent a request before, that has rested for
    the longest time. An address that has too many loses one of its own.
    """

    def __init__(self, limits: WaitingLimits) -> None:
        self.limits = limits
        # By connection its address, in the order in which they began to wait.
        self._silent: dict[Closable, str] = {}
        self._resting: dict[Closable, str] = {}
        self._last_warning = -_WARN_EVERY_S

    def arrive(self, connection: Closable, address: str) -> None:
        """A client has connected, and has sent nothing yet."""
        self._silent[connection] = address
        self._bound(address)

    def rest(self, connection: Closable, address: str) -> None:
        """A request was answered, and the client may send another."""
        self._resting[connection] = address
        self._bound(address)

    def leave(self, connection: Closable) -> None:
        """The connection has a request, or was closed."""
        self._silent.pop(connection, None)
        self._resting.pop(connection, None)

    def is_silent(self, connection: Closable) -> bool:
        """Whether a connection has not sent the head of a request."""
        return connection in self._silent

    def _bound(self, address: str) -> None:
        own = [*self._of(self._silent, address), *self._of(self._resting, address)]
        if len(own) > self.limits.each:
            self._cut(own[0], address)
        elif len(self._silent) + len(self._resting) > self.limits.total:
            self._cut(next(iter(self._silent or self._resting)), address)

    def _of(self, connections: dict[Closable, str], address: str) -> list[Closable]:
        return [one for one, of in connections.items() if of == address]

    def _cut(self, connection: Closable, address: str) -> None:
        self.leave(connection)
        connection.cut()
        now = trio.current_time()
        if now - self._last_warning >= _WARN_EVERY_S:
            self._last_warning = now
            log.warning("too many connections wait; the oldest are closed", address=address)
