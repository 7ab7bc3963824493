"""
Stalls, times in which the journal cannot be written: requests in flight end, new ones are refused
and counted, and the length of the stall is recorded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from cairn.actors.errors import CannotRecord, RefusalError, Stopping
from cairn.actors.measured import measured
from cairn.actors.sequencer import Sequencer
from cairn.actors.threads.writer import JournalWriter, Stall
from cairn.journal import events as ev


class Stalls:
    """Ends and refuses requests during a stall of the writer. There is one for a run."""

    def __init__(self, sequencer: Sequencer, writer: JournalWriter) -> None:
        self._sequencer = sequencer
        self._writer = writer
        self._refused = 0
        self._ends: list[Callable[[], None]] = []
        writer.observe_stalls(self)

    def refusal(self) -> RefusalError:
        """
        The refusal of a request that comes during a stall. It is counted and not recorded by
        itself, because the rows that wait must stay bounded.
        """
        self._refused += 1
        return self.reason()

    def reason(self) -> RefusalError:
        """Why a request that is in the server ends."""
        if self._writer.dead:
            return Stopping("the server stops because its journal cannot be written")
        assert self._writer.stall is not None
        return CannotRecord(self._writer.stall)

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
        """End all requests. The reason may also have changed during a stall."""
        for end_all in list(self._ends):
            end_all()

    def stall_ended(self, stall: Stall) -> None:
        """Record it."""
        refused, self._refused = self._refused, 0
        self._sequencer.append(measured(ev.JournalStalled, stall, requests_refused=refused))
