"""
Serves requests over one loaded model, and supervises its sessions.

The journal writer and the engine run next to the sessions, not above them. If one of the two dies,
no request may be answered any more and the server stops. A session that dies affects no other.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence, Set
from functools import partial
from pathlib import Path
from typing import TypeVar

import attrs
import structlog
import trio

from cairn.actors.agents.agents import StoredAgents
from cairn.actors.clock import new_id, request_id, wall_clock_us
from cairn.actors.errors import (
    Broken,
    QueueFull,
    RefusalError,
    SessionBusy,
    Stopping,
    TimedOut,
)
from cairn.actors.idle.activity import Activity
from cairn.actors.idle.expiry import Expiry
from cairn.actors.idle.shadow_check import ShadowCheck
from cairn.actors.memory import Memory
from cairn.actors.requests.admission import Admission, check_places
from cairn.actors.requests.context import RequestContext
from cairn.actors.requests.limits import Limits
from cairn.actors.requests.messages import Generate, PromptTokens, Reply, ServerFacts, Statistics
from cairn.actors.requests.prepare import Preparer
from cairn.actors.requests.replies import Replies, unless_dead
from cairn.actors.requests.ticket import Prepared, Ticket, leave_together
from cairn.actors.sequencer import Sequencer
from cairn.actors.sessions.gathering import Gathering
from cairn.actors.sessions.registry import Sessions
from cairn.actors.statistics import statistics_of
from cairn.actors.threads.engine import EngineThread
from cairn.actors.threads.journal_stalls import Stalls
from cairn.actors.threads.writer import JournalWriter
from cairn.engine.reports import ModelFacts
from cairn.journal.state import SessionId
from cairn.journal.summaries import Summaries
from cairn.journal.tenants import session_id, session_name

T = TypeVar("T")

log = structlog.get_logger("cairn")


@attrs.define(kw_only=True, eq=False)
class ModelServer:
    """
    Takes requests, finds a session for each, and returns the session's replies. ``boot.py`` wires
    it.

    Attributes:
        facts: about the model and the server, for clients and operators.
        model: about the model, as the engine reports it.
        shadow: None if no answers are checked.
    """

    facts: ServerFacts
    sequencer: Sequencer
    writer: JournalWriter
    engine: EngineThread
    memory: Memory
    sessions: Sessions
    preparer: Preparer
    expiry: Expiry
    shadow: ShadowCheck | None
    activity: Activity
    agents: StoredAgents
    model: ModelFacts
    gathering: Gathering
    summaries: Summaries
    _leaving: Set[str]
    _admission: Admission
    _stalls: Stalls
    _limits: Limits
    _running: trio.CapacityLimiter = attrs.field(init=False)
    _tickets: dict[str, Ticket] = attrs.field(factory=dict, init=False)
    _stopping: bool = attrs.field(default=False, init=False)
    _idle: trio.Event = attrs.field(factory=trio.Event, init=False)
    _nursery: trio.Nursery | None = attrs.field(default=None, init=False)

    @_running.default
    def _one_place_a_row(self) -> trio.CapacityLimiter:
        return trio.CapacityLimiter(self.model.decode_rows)

    def statistics(self) -> Statistics:
        """The server at this moment. Changes nothing."""
        return statistics_of(
            self.sequencer,
            self.writer,
            self.engine,
            self.gathering,
            queued=sum(not ticket.accepted for ticket in self._tickets.values()),
            facts=self.model,
            encoder=self.preparer.encoder,
            text_cache_bytes=self.agents.stored_turns.text_cache.bytes,
            degraded=self._degraded(),
        )

    def _degraded(self) -> dict[str, str]:
        """The idle work that is not done, with the bug's id or the system's error."""
        shadow = self.shadow.bug_id if self.shadow is not None else None
        ended = {
            "expiry": self.expiry.bug_id,
            "shadow_checks": shadow,
            "block_files": self.memory.write_fault,
        }
        return {name: why for name, why in ended.items() if why is not None}

    @contextlib.asynccontextmanager
    async def generate(self, command: Generate, tenant: str) -> AsyncIterator[AsyncIterator[Reply]]:
        """
        Ask for an answer. Leaving the context early cancels the request.

        Raises:
            RefusalError: on entering, if the request is refused; from the iteration, if it ends
                without an answer.
        """
        context = RequestContext(request_id(self.facts.node), tenant, self._limits)
        tickets: Sequence[Ticket] = ()
        try:
            tickets = await unless_dead(self.take(command, context))
            yield self.replies(tickets, context)
        except RefusalError as refusal:
            context.name(refusal, command)
            raise
        finally:
            leave_together(tickets)

    async def tokens(self, command: Generate, tenant: str) -> PromptTokens:
        """
        The tokens of a prompt, also of one that is too long to be answered.
        Puts nothing on record.

        Raises:
            RefusalError: the prompt cannot be rendered or tokenised, or too many requests wait.
        """
        deadline = trio.current_time() + self._limits.request_s
        self._check_places(command, None)
        with self.activity.preparing():
            return await self._in_time(deadline, self.preparer.tokens(command, tenant), None)

    def _ticketed(self, context: RequestContext, prepared: Sequence[Prepared]) -> list[Ticket]:
        """Make a ticket for each answer of a request. The first one has the request's own id."""
        created_s = wall_clock_us() // 1_000_000
        changed = self.activity.changed
        made = partial(Ticket, created_s=created_s, arrived=context.arrived, on_leave=changed)
        first = made(context.request, prepared[0])
        tickets = [first]
        for choice, other in enumerate(prepared[1:], start=1):
            tickets.append(made(request_id(self.facts.node), other, choice=choice, first=first))
        self._tickets.update((ticket.id, ticket) for ticket in tickets)
        self.activity.arrive(len(tickets))
        return tickets

    async def take(self, command: Generate, context: RequestContext) -> Sequence[Ticket]:
        """
        Admit a request, and begin to serve it. The caller leaves the tickets in the end, one for
        each answer.

        Raises:
            RefusalError: it is refused.
        """
        command = self._named(command, context.tenant)
        await self._admit(command)
        self._check_places(command, context)
        self.agents.begin(command, context)
        try:
            with self.activity.preparing(command.choices):
                prepared = await self._in_time(
                    context.deadline, self.preparer.choices(command, context.tenant), context
                )
                await self._admit(command)
                tickets = self._ticketed(context, prepared)
        except BaseException:
            self.agents.leave(context.request)
            raise
        assert self._nursery is not None
        for ticket in tickets:
            self._nursery.start_soon(self._dispatch, ticket)
        return tickets

    def replies(self, tickets: Sequence[Ticket], context: RequestContext) -> AsyncIterator[Reply]:
        """The replies to a request that was admitted."""
        return Replies(tickets, self.writer, context, self.summaries.turn_ended_at)

    async def find_blocks(
        self,
        folder: Path,
        budget_bytes: int,
        run: str,
        earlier: Collection[str],
        *,
        shared: bool = False,
    ) -> None:
        """
        Look for the block files of earlier runs. Called before the first request.

        Args:
            run: the id of this run of the server.
            earlier: the ids of earlier runs in this journal.
            shared: whether the folder is a node's, beside those of other nodes.
        """
        fingerprint = self.model.fingerprint
        await self.memory.open_files(folder, fingerprint, budget_bytes, run, earlier, shared=shared)

    async def write_blocks(self, progress: Callable[[int, int], None]) -> None:
        """
        Write the blocks in memory to files, within the limit of draining. Called after the last
        request.
        """
        if self.writer.stalled:
            return  # without their rows the next run would not know the files
        with trio.move_on_after(self._limits.drain_s) as limit:
            await self.memory.write_all(progress)
        if limit.cancelled_caught:
            log.warning("not all blocks were written", limit_s=self._limits.drain_s)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until ``drain`` has ended the last request."""
        self.activity.draining = False  # as the server over another model left it
        with contextlib.ExitStack() as observers:
            observers.enter_context(self._stalls.ending(self._stalled))
            if self.shadow is not None:
                observers.enter_context(self.writer.observed_by(self.shadow))
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                self.sessions.start_in(nursery)
                if self.shadow is not None:
                    nursery.start_soon(self.shadow.run)
                nursery.start_soon(self.expiry.run)
                task_status.started()
                try:
                    await self._idle.wait()
                finally:
                    # The server may have died while a thread prepares a request. No task can serve
                    # that, so it is refused, and before the nursery closes.
                    self._stopping = True
                self.expiry.close()
                if self.shadow is not None:
                    self.shadow.close()
                self.sessions.end_all()

    async def drain(self) -> None:
        """
        Refuse new requests, let those in flight finish, and end those that take longer than the
        limit. On return all of it is in the journal.
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
        """Nothing can be recorded: requests in flight end at their next step."""
        self._end_all("journal_stalled", self._stalls.reason())

    async def _no_tickets(self) -> None:
        while self._tickets:
            await self.activity.wait_change()

    # --- a request's way -------------------------------------------------------------------------

    def _named(self, command: Generate, tenant: str) -> Generate:
        """The command with the journal's id of the session that the client names."""
        if command.session_name is None:
            return command
        named = session_id(tenant, command.session_name)
        held = self.sequencer.state.sessions.get(SessionId(named))
        if held is not None and held.tenant != tenant:
            # No session would ever serve it. Ids name their tenant, so only a journal in which
            # they did not leads here.
            raise LookupError(f"session {named} belongs to the tenant {held.tenant}")
        return attrs.evolve(command, session_name=named)

    async def _admit(self, command: Generate) -> None:
        """Refuse a request if none may come in now, or if its session is quarantined."""
        self._admission.check_open(stopping=self._stopping)
        await self._admission.check_bugs(self.sessions.quarantine_of(command.session_name))
        name = command.session_name
        if name is not None and name in self._leaving:
            raise _leaving(name)

    def _check_places(self, command: Generate, context: RequestContext | None) -> None:
        """
        Refuse a request if too many are in flight.

        Args:
            context: the request's, for the journal; None for a count, which is not recorded.
        """
        try:
            check_places(
                command.choices,
                queue=self._limits.queue,
                rows=self.model.decode_rows,
                # The limiter counts a row as taken a step before its ticket is admitted.
                running=sum(ticket.admitted for ticket in self._tickets.values()),
                in_flight=self.activity.in_flight,
            )
        except QueueFull:
            self._reject(context, "queue_full")
            raise

    def _reject(self, context: RequestContext | None, why: str) -> None:
        if context is not None:
            self._admission.reject(context.request, context.tenant, why)

    async def _in_time(
        self, deadline: float, preparing: Awaitable[T], context: RequestContext | None
    ) -> T:
        """
        Prepare a request before its deadline. Work that has begun in a thread runs on there, and
        its result is dropped; a request that still waits for one leaves.

        Args:
            deadline: on trio's clock.
            context: as for ``_check_places``.

        Raises:
            TimedOut: it took too long.
        """
        try:
            with trio.move_on_at(deadline):
                return await preparing
        except TimedOut:  # its prompt or its grammar takes too long
            self._reject(context, "timed_out")
            raise
        self._reject(context, "timed_out")
        raise TimedOut(self._limits.request_s)

    async def _dispatch(self, ticket: Ticket) -> None:
        """Bring a ticket to a session; to another one if the rules choose that in the meantime."""
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
                self.agents.leave(ticket.id)
            self.activity.leave()
            self.sessions.drop_unopened(ticket.prepared.command.session_name)
            if not ticket.accepted and ticket.gone is not None:
                self._admission.reject(ticket.id, ticket.tenant, ticket.gone)

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
                if name is not None and name in self._leaving:
                    ticket.fail(_leaving(name))
                    break
                chosen = self.sequencer.choose(ticket.prepared.ask)
                found = chosen or name or session_id(ticket.tenant, new_id())
                actor = self.sessions.actor(found, ticket, named=name is not None)
                # A session that has the ticket checks itself whether the client still waits.
                with trio.CancelScope(shield=True):
                    await actor.serve(ticket)
                if name is None:
                    self.sessions.drop_unopened(actor.id)
                if not ticket.rerouted:
                    break
                # Serving was shielded, so a client that left meanwhile is noticed here.
                await trio.lowlevel.checkpoint_if_cancelled()
        self.sessions.close_excess()


def _leaving(session: str) -> SessionBusy:
    return SessionBusy(session_name(session), "is being forgotten")
