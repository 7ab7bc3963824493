"""
The cache of one session: its slab, and every step that changes it, each with its event.

It knows of the cache what the journal's fold says, and keeps no second account. An event carries
what the engine measured, and is appended in the job's ``record``, in the order in which jobs ran.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from cairn.actors.answer import runs
from cairn.actors.house import House
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
from cairn.journal.lifecycle import Life
from cairn.journal.state import OpenRequest, Session, SessionId
from cairn.journal.tenants import tenant_secret


class SessionCache:
    """
    What a session holds, and the events of its stream.

    Attributes:
        id: of the session.
        tenant: whose it is.
        opened: whether the journal knows the session, or knew it.
        seq: the sequence number of the last event in its stream.
    """

    def __init__(self, session_id: str, tenant: str, house: House) -> None:
        self.id = session_id
        self.tenant = tenant
        self._house = house
        self._secret = tenant_secret(house.secret, tenant)
        self.opened = session_id in house.sequencer.state.sessions
        self.seq = 0
        self.look_up_seq()

    # --- what the journal has --------------------------------------------------------------------

    @property
    def session(self) -> Session:
        """
        The session.
        """
        return self._house.sequencer.session(self.id)

    @property
    def request(self) -> OpenRequest:
        """
        The request in hand.
        """
        request = self.session.request
        assert request is not None
        return request

    @property
    def path(self) -> ev.PathSelected:
        """
        The decision for the request in hand.
        """
        path = self.request.path
        assert path is not None
        return path

    @property
    def slab_id(self) -> int:
        """
        The slab that it holds.
        """
        slab = self.session.slab
        assert slab is not None
        return slab.id

    @property
    def chunk(self) -> int:
        """
        C.
        """
        return self._house.facts.chunk_tokens

    def append(self, *events: ev.Event) -> int:
        """
        Append events of the session's stream and give the receipt.

        Raises:
            BugError: one is among them, or others took the session out of service meanwhile.
        """
        if (bug := self.taken_out()) is not None:
            raise bug
        receipt = self._house.sequencer.append(*events, expected_seq=self.seq + 1)
        self.seq += len(events)
        return receipt

    def taken_out(self) -> BugError | None:
        """
        The bug by which others took the session out of service while it was at work.
        """
        state = self._house.sequencer.state
        held = state.sessions.get(SessionId(self.id))
        if held is None or held.bug_id is None or self.seq == state.streams[f"session/{self.id}"]:
            return None
        bug = state.faults[held.bug_id].event
        return BugError(bug.bug_id, bug.invariant, bug.message)

    @property
    def out_of_service(self) -> bool:
        """
        Whether the session is quarantined.
        """
        held = self._house.sequencer.state.sessions.get(SessionId(self.id))
        return held is not None and held.life is Life.QUARANTINED

    def look_up_seq(self) -> None:
        """
        Go on where the journal has the stream, after others have appended to it.
        """
        self.seq = self._house.sequencer.state.streams.get(f"session/{self.id}", 0)

    def keys(self, ids: Sequence[int], known: Sequence[str]) -> tuple[str, ...]:
        """
        The keys of the full chunks of a sequence, of which the first are known.
        """
        return block_keys(
            secret=self._secret,
            fingerprint=self._house.facts.fingerprint,
            tenant=self.tenant,
            ids=ids,
            chunk_tokens=self.chunk,
            known=known,
        )

    def is_indexed(self, tokens: int) -> bool:
        """
        Whether blocks are sealed of a sequence of so many tokens.
        """
        model = self._house.sequencer.state.model
        return model is not None and tokens >= model.min_cache_tokens

    def can_seal(self, key: str, start: int) -> bool:
        """
        Whether a chunk may become a block: not one in doubt, and not one behind it. The passes of a
        block in doubt run like any other; its digest on record stays the first one.
        """
        blocks, held = self._house.sequencer.state.blocks, self.session.slab_keys
        # With a block, all on record that are built on it are in doubt: the last one tells of all.
        known = [blocks[one] for one in (*held[-1:], key) if one in blocks]
        unbroken = len(held) * self.chunk == start
        return unbroken and all(block.bug_id is None for block in known)

    # --- mutations -------------------------------------------------------------------------------

    async def acquire_slab(self, capacity_tokens: int) -> bool:
        """
        Open a slab. False where there is no room, and nobody gives up one.
        """

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

        return await self._house.memory.open_slab(capacity_tokens, record)

    async def release_slab(self, reason: str) -> None:
        """
        Close the slab; all KV in it is gone.
        """
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

        await self._house.engine.call(lambda mlx: mlx.close_slab(slab), record)

    async def trim(self, end: int, reason: str) -> None:
        """
        Cut the KV in the slab back to ``[0, end)``.
        """
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

        await self._house.engine.call(lambda mlx: mlx.trim(slab, end), record)

    async def share(self, request: str | None, keys: Sequence[str], start: int) -> None:
        """
        Copy sealed blocks into the slab, from ``start`` on: those of them that the policy needs at
        their end.

        Args:
            request: what it is for; None for what is anticipated.
        """
        slab, end, policy = self.slab_id, start + len(keys) * self.chunk, self._house.facts.policy
        copied = tuple(keys)
        places: list[int] | None = None
        if policy is not None:
            kept = start // self.chunk
            found = policy.copied(kept, kept + len(keys), self.chunk)
            copied = tuple(keys[place - kept] for place in found)
            places = [place * self.chunk for place in found]

        def record(report: ShareReport) -> None:
            self.append(
                ev.BlocksShared(
                    session=self.id,
                    request=request,
                    start=start,
                    end=end,
                    keys=copied,
                    digests=report.digests,
                    coverage=report.coverage,
                    duration_us=report.duration_us,
                )
            )

        await self._house.engine.call(lambda mlx: mlx.share(slab, copied, start, places), record)

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

        return await self._house.engine.prefill(run, record)

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

        return await self._house.engine.settle(run, record, wanted) is not None

    async def seal(self, key: str, start: int, end: int, *, foreseen: bool = False) -> None:
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
                    again=key in self._house.sequencer.state.blocks,
                    stored=report.stored,
                    store_blocks=report.store_blocks,
                    store_bytes=report.store_bytes,
                )
            )

        await self._house.memory.seal(self.slab_id, key, start, end, record, foreseen=foreseen)

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
        await self._house.engine.call(lambda mlx: mlx.held_tokens(slab), record)

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
