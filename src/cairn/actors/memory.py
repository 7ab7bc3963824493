"""
Allocates slabs, and manages blocks in memory and on disk. What to evict is a pure decision over the
journal's state (``cairn.journal.cache.eviction``); the engine carries it out.

Locks make "evict, then allocate" one step. A task that takes both locks takes ``eviction_lock``
before the lock of the blocks. A block is written to its file before it is evicted, under both.
Files have no lock: writing one in idle time, or when the server stops, takes none, because it may
wait for long and must not hold up a task that seals. So the engine checks again when it is the
file's turn, and skips what is no longer to be done.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import structlog
import trio

from cairn.actors.measured import measured
from cairn.actors.sequencer import Sequencer
from cairn.actors.threads.engine import EngineThread
from cairn.engine.reports import (
    EvictReport,
    FileReport,
    LoadReport,
    ModelFacts,
    RejectReport,
    ScanReport,
    SealReport,
    SlabReport,
    UnremovedReport,
    UnwrittenReport,
)
from cairn.journal import events as ev
from cairn.journal.cache import eviction, short_blocks
from cairn.journal.cache.adoption import is_of_prompt, may_adopt
from cairn.journal.cache.checkpoints import STATES_A_SLAB
from cairn.journal.errors import BugError
from cairn.journal.state import Session, SessionId

if TYPE_CHECKING:  # SQLAlchemy is loaded with it, and only a fleet needs it
    from cairn.journal.rows.database.other_nodes import SealedRow

log = structlog.get_logger("cairn")

BATCH = 64
"""
How many expired blocks are looked up at a time. After so many that could not be removed the rest
waits for the next change.
"""


class SlabOwner(Protocol):
    """A session that holds a slab."""

    async def give_up_slab(self, reason: str) -> None:
        """Release the slab, unless a request takes it first."""


class Memory:
    """
    Opens slabs, seals blocks, and writes and reads their files, within the budgets.

    Attributes:
        eviction_lock: held while deciding what to reuse, from the loading of blocks on, so that no
            block is reused that was chosen for eviction.
        write_fault: the folder of block files and why it was lost when one was last written; None
            if it was not.
    """

    def __init__(
        self,
        sequencer: Sequencer,
        engine: EngineThread,
        facts: ModelFacts,
        owners: Mapping[str, SlabOwner],
        node: str | None = None,
    ) -> None:
        """
        Args:
            facts: about the model, for the sizes of slabs and blocks.
            owners: the sessions that may hold slabs, by id. The caller keeps it up to date.
            node: the name of the server in its fleet, for the log; None if it is alone.
        """
        self._node = node
        self._sequencer = sequencer
        self._engine = engine
        self._facts = facts
        self._slabs = trio.Lock()
        self._blocks = trio.Lock()
        self.eviction_lock = trio.Lock()
        self._owners = owners
        self._line: list[object] = []  # the requests that wait for a slab, in order of arrival
        self._spare_slab: trio.Event | None = None  # while one is open; set when it is closed
        self._stuck: set[str] = set()  # expired blocks that could not be removed
        self._unwritten: dict[str, str] = {}  # why a block could not be written when last tried
        self._warned: set[tuple[str, str]] = set()  # what was logged since a write last succeeded
        self._folder: Path | None = None  # of the block files
        self.write_fault: str | None = None
        self._odd: set[tuple[str, int]] = set()  # rows of other nodes that were logged

    async def open_slab(self, capacity_tokens: int, record: Callable[[SlabReport], None]) -> bool:
        """
        Open a slab. Without room, closes that of a shadow check, else those of sessions without a
        request: the least recently used idle one, else one that settles. False if all sessions with
        a slab serve a request.

        Args:
            record: appends what was measured.
        """
        size = self._slab_bytes(capacity_tokens)
        async with self._slabs:
            while not eviction.slab_fits(self._sequencer.state, size):
                if await self.wait_spare_slab():
                    continue
                state = self._sequencer.state
                victim = eviction.slab_to_release(state) or eviction.settling_slab_to_release(state)
                if victim is None:
                    return False
                await self._give_up(victim.id, "room for another session")
            await self._open_slab(capacity_tokens, record, self._engine.call)
        return True

    @contextlib.contextmanager
    def in_line(self) -> Iterator[Callable[[], bool]]:
        """
        A place in the line of requests that want a slab, while the context lasts. Gives a function
        that returns whether it is the first one.
        """
        place = object()
        self._line.append(place)
        try:
            yield lambda: self._line[0] is place
        finally:
            self._line.remove(place)

    @property
    def slab_is_awaited(self) -> bool:
        """Whether requests are in the line."""
        return bool(self._line)

    @property
    def slab_will_come(self) -> bool:
        """Whether a slab will become free without eviction."""
        return eviction.slab_will_come(self._sequencer.state, self._owners.keys())

    def slab_can_fit(self, capacity_tokens: int) -> bool:
        """Whether a slab of this size fits into an empty pool."""
        return eviction.slab_can_fit(self._sequencer.state, self._slab_bytes(capacity_tokens))

    def can_spare_slab(self, capacity_tokens: int) -> bool:
        """Whether ``open_spare_slab`` would find room."""
        state, size = self._sequencer.state, self._slab_bytes(capacity_tokens)
        return eviction.slab_fits(state, size) or eviction.slab_to_spare(state, size) is not None

    async def open_spare_slab(
        self,
        capacity_tokens: int,
        record: Callable[[SlabReport], None],
        still_needed: Callable[[], bool],
    ) -> bool | None:
        """
        Open a slab for a shadow check, in free memory or in that of one idle session that can
        spare its slab. No lock is held while that session releases it. There is at most one such
        slab at a time.

        Args:
            record: appends what was measured.
            still_needed: called before each step, also on the engine's thread.

        Returns:
            False if there is no such room; None if it was no longer needed.
        """
        size = self._slab_bytes(capacity_tokens)
        if not eviction.slab_fits(self._sequencer.state, size):
            spared = eviction.slab_to_spare(self._sequencer.state, size)
            if spared is None:
                return False
            if not still_needed():
                return None
            await self._give_up(spared.id, "room for a shadow check")
        if not still_needed():
            return None
        async with self._slabs:
            if not eviction.slab_fits(self._sequencer.state, size):
                return False if still_needed() else None

            def opened(report: SlabReport) -> None:
                record(report)
                self._spare_slab = trio.Event()

            return await self._open_slab(
                capacity_tokens,
                opened,
                lambda run, record: self._engine.settle(run, record, still_needed),
            )

    async def close_spare_slab(self, slab: int, record: Callable[[SlabReport], None]) -> None:
        """
        Close the slab that ``open_spare_slab`` opened.

        Args:
            record: appends what was measured.
        """
        try:
            await self._engine.call(lambda mlx: mlx.close_slab(slab), record)
        finally:
            assert self._spare_slab is not None
            self._spare_slab.set()
            self._spare_slab = None

    @property
    def has_spare_slab(self) -> bool:
        """Whether the slab of a check is open."""
        return self._spare_slab is not None

    async def wait_spare_slab(self) -> bool:
        """
        Wait until the slab of a check is closed: the check ends by itself when a request comes.
        False if there is none.
        """
        if self._spare_slab is None:
            return False
        await self._spare_slab.wait()
        return True

    async def _give_up(self, session: str, reason: str) -> None:
        owner = self._owners.get(session)
        if owner is None:
            raise LookupError(f"session {session} holds a slab and has no actor")
        await owner.give_up_slab(reason)

    async def _open_slab(
        self,
        capacity_tokens: int,
        record: Callable[[SlabReport], None],
        ask: Callable[..., Awaitable[bool | None]],
    ) -> bool | None:
        """
        Args:
            ask: runs a job on the engine's thread.
        """
        opened: list[int] = []

        def record_and_note(report: SlabReport) -> bool:
            opened.append(report.slab)
            record(report)
            return True

        try:
            return await ask(lambda mlx: mlx.open_slab(capacity_tokens), record_and_note)
        except Exception:
            # It is not in the journal, so it must not exist.
            if opened:
                await self._engine.call(lambda mlx: mlx.close_slab(opened[0]), _noop)
            raise

    def _slab_bytes(self, capacity_tokens: int) -> int:
        facts = self._facts
        if facts.growth is not None:
            return facts.growth.bytes_at(capacity_tokens)
        rows = capacity_tokens if facts.policy is None else facts.policy.rows
        states = STATES_A_SLAB * facts.state_bytes
        return min(rows, capacity_tokens) * facts.kv_token_bytes + states

    def _block_bytes(self, start: int, end: int) -> int:
        facts = self._facts
        size = (end - start) * facts.kv_token_bytes
        if facts.checkpoints is not None and facts.checkpoints.at(end):
            size += facts.state_bytes
        return size

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
        Seal the rows ``[start, end)`` of a slab, evicting blocks to make room. If no room can be
        made, the block is hashed and not stored.

        Args:
            prewarmed: whether no request asks for it yet; then no block is evicted for it that a
                session also has in its slab.
        """
        size = self._block_bytes(start, end)
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

            def record_and_note(report: SealReport) -> None:
                sealed.append(report)
                record(report)

            try:
                await self._engine.call(
                    lambda mlx: mlx.seal(slab, key, start, end, store=store), record_and_note
                )
            except Exception:
                # It is not in the journal, so it must not be in the store.
                if sealed and sealed[0].stored and not self._present(key):
                    await self._engine.call(lambda mlx: mlx.evict(key), _noop)
                raise

    async def remove_superseded(self, session: str, key: str) -> None:
        """Evict the short blocks that a block which the session has sealed makes needless."""
        while True:
            state = self._sequencer.state
            needless = short_blocks.superseded(state, self._sequencer.session(session), key)
            if not needless:
                return
            async with self.eviction_lock, self._blocks:
                state = self._sequencer.state
                # Another session may be working with it by now.
                if not state.is_pinned(needless[0]) and state.blocks[needless[0]].present:
                    await self._evict(needless[0], reason="superseded")

    async def remove_if_superseded(self, session: Session, key: str) -> None:
        """
        Evict a short block that the session has matched, if another one makes it needless. The
        session may have been closed meanwhile.
        """
        async with self.eviction_lock, self._blocks:
            if short_blocks.is_superseded(self._sequencer.state, session, key):
                await self._evict(key, reason="superseded")

    def has_room(self, tokens: int) -> bool:
        """Whether a block of so many tokens fits without evicting any."""
        size = tokens * self._facts.kv_token_bytes
        return eviction.block_fits(self._sequencer.state, size)

    async def load(self, chain: Collection[str], still_needed: Callable[[], bool]) -> None:
        """
        Load the blocks of a chain that are only in files, one after the other, as far as there is
        room next to the chain itself. Ends at a file that fails. The caller holds
        ``eviction_lock``.

        Args:
            still_needed: called before each block.
        """
        keep = frozenset(chain)
        for key in chain:
            async with self._blocks:
                block = self._sequencer.state.blocks[key]
                if block.present:
                    continue
                if not (block.loadable and still_needed()):
                    return
                leaving = self._leaving(key, block.bytes, keep)
                if leaving is None:
                    return
                for other in leaving:
                    await self._evict(other, keep)
                if not await self._load(key, block.digest):
                    return

    def of_prompt(
        self, keys: Sequence[str], sealed: Mapping[str, Sequence[SealedRow]]
    ) -> dict[str, list[SealedRow]]:
        """
        The rows of other nodes that say of a block what its place in the prompt says. The others
        are logged, once each: they are the fault of the other node, and of no request here.

        Args:
            keys: of the prompt's full blocks.
        """
        fitting: dict[str, list[SealedRow]] = {}
        tokens = self._facts.block_tokens
        for place, key in enumerate(keys):
            size = self._block_bytes(place * tokens, (place + 1) * tokens)
            for row in sealed.get(key, ()):
                if is_of_prompt(row.event, keys, place, tokens, size):
                    fitting.setdefault(key, []).append(row)
                elif (row.node, row.position) not in self._odd:
                    self._odd.add((row.node, row.position))
                    log.warning(
                        "a row of another node says of a block what cannot be; the block is "
                        "computed here. Run `ops verify` on that node's journal",
                        node=row.node,
                        position=row.position,
                        block=key,
                    )
        return fitting

    async def adopt(
        self,
        chain: Sequence[str],
        sealed: Mapping[str, Sequence[SealedRow]],
        keep: Collection[str],
        ttl_s: int | None,
        still_needed: Callable[[], bool],
    ) -> None:
        """
        Read the blocks of a chain that other nodes have sealed, one after the other, as far as
        there is room. Ends at one that none of them has, or that fails. The caller holds
        ``eviction_lock``.

        Args:
            sealed: the rows by which other nodes sealed them, of ``of_prompt``.
            keep: blocks that must not be evicted for them.
            ttl_s: the TTL that the request asks for.
            still_needed: called before each block.
        """
        for place, key in enumerate(chain):
            async with self._blocks:
                block = self._sequencer.state.blocks.get(key)
                if block is not None and block.present:
                    continue
                if not still_needed():
                    return
                rates = self._sequencer.state.rates
                has_file = block is not None and block.loadable
                if not (has_file or may_adopt(rates)):
                    self._sequencer.append(
                        measured(ev.AdoptionDeclined, rates, key=key, blocks=len(chain) - place)
                    )
                    return
                rows = sealed.get(key, ())
                if not (has_file or rows):
                    return
                size = block.bytes if block is not None else rows[0].event.bytes
                leaving = self._leaving(key, size, keep)
                if leaving is None:
                    return
                # No block leaves memory for one whose file its node has removed.
                if leaving and not has_file and not await self._is_offered(key, rows):
                    return
                for other in leaving:
                    await self._evict(other, keep)
                if block is not None and has_file:
                    read = await self._load(key, block.digest)
                else:
                    read = await self._adopt(key, rows, ttl_s)
                if not read:
                    return

    async def open_files(
        self,
        folder: Path,
        fingerprint: str,
        budget_bytes: int,
        run: str,
        earlier: Collection[str],
        *,
        shared: bool = False,
    ) -> None:
        """
        Find the block files of earlier runs, and remove those over the budget.

        Args:
            run: the id of this run of the server.
            earlier: the ids of earlier runs of this journal.
            shared: whether the folder is a node's, beside those of other nodes.
        """
        self._folder = folder
        known = self._sequencer.state.blocks
        blocks = known.values()
        on_record = {b.key: b.file_bytes for b in blocks if b.file_bytes is not None}

        def record(report: ScanReport) -> None:
            for one in report.rejected:
                self._rejected(one)
            if report.removed_files:
                log.warning("removed unknown block files", files=report.removed_files)
            if report.left_files:
                log.warning(
                    "the folder of blocks has files that this journal does not know, or that "
                    "cannot be removed; they are ignored",
                    folder=str(folder),
                    files=report.left_files,
                )
            self._sequencer.append(
                measured(ev.BlockFilesScanned, report, budget_bytes=budget_bytes)
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
                shared=shared,
            ),
            record,
        )
        for key in eviction.files_over_budget(self._sequencer.state, self._sequencer.order):
            await self._drop(key)

    async def write_through(self, key: str, still_needed: Callable[[], bool]) -> bool:
        """Write a block to a file in idle time. False if it was no longer needed."""
        return await self._spill(key, still_needed=still_needed) and still_needed()

    async def write_all(self, progress: Callable[[int, int], None]) -> None:
        """
        Write all blocks that have no file, as long as the disk takes any. One that cannot be
        written does not stop the others. May be cancelled between two of them.

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

    async def remove_expired(self, still_needed: Callable[[], bool]) -> int:
        """
        Remove expired blocks from memory and disk, one after the other.

        Args:
            still_needed: called before each.

        Returns:
            How many were removed.
        """
        removed = failed = 0
        while still_needed() and failed < BATCH:
            state, order = self._sequencer.state, self._sequencer.order
            now_us = eviction.moment_us(state, self._sequencer.now_us())
            expired = eviction.expired(state, order, now_us, BATCH, self._stuck)
            if not expired:
                self._stuck.clear()  # tried again after the next change
                break
            for key in expired:
                if await self._remove(key, now_us, still_needed):
                    removed += 1
                else:
                    failed += 1
                    self._stuck.add(key)
        return removed

    async def release_idle(self, session: str, still_needed: Callable[[], bool]) -> None:
        """
        Under ``sink_window``, evict the blocks of an idle conversation that no window reaches any
        more, each written to a file first.

        Args:
            still_needed: called before each.
        """
        state = self._sequencer.state
        known = state.sessions.get(SessionId(session))
        for key in eviction.release_idle(state, known) if known is not None else ():
            async with self.eviction_lock, self._blocks:
                # Another session may need it by now.
                if not still_needed():
                    return
                if eviction.is_out_of_windows(self._sequencer.state, key):
                    await self._evict(key, reason="window")

    async def _remove(self, key: str, now_us: int, still_needed: Callable[[], bool]) -> bool:
        """Remove an expired block, unless it was used since. Whether it, or its file, is gone."""
        async with self.eviction_lock, self._blocks:
            state = self._sequencer.state
            block = state.blocks[key]
            expires_us = self._sequencer.order.expires_us(block)
            expired = expires_us is not None and expires_us <= now_us and not state.is_pinned(key)
            if not expired or not still_needed():
                return False
            if block.present:
                await self._engine.call(
                    lambda mlx: mlx.evict(key), partial(self._evicted, reason="expired")
                )
            if block.file_bytes is not None:
                return await self._drop(key, reason="expired") or block.present
            return block.present

    async def forget(self, keys: Collection[str], still_own: Callable[[str], bool]) -> str | None:
        """
        Remove blocks of a closed session from memory and disk, the last ones of their chains first,
        and what was set aside of their files.

        Args:
            still_own: whether no other session has a block by now; called before each.

        Returns:
            Why something of them is left, as the end of a sentence; None if nothing is.
        """
        known = self._sequencer.state.blocks
        for key in sorted(keys, key=lambda key: known[key].start, reverse=True):
            async with self.eviction_lock, self._blocks:
                block = self._sequencer.state.blocks[key]
                if not still_own(key):
                    continue
                if self._sequencer.state.is_pinned(key):
                    return "a session works with a block of it"
                if block.present:
                    await self._engine.call(methodcaller("evict", key), self._evicted)
                if block.file_bytes is not None and not await self._drop(key):
                    return "the disk refuses to remove the file of a block"
        own = [key for key in keys if still_own(key)]
        left = await self._engine.call(lambda mlx: mlx.drop_aside(own), _same)
        return None if left is None else f"the disk refuses to remove a file ({left.reason})"

    # --- blocks in memory ------------------------------------------------------------------------

    def _present(self, key: str) -> bool:
        known = self._sequencer.state.blocks.get(key)
        return known is not None and known.present

    def _leaving(
        self, key: str, size: int, keep: Collection[str] = (), *, prewarmed: bool = False
    ) -> tuple[str, ...] | None:
        """
        The blocks to evict for one of ``size`` bytes: none if it is present or fits. None if no
        room can be made.
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
        Write a block to a file, and remove it from memory.

        Args:
            keep: blocks whose files must stay.
        """
        await self._spill(key, keep)
        await self._engine.call(lambda mlx: mlx.evict(key), partial(self._evicted, reason=reason))

    def _evicted(self, report: EvictReport, reason: ev.RemovalReason = "space") -> None:
        self._sequencer.append(measured(ev.BlockEvicted, report, reason=reason))

    async def _load(self, key: str, digest: str) -> bool:
        """Load a block from its file. False if that is missing or damaged."""

        def record(report: LoadReport | RejectReport | None) -> bool:
            if isinstance(report, RejectReport):
                self._rejected(report)
            if not isinstance(report, LoadReport):
                return False
            self._sequencer.append(measured(ev.BlockLoaded, report))
            return True

        try:
            return await self._engine.copy_one(lambda mlx: mlx.load(key, digest), record)
        except BugError:
            # It is not in memory by the journal, so it must not be in the store.
            await self._engine.call(lambda mlx: mlx.evict(key), _noop)
            raise

    async def _is_offered(self, key: str, rows: Sequence[SealedRow]) -> bool:
        """Whether one of the nodes that sealed a block has a file of it."""
        for row in rows:
            if await self._engine.call(methodcaller("has_file_of", key, row.node), bool):
                return True
        return False

    async def _adopt(self, key: str, rows: Sequence[SealedRow], ttl_s: int | None) -> bool:
        """
        Adopt a block from the first node that has its file. False if none has. If another node
        has a second digest for it on record, and a file with that, INV-3 is violated.
        """
        for row in rows:
            event, block = row.event, self._sequencer.state.blocks.get(key)
            if block is not None and block.present and block.digest == event.digest:
                continue

            def record(report: LoadReport | RejectReport | None, row: SealedRow = row) -> None:
                if isinstance(report, RejectReport):
                    self._rejected(report, row.node)
                elif report is not None:
                    self._sequencer.append(
                        measured(
                            ev.BlockAdopted,
                            report,
                            parent=row.event.parent,
                            start=row.event.start,
                            end=row.event.end,
                            node=row.node,
                            position=row.position,
                            row_hash=row.row_hash,
                            ttl_s=ttl_s,
                        )
                    )

            try:
                await self._engine.copy_one(
                    methodcaller("adopt", key, row.node, event.digest, event.bytes), record
                )
            except BugError:
                if not self._present(key):
                    # By the journal it is not in memory, so it must not be in the store.
                    await self._engine.call(lambda mlx: mlx.evict(key), _noop)
                raise
        state = self._sequencer.state
        return key in state.blocks and state.blocks[key].usable

    # --- block files -----------------------------------------------------------------------------

    async def _spill(
        self,
        key: str,
        keep: Collection[str] = (),
        still_needed: Callable[[], bool] | None = None,
    ) -> bool:
        """
        Write a block to a file, unless it has one, is quarantined or expired, or is over the
        budget. No answer depends on it, so a failure is recorded and not raised.

        Args:
            keep: blocks whose files must stay.
            still_needed: if given, the file is written in idle time, as long as this returns True.

        Returns:
            False if it was no longer needed, or if no other block could be written now either.
        """
        state = self._sequencer.state
        block, budget = state.blocks.get(key), state.disk_budget
        if block is None or not block.usable or block.file_bytes is not None or not budget:
            return True
        if state.is_short(block) or block.node is not None:  # it is replaced soon, or has a file
            return True
        expires_us = self._sequencer.order.expires_us(block)
        now_us = eviction.moment_us(state, self._sequencer.now_us())
        if expires_us is not None and expires_us <= now_us:
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
            if still_needed is None:
                return await self._engine.call(
                    lambda mlx: mlx.spill(key, span, block.digest, budget), self._spilled
                )
            done = await self._engine.settle(
                lambda mlx: mlx.spill(key, span, block.digest, budget), self._spilled, still_needed
            )
            return done is not None and done
        except BugError as bug:
            log.error("a block was not spilled", block=key, bug_id=bug.bug_id, fact=str(bug))
            await self._engine.call(lambda mlx: mlx.drop_file(key), _noop)
            # A fault of one block does not concern the others; totals that do not add up do.
            return self._sequencer.state.admission_bug is None

    def _spilled(self, report: FileReport | UnwrittenReport | None) -> bool:
        if isinstance(report, UnwrittenReport):
            self._not_spilled(report)
            return not report.nowhere
        if report is not None:
            self._sequencer.append(measured(ev.BlockSpilled, report))
            self._unwritten.pop(report.key, None)
            self._warned.clear()
            self.write_fault = None
        return True

    def _not_spilled(self, report: UnwrittenReport) -> None:
        """
        Record it, once for each block and reason: writing is tried again in every idle time.
        """
        if report.is_lost:
            self.write_fault = f"{self._folder}: {report.reason}"
        if self._unwritten.get(report.key) == report.reason:
            return
        self._unwritten[report.key] = report.reason
        self._warn("a block could not be written", report.key, report.reason)
        self._sequencer.append(ev.BlockSpillFailed(key=report.key, reason=report.reason))

    async def _drop(self, key: str, reason: ev.RemovalReason = "space") -> bool:
        """
        Remove a block's file. False if the disk refuses: it stays, and counts.
        """

        def record(report: FileReport | UnremovedReport | None) -> bool:
            if isinstance(report, UnremovedReport):
                self._warn("a block file could not be removed", report.key, report.reason)
                return False
            if report is not None:
                self._sequencer.append(measured(ev.BlockFileRemoved, report, reason=reason))
            return True

        return await self._engine.call(lambda mlx: mlx.drop_file(key), record)

    def _warn(self, fact: str, key: str, reason: str) -> None:
        """Log a failure of the disk once for all blocks, until a write succeeds."""
        if (fact, reason) not in self._warned:
            self._warned.add((fact, reason))
            log.warning(fact, block=key, reason=reason, folder=str(self._folder))

    def _rejected(self, report: RejectReport, node: str | None = None) -> None:
        """
        Args:
            node: the other node that wrote the file; None if this server did.
        """
        log.warning(
            "a block file was rejected",
            block=report.key,
            reason=report.reason,
            moved_to=report.moved_to,
            **({"written_by": node, "rejected_by": self._node} if node is not None else {}),
        )
        self._sequencer.append(measured(ev.BlockFileRejected, report, node=node))


def _noop(report: object) -> None:
    """Nothing to record: the journal never knew of it."""


def _same(report: UnremovedReport | None) -> UnremovedReport | None:
    """Nothing to record: the journal does not know of it any more."""
    return report
