"""
The cache of one session: its slab, and every step that changes it, each with its event.

It knows of the cache what the journal's fold says, and keeps no second account. An event carries
what the engine measured, and is appended in the job's ``record``, in the order in which jobs ran.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import attrs

from cairn.actors.measured import measured
from cairn.actors.sessions.answer import runs
from cairn.actors.sessions.context import SessionContext
from cairn.engine.contract import Engine
from cairn.engine.reports import (
    DrawSpec,
    PassReport,
    SealReport,
    ShareReport,
    SlabReport,
    TrimReport,
)
from cairn.journal import events as ev
from cairn.journal import paths
from cairn.journal.cache import short_blocks
from cairn.journal.errors import BugError
from cairn.journal.keys import block_keys, ids_hash, short_block_key
from cairn.journal.lifecycle import SessionState
from cairn.journal.state import OpenRequest, Session, SessionId, State, slab_ids
from cairn.journal.tenants import tenant_secret


@attrs.frozen(kw_only=True)
class Copy:
    """
    Sealed blocks that are copied into a slab in one job.

    Attributes:
        start: the end of the slab before it, in tokens.
        end: the end of the slab after it.
        keys: of the blocks, in their order.
        places: the first token of each.
        rows: how many rows of the only block are copied (a partial match); None for all.
    """

    start: int
    end: int
    keys: tuple[str, ...]
    places: tuple[int, ...]
    rows: int | None = None


class SessionCache:
    """
    What a session holds, and the events of its stream.

    Attributes:
        id: of the session.
        tenant: that it belongs to.
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
        self.resync()

    # --- what the journal has --------------------------------------------------------------------

    @property
    def held(self) -> Session | None:
        """The session; None if the journal does not know it, or it has been closed."""
        return self._context.sequencer.state.sessions.get(SessionId(self.id))

    @property
    def session(self) -> Session:
        """The session, which must be open."""
        return self._context.sequencer.session(self.id)

    @property
    def request(self) -> OpenRequest:
        """The request that it serves."""
        request = self.session.request
        assert request is not None
        return request

    @property
    def path(self) -> ev.PathSelected:
        """The decision for that request."""
        path = self.request.path
        assert path is not None
        return path

    @property
    def slab_id(self) -> int:
        """The number of the session's slab."""
        slab = self.session.slab
        assert slab is not None
        return slab.id

    @property
    def block_tokens(self) -> int:
        """C, the size of a block."""
        return self._context.facts.block_tokens

    def append(self, *events: ev.Event) -> int:
        """
        Append events of the session's stream and return the receipt.

        Raises:
            BugError: one of them is a bug, or one found elsewhere has quarantined the session.
        """
        if (bug := self.quarantined_meanwhile()) is not None:
            raise bug
        receipt = self._context.sequencer.append(*events, expected_seq=self.seq + 1)
        self.seq += len(events)
        return receipt

    def quarantined_meanwhile(self) -> BugError | None:
        """The bug found elsewhere that quarantined the session while it was at work."""
        state, held = self._context.sequencer.state, self.held
        if held is None or held.bug_id is None or self.seq == state.streams[f"session/{self.id}"]:
            return None
        return _bug_of(state, held.bug_id)

    def rows_of_texts(self, texts: Mapping[str, str]) -> dict[str, int]:
        """
        Which of these texts an earlier stored turn of the session has, and in which row.

        The fold of the turns may lag behind the end of a session of this id.
        """
        rows = self._context.turns.noted(self.id, texts)
        return {name: row for name, row in rows.items() if row > self._closed_at}

    @property
    def is_quarantined(self) -> bool:
        """Whether the session is quarantined."""
        held = self.held
        return held is not None and held.state is SessionState.QUARANTINED

    def resync(self) -> None:
        """Go on from the journal's end of the stream, after events that others appended to it."""
        self.seq = self._context.sequencer.state.streams.get(f"session/{self.id}", 0)

    def whole(self, tokens: int) -> int:
        """How many of this many tokens settling computes: all, or with the grain C full blocks."""
        return tokens - tokens % self._context.facts.grain

    def keys(self, ids: Sequence[int], known: Sequence[str]) -> tuple[str, ...]:
        """The keys of the full blocks of a sequence, of which the first are known."""
        return block_keys(
            secret=self._secret,
            fingerprint=self._context.facts.fingerprint,
            tenant=self.tenant,
            ids=ids,
            block_tokens=self.block_tokens,
            known=known,
        )

    def is_indexed(self, tokens: int) -> bool:
        """Whether blocks of a sequence of this many tokens go into the prefix cache."""
        model = self._context.sequencer.state.model
        return model is not None and tokens >= model.min_cache_tokens

    def can_seal(self, key: str | None, start: int) -> bool:
        """
        Whether a block may be sealed: neither it nor one that it is built on is quarantined. The
        passes over a quarantined block run like any other; its digest on record stays the first
        one.

        Args:
            key: None for a block that is not full yet.
        """
        blocks, held = self._context.sequencer.state.blocks, self.session.slab_keys
        # A quarantined block quarantines all that are built on it, so the last one is enough.
        known = [blocks[one] for one in (*held[-1:], key) if one is not None and one in blocks]
        unbroken = len(held) * self.block_tokens == start
        return unbroken and all(block.bug_id is None for block in known)

    def has_quarantined(self, keys: Sequence[str]) -> bool:
        """Whether one of these blocks is quarantined."""
        blocks = self._context.sequencer.state.blocks
        return any(blocks[key].bug_id is not None for key in keys if key in blocks)

    def chain_bug(self, chain: Sequence[str]) -> BugError | None:
        """The bug that quarantined a block of a recorded chain. Its last block has it too."""
        state = self._context.sequencer.state
        bug_id = state.blocks[chain[-1]].bug_id
        return _bug_of(state, bug_id) if bug_id is not None else None

    # --- mutations -------------------------------------------------------------------------------

    async def acquire_slab(self, capacity_tokens: int) -> bool:
        """Open a slab. False if there is no room and no session can give one up."""

        def record(report: SlabReport) -> None:
            self.append(measured(ev.SlabAcquired, report, session=self.id))

        return await self._context.memory.open_slab(capacity_tokens, record)

    async def release_slab(self, reason: str) -> None:
        """Close the slab; all KV in it is gone."""
        slab = self.slab_id

        def record(report: SlabReport) -> None:
            self.append(measured(ev.SlabReleased, report, session=self.id, reason=reason))

        await self._context.engine.call(lambda mlx: mlx.close_slab(slab), record)
        if self._context.memory.slab_is_awaited:
            self._context.activity.changed()  # also if no request ends by it

    async def trim(self, end: int, reason: str) -> None:
        """Cut the KV in the slab back to ``[0, end)``."""
        slab = self.slab_id

        def record(report: TrimReport) -> None:
            self.append(measured(ev.CacheTrimmed, report, session=self.id, end=end, reason=reason))

        await self._context.engine.call(lambda mlx: mlx.trim(slab, end), record)

    def copies(
        self, keys: Sequence[str], start: int, partial: str | None = None, rows: int = 0
    ) -> list[Copy]:
        """
        The parts in which sealed blocks are copied into the slab from ``start`` on. Blocks that the
        window does not need at the end are left out.

        Args:
            partial: the block whose first rows come after these; None if there is none.
            rows: how many rows that are.
        """
        size, first = self.block_tokens, start // self.block_tokens
        found = []
        for places in self._context.facts.copies(first, first + len(keys)):
            end = (places[-1] + 1) * size
            found.append(
                Copy(
                    start=start,
                    end=end,
                    keys=tuple(keys[place - first] for place in places),
                    places=tuple(place * size for place in places),
                )
            )
            start = end
        if partial is not None:
            found.append(
                Copy(start=start, end=start + rows, keys=(partial,), places=(start,), rows=rows)
            )
        return found

    async def share(
        self, request: str, copies: Sequence[Copy], still_needed: Callable[[], bool]
    ) -> bool:
        """
        Copy sealed blocks into the slab for a request, in parts. False if they were no longer
        needed before all of them were there; then the slab holds the first parts.

        Args:
            still_needed: called on the engine's thread.
        """
        parts = [self._copying(request, copy) for copy in copies]
        done = await self._context.engine.copy(parts, still_needed)
        if not done:
            await self.end_copy()
        return done

    async def restore_prewarmed(self, copy: Copy, still_needed: Callable[[], bool]) -> bool:
        """
        Copy a part of the next prompt into the slab, when the engine has nothing else to do. False
        if it was no longer needed when its turn came.

        Args:
            still_needed: called on the engine's thread.
        """
        run, record = self._copying(None, copy)
        return await self._context.engine.settle(run, record, still_needed) is not None

    async def end_copy(self) -> None:
        """
        Empty the slab if not all parts were copied and the window needs the missing ones: without
        its last blocks the first ones are of no use.
        """
        policy, session = self._context.facts.policy, self.session
        if policy is not None and not policy.reaches(session.window_start, session.cached_tokens):
            await self.trim(0, "the blocks of its window are not all there")

    def _copying(
        self, request: str | None, copy: Copy
    ) -> tuple[Callable[[Engine], ShareReport], Callable[[ShareReport], int]]:
        """The job that copies a part, and what records it and returns the receipt."""
        slab = self.slab_id

        def run(engine: Engine) -> ShareReport:
            return engine.share(slab, copy.keys, copy.start, copy.places, rows=copy.rows)

        def record(report: ShareReport) -> int:
            return self.append(
                measured(
                    ev.BlocksRestored,
                    report,
                    session=self.id,
                    request=request,
                    start=copy.start,
                    end=copy.end,
                    keys=copy.keys,
                )
            )

        return run, record

    async def prefill(
        self,
        ids: Sequence[int],
        draw: DrawSpec | None,
        request: str,
        *,
        again: int | None = None,
    ) -> PassReport:
        """
        One pass over the next tokens of a prompt.

        Args:
            draw: how the token after it is drawn; None if the prompt continues.
            again: the token of the slab's last row, to compute that row again.

        Raises:
            BugError: that row has other bits now.
        """
        return await self._context.engine.prefill(
            self._pass_over(ids, draw, again),
            partial(self._extended, "prefill", request),
            lambda: paths.followers(self._context.sequencer.state, request),
        )

    async def settle(self, ids: Sequence[int], still_needed: Callable[[], bool]) -> bool:
        """
        One pass over tokens of a block, when the engine has nothing else to do. False if it was no
        longer needed when its turn came.

        Args:
            still_needed: called on the engine's thread.
        """
        ran = await self._context.engine.settle(
            self._pass_over(ids, None), partial(self._extended, "settle", None), still_needed
        )
        return ran is not None

    def _pass_over(
        self, ids: Sequence[int], draw: DrawSpec | None, again: int | None = None
    ) -> Callable[[Engine], PassReport]:
        slab = self.slab_id

        def run(engine: Engine) -> PassReport:
            return engine.run_chunk(slab, ids, draw, again=again)

        return run

    async def seal(self, key: str, start: int, end: int, *, prewarmed: bool = False) -> None:
        """
        Make a block of the rows ``[start, end)`` of the slab.

        Args:
            prewarmed: whether no request asks for it, see ``Memory.seal``.
        """

        def record(report: SealReport) -> None:
            session = self.session
            self.append(
                measured(
                    ev.BlockSealed,
                    report,
                    session=self.id,
                    key=key,
                    parent=session.slab_keys[-1] if session.slab_keys else None,
                    start=start,
                    end=end,
                    resealed=key in self._context.sequencer.state.blocks,
                )
            )

        memory = self._context.memory
        await memory.seal(self.slab_id, key, start, end, record, prewarmed=prewarmed)
        await memory.remove_superseded(self.id, key)

    async def seal_rest(self) -> None:
        """Make a short block of what the slab holds after its last full block, if that helps."""
        session = self.session
        rest = short_blocks.rest_to_seal(self._context.sequencer.state, session)
        if rest is None:
            return
        key = short_block_key(
            secret=self._secret,
            fingerprint=self._context.facts.fingerprint,
            tenant=self.tenant,
            parent=session.slab_keys[-1] if session.slab_keys else None,
            ids=slab_ids(session, *rest),
        )
        # It saves less than a block, so no block is evicted for it.
        if self.can_seal(key, rest[0]) and self._context.memory.has_room(rest[1] - rest[0]):
            await self.seal(key, *rest, prewarmed=True)

    def decoded(self, batch: Sequence[PassReport], request: str, emitted: int, text: str) -> int:
        """
        Record decode passes that were gathered, and what is released with them: one event for each
        run whose measurements follow from each other. Returns the receipt.

        Args:
            emitted: how many tokens are released.
            text: their text.
        """
        found = runs(batch)
        events = []
        for place, run in enumerate(found, 1):
            drawn = [one for report in run for one in report.all_drawn]
            last = place == len(found)
            events.append(
                ev.CacheExtended(
                    session=self.id,
                    request=request,
                    step="decode",
                    start=run[0].start,
                    end=run[-1].end,
                    input_hash=ids_hash([token for report in run for token in report.ran]),
                    coverage=run[-1].coverage,
                    sampled=tuple(one.token for one in drawn),
                    logprobs=tuple(one.logprob for one in drawn),
                    drafted=sum(report.drafted for report in run),
                    accepted=sum(len(report.accepted) for report in run),
                    emitted=emitted if last else 0,
                    text=text if last else "",
                    duration_us=sum(report.duration_us for report in run),
                )
            )
        return self.append(*events)

    async def rest(self, complete: bool) -> None:
        """
        Record that the session has settled, and what the slab holds.

        Args:
            complete: whether everything planned was computed.
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

    def _extended(self, step: ev.Step, request: str | None, report: PassReport) -> PassReport:
        drawn = report.drawn
        extended = measured(
            ev.CacheExtended,
            report,
            session=self.id,
            request=request,
            step=step,
            input_hash=ids_hash(report.ran),
            accepted=0,
            sampled=(drawn.token,) if drawn else (),
            logprobs=(drawn.logprob,) if drawn else (),
        )
        if report.again is None:
            self.append(extended)
            return report
        assert request is not None
        held, computed = report.again
        checked = ev.RowChecked(
            session=self.id,
            request=request,
            row=report.start - 1,
            held_digest=held,
            digest=computed,
        )
        self.append(checked, extended)
        return report


def _bug_of(state: State, bug_id: str) -> BugError:
    """A bug that is on record, to be raised again."""
    bug = state.faults[bug_id].event
    return BugError(bug.bug_id, bug.invariant, bug.message)
