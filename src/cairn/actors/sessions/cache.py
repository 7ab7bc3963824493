"""
The cache of one session: its slab, and every step that changes it, each with its event.

It knows of the cache what the journal's fold says, and keeps no second account. An event carries
what the engine measured, and is appended in the job's ``record``, in the order in which jobs ran.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from cairn.actors.sessions.answer import runs
from cairn.actors.sessions.context import SessionContext
from cairn.engine.reports import (
    PassReport,
    SealReport,
    ShareReport,
    SlabReport,
    TrimReport,
    Wanted,
)
from cairn.journal import events as ev
from cairn.journal.errors import BugError
from cairn.journal.keys import block_keys, ids_hash
from cairn.journal.lifecycle import SessionState
from cairn.journal.state import OpenRequest, Session, SessionId, State
from cairn.journal.tenants import tenant_secret


@attrs.frozen(kw_only=True)
class Copy:
    """
    Sealed blocks that are copied into a slab in one go.

    Attributes:
        start: where the slab ends before it.
        end: where it ends after it.
        keys: of the blocks, in their order.
        places: the first token of each.
    """

    start: int
    end: int
    keys: tuple[str, ...]
    places: tuple[int, ...]


class SessionCache:
    """
    What a session holds, and the events of its stream.

    Attributes:
        id: of the session.
        tenant: whose it is.
        opened: whether the journal knows the session, or knew it.
        seq: the sequence number of the last event in its stream.
    """

    def __init__(self, session_id: str, tenant: str, context: SessionContext) -> None:
        self.id = session_id
        self.tenant = tenant
        self._context = context
        self._secret = tenant_secret(context.secret, tenant)
        state = context.sequencer.state
        self.opened = session_id in state.sessions
        # Rows up to here are of an earlier session of this id, which has been closed.
        self._closed_at = 0 if self.opened else state.position
        self.seq = 0
        self.look_up_seq()

    # --- what the journal has --------------------------------------------------------------------

    @property
    def held(self) -> Session | None:
        """The session; None where the journal does not know it, or it has been closed."""
        return self._context.sequencer.state.sessions.get(SessionId(self.id))

    @property
    def session(self) -> Session:
        """The session, where there is one."""
        return self._context.sequencer.session(self.id)

    @property
    def request(self) -> OpenRequest:
        """The request in hand."""
        request = self.session.request
        assert request is not None
        return request

    @property
    def path(self) -> ev.PathSelected:
        """The decision for the request in hand."""
        path = self.request.path
        assert path is not None
        return path

    @property
    def slab_id(self) -> int:
        """The slab that it holds."""
        slab = self.session.slab
        assert slab is not None
        return slab.id

    @property
    def chunk(self) -> int:
        """C."""
        return self._context.facts.block_tokens

    def append(self, *events: ev.Event) -> int:
        """
        Append events of the session's stream and give the receipt.

        Raises:
            BugError: one is among them, or others took the session out of service meanwhile.
        """
        if (bug := self.taken_out()) is not None:
            raise bug
        receipt = self._context.sequencer.append(*events, expected_seq=self.seq + 1)
        self.seq += len(events)
        return receipt

    def taken_out(self) -> BugError | None:
        """The bug by which others took the session out of service while it was at work."""
        state, held = self._context.sequencer.state, self.held
        if held is None or held.bug_id is None or self.seq == state.streams[f"session/{self.id}"]:
            return None
        return _bug_of(state, held.bug_id)

    def noted(self, texts: Mapping[str, str]) -> dict[str, int]:
        """
        Which texts of a note an earlier turn of the session has, and in which row. The fold of the
        turns may not have heard yet that a session was closed.
        """
        rows = self._context.turns.noted(self.id, texts)
        return {name: row for name, row in rows.items() if row > self._closed_at}

    @property
    def out_of_service(self) -> bool:
        """Whether the session is quarantined."""
        held = self.held
        return held is not None and held.state is SessionState.QUARANTINED

    def look_up_seq(self) -> None:
        """Go on where the journal has the stream, after others have appended to it."""
        self.seq = self._context.sequencer.state.streams.get(f"session/{self.id}", 0)

    def keys(self, ids: Sequence[int], known: Sequence[str]) -> tuple[str, ...]:
        """The keys of the full chunks of a sequence, of which the first are known."""
        return block_keys(
            secret=self._secret,
            fingerprint=self._context.facts.fingerprint,
            tenant=self.tenant,
            ids=ids,
            block_tokens=self.chunk,
            known=known,
        )

    def is_indexed(self, tokens: int) -> bool:
        """Whether blocks are sealed of a sequence of so many tokens."""
        model = self._context.sequencer.state.model
        return model is not None and tokens >= model.min_cache_tokens

    def can_seal(self, key: str, start: int) -> bool:
        """
        Whether a chunk may become a block: not one in doubt, and not one behind it. The passes of a
        block in doubt run like any other; its digest on record stays the first one.
        """
        blocks, held = self._context.sequencer.state.blocks, self.session.slab_keys
        # With a block, all on record that are built on it are in doubt: the last one tells of all.
        known = [blocks[one] for one in (*held[-1:], key) if one in blocks]
        unbroken = len(held) * self.chunk == start
        return unbroken and all(block.bug_id is None for block in known)

    def is_quarantined(self, keys: Sequence[str]) -> bool:
        """Whether one of these blocks is quarantined."""
        blocks = self._context.sequencer.state.blocks
        return any(blocks[key].bug_id is not None for key in keys if key in blocks)

    def doubt(self, chain: Sequence[str]) -> BugError | None:
        """
        The bug that quarantined a block of a chain that is on record. Its last one tells of all.
        """
        state = self._context.sequencer.state
        bug_id = state.blocks[chain[-1]].bug_id
        return _bug_of(state, bug_id) if bug_id is not None else None

    # --- mutations -------------------------------------------------------------------------------

    async def acquire_slab(self, capacity_tokens: int) -> bool:
        """Open a slab. False where there is no room, and nobody gives up one."""

        def record(report: SlabReport) -> None:
            self.append(
                ev.SlabAcquired(
                    session=self.id,
                    slab=report.slab,
                    capacity_tokens=report.capacity_tokens,
                    bytes=report.bytes,
                    pool_slabs=report.pool_slabs,
                    pool_bytes=report.pool_bytes,
                )
            )

        return await self._context.memory.open_slab(capacity_tokens, record)

    async def release_slab(self, reason: str) -> None:
        """Close the slab; all KV in it is gone."""
        slab = self.slab_id

        def record(report: SlabReport) -> None:
            self.append(
                ev.SlabReleased(
                    session=self.id,
                    slab=report.slab,
                    bytes=report.bytes,
                    pool_slabs=report.pool_slabs,
                    pool_bytes=report.pool_bytes,
                    reason=reason,
                )
            )

        await self._context.engine.call(lambda mlx: mlx.close_slab(slab), record)

    async def trim(self, end: int, reason: str) -> None:
        """Cut the KV in the slab back to ``[0, end)``."""
        slab = self.slab_id

        def record(report: TrimReport) -> None:
            self.append(
                ev.CacheTrimmed(
                    session=self.id,
                    held_tokens=report.held_tokens,
                    end=end,
                    coverage=report.coverage,
                    reason=reason,
                )
            )

        await self._context.engine.call(lambda mlx: mlx.trim(slab, end), record)

    def copies(self, keys: Sequence[str], start: int) -> list[Copy]:
        """
        The parts in which sealed blocks are copied into the slab, from ``start`` on: those of them
        that are needed at their end.
        """
        chunk, kept = self.chunk, start // self.chunk
        found = []
        for places in self._context.facts.copies(kept, kept + len(keys)):
            end = (places[-1] + 1) * chunk
            found.append(
                Copy(
                    start=start,
                    end=end,
                    keys=tuple(keys[place - kept] for place in places),
                    places=tuple(place * chunk for place in places),
                )
            )
            start = end
        return found

    async def share(
        self, request: str, keys: Sequence[str], start: int, wanted: Callable[[], bool]
    ) -> bool:
        """
        Copy sealed blocks into the slab for a request, in parts. False where that was not wanted
        any more before all of them were there; then the slab holds the first parts.

        Args:
            wanted: asked on the engine's thread.
        """
        parts = [self._copying(request, copy) for copy in self.copies(keys, start)]
        done = await self._context.engine.copy(parts, wanted)
        if not done:
            await self.end_copy()
        return done

    async def restore_prewarmed(self, copy: Copy, wanted: Callable[[], bool]) -> bool:
        """
        Copy a part of what is anticipated into the slab, when the engine has nothing else to do.
        False where that was not wanted any more before its turn came.

        Args:
            wanted: asked on the engine's thread.
        """
        run, record = self._copying(None, copy)
        return await self._context.engine.settle(run, record, wanted) is not None

    async def end_copy(self) -> None:
        """
        Have the slab hold something to go on from, where not all parts were copied: the first
        blocks of a window are nothing without its last ones.
        """
        policy, session = self._context.facts.policy, self.session
        if policy is not None and not policy.reaches(session.window_start, session.cached_tokens):
            await self.trim(0, "the blocks of its window are not all there")

    def _copying(
        self, request: str | None, copy: Copy
    ) -> tuple[Callable[[Any], ShareReport], Callable[[ShareReport], int]]:
        """What copies a part, and what records it and gives the receipt."""
        slab = self.slab_id

        def run(mlx: Any) -> ShareReport:
            report: ShareReport = mlx.share(slab, copy.keys, copy.start, copy.places)
            return report

        def record(report: ShareReport) -> int:
            return self.append(
                ev.BlocksRestored(
                    session=self.id,
                    request=request,
                    start=copy.start,
                    end=copy.end,
                    keys=copy.keys,
                    digests=report.digests,
                    coverage=report.coverage,
                    duration_us=report.duration_us,
                )
            )

        return run, record

    async def prefill(self, ids: Sequence[int], wanted: Wanted | None, request: str) -> PassReport:
        """
        One pass over the next tokens of a prompt.

        Args:
            wanted: how the token behind it is drawn; None where the prompt goes on.
        """
        slab = self.slab_id

        def run(mlx: Any) -> PassReport:
            report: PassReport = mlx.run_chunk(slab, ids, wanted)
            return report

        def record(report: PassReport) -> PassReport:
            return self._extended(report, "prefill", request)

        return await self._context.engine.prefill(run, record)

    async def settle(self, ids: Sequence[int], wanted: Callable[[], bool]) -> bool:
        """
        One pass over a chunk, when the engine has nothing else to do. False where that was not
        wanted any more before its turn came.

        Args:
            wanted: asked on the engine's thread.
        """
        slab = self.slab_id

        def run(mlx: Any) -> PassReport:
            report: PassReport = mlx.run_chunk(slab, ids, None)
            return report

        def record(report: PassReport) -> PassReport:
            return self._extended(report, "settle", None)

        return await self._context.engine.settle(run, record, wanted) is not None

    async def seal(self, key: str, start: int, end: int, *, prewarmed: bool = False) -> None:
        """
        Make a block of the rows ``[start, end)`` of the slab.

        Args:
            foreseen: no request asks for it, see ``Memory.seal``.
        """

        def record(report: SealReport) -> None:
            session = self.session
            self.append(
                ev.BlockSealed(
                    session=self.id,
                    key=key,
                    parent=session.slab_keys[-1] if session.slab_keys else None,
                    digest=report.digest,
                    start=start,
                    end=end,
                    bytes=report.bytes,
                    again=key in self._context.sequencer.state.blocks,
                    stored=report.stored,
                    store_blocks=report.store_blocks,
                    store_bytes=report.store_bytes,
                )
            )

        await self._context.memory.seal(self.slab_id, key, start, end, record, prewarmed=prewarmed)

    def decoded(self, batch: Sequence[PassReport], request: str) -> None:
        """
        Record decode passes that came together: one event for all whose measures follow each other.
        """
        for run in runs(batch):
            drawn = [report.drawn for report in run if report.drawn is not None]
            self.append(
                ev.CacheExtended(
                    session=self.id,
                    request=request,
                    step="decode",
                    start=run[0].start,
                    end=run[-1].end,
                    ran_hash=ids_hash([token for report in run for token in report.ran]),
                    coverage=run[-1].coverage,
                    sampled=tuple(one.token for one in drawn),
                    logprobs=tuple(one.logprob for one in drawn),
                    duration_us=sum(report.duration_us for report in run),
                )
            )

    async def rest(self, complete: bool) -> None:
        """
        Put on record that the session is at rest with what the slab holds.

        Args:
            complete: whether it settled all that it wanted to.
        """

        def record(held_tokens: int) -> None:
            self.append(
                ev.SessionSettled(session=self.id, canonical_tokens=held_tokens, complete=complete)
            )

        if self.session.slab is None:
            record(0)
            return
        slab = self.slab_id
        await self._context.engine.call(lambda mlx: mlx.held_tokens(slab), record)

    def _extended(self, report: PassReport, step: ev.Step, request: str | None) -> PassReport:
        drawn = report.drawn
        self.append(
            ev.CacheExtended(
                session=self.id,
                request=request,
                step=step,
                start=report.start,
                end=report.end,
                ran_hash=ids_hash(report.ran),
                coverage=report.coverage,
                sampled=(drawn.token,) if drawn else (),
                logprobs=(drawn.logprob,) if drawn else (),
                duration_us=report.duration_us,
            )
        )
        return report


def _bug_of(state: State, bug_id: str) -> BugError:
    """A bug that is on record, to be raised again."""
    bug = state.faults[bug_id].event
    return BugError(bug.bug_id, bug.invariant, bug.message)
