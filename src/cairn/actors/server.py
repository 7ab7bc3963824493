"""
The running server, as the HTTP layer sees it; and the supervisor of everything in the room.

The journal writer and the engine stand beside the sessions, not above them: when one of the two
dies nothing may be answered any more, and the server stops. A session that dies ends alone.
"""

from __future__ import annotations

import collections
import contextlib
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import attrs
import structlog
import trio

from cairn.actors.engine import EngineThread
from cairn.actors.memory import Memory
from cairn.actors.messages import (
    Broken,
    Finished,
    Generate,
    JournalFull,
    PromptRefused,
    PromptTooLong,
    QueueFull,
    RefusalError,
    Reply,
    ServerFacts,
    Statistics,
    Stopping,
    Waiting,
)
from cairn.actors.outside import new_id, wall_clock_us
from cairn.actors.request_log import RequestLog
from cairn.actors.sequencer import Sequencer
from cairn.actors.session import House, SessionActor
from cairn.actors.ticket import Prepared, Ticket
from cairn.actors.writer import JournalWriter, Stall, WriterDied
from cairn.engine import prompt as prompts
from cairn.engine.reports import ModelFacts
from cairn.engine.schedule import slab_capacity
from cairn.journal import events as ev
from cairn.journal import eviction
from cairn.journal.events import Recorded
from cairn.journal.keys import block_keys
from cairn.journal.paths import Ask
from cairn.journal.state import SessionId

log = structlog.get_logger("cairn")

_REJECTED = {
    "client": (499, "client_gone"),
    "server_stopped": (503, "server_stopping"),
    "journal_full": (503, "journal_full"),
}
"""
Why nobody waits for a request that no session has taken: how that goes on record.
"""


@attrs.frozen(kw_only=True)
class Limits:
    """
    What the server takes on.

    Attributes:
        queue: requests that may wait for a session.
        sessions: sessions that are remembered.
        max_tokens: the longest answer where the client names none.
        heartbeat_s: how often a client that waits hears that it still does.
        drain_s: how long running answers may go on when the server is told to stop.
    """

    queue: int = 64
    sessions: int = 1000
    max_tokens: int = 1024
    heartbeat_s: float = 10.0
    drain_s: float = 30.0


