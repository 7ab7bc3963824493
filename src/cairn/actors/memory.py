"""
Room for slabs and blocks: who decides is the journal's fold, who carries out is the engine.

Making room and taking it is one step for everybody else, hence the locks.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import trio

from cairn.actors.engine import EngineThread
from cairn.actors.sequencer import Sequencer
from cairn.engine.reports import EvictReport, SealReport, SlabReport
from cairn.journal import events as ev
from cairn.journal import eviction
from cairn.journal.lifecycle import Life
from cairn.journal.state import Session, State


class Memory:
    """
    Opens slabs and seals blocks within their budgets.

    Attributes:
        give_up: has a session give up its slab, unless it takes a request first.
        steady: who decides what to reuse holds this. A block that was chosen to leave must not be
            chosen to be shared before the engine has dropped it.
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
        self.steady = trio.Lock()
        self.give_up: Callable[[str], Awaitable[None]] = _nobody

    async def open_slab(self, capacity_tokens: int, record: Callable[[SlabReport], None]) -> bool:
        """
        Open a slab, taking those of sessions without a request where there is no room: the least
        recently used at rest, else one that settles. False where all have a request in hand.

        Args:
            record: appends what was measured.
        """
        size = capacity_tokens * self._token_bytes
        async with self._slabs:
            while not eviction.slab_fits(self._sequencer.state, size):
                state = self._sequencer.state
                victim = eviction.slab_to_release(state) or _settling(state)
                if victim is None:
                    return False
                await self.give_up(victim.id)
            opened: list[int] = []

            def kept(report: SlabReport) -> None:
                opened.append(report.slab)
                record(report)

            try:
                await self._engine.call(lambda mlx: mlx.open_slab(capacity_tokens), kept)
            except Exception:
                # The journal does not have it, so nobody may hold it.
                if opened:
                    await self._engine.call(lambda mlx: mlx.close_slab(opened[0]), _undone)
                raise
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
            there = known is not None and known.present
            store = there or await self._make_room((end - start) * self._token_bytes)
            sealed: list[SealReport] = []

            def kept(report: SealReport) -> None:
                sealed.append(report)
                record(report)

            try:
                await self._engine.call(
                    lambda mlx: mlx.seal(slab, key, start, end, store=store), kept
                )
            except Exception:
                # The journal does not have it, so the store may not either.
                if sealed and store and not there:
                    await self._engine.call(lambda mlx: mlx.evict(key), _undone)
                raise

    async def _make_room(self, size: int) -> bool:
        """
        Have blocks leave until one of ``size`` bytes fits. False where that cannot be had.
        """
        async with self.steady:
            leaving = eviction.room_for_block(self._sequencer.state, size)
            for key in leaving or ():
                await self._evict(key)
            return leaving is not None

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


def _undone(report: object) -> None:
    """
    Nothing to record: the journal never had it.
    """


def _settling(state: State) -> Session | None:
    """
    The least recently used session that settles and could do without its slab. What it has not
    settled yet, its next request computes.
    """
    found = (
        session
        for session in state.sessions.values()
        if session.slab is not None and session.life is Life.SETTLING
    )
    return min(found, key=lambda session: session.last_used, default=None)


async def _nobody(session: str) -> None:
    raise LookupError(f"nobody can ask session {session} for its slab yet")
