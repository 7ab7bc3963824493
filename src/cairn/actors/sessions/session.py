"""
A session: one conversation, the only owner of its cache, one command at a time.

Rules of this module and of those that hold its steps:

1. A session does things in the order of ``lifecycle.STEPS``, and everything that it does to its
   cache goes through ``SessionCache`` as an event that carries what the engine measured.
2. It knows of its cache what the journal's fold says, and keeps no second account.
3. With a request in hand it waits for nothing but the engine and memory. In its own time it waits
   for all other requests, and never for them with a request in its inbox. Replies carry the
   receipt that they wait for.

A request is served in six steps: take it (``taking``: one append with the decision); lay the stones
(slab, trim, shared blocks), prefill what is not there, decode, finish (``answering``); settle
(``settling``). A client that goes away ends it at the next step.

To settle is to compute canonical KV over what the next prompt will begin with (``anticipation``),
where that can be rendered, else over prompt and answer. It is the session's own time: a command in
the inbox ends it.

A session that nobody wants anything of for a while gives its slab up by itself, where all of it
lies in blocks: memory holds a conversation at rest once, and what several share once for all.
"""

from __future__ import annotations

import structlog
import trio

from cairn.actors.requests.messages import Broken
from cairn.actors.requests.ticket import Ticket
from cairn.actors.sessions.cache import SessionCache
from cairn.actors.sessions.claim import Claim
from cairn.actors.sessions.context import SessionContext
from cairn.actors.sessions.generate import Answering, Gone
from cairn.actors.sessions.inbox import Command, GiveUpSlab, Inbox, Serve
from cairn.actors.sessions.settle import Settling
from cairn.engine.reports import EngineFault
from cairn.journal import events as ev
from cairn.journal.errors import BugError
from cairn.journal.lifecycle import SessionState

log = structlog.get_logger("cairn")


_AT_REST = "at rest, and all of it lies in blocks"
"""Why a session gives its slab up that nobody asked for it."""


class SessionActor:
    """
    The actor of one session.

    Attributes:
        line: who names this session waits here for its turn.
        inbox: what others want of it.
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
        self.line = trio.Lock()
        self.inbox = Inbox()
        self.cache = SessionCache(session_id, tenant, context)
        self.ended = False
        self._context = context
        self._claim = Claim(context=context, cache=self.cache, group=group, named=named)
        self._settling = Settling(context, self.cache, self.inbox)

    @property
    def opened(self) -> bool:
        """Whether the journal knows the session, or knew it."""
        return self.cache.opened

    # --- commands, for other tasks -----------------------------------------------------------

    async def serve(self, ticket: Ticket) -> None:
        """Have the session serve a request, and wait until it has left the session's hands."""
        await self.inbox.serve(ticket)

    async def give_up_slab(self, reason: str) -> None:
        """
        Have a session without a request release its slab. Nothing happens where it holds none, or
        where it takes a request first: who asks must not wait for that request's end.
        """
        await self.inbox.give_up_slab(reason)

    def leave_service(self) -> None:
        """
        A bug that broke no step of the session's own has taken it out of service: that is on record
        already, and its slab is to be given back.
        """
        self.inbox.leave_service()

    def close(self) -> None:
        """End the actor when it is at rest."""
        self.inbox.close()

    # --- the actor ------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve commands until ``close``, or until the session is quarantined."""
        try:
            async for command in self.inbox:
                await self._at_work(command)
                if self.cache.out_of_service:
                    break
                if not await self._settling.has_rested_long():
                    # Somebody wants it. Whoever took it out of service meanwhile is heard first:
                    # its slab is still to be given back.
                    continue
                await self._at_work(GiveUpSlab(trio.Event(), _AT_REST, to_system=True))
                if self.cache.out_of_service:
                    break
        finally:
            self.ended = True
            self.inbox.close()
            self._turn_away()

    async def _at_work(self, command: Command) -> None:
        with self._context.activity.session_at_work():
            await self._obey(command)

    async def _obey(self, command: Command) -> None:
        ticket = command.ticket if isinstance(command, Serve) else None
        try:
            if ticket is not None and self.cache.out_of_service:
                ticket.rerouted = True
            elif ticket is not None:
                await self._serve(ticket)
            elif isinstance(command, GiveUpSlab):
                await self._release_for(command)
            if self.cache.out_of_service:
                await self._leave_service()
        except BugError as bug:
            await self._break(ticket, bug)
        except Exception as error:
            # Who is taken out of service in the middle of a step has no request to go on with.
            found = self.cache.taken_out() or self._context.sequencer.crash(self.id, error)
            await self._break(ticket, found)
        finally:
            command.done.set()

    async def _release_for(self, command: GiveUpSlab) -> None:
        # Of several that asked, the first may have closed the session as soon as it had the slab.
        held = self.cache.held
        if not command.done.is_set() and held is not None and held.slab is not None:
            await self.cache.release_slab(command.reason)
            if command.to_system:
                await self._settling.give_memory_back()

    async def _leave_service(self) -> None:
        self.cache.look_up_seq()
        if self.cache.session.slab is not None:
            await self.cache.release_slab(f"bug {self.cache.session.bug_id}")

    async def _serve(self, ticket: Ticket) -> None:
        async with self._context.memory.eviction_lock:
            await self._claim.load_blocks(ticket)
            if ticket.gone is not None:
                return
            closed = self._context.sequencer.state.admission_bug
            if closed is not None:
                ticket.fail(Broken(closed))
                return
            taken = self._claim.take(ticket)
        if taken is None:
            ticket.rerouted = True
            return
        self.inbox.keep_slab()
        said = None
        answering = Answering(self._context, self.cache, ticket)
        try:
            await answering.restore_prefix()
            # Not before there is a slab: until then the request may still be refused.
            ticket.reply(*taken)
            said = await answering.answer(await answering.prefill())
        except Gone as gone:
            self.cache.append(
                ev.RequestCancelled(session=self.id, request=ticket.id, stage=gone.stage)
            )
        # The client has its answer; what follows is the session's own time.
        ticket.left_turn.set()
        await self._settling.settle(ticket, said)
        await self._settling.write_through()

    async def _break(self, ticket: Ticket | None, bug: BugError) -> None:
        """
        A bug came to light: tell the client, and give back what the session holds. Who has the
        whole answer hears nothing of it, and who waits for another one beside it goes on.
        """
        if ticket is not None:
            if not ticket.finished:
                ticket.fail(Broken(bug.bug_id))
            ticket.left_turn.set()
        cache = self.cache
        cache.look_up_seq()
        if cache.held is None:
            return
        if cache.session.request is not None:
            # The bug was another's: this request ends with it, and the session goes on.
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
                # The bug is on record, and the pool's next measure (INV-5) will not add up.
                log.error("slab not released", session=self.id, bug_id=bug.bug_id, fact=str(fault))
                return
        if cache.session.state is SessionState.SETTLING:
            cache.append(ev.SessionSettled(session=self.id, canonical_tokens=0, complete=False))

    def _turn_away(self) -> None:
        """Requests that were still in the inbox look for another session, or hear of the bug."""
        for command in self.inbox.left_over():
            if isinstance(command, Serve):
                command.ticket.rerouted = True
            command.done.set()
