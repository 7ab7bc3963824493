"""
The sessions of a server. Each has an actor, which a request for it starts. An actor that dies
affects no other.
"""

from __future__ import annotations

import structlog
import trio

from cairn.actors.requests.limits import Limits
from cairn.actors.requests.ticket import Ticket
from cairn.actors.sessions.context import SessionContext
from cairn.actors.sessions.session import SessionActor
from cairn.actors.threads.writer import WriterDied
from cairn.journal import events as ev
from cairn.journal.cache import eviction
from cairn.journal.lifecycle import SessionState
from cairn.journal.state import SessionId

log = structlog.get_logger("cairn")

_EXPIRED = "its TTL has expired"


class Sessions:
    """
    Finds and starts the actors of sessions, and closes sessions.

    Attributes:
        actors: those that run, by the ids of their sessions.
    """

    def __init__(
        self, context: SessionContext, limits: Limits, actors: dict[str, SessionActor]
    ) -> None:
        """
        Args:
            actors: to keep them in; ``Memory`` finds the owners of slabs there.
        """
        self.actors = actors
        self._context = context
        self._sequencer = context.sequencer
        self._limits = limits
        self._nursery: trio.Nursery | None = None

    def start_in(self, nursery: trio.Nursery) -> None:
        """Start the tasks of actors in this nursery. Before the first request."""
        self._nursery = nursery

    def end_all(self) -> None:
        """End all actors after their running commands. Their sessions stay open."""
        for actor in self.actors.values():
            actor.close()

    def quarantine_of(self, name: str | None) -> str | None:
        """The id of the bug that quarantined a named session, if one did."""
        named = self._sequencer.state.sessions.get(SessionId(name)) if name else None
        return named.bug_id if named is not None else None

    def drop_unopened(self, session_id: str | None) -> None:
        """End an actor whose session was never opened and that no request waits for."""
        actor = self.actors.get(session_id) if session_id is not None else None
        if actor is not None and not actor.opened and not actor.turn.locked():
            del self.actors[actor.id]
            actor.close()

    def actor(self, session_id: str, ticket: Ticket, *, named: bool) -> SessionActor:
        """The actor of a session, started if it does not run."""
        actor = self.actors.get(session_id)
        if actor is None or actor.ended:
            command = ticket.prepared.command
            actor = SessionActor(
                session_id, self._context, tenant=ticket.tenant, group=command.group, named=named
            )
            self.actors[session_id] = actor
            assert self._nursery is not None
            self._nursery.start_soon(self._run, actor)
        return actor

    async def _run(self, actor: SessionActor) -> None:
        """The task of an actor. An error that it could not handle ends this session alone."""
        try:
            await actor.run()
        except WriterDied:
            pass  # not this session's fault; what killed the writer stops the server and is logged
        except Exception:
            log.exception("session ended", session=actor.id)
        finally:
            if self.actors.get(actor.id) is actor:
                del self.actors[actor.id]

    def report_quarantine(self, session_id: str) -> None:
        """Have a session that a check has quarantined release its slab, if its actor runs."""
        actor = self.actors.get(session_id)
        if actor is not None:
            actor.leave_service()

    async def give_up_slab(self, session_id: str, reason: str) -> None:
        """
        Have a session release its slab.

        Raises:
            LookupError: it has no actor.
        """
        actor = self.actors.get(session_id)
        if actor is None:
            raise LookupError(f"session {session_id} holds a slab and has no actor")
        await actor.give_up_slab(reason)

    async def close_expired(self, session_id: str) -> None:
        """Close a session whose TTL has expired, unless a request comes before that."""
        held = self._sequencer.state.sessions.get(SessionId(session_id))
        if held is not None and held.slab is not None:
            await self.give_up_slab(session_id, _EXPIRED)
        now = self._sequencer.state.sessions.get(SessionId(session_id))
        if now is not None and now.slab is None and self._context.activity.upkeep_may_begin:
            self._close(session_id, _EXPIRED)

    def _close(self, session_id: str, reason: str) -> None:
        actor = self.actors.pop(session_id, None)
        if actor is not None:
            actor.close()
        self._sequencer.append(ev.SessionClosed(session=session_id, reason=reason))

    def close_excess(self) -> None:
        """Close the least recently used sessions over the limit."""
        while session := eviction.session_to_forget(self._sequencer.state, self._limits.sessions):
            self._close(session.id, "least recently used")

    async def close_session(self, session_id: str, reason: str) -> None:
        """
        Close a session that no request is using or will name meanwhile, even a quarantined one: its
        bug stays on record.
        """
        actor = self.actors.get(session_id)
        if actor is not None and not actor.ended:
            await actor.give_up_slab("it is to be closed")
        held = self._sequencer.state.sessions.get(SessionId(session_id))
        if held is None or held.slab is not None:
            return
        if held.state in (SessionState.IDLE, SessionState.COLD, SessionState.QUARANTINED):
            self._close(session_id, reason)
