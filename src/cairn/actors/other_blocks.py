"""Asks the journals of other nodes which of them has sealed a block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

import structlog
import trio

from cairn.journal.errors import StoreError

if TYPE_CHECKING:  # SQLAlchemy is loaded with it, and only a fleet needs it
    from cairn.journal.rows.database.other_nodes import OtherNodes, SealedRow

log = structlog.get_logger("cairn")

ASK_S: Final = 1.0
"""How long a request waits for the journals of other nodes, in seconds."""

FIRST_ASK_S: Final = 30.0
"""How long a start waits until they are indexed."""


class OtherBlocks:
    """
    What other nodes have sealed. A request goes on without an answer if there is none in time, or
    if the journals cannot be read: its prompt is then computed.
    """

    def __init__(self, nodes: OtherNodes | None) -> None:
        """
        Args:
            nodes: their journals; None if the server shares no blocks.
        """
        self._nodes = nodes
        self._failing = False
        self._skipped: Mapping[str, str] = {}

    @property
    def asks(self) -> bool:
        """Whether the server shares blocks with others."""
        return self._nodes is not None

    async def index(self) -> None:
        """Read the journals for the first time, so that no request waits for that."""
        await self._ask((), (), FIRST_ASK_S)

    async def sealed(
        self, keys: Sequence[str], above: Sequence[str]
    ) -> Mapping[str, Sequence[SealedRow]]:
        """
        The rows by which other nodes sealed these blocks, by key.

        Args:
            above: the keys of the blocks that the first one is built on.
        """
        return await self._ask(keys, above, ASK_S) if keys else {}

    async def _ask(
        self, keys: Sequence[str], above: Sequence[str], patience_s: float
    ) -> Mapping[str, Sequence[SealedRow]]:
        if self._nodes is None:
            return {}
        with trio.move_on_after(patience_s):
            try:
                found = await trio.to_thread.run_sync(
                    self._nodes.sealed, keys, above, abandon_on_cancel=True
                )
            except StoreError as error:
                if not self._failing:
                    log.warning("the blocks of other nodes are not used", fact=str(error))
                self._failing = True
                return {}
            if self._failing:
                log.info("the blocks of other nodes are used again")
            self._failing = False
            self._report_skipped(self._nodes.skipped)
            return found
        return {}

    def _report_skipped(self, skipped: Mapping[str, str]) -> None:
        """Log the nodes whose journals cannot be read, and those that are read again."""
        for node in sorted(skipped.keys() - self._skipped.keys()):
            log.warning("the blocks of a node are not used", node=node, fact=skipped[node])
        for node in sorted(self._skipped.keys() - skipped.keys()):
            log.info("the blocks of a node are used again", node=node)
        self._skipped = skipped
