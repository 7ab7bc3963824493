"""
Stalls, times in which there is no room for the journal: requests in flight end, new ones are
refused and counted, and the length of the stall is recorded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from cairn.actors.errors import JournalFull
from cairn.actors.measured import measured
from cairn.actors.sequencer import Sequencer
from cairn.actors.threads.writer import JournalWriter, Stall
from cairn.journal import events as ev


class Stalls:
    """Ends and refuses requests during a stall of the writer. There is one for a run."""

    def __init__(self, sequencer: Sequencer, writer: JournalWriter) -> None:
        self._sequencer = sequencer
        self._refused = 0
        self._ends: list[Callable[[], None]] = []
        writer.observe_stalls(self)

    def refusal(self) -> JournalFull:
        """
        The refusal of a request that comes during a stall. It is counted and not recorded by
        itself, because rows that wait for room must stay bounded.
        """
        self._refused += 1
        return JournalFull()

    @contextlib.contextmanager
    def ending(self, end_all: Callable[[], None]) -> Iterator[None]:
        """
        Call ``end_all`` when a stall begins, while the context lasts, to end all requests.
        """
        self._ends.append(end_all)
        try:
            yield
        finally:
            self._ends.remove(end_all)

    def stall_began(self) -> None:
        """End all requests."""
        self._refused = 0
        for end_all in list(self._ends):
            end_all()

    def stall_ended(self, stall: Stall) -> None:
        """Record it."""
        self._sequencer.append(measured(ev.JournalStalled, stall, requests_refused=self._refused))
