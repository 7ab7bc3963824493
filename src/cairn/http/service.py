"""
What the HTTP layer is given: one object that takes commands and gives replies.

The real one is made by the actors. Nothing else of them is used here, so that every adapter can be
tried against a scripted stand-in.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from cairn.actors.messages import Generate, Reply, ServerFacts, Statistics
from cairn.journal.events import Recorded


class Service(Protocol):
    """
    The server behind the protocols.
    """

    @property
    def facts(self) -> ServerFacts:
        """
        What the server tells of itself; the same for as long as it runs.
        """

    def statistics(self) -> Statistics:
        """
        The server at this moment. Changes nothing.
        """

    def generate(self, command: Generate) -> AbstractAsyncContextManager[AsyncIterator[Reply]]:
        """
        Serve a request: ``Waiting``*, ``Accepted``, ``Delta``*, ``Finished``.

        ``Waiting`` may also come between the others. Leaving the context early cancels the request.

        Raises:
            RefusalError: on entering, where the request is not served; from the iteration, where it
                ended before its answer did. ``errors.py`` tells the client.
        """

    def observe(self, observer: Callable[[Recorded], None]) -> None:
        """
        Have each event told to ``observer`` once it is committed, in order.
        """
