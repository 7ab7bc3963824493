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
from functools import partial
from pathlib import Path

import structlog
import trio

from cairn.actors.clock import wall_clock_us
from cairn.actors.sequencer import Sequencer
from cairn.actors.threads.engine import EngineThread
from cairn.engine.growth import Growth
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
from cairn.journal.checkpoints import STATES_A_SLAB, Checkpoints
from cairn.journal.errors import BugError
from cairn.journal.lifecycle import SessionState
from cairn.journal.state import Session, SessionId, State

log = structlog.get_logger("cairn")

_AT_ONCE = 64
"""
So many blocks whose lives are over are looked up at a time; after so many that cannot be removed
the others wait until something stirs.
"""


class Memory:
    """
    Opens slabs, seals blocks, and writes and reads their files, within the budgets.

    Attributes:
        give_up: has a session give up its slab, unless it takes a request first; is given why.
        give_way: has a shadow check end and give its slab back; false where it holds none.
        steady: who decides what to reuse holds this, from the loading of blocks on. A block that
            was chosen to leave must not be chosen to be shared before the engine has dropped it.
    """

    def __init__(
        self,
        sequencer: Sequencer,
        engine: EngineThread,
        token_bytes: int,
        slab_rows: int | None = None,
        *,
        state_bytes: int = 0,
        checkpoints: Checkpoints | None = None,
        growth: Growth | None = None,
        now_us: Callable[[], int] = wall_clock_us,
    ) -> None:
        """
        Args:
            token_bytes: bytes of KV that a token takes.
            slab_rows: the most tokens that a slab holds; None for its capacity.
            state_bytes: bytes of the states of recurrent layers.
            checkpoints: which blocks carry those; None where there are none.
            growth: what caches that grow take; None where slabs are of a fixed size.
            now_us: microseconds since 1970.
        """
        self._now_us = now_us
        self._sequencer = sequencer
        self._engine = engine
        self._token_bytes = token_bytes
        self._slab_rows = slab_rows
        self._state_bytes = state_bytes
        self._checkpoints = checkpoints
        self._growth = growth
        self._slabs = trio.Lock()
        self._blocks = trio.Lock()
        self.eviction_lock = trio.Lock()
        self.give_up: Callable[[str, str], Awaitable[None]] = _nobody
        self.give_way: Callable[[], Awaitable[bool]] = _no_check
        self._stuck: set[str] = set()  # whose lives are over, and which could not be removed
        self._unwritten: dict[str, str] = {}  # why a block could not be written when last tried
        self._told: set[tuple[str, str]] = set()  # what was logged since it last went well

    async def open_slab(self, capacity_tokens: int, record: Callable[[SlabReport], None]) -> bool:
        """
        Open a slab, where there is no room by taking that of a shadow check, else those of sessions
        without a request: the least recently used at rest, else one that settles. False where all
        have a request in hand.

        Args:
            record: appends what was measured.
        """
        size = self._slab_bytes(capacity_tokens)
        async with self._slabs:
            while not eviction.slab_fits(self._sequencer.state, size):
                if await self.give_way():
                    continue
                state = self._sequencer.state
                victim = eviction.slab_to_release(state) or _settling(state)
                if victim is None:
                    return False
                await self.give_up(victim.id, "room for another session")
            await self._open_slab(capacity_tokens, record, self._engine.call)
        return True

    def can_spare_slab(self, capacity_tokens: int) -> bool:
        """Whether there is room for a slab for what nobody waits for, see ``open_spare_slab``."""
        state, size = self._sequencer.state, self._slab_bytes(capacity_tokens)
        return eviction.slab_fits(state, size) or eviction.slab_to_spare(state, size) is not None

    async def open_spare_slab(
        self,
        capacity_tokens: int,
        record: Callable[[SlabReport], None],
        wanted: Callable[[], bool],
    ) -> bool | None:
        """
        Open a slab for what nobody waits for: in room that is free, else in that of the one session
        at rest that can spare its slab. Nobody who needs a slab waits while one is spared.

        Args:
            record: appends what was measured.
            wanted: asked again before each step, on the engine's thread too.

        Returns:
            False where there is no such room; None where it was not wanted any more.
        """
        size = self._slab_bytes(capacity_tokens)
        if not eviction.slab_fits(self._sequencer.state, size):
            spared = eviction.slab_to_spare(self._sequencer.state, size)
            if spared is None:
                return False
            if not wanted():
                return None
            await self.give_up(spared.id, "room for a shadow check")
        if not wanted():
            return None
        async with self._slabs:
            if not eviction.slab_fits(self._sequencer.state, size):
                return False if wanted() else None
            return await self._open_slab(
                capacity_tokens,
                record,
                lambda run, kept: self._engine.settle(run, kept, wanted),
            )

    async def _open_slab(
        self,
        capacity_tokens: int,
        record: Callable[[SlabReport], None],
        ask: Callable[..., Awaitable[bool | None]],
    ) -> bool | None:
        """
        Args:
            ask: how the engine is asked.
        """
        opened: list[int] = []

        def kept(report: SlabReport) -> bool:
            opened.append(report.slab)
            record(report)
            return True

        try:
            return await ask(lambda mlx: mlx.open_slab(capacity_tokens), kept)
        except Exception:
            # The journal does not have it, so nobody may hold it.
            if opened:
                await self._engine.call(lambda mlx: mlx.close_slab(opened[0]), _undone)
            raise

    def _slab_bytes(self, capacity_tokens: int) -> int:
        if self._growth is not None:
            return self._growth.bytes_at(capacity_tokens)
        rows = capacity_tokens if self._slab_rows is None else self._slab_rows
        states = STATES_A_SLAB * self._state_bytes
        return min(rows, capacity_tokens) * self._token_bytes + states

    async def seal(
        self,
        slab: int,
        key: str,
        start: int,
        end: int,
        record: Callable[[SealReport], None],
        *,
        prewarmed: bool = False,
    ) -> None:
        """
        Seal the rows ``[start, end)`` of a slab, evicting blocks where there is no room. Where
        nothing can make room, the block is hashed and not kept.

        Args:
            foreseen: no request asks for it, so that no block leaves for it that a session holds
                ready in its slab.
        """
        size = (end - start) * self._token_bytes
        if self._checkpoints is not None and self._checkpoints.at(end):
            size += self._state_bytes
        async with contextlib.AsyncExitStack() as held:
            await held.enter_async_context(self._blocks)
            leaving = self._leaving(key, size, prewarmed=prewarmed)
            if leaving:
                await held.aclose()
                async with self.eviction_lock:
                    await held.enter_async_context(self._blocks)
                    leaving = self._leaving(key, size, prewarmed=prewarmed)
                    for other in leaving or ():
                        await self._evict(other)
            store = leaving is not None
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
                ev.BlockFilesScanned(
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
        for key in eviction.files_over_budget(self._sequencer.state, self._sequencer.order):
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
        keys = eviction.blocks_to_write(self._sequencer.state, self._sequencer.order)
        if not self._sequencer.state.disk_budget:
            return
        for done, key in enumerate(keys):
            progress(done, len(keys))
            await trio.lowlevel.checkpoint()
            if not await self._spill(key):
                return
        if keys:
            progress(len(keys), len(keys))

    async def remove_over(self, wanted: Callable[[], bool]) -> int:
        """
        Remove the blocks whose lives are over from memory and their files from the disk, one after
        the other. How many went.

        Args:
            wanted: asked before each.
        """
        removed = failed = 0
        while wanted() and failed < _AT_ONCE:
            state, order = self._sequencer.state, self._sequencer.order
            now_us = eviction.moment_us(state, self._now_us())
            over = eviction.expired(state, order, now_us, _AT_ONCE, self._stuck)
            if not over:
                self._stuck.clear()  # they are tried again when something stirs the next time
                break
            for key in over:
                if await self._remove(key, now_us, wanted):
                    removed += 1
                else:
                    failed += 1
                    self._stuck.add(key)
        return removed

    async def release_idle(self, session: str, wanted: Callable[[], bool]) -> None:
        """
        Have the blocks of a conversation at rest leave memory that no window reaches any more,
        under ``sink_window``, each written to a file before.

        Args:
            wanted: asked before each.
        """
        state = self._sequencer.state
        known = state.sessions.get(SessionId(session))
        for key in eviction.release_idle(state, known) if known is not None else ():
            async with self.eviction_lock, self._blocks:
                # Others may have come to need it since.
                if not wanted():
                    return
                if eviction.is_out_of_windows(self._sequencer.state, key):
                    await self._evict(key, reason="window")

    async def _remove(self, key: str, now_us: int, wanted: Callable[[], bool]) -> bool:
        """Remove a block, unless it came to be of use since. Whether it, or its file, went."""
        async with self.eviction_lock, self._blocks:
            state = self._sequencer.state
            block = state.blocks[key]
            expires_us = self._sequencer.order.expires_us(block)
            over = expires_us is not None and expires_us <= now_us and not state.is_pinned(key)
            if not over or not wanted():
                return False
            if block.present:
                await self._engine.call(
                    lambda mlx: mlx.evict(key), partial(self._evicted, reason="expired")
                )
            if block.file_bytes is not None:
                return await self._drop(key, reason="expired") or block.present
            return block.present

    # --- blocks in memory ------------------------------------------------------------------------

    def _present(self, key: str) -> bool:
        known = self._sequencer.state.blocks.get(key)
        return known is not None and known.present

    def _leaving(
        self, key: str, size: int, keep: Collection[str] = (), *, prewarmed: bool = False
    ) -> tuple[str, ...] | None:
        """
        The blocks that must leave for one of ``size`` bytes: none where it is there or fits. None
        where nothing could make room.
        """
        if self._present(key):
            return ()
        state, order = self._sequencer.state, self._sequencer.order
        if prewarmed:
            return eviction.room_for_prewarm(state, size, order=order)
        return eviction.room_for_block(state, size, keep, order=order)

    async def _evict(
        self, key: str, keep: Collection[str] = (), reason: ev.RemovalReason = "space"
    ) -> None:
        """
        Have a block leave memory, written to a file before.

        Args:
            keep: blocks whose files must stay.
        """
        await self._spill(key, keep)
        await self._engine.call(lambda mlx: mlx.evict(key), partial(self._evicted, reason=reason))

    def _evicted(self, report: EvictReport, reason: ev.RemovalReason = "space") -> None:
        self._sequencer.append(
            ev.BlockEvicted(
                key=report.key,
                bytes=report.bytes,
                memory_blocks=report.memory_blocks,
                memory_bytes=report.memory_bytes,
                reason=reason,
            )
        )

    async def _load(self, key: str, digest: str) -> bool:
        """Read a block from its file. False where it is not there, or not what was written."""

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
                    memory_blocks=report.memory_blocks,
                    memory_bytes=report.memory_bytes,
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
        Write a block to a file, unless it has one, or its KV is in doubt, or its life is over, or
        the budget does not admit it. Nobody's answer hangs on it, so what goes wrong is put on
        record and goes no further.

        Args:
            keep: blocks whose files must stay.
            wanted: where given, it is written when nothing else is to be done, and as long as this
                says so.

        Returns:
            False where it was not wanted any more, or no other could be written now either.
        """
        state = self._sequencer.state
        block, budget = state.blocks.get(key), state.disk_budget
        if block is None or not block.usable or block.file_bytes is not None or not budget:
            return True
        expires_us = self._sequencer.order.expires_us(block)
        if expires_us is not None and expires_us <= eviction.moment_us(state, self._now_us()):
            return True
        size = eviction.file_bytes_at_most(state, block.bytes)
        leaving = eviction.room_for_file(state, block, size, keep, order=self._sequencer.order)
        if leaving is None:
            return True
        for other in leaving:
            if not await self._drop(other):
                return True
        rows = self._sequencer.state.model.block_tokens if self._sequencer.state.model else 0
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
        self._sequencer.append(ev.BlockSpillFailed(key=report.key, reason=report.reason))

    async def _drop(self, key: str, reason: ev.RemovalReason = "space") -> bool:
        """
        Remove a block's file. False where the disk does not let it go: it is there and counts.
        """

        def record(report: FileReport | UnremovedReport | None) -> bool:
            if isinstance(report, UnremovedReport):
                self._warn("a block file could not be removed", report.key, report.reason)
                return False
            if report is not None:
                self._sequencer.append(
                    ev.BlockFileRemoved(
                        key=report.key,
                        bytes=report.bytes,
                        disk_blocks=report.disk_blocks,
                        disk_bytes=report.disk_bytes,
                        reason=reason,
                    )
                )
            return True

        return await self._engine.call(lambda mlx: mlx.drop_file(key), record)

    def _warn(self, fact: str, key: str, reason: str) -> None:
        """Log what the disk does not do, once for all blocks, until it does it again."""
        if (fact, reason) not in self._told:
            self._told.add((fact, reason))
            log.warning(fact, block=key, reason=reason)

    def _rejected(self, report: RejectReport) -> None:
        log.warning(
            "a block file was rejected",
            block=report.key,
            reason=report.reason,
            moved_to=report.moved_to,
        )
        self._sequencer.append(
            ev.BlockFileRejected(key=report.key, reason=report.reason, moved_to=report.moved_to)
        )


def _undone(report: object) -> None:
    """Nothing to record: the journal never had it."""


def _settling(state: State) -> Session | None:
    """
    The least recently used session that settles and could do without its slab. What it has not
    settled yet, its next request computes.
    """
    found = (
        session
        for session in state.sessions.values()
        if session.slab is not None and session.state is SessionState.SETTLING
    )
    return min(found, key=lambda session: session.last_used, default=None)


async def _no_check() -> bool:
    return False


async def _nobody(session: str, reason: str) -> None:
    raise LookupError(f"nobody can ask session {session} for its slab yet")
