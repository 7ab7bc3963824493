"""
Room for slabs, blocks and block files: who decides is the journal's fold, who carries out is the
engine.

Making room and taking it is one step for everybody else, hence the locks. Who takes both takes
``steady`` before the lock of the blocks. A block that must leave memory is written before that,
under both. Files have no lock of their own: who writes one early, or when the server stops, holds
none, since a write of low urgency may wait long and must not hold up who seals meanwhile. So the
engine looks again when a file's turn comes, and what is not to be done any more is not done.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Collection
from pathlib import Path

import structlog
import trio

from cairn.actors.engine import EngineThread
from cairn.actors.sequencer import Sequencer
from cairn.engine.reports import (
    EvictReport,
    FileReport,
    LoadReport,
    RejectReport,
    ScanReport,
    SealReport,
    SlabReport,
    UnremovedReport,
    UnwrittenReport,
)
from cairn.journal import events as ev
from cairn.journal import eviction
from cairn.journal.errors import BugError
from cairn.journal.lifecycle import Life
from cairn.journal.state import Session, State

log = structlog.get_logger("cairn")


class Memory:
    """
    Opens slabs, seals blocks, and writes and reads their files, within the budgets.

    Attributes:
        give_up: has a session give up its slab, unless it takes a request first.
        steady: who decides what to reuse holds this, from the loading of blocks on. A block that
            was chosen to leave must not be chosen to be shared before the engine has dropped it.
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
        self._unwritten: dict[str, str] = {}  # why a block could not be written when last tried
        self._told: set[tuple[str, str]] = set()  # what was logged since it last went well

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
        size = (end - start) * self._token_bytes
        async with contextlib.AsyncExitStack() as held:
            await held.enter_async_context(self._blocks)
            if self._leaving(key, size):
                await held.aclose()
                async with self.steady:
                    await held.enter_async_context(self._blocks)
                    for other in self._leaving(key, size) or ():
                        await self._evict(other)
            store = self._leaving(key, size) is not None
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
                if sealed and sealed[0].stored and not self._present(key):
                    await self._engine.call(lambda mlx: mlx.evict(key), _undone)
                raise

    async def load(self, chain: Collection[str], wanted: Callable[[], bool]) -> None:
        """
        Bring the blocks of a chain into memory that are only in files, one after the other, as far
        as there is room beside the chain itself. One whose file fails ends the chain. For who holds
        ``steady``.

        Args:
            wanted: asked before each block.
        """
        keep = frozenset(chain)
        for key in chain:
            async with self._blocks:
                block = self._sequencer.state.blocks[key]
                if block.present:
                    continue
                if not (block.loadable and wanted()):
                    return
                leaving = self._leaving(key, block.bytes, keep)
                if leaving is None:
                    return
                for other in leaving:
                    await self._evict(other, keep)
                if not await self._load(key, block.digest):
                    return

    async def open_files(
        self, folder: Path, fingerprint: str, budget_bytes: int, run: str, earlier: Collection[str]
    ) -> None:
        """
        Look for the block files of earlier runs, and remove what is over the budget.

        Args:
            run: this run of the server.
            earlier: those of this journal before.
        """
        known = self._sequencer.state.blocks
        blocks = known.values()
        on_record = {b.key: b.file_bytes for b in blocks if b.file_bytes is not None}

        def record(report: ScanReport) -> None:
            for one in report.rejected:
                self._rejected(one)
            if report.removed_files:
                log.warning("files of no block on record removed", files=report.removed_files)
            if report.left_files:
                log.warning(
                    "there is something in the folder of blocks that runs of this journal did not "
                    "leave there, or that cannot be removed; it was left alone, and is not used",
                    folder=str(folder),
                    files=report.left_files,
                )
            self._sequencer.append(
                ev.BlocksFound(
                    budget_bytes=budget_bytes,
                    disk_blocks=report.disk_blocks,
                    disk_bytes=report.disk_bytes,
                    removed_files=report.removed_files,
                )
            )

        await self._engine.call(
            lambda mlx: mlx.open_files(
                folder,
                fingerprint,
                on_record,
                run=run,
                earlier=earlier,
                known=known,
                keep_aside=budget_bytes > 0,
            ),
            record,
        )
        for key in eviction.files_over_budget(self._sequencer.state):
            await self._drop(key)

    async def write_through(self, key: str, wanted: Callable[[], bool]) -> bool:
        """
        Write a block to a file when nobody wants anything else. Whether that was wanted to the end.
        """
        return await self._spill(key, wanted=wanted) and wanted()

    async def write_all(self, progress: Callable[[int, int], None]) -> None:
        """
        Write all blocks in memory that no file has, as long as the disk takes any. One that cannot
        be written stops no other. Can be cancelled between two of them.

        Args:
            progress: called with (done, total).
        """
        keys = eviction.blocks_to_write(self._sequencer.state)
        if not self._sequencer.state.disk_budget:
            return
        for done, key in enumerate(keys):
            progress(done, len(keys))
            await trio.lowlevel.checkpoint()
            if not await self._spill(key):
                return
        if keys:
            progress(len(keys), len(keys))

    # --- blocks in memory ------------------------------------------------------------------------

    def _present(self, key: str) -> bool:
        known = self._sequencer.state.blocks.get(key)
        return known is not None and known.present

    def _leaving(self, key: str, size: int, keep: Collection[str] = ()) -> tuple[str, ...] | None:
        """
        The blocks that must leave for one of ``size`` bytes: none where it is there or fits. None
        where nothing could make room.
        """
        if self._present(key):
            return ()
        return eviction.room_for_block(self._sequencer.state, size, keep)

    async def _evict(self, key: str, keep: Collection[str] = ()) -> None:
        """
        Have a block leave memory, written to a file before.

        Args:
            keep: blocks whose files must stay.
        """
        await self._spill(key, keep)
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

    async def _load(self, key: str, digest: str) -> bool:
        """
        Read a block from its file. False where it is not there, or not what was written.
        """

        def record(report: LoadReport | RejectReport | None) -> bool:
            if isinstance(report, RejectReport):
                self._rejected(report)
            if not isinstance(report, LoadReport):
                return False
            self._sequencer.append(
                ev.BlockLoaded(
                    key=report.key,
                    digest=report.digest,
                    bytes=report.bytes,
                    store_blocks=report.store_blocks,
                    store_bytes=report.store_bytes,
                    duration_us=report.duration_us,
                )
            )
            return True

        try:
            return await self._engine.call(lambda mlx: mlx.load(key, digest), record)
        except BugError:
            # The journal does not have it in memory, so the store may not either.
            await self._engine.call(lambda mlx: mlx.evict(key), _undone)
            raise

    # --- block files -----------------------------------------------------------------------------

    async def _spill(
        self,
        key: str,
        keep: Collection[str] = (),
        wanted: Callable[[], bool] | None = None,
    ) -> bool:
        """
        Write a block to a file, unless it has one, or its KV is in doubt, or the budget does not
        admit it. Nobody's answer hangs on it, so what goes wrong is put on record and goes no
        further.

        Args:
            keep: blocks whose files must stay.
            wanted: where given, it is written when nothing else is to be done, and as long as this
                says so.

        Returns:
            False where it was not wanted any more, or no other could be written now either.
        """
        block = self._sequencer.state.blocks.get(key)
        budget = self._sequencer.state.disk_budget
        if block is None or not block.usable or block.file_bytes is not None or not budget:
            return True
        size = eviction.file_bytes_at_most(self._sequencer.state, block.bytes)
        leaving = eviction.room_for_file(self._sequencer.state, block, size, keep)
        if leaving is None:
            return True
        for other in leaving:
            if not await self._drop(other):
                return True
        rows = self._sequencer.state.model.chunk_tokens if self._sequencer.state.model else 0
        span = (block.start, block.start + rows)
        try:
            if wanted is None:
                return await self._engine.call(
                    lambda mlx: mlx.spill(key, span, block.digest, budget), self._spilled
                )
            done = await self._engine.settle(
                lambda mlx: mlx.spill(key, span, block.digest, budget), self._spilled, wanted
            )
            return done is not None and done
        except BugError as bug:
            log.error("a block was not spilled", block=key, bug_id=bug.bug_id, fact=str(bug))
            await self._engine.call(lambda mlx: mlx.drop_file(key), _undone)
            # What is wrong with one block is not wrong with the others; a wrong sum is.
            return self._sequencer.state.admission_bug is None

    def _spilled(self, report: FileReport | UnwrittenReport | None) -> bool:
        if isinstance(report, UnwrittenReport):
            self._not_spilled(report)
            return not report.nowhere
        if report is not None:
            self._sequencer.append(
                ev.BlockSpilled(
                    key=report.key,
                    digest=report.digest,
                    bytes=report.bytes,
                    disk_blocks=report.disk_blocks,
                    disk_bytes=report.disk_bytes,
                )
            )
            self._unwritten.pop(report.key, None)
            self._told.clear()
        return True

    def _not_spilled(self, report: UnwrittenReport) -> None:
        """
        Put it on record, once for a block and a reason: it is tried again whenever there is time.
        """
        if self._unwritten.get(report.key) == report.reason:
            return
        self._unwritten[report.key] = report.reason
        self._warn("a block could not be written", report.key, report.reason)
        self._sequencer.append(ev.BlockNotSpilled(key=report.key, reason=report.reason))

    async def _drop(self, key: str) -> bool:
        """
        Remove a block's file. False where the disk does not let it go: it is there and counts.
        """

        def record(report: FileReport | UnremovedReport | None) -> bool:
            if isinstance(report, UnremovedReport):
                self._warn("a block file could not be removed", report.key, report.reason)
                return False
            if report is not None:
                self._sequencer.append(
                    ev.BlockDropped(
                        key=report.key,
                        bytes=report.bytes,
                        disk_blocks=report.disk_blocks,
                        disk_bytes=report.disk_bytes,
                    )
                )
            return True

        return await self._engine.call(lambda mlx: mlx.drop_file(key), record)

    def _warn(self, fact: str, key: str, reason: str) -> None:
        """
        Log what the disk does not do, once for all blocks, until it does it again.
        """
        if (fact, reason) not in self._told:
            self._told.add((fact, reason))
            log.warning(fact, block=key, reason=reason)

    def _rejected(self, report: RejectReport) -> None:
        log.warning(
            "a block file was rejected", block=report.key, reason=report.reason, aside=report.aside
        )
        self._sequencer.append(
            ev.BlockRejected(key=report.key, reason=report.reason, aside=report.aside)
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
