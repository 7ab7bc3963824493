"""
A session: one conversation, the only owner of its cache, one command at a time.

Rules of this module and of those that hold its steps:

1. A session does things in the order of ``lifecycle.STEPS``, and everything that it does to its
   cache goes through ``SessionCache`` as an event that carries what the engine measured.
2. It knows of its cache what the journal's fold says, and keeps no second account.
3. While it serves a request it waits for nothing but the engine, memory, and a request that
   computes the beginning of the same prompt. For idle-time work it waits until no request is in
   flight, and does none while a request is in its inbox. Replies carry the receipt that they wait
   for.

``_serve`` has the way of a request: claim, follow a request that computes the same prefix, restore
it, prefill, decode, finish, and prewarm what the next request will begin with. An idle session
releases its slab after a while if all of it is in blocks, so that memory holds an idle conversation
once.
"""

from __future__ import annotations

import structlog
import trio

from cairn.actors.errors import Broken
from cairn.actors.requests.ticket import Ticket
from cairn.actors.sessions.cache import SessionCache
from cairn.actors.sessions.claim import Claim
from cairn.actors.sessions.context import SessionContext
from cairn.actors.sessions.generate import Generation, Gone
from cairn.actors.sessions.inbox import Command, GiveUpSlab, Inbox, LeaveService, Serve
from cairn.actors.sessions.prewarm import Prewarm
from cairn.actors.sessions.settle import Settle
from cairn.engine.errors import EngineFault
from cairn.journal import events as ev
from cairn.journal.errors import BugError
from cairn.journal.lifecycle import SessionState

log = structlog.get_logger("cairn")


_IDLE = "idle, and its blocks are in memory"
"""The reason on record if a session releases its slab unasked."""


