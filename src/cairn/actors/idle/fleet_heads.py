"""
Appends the heads of the other nodes of a fleet, so that rows which are removed from the end of a
node's journal show in those of the others.

They are read on a thread of their own, over a connection of their own, whatever requests do. A
database that cannot be read at that moment is logged, and read again the next time. So is a
journal, and the others are read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import structlog
import trio

from cairn.actors.sequencer import Sequencer
from cairn.actors.threads.writer import JournalWriter, WriterDied
from cairn.journal import events as ev
from cairn.journal.errors import StoreError
from cairn.journal.nodes import NodeHead

log = structlog.get_logger("cairn")

HEADS_S = 60.0
"""How often a node looks, unless the operator sets another time."""


ReadHeads = Callable[[Mapping[str, tuple[int, str]]], Sequence[NodeHead]]
"""
Reads the heads of the other nodes. Gets those that were seen last, by node: position and hash.
Raises ``StoreError`` if the database cannot be read.
"""


class FleetHeads:
    """
    Looks every so often, and appends ``heads_seen`` if a node has more rows than before, and
    ``loss_seen`` if its operator accepted that rows which were seen are lost.

    Attributes:
        bug_id: of the bug that ended it; None while it runs.
    """

    def __init__(
        self, *, every_s: float, read: ReadHeads, sequencer: Sequencer, writer: JournalWriter
    ) -> None:
        self._every_s = every_s
        self._read = read
        self._sequencer = sequencer
        self._writer = writer
        self._running = trio.CancelScope()
        self._lost: frozenset[str] = frozenset()
        self._faults: dict[str, str] = {}
        self.bug_id: str | None = None

    def close(self) -> None:
        """End ``run``."""
        self._running.cancel()

    async def run(self) -> None:
        """Look, until ``close``. A failure ends this task only, and is a bug on record."""
        with self._running:
            try:
                while True:
                    await trio.sleep(self._every_s)
                    await self._look()
            except WriterDied:
                pass  # what ended it stops the server and is logged
            except Exception as error:
                with contextlib.suppress(WriterDied):  # as above
                    self.bug_id = self._sequencer.bug_that_ended(error)
                    log.exception(
                        "the heads of other nodes are not seen until the next start",
                        bug_id=self.bug_id,
                    )

    async def _look(self) -> None:
        if self._writer.stalled:
            return  # rows wait already
        since = dict(self._sequencer.state.heads_seen)
        try:
            # A database that does not answer does not keep the server from stopping.
            found = await trio.to_thread.run_sync(
                partial(self._read, since), abandon_on_cancel=True
            )
        except StoreError as error:
            log.warning("the heads of other nodes cannot be read", fact=str(error))
            return
        # It may have been closed while the thread's answer was on its way.
        if self._running.cancel_called:
            return
        self._note_faults(found)
        lost = frozenset(head.node for head in found if head.is_lost and head.accepted is None)
        for head in found:
            if head.is_lost and head.accepted is not None:
                self._see_loss(head, head.accepted, since[head.node])
            if head.node in lost - self._lost:
                log.error(
                    "the journal of another node lost rows that this node saw",
                    node=head.node,
                    row=since[head.node][0],
                    ends_at=head.position,
                    hint="ops verify --fleet",
                )
        self._lost = lost
        news = tuple((head.node, head.position, head.hash) for head in found if head.is_news)
        if news:
            self._sequencer.append(ev.HeadsSeen(heads=news))

    def _note_faults(self, found: Sequence[NodeHead]) -> None:
        """Log the journals that cannot be read, each once for a reason."""
        faults = {head.node: head.fault for head in found if head.fault is not None}
        for node, fault in faults.items():
            if self._faults.get(node) != fault:
                log.warning("the head of another node cannot be read", node=node, fact=fault)
        self._faults = faults

    def _see_loss(self, head: NodeHead, accepted: tuple[int, str], before: tuple[int, str]) -> None:
        """From the next look on, the node's journal is seen from the row of the acceptance on."""
        position, row_hash = accepted
        log.warning(
            "the operator of another node accepted that rows which this node saw are lost",
            node=head.node,
            row=before[0],
            accepted_at=position,
        )
        lost = f"{before[0]}:{before[1]}"
        self._sequencer.append(
            ev.LossSeen(node=head.node, lost=lost, position=position, row_hash=row_hash)
        )
