"""
A session: one conversation, the only owner of its cache, one command at a time.

Rules of this module:

1. A session does things in the order of ``lifecycle.STEPS``, and everything that it does to its
   cache goes through ``_append`` as an event that carries what the engine measured.
2. It knows of its cache what the journal's fold says, and keeps no second account.
3. It waits for nothing but its inbox and the engine. Replies carry the receipt that they wait for.

A request is served in six steps: take it (one append with the decision), lay the stones (slab,
trim, shared blocks), prefill what is not there, decode, finish, settle. A client that goes away
ends it at the next step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import attrs
import structlog
import trio

from cairn.actors.answer import Answer, into, runs
from cairn.actors.engine import Decoding, EngineThread
from cairn.actors.memory import Memory
from cairn.actors.messages import Accepted, Broken, NoMemory
from cairn.actors.sequencer import Sequencer
from cairn.actors.ticket import Ticket
from cairn.engine.prompt import Tokenizer
from cairn.engine.reports import (
    DecodeRow,
    Drawn,
    EngineFault,
    ModelFacts,
    PassReport,
    SealReport,
    ShareReport,
    SlabReport,
    TrimReport,
    Wanted,
)
from cairn.engine.schedule import passes
from cairn.engine.text import AnswerText
from cairn.journal import events as ev
from cairn.journal import paths
from cairn.journal.errors import BugError
from cairn.journal.keys import block_keys, ids_hash
from cairn.journal.lifecycle import Life
from cairn.journal.state import OpenRequest, Session, SessionId

log = structlog.get_logger("cairn")


@attrs.frozen(kw_only=True)
class House:
    """
    What all sessions share.

    Attributes:
        secret: the tenant's, for block keys.
        detokenizer: a streaming detokenizer to copy.
    """

    sequencer: Sequencer
    engine: EngineThread
    memory: Memory
    facts: ModelFacts
    tokenizer: Tokenizer
    detokenizer: Any = attrs.field(repr=False)
    secret: bytes = attrs.field(repr=False)


@attrs.frozen
class _Serve:
    ticket: Ticket


@attrs.frozen
class _GiveUpSlab:
    done: trio.Event


_STAGES: Mapping[str, ev.CancelStage] = MappingProxyType(
    {"server_stopped": "server_stopped", "journal_full": "journal_full"}
)
"""
Why nobody waits any more, where that says more than the step at which it was seen.
"""


class _Gone(Exception):
    """
    Nobody waits for the answer any more.
    """

    def __init__(self, stage: ev.CancelStage) -> None:
        self.stage: ev.CancelStage = stage


class SessionActor:
    """
    The actor of one session.

    Attributes:
        line: who names this session waits here for its turn.
        opened: whether the journal knows the session.
        ended: whether the actor takes no more commands.
    """

    def __init__(
        self, session_id: str, house: House, *, tenant: str, group: str | None, named: bool
    ) -> None:
        self.id = session_id
        self.line = trio.Lock()
        self._house = house
        self._tenant = tenant
        self._group = group
        self._named = named
        self.ended = False
        self.opened = session_id in house.sequencer.state.sessions
        self._seq = house.sequencer.state.streams.get(f"session/{session_id}", 0)
        self._asked_for_slab: list[trio.Event] = []
        self._send, self._inbox = trio.open_memory_channel[_Serve | _GiveUpSlab](float("inf"))

    # --- commands, for other tasks -----------------------------------------------------------

    async def serve(self, ticket: Ticket) -> None:
        """
        Have the session serve a request, and wait until it has left the session's hands.
        """
        ticket.left_turn = trio.Event()
        self._send.send_nowait(_Serve(ticket))
        await ticket.left_turn.wait()

    async def give_up_slab(self) -> None:
        """
        Have a session without a request release its slab. Nothing happens where it holds none, or
        where it takes a request first: who asks must not wait for that request's end.
        """
        done = trio.Event()
        self._asked_for_slab.append(done)
        self._send.send_nowait(_GiveUpSlab(done))
        await done.wait()

    def close(self) -> None:
        """
        End the actor when it is at rest.
        """
        self._send.close()

    # --- the actor ------------------------------------------------------------------------------

    async def run(self) -> None:
        """
        Serve commands until ``close``, or until the session is quarantined.
        """
        try:
            async for command in self._inbox:
                await self._obey(command)
                if self.opened and self._session.life is Life.QUARANTINED:
                    break
        finally:
            self.ended = True
            self._send.close()
            self._turn_away()

    async def _obey(self, command: _Serve | _GiveUpSlab) -> None:
        ticket = command.ticket if isinstance(command, _Serve) else None
        try:
            if ticket is not None:
                await self._serve(ticket)
            elif isinstance(command, _GiveUpSlab) and not command.done.is_set():
                self._asked_for_slab.remove(command.done)
                if self._session.slab is not None:
                    await self._release_slab("room for another session")
        except BugError as bug:
            await self._break(ticket, bug)
        except Exception as error:
            await self._break(ticket, self._house.sequencer.crash(self.id, error))
        finally:
            if ticket is not None:
                ticket.left_turn.set()
            elif isinstance(command, _GiveUpSlab):
                command.done.set()

    async def _break(self, ticket: Ticket | None, bug: BugError) -> None:
        """
        A bug came to light: tell the client, and give back what the session holds.
        """
        if ticket is not None:
            ticket.fail(Broken(bug.bug_id))
            ticket.left_turn.set()
        self._seq = self._house.sequencer.state.streams.get(f"session/{self.id}", 0)
        if self.id not in self._house.sequencer.state.sessions:
            return
        if self._session.request is not None:
            # The bug was another's: this request ends with it, and the session goes on.
            request = self._session.request.ask.request
            self._append(ev.RequestCancelled(session=self.id, request=request, stage="bug"))
        if self._session.slab is not None:
            try:
                await self._release_slab(f"bug {bug.bug_id}")
            except EngineFault as fault:
                # The bug is on record, and the pool's next measure (INV-5) will not add up.
                log.error("slab not released", session=self.id, bug_id=bug.bug_id, fact=str(fault))
                return
        if self._session.life is Life.SETTLING:
            self._append(ev.SessionSettled(session=self.id, canonical_tokens=0, complete=False))

    def _turn_away(self) -> None:
        """
        Requests that were still in the inbox look for another session, or hear of the bug.
        """
        while True:
            try:
                command = self._inbox.receive_nowait()
            except (trio.WouldBlock, trio.EndOfChannel, trio.ClosedResourceError):
                return
            if isinstance(command, _Serve):
                command.ticket.rerouted = True
                command.ticket.left_turn.set()
            else:
                command.done.set()

    # --- the six steps ----------------------------------------------------------------------------

    async def _serve(self, ticket: Ticket) -> None:
        async with self._house.memory.steady:
            await self._load_blocks(ticket)
            if ticket.gone is not None:
                return
            closed = self._house.sequencer.state.admission_bug
            if closed is not None:
                ticket.fail(Broken(closed))
                return
            taken = self._take(ticket)
        if taken is None:
            ticket.rerouted = True
            return
        while self._asked_for_slab:
            self._asked_for_slab.pop().set()
        try:
            await self._lay_stones(ticket)
            # Not before there is a slab: until then the request may still be refused.
            ticket.reply(*taken)
            first = await self._prefill(ticket)
            await self._answer(ticket, first)
        except _Gone as gone:
            self._append(ev.RequestCancelled(session=self.id, request=ticket.id, stage=gone.stage))
        # The client has its answer; what follows is the session's own time.
        ticket.left_turn.set()
        await self._settle()
        await self._write_through()

    async def _load_blocks(self, ticket: Ticket) -> None:
        """
        Bring sealed blocks from files into memory that the decision could reuse.
        """
        house, prepared = self._house, ticket.prepared
        state = house.sequencer.state
        idle = ticket.gone is not None or state.admission_bug is not None
        if idle or not prepared.ask.cache_prompt or not self._serves(ticket):
            return
        tokens = len(prepared.prompt_ids)
        session = state.sessions.get(SessionId(self.id))
        chain = paths.chain_to_load(
            state, session, prepared.keys, tokens, tokens + prepared.max_tokens
        )
        await house.memory.load(chain, lambda: ticket.gone is None)

    def _serves(self, ticket: Ticket) -> bool:
        """
        Whether a request is still this session's to serve.
        """
        chosen = self._house.sequencer.choose(ticket.prepared.ask)
        return chosen == self.id or (chosen is None and not self.opened)

    def _take(self, ticket: Ticket) -> tuple[int, Accepted] | None:
        """
        Take a request in hand and select its path, where it is still this session's to serve.

        Returns:
            What to tell its client and the receipt that it waits for; None for another's request.
        """
        house, prepared = self._house, ticket.prepared
        if not self._serves(ticket):
            return None
        opened = None
        if not self.opened:
            opened = ev.SessionOpened(
                session=self.id,
                tenant=self._tenant,
                fingerprint=prepared.ask.fingerprint,
                group=self._group,
                named=self._named,
            )
        self.opened = True
        ids = prepared.prompt_ids

        def around(token: int) -> str:
            return house.tokenizer.decode(ids[max(0, token - 8) : token + 8])

        receipt = house.sequencer.begin(self._received(ticket), opened, around)
        self._seq += 2 if opened is None else 3
        ticket.accepted = True
        path = self._path
        ticket.prefilled_tokens = path.reused_tokens
        return receipt, Accepted(
            request=ticket.id,
            session=self.id,
            path=path.path,
            reason=path.reason,
            prompt_tokens=len(prepared.prompt_ids),
            cached_tokens=path.reused_tokens,
            seed=prepared.seed,
            created_s=ticket.created_s,
        )

    def _received(self, ticket: Ticket) -> ev.RequestReceived:
        """
        The request, told by what is new against the session's last one.
        """
        prepared, command = ticket.prepared, ticket.prepared.command
        sessions = self._house.sequencer.state.sessions
        last = self._session.last if self.id in sessions else None
        kept_tokens = paths.common_length(last.prompt_ids, prepared.prompt_ids) if last else 0
        kept_keys = _common_parts(last.prompt_keys, prepared.keys) if last else 0
        kept_parts = _common_parts(last.chain, prepared.chain) if last else 0
        return ev.RequestReceived(
            session=self.id,
            request=ticket.id,
            protocol=command.protocol,
            tenant=command.tenant,
            fingerprint=prepared.ask.fingerprint,
            session_name=command.session_name,
            group=command.group,
            cache_prompt=command.cache_prompt,
            base_request=last.request if last else None,
            kept_parts=kept_parts,
            new_parts=prepared.chain[kept_parts:],
            kept_tokens=kept_tokens,
            new_ids=prepared.prompt_ids[kept_tokens:],
            kept_keys=kept_keys,
            new_keys=prepared.keys[kept_keys:],
            prompt_tokens=len(prepared.prompt_ids),
            max_tokens=prepared.max_tokens,
            sampling=attrs.asdict(command.sampling),
            seed=prepared.seed,
            seed_given=command.seed is not None,
            asked_model=command.asked_model,
        )

    async def _lay_stones(self, ticket: Ticket) -> None:
        """
        Bring the slab to what the decision reuses: trim it, or open one, and share blocks into it.
        """
        path = self._path
        keep = path.kept_blocks * self._chunk
        needed = len(ticket.prepared.prompt_ids) + ticket.prepared.max_tokens
        if self._session.slab is not None and self._session.slab.capacity_tokens < needed:
            await self._release_slab("too small for the prompt and its answer")
        if self._session.slab is None:
            await self._acquire_slab(ticket)
        if self._session.cached_tokens > keep:
            await self._trim(keep, "not shared with this request")
        if path.shared_blocks:
            keys = self._request.prompt_keys[path.kept_blocks :][: path.shared_blocks]
            await self._share(ticket, keys, keep)

    async def _prefill(self, ticket: Ticket) -> Drawn:
        """
        Run the canonical passes over what is not there, sealing each full chunk.
        """
        prompt = self._request.prompt_ids
        wanted = self._wanted(ticket)
        drawn = None
        for start, end in passes(self._session.cached_tokens, len(prompt), self._chunk):
            self._look(ticket, "prefill")
            report = await self._house.engine.prefill(
                self._chunk_pass(prompt[start:end], wanted if end == len(prompt) else None),
                lambda report: self._extended(report, "prefill", ticket.id),
            )
            ticket.prefilled_tokens = end
            if end - start == self._chunk and self._house.facts.reusable:
                key = self._request.prompt_keys[start // self._chunk]
                if self._can_seal(key, start):
                    await self._seal(key, start, end)
            drawn = report.drawn
        assert drawn is not None
        self._look(ticket, "prefill")
        return drawn

    async def _answer(self, ticket: Ticket, first: Drawn) -> None:
        """
        Decode to the end of the answer, releasing text as it becomes certain.
        """
        answer = Answer(
            ticket,
            self._path,
            AnswerText(self._house.detokenizer, ticket.prepared.command.stop),
            self._house.tokenizer,
            self._house.facts.eos_ids,
            self._append,
        )
        if not answer.take([first]):
            decoding, reports = self._house.engine.decode(
                _rows(self._slab_id, self._wanted(ticket)),
                token=first.token,
                left=ticket.prepared.max_tokens - 1,
                ends=self._house.facts.eos_ids,
            )
            await self._follow(ticket, answer, decoding, reports)
        answer.finish()

    async def _follow(
        self,
        ticket: Ticket,
        answer: Answer,
        decoding: Decoding,
        reports: trio.MemoryReceiveChannel[PassReport | BaseException | None],
    ) -> None:
        """
        Record passes and release their tokens, those that came together as one.
        """
        ended = False
        try:
            while not ended:
                batch: list[PassReport] = []
                ended, failure = into(batch, await reports.receive())
                while not ended:
                    try:
                        ended, failure = into(batch, reports.receive_nowait())
                    except trio.WouldBlock:
                        break
                self._decoded(batch, ticket.id)
                if failure is not None:
                    raise failure
                if answer.ended:
                    continue  # these passes were under way when the answer ended; they are trimmed
                drawn = [report.drawn for report in batch if report.drawn is not None]
                if answer.take(drawn) or ticket.gone is not None:
                    self._house.engine.stop(decoding)
        finally:
            if not ended:
                self._house.engine.stop(decoding)
                with trio.CancelScope(shield=True):
                    while not ended:
                        ended, _ = into([], await reports.receive())
        if not answer.ended:
            self._look(ticket, "decode")

    async def _settle(self) -> None:
        """
        Compute canonical KV over the answer, a chunk at a time, until somebody wants something.
        """
        session, facts = self._session, self._house.facts
        assert session.last is not None
        sealed = len(session.slab_keys)
        if session.slab is not None and not facts.reusable:
            await self._release_slab("this model's caches cannot be cut back")
        elif session.slab is not None and session.cached_tokens > sealed * self._chunk:
            await self._trim(sealed * self._chunk, "decoded or partial, so not canonical")
        sequence = session.last.sequence
        # A prompt that was cut off is not read to its end for nobody.
        full = len(sequence) // self._chunk if session.last.answered else sealed
        complete = True
        if session.slab is not None and facts.reusable and sealed < full:
            keys = block_keys(
                secret=self._house.secret,
                fingerprint=facts.fingerprint,
                tenant=self._tenant,
                ids=sequence,
                chunk_tokens=self._chunk,
                known=session.last.prompt_keys,
            )
            for place in range(sealed, full):
                start, end = place * self._chunk, (place + 1) * self._chunk
                if not self._can_seal(keys[place], start):
                    break
                report = await self._house.engine.settle(
                    self._chunk_pass(sequence[start:end], None),
                    lambda report: self._extended(report, "settle", None),
                    self._undisturbed,
                )
                if report is None:
                    complete = False
                    break
                await self._seal(keys[place], start, end)
        await self._rest(complete)

    async def _write_through(self) -> None:
        """
        Have the blocks of this conversation written to files while nobody wants anything, so that a
        server that is lost loses little.
        """
        for key in self._session.slab_keys:
            if not await self._house.memory.write_through(key, self._undisturbed):
                return

    # --- mutations of the cache, each with its event ------------------------------------------

    async def _acquire_slab(self, ticket: Ticket) -> None:
        def record(report: SlabReport) -> None:
            self._append(
                ev.SlabAcquired(
                    session=self.id,
                    slab=report.slab,
                    capacity_tokens=report.capacity_tokens,
                    bytes=report.bytes,
                    pool_slabs=report.pool_slabs,
                    pool_bytes=report.pool_bytes,
                )
            )

        capacity = ticket.prepared.capacity_tokens
        if not await self._house.memory.open_slab(capacity, record):
            ticket.fail(
                NoMemory(
                    f"a slab of {capacity} tokens does not fit beside those in use; "
                    "try again, or ask for a smaller max_tokens",
                    retry_after_s=5,
                )
            )
            raise _Gone("no_memory")

    async def _rest(self, complete: bool) -> None:
        """
        Come to rest with what the slab holds.
        """

        def record(held_tokens: int) -> None:
            self._append(
                ev.SessionSettled(session=self.id, canonical_tokens=held_tokens, complete=complete)
            )

        if self._session.slab is None:
            record(0)
            return
        slab = self._slab_id
        await self._house.engine.call(lambda mlx: mlx.held_tokens(slab), record)

    async def _release_slab(self, reason: str) -> None:
        slab = self._slab_id

        def record(report: SlabReport) -> None:
            self._append(
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

    async def _trim(self, end: int, reason: str) -> None:
        slab = self._slab_id

        def record(report: TrimReport) -> None:
            self._append(
                ev.CacheTrimmed(
                    session=self.id,
                    held_tokens=report.held_tokens,
                    end=end,
                    coverage=report.coverage,
                    reason=reason,
                )
            )

        await self._house.engine.call(lambda mlx: mlx.trim(slab, end), record)

    async def _share(self, ticket: Ticket, keys: Sequence[str], start: int) -> None:
        slab = self._slab_id

        def record(report: ShareReport) -> None:
            self._append(
                ev.BlocksShared(
                    session=self.id,
                    request=ticket.id,
                    start=start,
                    end=start + len(keys) * self._chunk,
                    keys=tuple(keys),
                    digests=report.digests,
                    coverage=report.coverage,
                    duration_us=report.duration_us,
                )
            )

        await self._house.engine.call(lambda mlx: mlx.share(slab, keys, start), record)

    def _can_seal(self, key: str, start: int) -> bool:
        """
        Whether a chunk may become a block: not one in doubt, and not one behind it. The passes of a
        block in doubt run like any other; its digest on record stays the first one.
        """
        known = self._house.sequencer.state.blocks.get(key)
        unbroken = len(self._session.slab_keys) * self._chunk == start
        return unbroken and (known is None or known.bug_id is None)

    async def _seal(self, key: str, start: int, end: int) -> None:
        def record(report: SealReport) -> None:
            session = self._session
            self._append(
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

        await self._house.memory.seal(self._slab_id, key, start, end, record)

    def _extended(self, report: PassReport, step: ev.Step, request: str | None) -> PassReport:
        drawn = report.drawn
        self._append(
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

    def _decoded(self, batch: Sequence[PassReport], request: str) -> None:
        """
        Decode steps that came together: one event for all whose measures follow each other.
        """
        for run in runs(batch):
            drawn = [report.drawn for report in run if report.drawn is not None]
            self._append(
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

    # --- small things -----------------------------------------------------------------------------

    @property
    def _session(self) -> Session:
        return self._house.sequencer.session(self.id)

    @property
    def _request(self) -> OpenRequest:
        request = self._session.request
        assert request is not None
        return request

    @property
    def _path(self) -> ev.PathSelected:
        path = self._request.path
        assert path is not None
        return path

    @property
    def _slab_id(self) -> int:
        slab = self._session.slab
        assert slab is not None
        return slab.id

    @property
    def _chunk(self) -> int:
        return self._house.facts.chunk_tokens

    def _append(self, *events: ev.Event) -> int:
        receipt = self._house.sequencer.append(*events, expected_seq=self._seq + 1)
        self._seq += len(events)
        return receipt

    def _wanted(self, ticket: Ticket) -> Wanted:
        command = ticket.prepared.command
        return Wanted.first(
            command.sampling,
            seed=ticket.prepared.seed,
            prompt_ids=self._request.prompt_ids,
            top=command.top_logprobs or 0,
        )

    def _chunk_pass(self, ids: Sequence[int], wanted: Wanted | None) -> Callable[[Any], PassReport]:
        slab = self._slab_id

        def run(mlx: Any) -> PassReport:
            report: PassReport = mlx.run_chunk(slab, ids, wanted)
            return report

        return run

    def _undisturbed(self) -> bool:
        """
        Whether nobody wants anything of this session. Asked on the engine's thread too.
        """
        inbox = self._inbox.statistics()
        return inbox.current_buffer_used == 0 and inbox.open_send_channels > 0

    def _look(self, ticket: Ticket, stage: ev.CancelStage) -> None:
        """
        Go on only while somebody waits.
        """
        if ticket.gone is not None:
            raise _Gone(_STAGES.get(ticket.gone, stage))


def _rows(slab: int, wanted: Wanted) -> Callable[[int], DecodeRow]:
    """
    Makes the rows of an answer, each of the token that the one before it gave.
    """

    def row(token: int) -> DecodeRow:
        nonlocal wanted
        wanted = wanted.after(token)
        return DecodeRow(slab=slab, token=token, wanted=wanted)

    return row


def _common_parts(one: Sequence[Any], other: Sequence[Any]) -> int:
    length = 0
    for mine, theirs in zip(one, other, strict=False):
        if mine != theirs:
            break
        length += 1
    return length
