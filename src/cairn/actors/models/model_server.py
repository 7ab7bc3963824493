"""
Serves requests over one loaded model, and supervises its sessions.

The journal writer and the engine run beside the sessions, not above them: if one of the two dies,
nothing may be answered any more and the server stops. A session that dies ends alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from pathlib import Path
from typing import Any, TypeVar

import attrs
import structlog
import trio

from cairn.actors.agents.agents import StoredAgents
from cairn.actors.clock import new_id, wall_clock_us
from cairn.actors.errors import (
    Broken,
    JournalFull,
    QueueFull,
    RefusalError,
    Stopping,
    TimedOut,
    TooManyAnswers,
)
from cairn.actors.idle.activity import Activity
from cairn.actors.idle.expiry import Expiry
from cairn.actors.idle.shadow_check import ShadowCheck
from cairn.actors.memory import Memory
from cairn.actors.requests.context import RequestContext
from cairn.actors.requests.limits import Limits
from cairn.actors.requests.messages import Generate, Reply, ServerFacts, Statistics
from cairn.actors.requests.prepare import Preparer
from cairn.actors.requests.replies import Replies, unless_dead
from cairn.actors.requests.ticket import Prepared, Ticket, leave_together
from cairn.actors.sequencer import Sequencer
from cairn.actors.sessions.context import SessionContext
from cairn.actors.sessions.next_prompt import NextPrompt
from cairn.actors.sessions.registry import Sessions
from cairn.actors.statistics import statistics_of
from cairn.actors.threads.engine import EngineThread
from cairn.actors.threads.journal_stalls import Stalls
from cairn.actors.threads.writer import JournalWriter
from cairn.engine.prompt import template as prompts
from cairn.engine.reports import ModelFacts
from cairn.journal import events as ev
from cairn.journal.state import SessionId
from cairn.journal.tenants import session_id

T = TypeVar("T")

log = structlog.get_logger("cairn")

REJECTED = {
    "client": (499, "client_gone"),
    "timed_out": (504, "timed_out"),
    "sibling_failed": (424, "sibling_failed"),
    "server_stopped": (503, "server_stopping"),
    "journal_full": (503, "journal_full"),
}
"""Why nobody waits for a request that no session has taken: how that goes on record."""


class ModelServer:
    """Takes requests, finds a session for each, and hands back the session's replies."""

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
        prewarm: bool,
        shadow_share: float = 0.0,
        agents: StoredAgents,
        stalls: Stalls,
        activity: Activity,
    ) -> None:
        """
        Args:
            tokenizer: mlx-lm's wrapper.
            secret: the data directory's, from which those of tenants follow.
            kv_cache: the cache classes in use, for people.
            anticipate: whether what the next prompt begins with is computed before it comes.
            shadow_share: the share of answers that are computed once more in idle time.
            agents: those of this run; they hear here which context there is, and how a session
                ends.
        """
        self.sequencer = sequencer
        self.writer = writer
        self.engine = engine
        self._model = facts
        self.preparer = Preparer(
            sequencer=sequencer,
            facts=facts,
            tokenizer=tokenizer,
            secret=secret,
            max_tokens=limits.max_tokens,
        )
        self._limits = limits
        rows = facts.policy.rows if facts.policy is not None else None
        self.memory = Memory(
            sequencer,
            engine,
            facts.kv_token_bytes,
            rows,
            state_bytes=facts.state_bytes,
            checkpoints=facts.checkpoints,
            growth=facts.growth,
        )
        next_prompt = NextPrompt(tokenizer, self.preparer.encoder, self.preparer.tokenizing)
        context = SessionContext(
            sequencer=sequencer,
            engine=engine,
            memory=self.memory,
            facts=facts,
            tokenizer=tokenizer,
            detokenizer=tokenizer.detokenizer,
            secret=secret,
            activity=activity,
            patience_s=limits.patience_s,
            next_prompt=next_prompt if prewarm else None,
            slab_idle_s=limits.slab_idle_s,
            ttl_s=limits.ttl_s,
            turns=agents.agents.turns,
        )
        self.sessions = Sessions(context, limits)
        self.memory.give_up = self.sessions.give_up_slab
        self._agents = agents
        self._stalls = stalls
        self._running = trio.CapacityLimiter(facts.decode_rows)
        self._tickets: dict[str, Ticket] = {}
        self.activity = activity
        self._stopping = False
        self._idle = trio.Event()
        self._nursery: trio.Nursery | None = None
        self.expiry = Expiry(
            sequencer=sequencer,
            memory=self.memory,
            activity=activity,
            close=self.sessions.close_expired,
        )
        self.shadow: ShadowCheck | None = None
        if shadow_share > 0:
            self.shadow = ShadowCheck(
                sequencer=sequencer,
                engine=engine,
                memory=self.memory,
                facts=facts,
                secret=secret,
                share=shadow_share,
                activity=activity,
                taken_out=self.sessions.report_quarantine,
                matcher=self.preparer.matcher,
            )
            self.memory.give_way = self.shadow.give_way
        model = sequencer.state.model
        self.facts = ServerFacts(
            model=facts.name,
            fingerprint=facts.fingerprint,
            context_tokens=facts.context_tokens,
            block_tokens=facts.block_tokens,
            decode_rows=facts.decode_rows,
            kv_cache=kv_cache,
            started_s=wall_clock_us() // 1_000_000,
            default_max_tokens=limits.max_tokens,
            vocabulary_tokens=facts.vocabulary_tokens,
            defaults=facts.defaults,
            template=facts.template,
            switches=prompts.switches(tokenizer, facts.template),
            dtype=facts.dtype,
            policy=facts.policy,
            min_cache_tokens=model.min_cache_tokens if model is not None else 0,
            model_context_tokens=facts.model_context_tokens,
        )

    def statistics(self) -> Statistics:
        """The server at this moment."""
        return statistics_of(
            self.sequencer,
            self.writer,
            self.engine,
            queued=sum(not ticket.accepted for ticket in self._tickets.values()),
            token_bytes=self._model.kv_token_bytes,
            state_bytes=self._model.state_bytes,
            growth=self._model.growth,
            encoder=self.preparer.encoder,
            text_cache_bytes=self._agents.kept.remembered.bytes,
        )

    @contextlib.asynccontextmanager
    async def generate(self, command: Generate, tenant: str) -> AsyncIterator[AsyncIterator[Reply]]:
        """
        Ask for an answer. Leaving the context early cancels the request.

        Raises:
            RefusalError: on entering, where the request is not taken; from the iteration, where it
                ends without an answer.
        """
        arrival = RequestContext(new_id(), tenant, self._limits)
        tickets: Sequence[Ticket] = ()
        try:
            tickets = await self.take(command, arrival)
            yield self.replies(tickets, arrival)
        except RefusalError as refusal:
            arrival.name(refusal, command)
            raise
        finally:
            leave_together(tickets)

    async def count(self, command: Generate, tenant: str) -> int:
        """
        The tokens of a prompt, however long it is. Nothing is on record of it.

        Raises:
            RefusalError: it cannot be rendered or tokenised, or too many wait for that already.
        """
        deadline = trio.current_time() + self._limits.request_s
        self._check_queue(command, None)
        with self.activity.preparing():
            return await self._in_time(deadline, self.preparer.count(command, tenant), None)

    def _ticketed(self, request_id: str, prepared: Sequence[Prepared]) -> list[Ticket]:
        """A ticket for each answer of a request. The first one has the request's own id."""
        created_s = wall_clock_us() // 1_000_000
        stir = self.activity.changed
        tickets = [Ticket(request_id, prepared[0], created_s, on_leave=stir)]
        for choice, other in enumerate(prepared[1:], start=1):
            tickets.append(
                Ticket(new_id(), other, created_s, choice=choice, first=tickets[0], on_leave=stir)
            )
        self._tickets.update((ticket.id, ticket) for ticket in tickets)
        self.activity.arrive(len(tickets))
        return tickets

    async def take(self, command: Generate, arrival: RequestContext) -> Sequence[Ticket]:
        """
        Take a request, and begin to serve it. Who asked is to leave the tickets in the end: one for
        each answer.

        Raises:
            RefusalError: it is not taken.
        """
        command = self._named(command, arrival.tenant)
        await self._admit(command)
        self._check_queue(command, arrival)
        self._agents.begin(command, arrival)
        try:
            with self.activity.preparing(command.choices):
                prepared = await self._in_time(
                    arrival.deadline, self.preparer.choices(command, arrival.tenant), arrival
                )
                await self._admit(command)
                tickets = self._ticketed(arrival.request, prepared)
        except BaseException:
            self._agents.leave(arrival.request)
            raise
        assert self._nursery is not None
        for ticket in tickets:
            self._nursery.start_soon(self._dispatch, ticket)
        return tickets

    def replies(self, tickets: Sequence[Ticket], arrival: RequestContext) -> AsyncIterator[Reply]:
        """What a request that was taken is told."""
        return Replies(tickets, self.writer, arrival)

    async def close_session(self, session: str, reason: str) -> None:
        """See ``Sessions.close_session``."""
        await self.sessions.close_session(session, reason)

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
        await self.memory.open_files(folder, fingerprint, budget_bytes, run, earlier)

    async def write_blocks(self, progress: Callable[[int, int], None]) -> None:
        """
        Write the blocks in memory to files, as far as the limit of draining goes. After the last
        request.
        """
        if self.writer.stalled:
            return  # without their rows nobody would know what the files are
        with trio.move_on_after(self._limits.drain_s) as limit:
            await self.memory.write_all(progress)
        if limit.cancelled_caught:
            log.warning("not all blocks were written", limit_s=self._limits.drain_s)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until ``drain`` has ended the last request."""
        self.activity.draining = False  # as the server over another model left it
        with contextlib.ExitStack() as told:
            told.enter_context(self._stalls.heard_by(self._stalled))
            if self.shadow is not None:
                told.enter_context(self.writer.observed_by(self.shadow))
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                self.sessions.start_in(nursery)
                if self.shadow is not None:
                    nursery.start_soon(self.shadow.run)
                nursery.start_soon(self.expiry.run)
                task_status.started()
                await self._idle.wait()
                self.expiry.close()
                if self.shadow is not None:
                    self.shadow.close()
                self.sessions.end_all()

    async def drain(self) -> None:
        """
        Take no more requests, let those that run come to their end, and cut off what takes longer
        than the limit. Everything that happened is in the journal then.
        """
        self._stopping = self.activity.draining = True
        with trio.move_on_after(self._limits.drain_s):
            await self._no_tickets()
        self._end_all(
            "server_stopped", Stopping("the server was stopped before the answer was complete")
        )
        await self._no_tickets()
        self._idle.set()

    def _end_all(self, why: str, refusal: RefusalError) -> None:
        """End all requests that are not answered yet."""
        for ticket in list(self._tickets.values()):
            ticket.leave(why)
            ticket.fail(refusal)

    def _stalled(self) -> None:
        """Nothing can be put on record: what is under way ends, at its next step."""
        self._end_all("journal_full", JournalFull())

    async def _no_tickets(self) -> None:
        while self._tickets:
            await self.activity.wait_change()

    # --- a request's way -------------------------------------------------------------------------

    def _named(self, command: Generate, tenant: str) -> Generate:
        """The command with the journal's id in the place of its client's name for a session."""
        if command.session_name is None:
            return command
        named = session_id(tenant, command.session_name)
        held = self.sequencer.state.sessions.get(SessionId(named))
        if held is not None and held.tenant != tenant:
            # Nobody would ever serve it. Ids say whose they are, so only a journal in which they
            # once did not leads here.
            raise LookupError(f"session {named} is of the tenant {held.tenant}")
        return attrs.evolve(command, session_name=named)

    async def _admit(self, command: Generate) -> None:
        """Turn a request away where none is taken now."""
        state = self.sequencer.state
        if self._stopping:
            raise Stopping("the server is stopping; try again in a moment")
        if self.writer.stalled:
            raise self._stalls.refusal()
        bug_id = state.admission_bug or self.sessions.quarantine_of(command.session_name)
        if bug_id is not None:
            # Who hears of a bug can look it up.
            await unless_dead(self.writer.wait_all_committed())
            raise Broken(bug_id)

    def _check_queue(self, command: Generate, arrival: RequestContext | None) -> None:
        """
        Turn a request away where too many wait: for a row, or to be read at all.

        Args:
            arrival: of the request, for the journal; None for what is not on record.
        """
        most = self._limits.queue + self._model.decode_rows
        if command.choices > most:
            raise TooManyAnswers(command.choices, most)
        # The limiter counts a row as taken a step before its ticket is seated, so it is not asked.
        admitted = sum(ticket.admitted for ticket in self._tickets.values())
        waiting = self.activity.in_flight - admitted
        room = self._limits.queue + self._model.decode_rows - admitted
        if waiting + command.choices > room:
            self._rejected(arrival, 429, "queue_full")
            raise QueueFull(
                f"the server is busy (answers under way: {admitted}, waiting: {waiting}) and has "
                f"no room for {command.choices} more; try again in a few seconds",
                retry_after_s=5,
            )

    def _rejected(self, arrival: RequestContext | None, status: int, code: str) -> None:
        if arrival is not None:
            self.sequencer.append(
                ev.RequestRejected(
                    request=arrival.request, tenant=arrival.tenant, status=status, code=code
                )
            )

    async def _in_time(
        self, deadline: float, reading: Awaitable[T], arrival: RequestContext | None
    ) -> T:
        """
        What is made of a request before it has a ticket, where that is done in time. What a thread
        has in hand is brought to its end; what waits for one is not.

        Args:
            deadline: on trio's clock.
            arrival: as for ``_check_queue``.
        """
        with trio.move_on_at(deadline):
            return await reading
        self._rejected(arrival, *REJECTED["timed_out"])
        raise TimedOut(self._limits.request_s)

    async def _dispatch(self, ticket: Ticket) -> None:
        """Bring a ticket to a session, again where the rules choose another one in the meantime."""
        try:
            with ticket.waiting:
                if ticket.first is not None:
                    await ticket.first.prefilled.wait()  # its blocks are shared
                    if ticket.first.failed:
                        ticket.leave("sibling_failed")
                name = ticket.prepared.command.session_name
                if name is not None:
                    async with self.sessions.actor(name, ticket, named=True).turn:
                        await self._in_turn(ticket)
                else:
                    await self._in_turn(ticket)
        finally:
            ticket.prefilled.set()
            del self._tickets[ticket.id]
            if not ticket.finished:
                self._agents.leave(ticket.id)
            self.activity.leave()
            self.sessions.drop_unopened(ticket.prepared.command.session_name)
            if not ticket.accepted and ticket.gone is not None:
                status, code = REJECTED[ticket.gone]
                self.sequencer.append(
                    ev.RequestRejected(
                        request=ticket.id, tenant=ticket.tenant, status=status, code=code
                    )
                )

    async def _in_turn(self, ticket: Ticket) -> None:
        async with self._running:
            ticket.admitted = True
            while True:
                ticket.rerouted = False
                name = ticket.prepared.command.session_name
                bug_id = self.sessions.quarantine_of(name)
                if bug_id is not None:
                    ticket.fail(Broken(bug_id))
                    break
                chosen = self.sequencer.choose(ticket.prepared.ask)
                found = chosen or name or session_id(ticket.tenant, new_id())
                actor = self.sessions.actor(found, ticket, named=name is not None)
                # A session that has the ticket looks itself whether somebody still waits.
                with trio.CancelScope(shield=True):
                    await actor.serve(ticket)
                if name is None:
                    self.sessions.drop_unopened(actor.id)
                if not ticket.rerouted:
                    break
                # Serving was shielded: who left since, or ends with the server, goes no further.
                await trio.lowlevel.checkpoint_if_cancelled()
        self.sessions.close_excess()