class SessionActor:
    """
    The actor of one session.

    Attributes:
        turn: requests that name this session wait here for their turn.
        inbox: its commands.
        cache: what it holds.
        ended: whether the actor takes no more commands.
    """

    def __init__(
        self,
        session_id: str,
        context: SessionContext,
        *,
        tenant: str,
        group: str | None,
        named: bool,
    ) -> None:
        self.id = session_id
        self.turn = trio.Lock()
        self.inbox = Inbox()
        self.cache = SessionCache(session_id, tenant, context)
        self.ended = False
        self._context = context
        self._claim = Claim(context=context, cache=self.cache, group=group, named=named)
        self._prewarm = Prewarm(context, self.cache, self.inbox)
        self._settle = Settle(context, self.cache, self.inbox)

    @property
    def opened(self) -> bool:
        """Whether the journal knows the session, or knew it."""
        return self.cache.opened

    # --- commands, for other tasks -----------------------------------------------------------

    async def serve(self, ticket: Ticket) -> None:
        """Serve a request, and wait until the session has done with it."""
        await self.inbox.serve(ticket)

    async def give_up_slab(self, reason: str) -> None:
        """
        Release the slab, if there is one and no request takes it first: the caller does not wait
        for the end of that request.
        """
        await self.inbox.give_up_slab(reason)

    def leave_service(self) -> None:
        """Release the slab: a bug found elsewhere has quarantined the session, on record."""
        self.inbox.leave_service()

    def close(self) -> None:
        """End the actor when it has nothing left to do."""
        self.inbox.close()

    # --- the way of a request -----------------------------------------------------------------

    async def _serve(self, command: Serve) -> None:
        ticket = command.ticket
        claimed = await self._claim.claim(ticket)
        if claimed is None:
            return  # refused, or another session's by now
        self.inbox.keep_slab()
        generation, message = Generation(self._context, self.cache, ticket), None
        matched = None
        try:
            accepted = await self._claim.follow(ticket, claimed)
            matched = self.cache.path.partial_key
            await generation.restore_prefix()
            # Not before there is a slab: until then the request may still be refused.
            ticket.reply(*accepted)
            first = await generation.prefill()
            answer = await generation.decode(first)
            message = answer.finish()
        except Gone as gone:
            self.cache.append(
                ev.RequestCancelled(session=self.id, request=ticket.id, stage=gone.stage)
            )
        # The client has its answer. What follows is idle-time work.
        command.done.set()
        await self._settle.cut_back()
        complete = await self._prewarm.next_turn(ticket, message)
        await self._settle.share_rest()
        held = self.cache.session
        await self.cache.rest(complete)
        # From here on the session is idle, and may be closed at any moment.
        if matched is not None:
            # Until now the session was working with it.
            await self._context.memory.remove_if_superseded(held, matched)
        await self._settle.write_through()

    # --- the actor ------------------------------------------------------------------------------

    async def run(self) -> None:
        """Execute commands until ``close``, or until the session is quarantined."""
        try:
            async for command in self.inbox:
                await self._execute(command)
                if self.cache.is_quarantined:
                    break
                if not await self._settle.outlasts_idle_limit():
                    continue  # a command came; that of a quarantine is still to release the slab
                await self._execute(GiveUpSlab(trio.Event(), _IDLE, to_system=True))
                if self.cache.is_quarantined:
                    break
        finally:
            self.ended = True
            self.inbox.close()
            self._turn_away()

    async def _execute(self, command: Command) -> None:
        with self._context.activity.session_at_work():
            try:
                match command:
                    case Serve(ticket=ticket) if self.cache.is_quarantined:
                        ticket.rerouted = True
                    case Serve():
                        await self._serve(command)
                    case GiveUpSlab():
                        await self._release_for(command)
                    case LeaveService():
                        pass  # as any command of a quarantined session
                if self.cache.is_quarantined:
                    await self._leave_service()
            except BugError as bug:
                await self._break(command, bug)
            except Exception as error:
                # A session that was quarantined in the middle of a step has no request to
                # continue, so that bug explains the error.
                found = self.cache.quarantined_meanwhile()
                found = found or self._context.sequencer.crash(self.id, error)
                await self._break(command, found)
            finally:
                command.done.set()

    async def _release_for(self, command: GiveUpSlab) -> None:
        # If several asked, the first may have closed the session as soon as it had the slab.
        held = self.cache.held
        if not command.done.is_set() and held is not None and held.slab is not None:
            await self.cache.release_slab(command.reason)
            if command.to_system:
                await self._settle.give_memory_back()

    async def _leave_service(self) -> None:
        self.cache.resync()
        if self.cache.session.slab is not None:
            await self.cache.release_slab(f"bug {self.cache.session.bug_id}")

    async def _break(self, command: Command, bug: BugError) -> None:
        """
        Report a bug to the client, and release what the session holds. Does not report it if the
        client has the whole answer, nor to other answers of the same request, which continue.
        """
        if isinstance(command, Serve):
            if not command.ticket.finished:
                command.ticket.fail(Broken(bug.bug_id))
            command.done.set()
        cache = self.cache
        cache.resync()
        if cache.held is None:
            return
        if cache.session.request is not None:
            # The bug was in another session: this request ends with it, and the session continues.
            request = cache.session.request.ask.request
            cache.append(ev.RequestCancelled(session=self.id, request=request, stage="bug"))
        if (prewarm := cache.session.prewarm) is not None:
            cache.append(
                ev.PrewarmAbandoned(
                    session=self.id, reason="bug", computed_tokens=prewarm.computed_tokens
                )
            )
        if cache.session.slab is not None:
            try:
                await cache.release_slab(f"bug {bug.bug_id}")
            except EngineFault as fault:
                # The bug is on record, and the pool's next measurement (INV-5) will not add up.
                log.error("slab not released", session=self.id, bug_id=bug.bug_id, fact=str(fault))
                return
        if cache.session.state is SessionState.SETTLING:
            cache.append(ev.SessionSettled(session=self.id, canonical_tokens=0, complete=False))

    def _turn_away(self) -> None:
        """Requests that are still in the inbox look for another session, or report the bug."""
        for command in self.inbox.left_over():
            if isinstance(command, Serve):
                command.ticket.rerouted = True
            command.done.set()
