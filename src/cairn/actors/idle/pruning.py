"""
Prunes the journal while the server runs, by the rules of `ops journal prune`.

1. The journal is read on a thread of its own, with a connection of its own, and only while the
   server is idle: the thread waits at the next row when a request comes.
2. What was read is proven to be the same without the first rows, as by the command. Rows that came
   since are added to what the base must keep. If one of them may change where the journal can be
   cut, nothing is pruned before the next time.
3. The writer's thread cuts, in one transaction with the event. From then on no reader sees the rows
   before the base, and the thread removes them between commits, a few at a time. Requests that
   come meanwhile wait for one of these transactions at most.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import structlog
import trio

from cairn.actors.clock import clock
from cairn.actors.errors import CannotRecord
from cairn.actors.idle.activity import Activity
from cairn.actors.sequencer import Sequencer
from cairn.actors.threads.writer import JournalWriter, WriterDied
from cairn.journal import events as ev
from cairn.journal.agents import Agents
from cairn.journal.errors import JournalError, StoreError
from cairn.journal.pruning import PreparedPrune, PruneOptions, prepare_prune
from cairn.journal.retention import NAMING
from cairn.journal.rows.codec import Row
from cairn.journal.rows.store import Store

log = structlog.get_logger("cairn")

DAY_S = 86_400.0

_LOOK_S = 0.05


class _Ended(Exception):
    """The server stops, so the journal is not read any further."""


_MOVES_THE_CUT = (ev.InvariantViolated, ev.ShadowChecked)
_UNMAKES_THE_BASE = ev.SessionForgotten
"""What was read before this may have token ids of the session."""


class _Later:
    """
    The events that were committed since, as far as they count for a prune: a server that never
    rests would fill its memory with the others.
    """

    def __init__(self) -> None:
        self.counting: list[ev.Recorded] = []
        self.forgot = False

    def see(self, one: ev.Recorded) -> None:
        """Keep an event if it counts."""
        if one.event.kind in NAMING or isinstance(one.event, _MOVES_THE_CUT):
            self.counting.append(one)
        self.forgot = self.forgot or isinstance(one.event, _UNMAKES_THE_BASE)


class Pruning:
    """Prunes at the start and once a day. ``writer`` passes it each committed event meanwhile."""

    def __init__(
        self,
        *,
        keep_s: int,
        reader: Callable[[], Store],
        sequencer: Sequencer,
        writer: JournalWriter,
        activity: Activity,
        agents: Agents,
    ) -> None:
        """
        Args:
            keep_s: how many seconds a row stays at least.
            reader: opens the journal once more, read-only.
        """
        self._keep_us = 1_000_000 * keep_s
        self._reader = reader
        self._sequencer = sequencer
        self._writer = writer
        self._activity = activity
        self._agents = agents
        self._closed = False
        self._running = trio.CancelScope()

    def close(self) -> None:
        """End ``run`` at the next row."""
        self._closed = True
        self._running.cancel()

    async def run(self) -> None:
        """Prune, until ``close``. What cannot be pruned is logged, and tried again the next day."""
        with self._running, contextlib.suppress(_Ended, WriterDied):
            while True:
                try:
                    await self.prune()
                except (JournalError, CannotRecord) as error:
                    log.warning("the journal was not pruned", fact=str(error))
                await trio.sleep(DAY_S)

    async def prune(self) -> None:
        """
        Remove the rows that may go.

        Raises:
            JournalError: they cannot be read or removed; nothing was.
        """
        later = _Later()
        before_us = self._sequencer.now_us() - self._keep_us
        with self._writer.observed_by(later.see):
            prepared = await trio.to_thread.run_sync(partial(self._prepared, before_us))
            while prepared.base is not None:
                seen = self._activity.changes
                if not self._may_cut():
                    await self._activity.wait_change(seen)
                elif await self._cut(prepared, later):
                    break

    async def _cut(self, prepared: PreparedPrune, later: _Later) -> bool:
        """
        Do it. False if something was decided meanwhile, by a request or by a session at rest.

        Args:
            later: the events that were committed since, and perhaps some that were read.
        """
        assert prepared.cut is not None
        await self._writer.wait_all_committed()
        seen = self._writer.committed
        events = [one.event for one in later.counting if one.position > prepared.state.position]
        began = time.monotonic()
        needed = self._agents.needed()
        base, cut = await trio.to_thread.run_sync(partial(prepared.cut.later, events, needed))
        if not self._sequencer.state.position == self._writer.committed == seen:
            return False
        if not self._may_cut():
            return False
        if any(isinstance(event, _MOVES_THE_CUT) for event in events):
            raise StoreError("An answer was checked, or an invariant broken, while it was read.")
        if later.forgot:
            raise StoreError("A session was forgotten while it was read.")
        receipt = self._sequencer.prune(base, cut)
        try:
            await self._writer.wait_committed(receipt)
        except CannotRecord as stall:
            log.warning("the journal is pruned as soon as it can be written", fact=str(stall))
            return True
        log.info(
            "journal pruned",
            rows=cut.pruned.rows,
            sessions=cut.pruned.sessions,
            up_to=base.position,
            seconds=round(time.monotonic() - began, 1),
        )
        return True

    def _may_cut(self) -> bool:
        return self._activity.upkeep_may_begin and self._sequencer.state.shadow is None

    def _prepared(self, before_us: int) -> PreparedPrune:
        """Read the journal, on a thread of its own."""
        self._wait_idle()
        store = self._reader()
        try:
            options = PruneOptions(before_us=before_us)
            return prepare_prune(store, options, clock(), watched=self._watched)
        finally:
            store.close()

    def _watched(self, rows: Iterable[Row], _: str, __: int) -> Iterator[Row]:
        for row in rows:
            self._wait_idle()
            yield row

    def _wait_idle(self) -> None:
        """
        Raises:
            _Ended: the server stops.
        """
        while not self._closed and not self._may_read():
            time.sleep(_LOOK_S)
        if self._closed:
            raise _Ended

    def _may_read(self) -> bool:
        # Before a model is loaded, the start is not to be delayed.
        return self._activity.upkeep_may_begin and self._sequencer.state.model is not None
