"""
Times in which there is no room for the journal: what is under way ends, who comes is counted, and
how long it lasted goes on record.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from cairn.actors.errors import JournalFull
from cairn.actors.sequencer import Sequencer
from cairn.actors.threads.writer import JournalWriter, Stall
from cairn.journal import events as ev


class Stalls:
    """What the server does of the writer's stalls. There is one for a run."""

    def __init__(self, sequencer: Sequencer, writer: JournalWriter) -> None:
        self._sequencer = sequencer
        self._refused = 0
        self._heard_by: list[Callable[[], None]] = []
        writer.on_stall, writer.on_room = self._begins, self._ends

    def refusal(self) -> JournalFull:
        """
        What to tell who comes now. Counted only: what waits for room in memory is bounded by the
        requests under way.
        """
        self._refused += 1
        return JournalFull()

    @contextlib.contextmanager
    def heard_by(self, end_all: Callable[[], None]) -> Iterator[None]:
        """
        Have somebody who holds requests end them when a stall begins, while the context lasts.
        """
        self._heard_by.append(end_all)
        try:
            yield
        finally:
            self._heard_by.remove(end_all)

    def _begins(self) -> None:
        self._refused = 0
        for end_all in list(self._heard_by):
            end_all()

    def _ends(self, stall: Stall) -> None:
        self._sequencer.append(
            ev.JournalStalled(
                error=stall.fact,
                rows_waiting=stall.rows_waiting,
                requests_refused=self._refused,
                duration_us=stall.duration_us,
            )
        )