class Server:
    """
    Takes requests, finds each its session, and hands back what the session says.
    """

    def __init__(
        self,
        *,
        sequencer: Sequencer,
        writer: JournalWriter,
        engine: EngineThread,
        facts: ModelFacts,
        tokenizer: Any,
        secret: bytes,
        limits: Limits,
        kv_cache: str,
    ) -> None:
        """
        Args:
            tokenizer: mlx-lm's wrapper.
            secret: the tenant's secret, for keys.
            kv_cache: the cache classes in use, for people.
        """
        self._sequencer = sequencer
        self._writer = writer
        self._engine = engine
        self._model = facts
        self._tokenizer = tokenizer
        self._limits = limits
        self._secret = secret
        self._memory = Memory(sequencer, engine, facts.kv_token_bytes)
        self._memory.give_up = self._give_up_slab
        self._house = House(
            sequencer=sequencer,
            engine=engine,
            memory=self._memory,
            facts=facts,
            tokenizer=tokenizer,
            detokenizer=tokenizer.detokenizer,
            secret=secret,
        )
        writer.observe(RequestLog())
        writer.on_stall, writer.on_room = self._stalled, self._has_room
        self._refused_for_room = 0
        self._actors: dict[str, SessionActor] = {}
        self._running = trio.CapacityLimiter(facts.decode_rows)
        # One at a time: a tokenizer is not made for several threads.
        self._tokenizing = trio.CapacityLimiter(1)
        self._tickets: dict[str, Ticket] = {}
        self._ticket_gone = trio.lowlevel.ParkingLot()
        self._stopping = False
        self._idle = trio.Event()
        self._nursery: trio.Nursery | None = None
        self.facts = ServerFacts(
            model=facts.name,
            fingerprint=facts.fingerprint,
            context_tokens=facts.context_tokens,
            chunk_tokens=facts.chunk_tokens,
            decode_rows=facts.decode_rows,
            kv_cache=kv_cache,
            started_s=wall_clock_us() // 1_000_000,
            default_max_tokens=limits.max_tokens,
            vocabulary_tokens=facts.vocabulary_tokens,
            defaults=facts.defaults,
            template=facts.template,
        )

    # --- for the HTTP layer --------------------------------------------------------------------

    def observe(self, observer: Callable[[Recorded], None]) -> None:
        """
        Have every event passed on once it is committed, in order.
        """
        self._writer.observe(observer)

    def statistics(self) -> Statistics:
        """
        The server at this moment.
        """
        state = self._sequencer.state
        lives = collections.Counter(str(session.life) for session in state.sessions.values())
        held = sum(session.cached_tokens for session in state.sessions.values())
        model = state.model
        return Statistics(
            sessions=dict(lives),
            queued=sum(not ticket.accepted for ticket in self._tickets.values()),
            running=len(state.requests),
            slabs=state.pool.slabs,
            slabs_total=model.pool_slabs if model else 0,
            slab_bytes=state.pool.slab_bytes,
            slab_bytes_total=model.pool_bytes if model else 0,
            blocks=state.pool.blocks,
            block_bytes=state.pool.block_bytes,
            block_bytes_total=model.blocks_bytes if model else 0,
            disk_blocks=state.pool.disk_blocks,
            disk_bytes=state.pool.disk_bytes,
            disk_bytes_total=state.disk_budget,
            kv_live_bytes=held * self._model.kv_token_bytes,
            journal_position=self._writer.committed,
            bugs=len(state.faults),
            admission_bug=state.admission_bug,
            journal_full=self._writer.stalled,
        )

    def generate(self, command: Generate) -> AbstractAsyncContextManager[AsyncIterator[Reply]]:
        """
        Ask for an answer. Leaving the context early cancels the request.

        Raises:
            RefusalError: on entering, where the request is not taken; from the iteration, where it
                ends without an answer.
        """
        return self._generate(command)

    @contextlib.asynccontextmanager
    async def _generate(self, command: Generate) -> AsyncIterator[AsyncIterator[Reply]]:
        request_id = new_id()
        ticket = None
        try:
            await self._admit(command, request_id)
            prepared = await self._prepare(command)
            await self._admit(command, request_id)
            ticket = Ticket(request_id, prepared, wall_clock_us() // 1_000_000)
            assert self._nursery is not None
            self._tickets[ticket.id] = ticket
            self._nursery.start_soon(self._dispatch, ticket)
            yield _Replies(ticket, self._writer, self._limits.heartbeat_s)
        except RefusalError as refusal:
            refusal.request = request_id
            refusal.session = command.session_name
            raise
        finally:
            if ticket is not None:
                ticket.leave("client")

    # --- life ------------------------------------------------------------------------------

    async def find_blocks(
        self, folder: Path, budget_bytes: int, run: str, earlier: Collection[str]
    ) -> None:
        """
        Look for the block files of earlier runs. Before the first request.

        Args:
            run: this run of the server.
            earlier: those of this journal before.
        """
        fingerprint = self._model.fingerprint
        await self._memory.open_files(folder, fingerprint, budget_bytes, run, earlier)

    async def write_blocks(self, progress: Callable[[int, int], None]) -> None:
        """
        Write the blocks in memory to files, as far as the limit of draining goes. After the last
        request.
        """
        if self._writer.stalled:
            return  # without their rows nobody would know what the files are
        with trio.move_on_after(self._limits.drain_s) as limit:
            await self._memory.write_all(progress)
        if limit.cancelled_caught:
            log.warning("not all blocks were written", limit_s=self._limits.drain_s)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """
        Serve until ``drain`` has ended the last request.
        """
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            task_status.started()
            await self._idle.wait()
            for actor in self._actors.values():
                actor.close()

    async def drain(self) -> None:
        """
        Take no more requests, let those that run come to their end, and cut off what takes longer
        than the limit. Everything that happened is in the journal then.
        """
        self._stopping = True
        with trio.move_on_after(self._limits.drain_s):
            await self._no_tickets()
        self._end_all(
            "server_stopped", Stopping("the server was stopped before the answer was complete")
        )
        await self._no_tickets()
        self._idle.set()

    def _end_all(self, why: str, refusal: RefusalError) -> None:
        """
        End all requests that are not answered yet.
        """
        for ticket in list(self._tickets.values()):
            ticket.leave(why)
            ticket.fail(refusal)

    def _stalled(self) -> None:
        """
        Nothing can be put on record: what is under way ends, at its next step.
        """
        self._refused_for_room = 0
        self._end_all("journal_full", JournalFull())

    def _has_room(self, stall: Stall) -> None:
        self._sequencer.append(
            ev.JournalStalled(
                fact=stall.fact,
                rows_waiting=stall.rows_waiting,
                requests_refused=self._refused_for_room,
                duration_us=stall.duration_us,
            )
        )

    async def _no_tickets(self) -> None:
        while self._tickets:
            await self._ticket_gone.park()

    # --- a request's way -------------------------------------------------------------------------

    async def _admit(self, command: Generate, request_id: str) -> None:
        """
        Turn a request away where it cannot be taken now.
        """
        state = self._sequencer.state
        if self._stopping:
            raise Stopping("the server is stopping; try again in a moment")
        if self._writer.stalled:
            # Counted only: what waits for room in memory is bounded by the requests under way.
            self._refused_for_room += 1
            raise JournalFull()
        bug_id = state.admission_bug or self._quarantine_of(command.session_name)
        if bug_id is not None:
            # Who hears of a bug can look it up.
            await _unless_dead(self._writer.wait_all_committed())
            raise Broken(bug_id)
        # The limiter counts a row as taken a step before its ticket is seated, so it is not asked.
        seated = sum(ticket.seated for ticket in self._tickets.values())
        waiting = len(self._tickets) - seated
        if waiting >= self._limits.queue + self._model.decode_rows - seated:
            self._sequencer.append(
                ev.RequestRejected(request=request_id, status=429, code="queue_full")
            )
            raise QueueFull(
                f"no row is free and {waiting} requests wait already; try again in a few seconds",
                retry_after_s=5,
            )

    async def _prepare(self, command: Generate) -> Prepared:
        """
        Everything that follows from a request alone: token ids, chain, keys, limits.
        """
        try:
            return await trio.to_thread.run_sync(
                self._prepared, command, limiter=self._tokenizing, abandon_on_cancel=False
            )
        except prompts.TemplateError as error:
            raise PromptRefused(str(error)) from error

    def _prepared(self, command: Generate) -> Prepared:
        ids, parts = self._read(command)
        if not ids:
            raise PromptRefused("the prompt is empty; there is nothing to answer")
        context = self._model.context_tokens
        if len(ids) >= context:
            raise PromptTooLong(len(ids), context)
        chain = prompts.chain_of(parts, secret=self._secret, tenant=command.tenant)
        keys = block_keys(
            secret=self._secret,
            fingerprint=self._model.fingerprint,
            tenant=command.tenant,
            ids=ids,
            chunk_tokens=self._model.chunk_tokens,
        )
        asked = command.max_tokens or self._limits.max_tokens
        max_tokens = min(asked, context - len(ids))
        return Prepared(
            command=command,
            ask=Ask(
                tenant=command.tenant,
                fingerprint=self._model.fingerprint,
                chain=chain,
                session_name=command.session_name,
                group=command.group,
                cache_prompt=command.cache_prompt,
            ),
            prompt_ids=ids,
            chain=chain,
            keys=keys,
            seed=secrets.randbits(63) if command.seed is None else command.seed,
            max_tokens=max_tokens,
            capacity_tokens=slab_capacity(len(ids) + max_tokens, self._model.chunk_tokens, context),
        )

    def _read(self, command: Generate) -> tuple[tuple[int, ...], tuple[tuple[str, bytes], ...]]:
        """
        Token ids and parts of a request.
        """
        if command.conversation is not None:
            text = prompts.render(self._tokenizer, command.conversation)
            ids = prompts.encode(self._tokenizer, text, special=False)
            return ids, prompts.conversation_parts(command.conversation)
        if isinstance(command.prompt, str):
            ids = prompts.encode(self._tokenizer, command.prompt, special=True)
            return ids, (("prompt", command.prompt.encode()),)
        ids = tuple(command.prompt or ())
        return ids, (("prompt", repr(ids).encode()),)

    async def _dispatch(self, ticket: Ticket) -> None:
        """
        Bring a ticket to a session, again where the rules choose another one in the meantime.
        """
        try:
            with ticket.waiting:
                name = ticket.prepared.command.session_name
                if name is not None:
                    async with self._actor(name, ticket, named=True).line:
                        await self._in_turn(ticket)
                else:
                    await self._in_turn(ticket)
        finally:
            del self._tickets[ticket.id]
            self._ticket_gone.unpark_all()
            self._dismiss_unopened(ticket.prepared.command.session_name)
            if not ticket.accepted and ticket.gone is not None:
                status, code = _REJECTED[ticket.gone]
                self._sequencer.append(
                    ev.RequestRejected(request=ticket.id, status=status, code=code)
                )

    async def _in_turn(self, ticket: Ticket) -> None:
        async with self._running:
            ticket.seated = True
            while True:
                ticket.rerouted = False
                name = ticket.prepared.command.session_name
                bug_id = self._quarantine_of(name)
                if bug_id is not None:
                    ticket.fail(Broken(bug_id))
                    break
                chosen = self._sequencer.choose(ticket.prepared.ask)
                actor = self._actor(chosen or name or new_id(), ticket, named=name is not None)
                # A session that has the ticket looks itself whether somebody still waits.
                with trio.CancelScope(shield=True):
                    await actor.serve(ticket)
                if name is None:
                    self._dismiss_unopened(actor.id)
                if not ticket.rerouted:
                    break
                # Serving was shielded: who left since, or ends with the server, goes no further.
                await trio.lowlevel.checkpoint_if_cancelled()
        self._forget_sessions()

    def _quarantine_of(self, name: str | None) -> str | None:
        """
        The bug that took a named session out of service, if one did.
        """
        named = self._sequencer.state.sessions.get(SessionId(name)) if name else None
        return named.bug_id if named is not None else None

    def _dismiss_unopened(self, session_id: str | None) -> None:
        """
        End an actor that never came to be a session, and that nobody waits for.
        """
        actor = self._actors.get(session_id) if session_id is not None else None
        if actor is not None and not actor.opened and not actor.line.locked():
            del self._actors[actor.id]
            actor.close()

    def _actor(self, session_id: str, ticket: Ticket, *, named: bool) -> SessionActor:
        """
        The actor of a session, which begins to live where it did not.
        """
        actor = self._actors.get(session_id)
        if actor is None or actor.ended:
            command = ticket.prepared.command
            actor = SessionActor(
                session_id, self._house, tenant=command.tenant, group=command.group, named=named
            )
            self._actors[session_id] = actor
            assert self._nursery is not None
            self._nursery.start_soon(self._live, actor)
        return actor

    async def _live(self, actor: SessionActor) -> None:
        """
        A session's task. What it could not handle itself ends it, and nobody else.
        """
        try:
            await actor.run()
        except WriterDied:
            pass  # no fault of the session's; what killed the writer stops the server, and says so
        except Exception:
            log.exception("session ended", session=actor.id)
        finally:
            if self._actors.get(actor.id) is actor:
                del self._actors[actor.id]

    async def _give_up_slab(self, session_id: str) -> None:
        actor = self._actors.get(session_id)
        if actor is None:
            raise LookupError(f"session {session_id} holds a slab and has no actor")
        await actor.give_up_slab()

    def _forget_sessions(self) -> None:
        """
        Keep the number of remembered sessions bounded.
        """
        while session := eviction.session_to_forget(self._sequencer.state, self._limits.sessions):
            actor = self._actors.pop(session.id, None)
            if actor is not None:
                actor.close()
            self._sequencer.append(
                ev.SessionClosed(session=session.id, reason="least recently used")
            )


class _Replies:
    """
    What a session says to one request, each reply once it is committed.
    """

    def __init__(self, ticket: Ticket, writer: JournalWriter, heartbeat_s: float) -> None:
        self._ticket = ticket
        self._writer = writer
        self._heartbeat_s = heartbeat_s
        self._finished = False

    def __aiter__(self) -> _Replies:
        return self

    async def __anext__(self) -> Reply:
        if self._finished:
            raise StopAsyncIteration
        ticket = self._ticket
        with trio.move_on_after(self._heartbeat_s) as waited:
            item = await ticket.replies.receive()
        if waited.cancelled_caught:
            return Waiting(queued=not ticket.accepted, prefilled_tokens=ticket.prefilled_tokens)
        self._finished = True
        if isinstance(item, RefusalError):
            if isinstance(item, Broken):
                await _unless_dead(self._writer.wait_all_committed())
            raise item
        await _unless_dead(self._writer.wait_committed(item.receipt))
        self._finished = isinstance(item.reply, Finished)
        return item.reply


async def _unless_dead(committed: Awaitable[None]) -> None:
    """
    Wait for a commit. Where the writer has died the server stops, and so do its answers.
    """
    try:
        await committed
    except WriterDied as died:
        raise Stopping("the server stops, since its journal cannot be written") from died
