"""
A share of the server's time for each tenant that reads pages of the journal.

A page is read through the thread that writes the journal, and takes the interpreter from all other
threads. So a tenant reads one page at a time, and then rests for as long as that took, up to a
second: as fast as it asks, half of the time is left to others. A single page is not delayed.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import attrs
import trio

REPLAYS_MAX: Final = 4
"""The most replays that run at the same time, one of each tenant."""

REST_MAX_S: Final = 1.0
"""The longest rest after a page, in seconds."""


@attrs.define
class _Share:
    lock: trio.Lock = attrs.field(factory=trio.Lock)
    rests_until: float = 0.0


class PageShares:
    """The shares of all tenants."""

    def __init__(self) -> None:
        self._shares: dict[str, _Share] = {}
        self._replays: set[str] = set()

    def begin_replay(self, tenant: str) -> bool:
        """Begin a replay of a tenant, unless it has one, or there are as many as may be."""
        if tenant in self._replays or len(self._replays) >= REPLAYS_MAX:
            return False
        self._replays.add(tenant)
        return True

    def end_replay(self, tenant: str) -> None:
        """End the replay that a tenant began."""
        self._replays.remove(tenant)

    @asynccontextmanager
    async def one_of(self, tenant: str) -> AsyncIterator[None]:
        """Read a page of a tenant, when it is its turn."""
        share = self._shares.setdefault(tenant, _Share())
        async with share.lock:
            await trio.sleep_until(share.rests_until)
            began = trio.current_time()
            try:
                yield
            finally:
                now = trio.current_time()
                share.rests_until = now + min(now - began, REST_MAX_S)
