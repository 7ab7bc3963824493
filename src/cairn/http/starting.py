"""
A server that starts: it listens, and answers every request with how far the start has come.

``StartingServer`` takes the place of the server until that is there. The application asks it as it
would ask the server, so that hosts, keys and the form of errors are the same from the first request
on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from cairn.actors.errors import StillStarting
from cairn.actors.models.size import ModelSize
from cairn.actors.requests.messages import ListedModel, ServerFacts, Statistics
from cairn.http.service import Server, Service
from cairn.journal.events import Recorded

_RETRY_MOST_S = 60
_FIRST_STEP = "starting"


class StartingServer:
    """
    A server that is not there yet. ``progress`` may be called from any thread, everything else from
    trio's.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._server: Server | None = None
        self._observers: list[Callable[[Recorded], None]] = []
        self._clock = clock
        # (what is done now, how much of it, of how much, since when), replaced in one step.
        self._step = (_FIRST_STEP, 0, 0, clock())

    def progress(self, what: str, done: int, total: int) -> None:
        """Note how far the start has come. See ``actors.settings.Progress``."""
        before, _, _, since = self._step
        self._step = (what, done, total, since if what == before else self._clock())

    def open(self, server: Server) -> None:
        """Pass everything on to the server from now on."""
        self._server = server
        for observer in self._observers:
            server.observe(observer)

    @property
    def facts(self) -> ServerFacts:
        """See ``Server``, here and below."""
        return self._there().facts

    @property
    def models(self) -> tuple[ListedModel, ...]:
        return self._there().models

    def for_tenant(self, tenant: str) -> Service:
        return self._there().for_tenant(tenant)

    def load_model(self, name: str) -> None:
        self._there().load_model(name)

    def unload_model(self) -> None:
        self._there().unload_model()

    async def model_sizes(self) -> Mapping[str, ModelSize]:
        return await self._there().model_sizes()

    def statistics(self) -> Statistics:
        return self._there().statistics()

    def observe(self, observer: Callable[[Recorded], None]) -> None:
        """Events before the server is there are passed to no observer."""
        if self._server is not None:
            self._server.observe(observer)
        else:
            self._observers.append(observer)

    def _there(self) -> Server:
        if self._server is None:
            what, done, total, since = self._step
            left_s = 1.0
            if 0 < done < total:
                left_s = (self._clock() - since) / done * (total - done)
            retry_after_s = min(_RETRY_MOST_S, max(1, round(left_s)))
            raise StillStarting(what, done, total, retry_after_s)
        return self._server
