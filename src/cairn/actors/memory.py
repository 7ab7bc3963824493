"""
Room for slabs and blocks: who decides is the journal's fold, who carries out is the engine.

Making room and taking it is one step for everybody else, hence the lock.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import trio

from cairn.actors.engine import EngineThread
from cairn.actors.sequencer import Sequencer
from cairn.engine.reports import EvictReport, SealReport, SlabReport
from cairn.journal import events as ev
from cairn.journal import eviction


class Memory:
    """
    Opens slabs and seals blocks within their budgets.
    """

    def __init__(self, sequencer: Sequencer, engine: EngineThread, slab_token_bytes: int) -> None:
        """
        Args:
            slab_token_bytes: bytes of KV that a slab holds for one token of capacity.
        """
        self._sequencer = sequencer
        self._engine = engine
        self._token_bytes = slab_token_bytes
        self._slabs = trio.Lock()
        self._blocks = trio.Lock()
        self.give_up: Callable[[str], Awaitable[None]] = _nobody

    async def open_slab(self, capacity_tokens: int, record: Callable[[SlabReport], None]) -> bool:
        """
        Open a slab, taking those of sessions at rest where there is no room. False where all work.

        Args:
            record: appends what was measured.
        """
        size = capacity_tokens * self._token_bytes
        async with self._slabs:
            while not eviction.slab_fits(self._sequencer.state, size):
                victim = eviction.slab_to_release(self._sequencer.state)
                if victim is None:
                    return False
                await self.give_up(victim.id)
            await self._engine.call(lambda mlx: mlx.open_slab(capacity_tokens), record)
        return True

    async def seal(
        self, slab: int, key: str, start: int, end: int, record: Callable[[SealReport], None]
    ) -> None:
        """
        Seal the rows ``[start, end)`` of a slab, evicting blocks where there is no room. Where
        nothing can make room, the block is hashed and not kept.
        """
        async with self._blocks:
            known = self._sequencer.state.blocks.get(key)
            store = True
            if known is None or not known.present:
                leaving = eviction.room_for_block(
                    self._sequencer.state, (end - start) * self._token_bytes
                )
                store = leaving is not None
                for other in leaving or ():
                    await self._evict(other)
            await self._engine.call(
                lambda mlx: mlx.seal(slab, key, start, end, store=store), record
            )

    async def _evict(self, key: str) -> None:
        await self._engine.call(lambda mlx: mlx.evict(key), self._evicted)

    def _evicted(self, report: EvictReport) -> None:
        self._sequencer.append(
            ev.BlockEvicted(
                key=report.key,
                bytes=report.bytes,
                store_blocks=report.store_blocks,
                store_bytes=report.store_bytes,
            )
        )


async def _nobody(session: str) -> None:
    raise LookupError(f"nobody can ask session {session} for its slab yet")
