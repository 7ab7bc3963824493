"""
The sessions that are there: each has an actor, which begins to live when a request comes for it,
and ends alone.
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
from cairn.journal import eviction
from cairn.journal.lifecycle import SessionState
from cairn.journal.state import SessionId

log = structlog.get_logger("cairn")


class Sessions:
    """
    Finds the actors of sessions, has them live, and closes sessions.

    Attributes:
        actors: those that live, by their sessions' ids.
    """

    def __init__(self, context: SessionContext, limits: Limits) -> None:
        self.actors: dict[str, SessionActor] = {}
        self._context = context
        self._sequencer = context.sequencer
        self._limits = limits
        self._nursery: trio.Nursery | None = None

    def live_in(self, nursery: trio.Nursery) -> None:
        """Have the actors' tasks begin there. Before the first request."""
        self._nursery = nursery

    def end_all(self) -> None:
        """Have all actors end when what they have in hand is done. Their sessions stay."""
        for actor in self.actors.values():
            actor.close()

    def quarantine_of(self, name: str | None) -> str | None:
        """The bug that took a named session out of service, if one did."""
        named = self._sequencer.state.sessions.get(SessionId(name)) if name else None
        return named.bug_id if named is not None else None

    def dismiss_unopened(self, session_id: str | None) -> None:
        """End an actor that never came to be a session, and that nobody waits for."""
        actor = self.actors.get(session_id) if session_id is not None else None
        if actor is not None and not actor.opened and not actor.line.locked():
            del self.actors[actor.id]
            actor.close()

    def actor(self, session_id: str, ticket: Ticket, *, named: bool) -> SessionActor:
        """The actor of a session, which begins to live where it did not."""
        actor = self.actors.get(session_id)
        if actor is None or actor.ended:
            command = ticket.prepared.command
            actor = SessionActor(
                session_id, self._context, tenant=command.tenant, group=command.group, named=named
            )
            self.actors[session_id] = actor
            assert self._nursery is not None
            self._nursery.start_soon(self._live, actor)
        return actor

    async def _live(self, actor: SessionActor) -> None:
        """A session's task. What it could not handle itself ends it, and nobody else."""
        try:
            await actor.run()
        except WriterDied:
            pass  # no fault of the session's; what killed the writer stops the server, and says so
        except Exception:
            log.exception("session ended", session=actor.id)
        finally:
            if self.actors.get(actor.id) is actor:
                del self.actors[actor.id]

    def taken_out(self, session_id: str) -> None:
        """Tell a session that a check took it out of service, where it is still there."""
        actor = self.actors.get(session_id)
        if actor is not None:
            actor.leave_service()

    async def give_up_slab(self, session_id: str, reason: str) -> None:
        """
        Have a session give up the slab that it holds.

        Raises:
            LookupError: it has no actor, so nobody could.
        """
        actor = self.actors.get(session_id)
        if actor is None:
            raise LookupError(f"session {session_id} holds a slab and has no actor")
        await actor.give_up_slab(reason)

    async def close_over(self, session_id: str) -> None:
        """Close a session whose life is over, unless somebody wants something meanwhile."""
        reason = "its life is over"
        held = self._sequencer.state.sessions.get(SessionId(session_id))
        if held is not None and held.slab is not None:
            await self.give_up_slab(session_id, reason)
        now = self._sequencer.state.sessions.get(SessionId(session_id))
        if now is not None and now.slab is None and self._context.activity.upkeep_may_begin:
            self._close(session_id, reason)

    def _close(self, session_id: str, reason: str) -> None:
        actor = self.actors.pop(session_id, None)
        if actor is not None:
            actor.close()
        self._sequencer.append(ev.SessionClosed(session=session_id, reason=reason))

    def forget_sessions(self) -> None:
        """Keep the number of remembered sessions bounded."""
        while session := eviction.session_to_forget(self._sequencer.state, self._limits.sessions):
            self._close(session.id, "least recently used")

    async def close_session(self, session_id: str, reason: str) -> None:
        """
        End a session that nobody is at work in and that nobody will name meanwhile, also one that a
        bug took out of service: the bug stays on record.
        """
        actor = self.actors.get(session_id)
        if actor is not None and not actor.ended:
            await actor.give_up_slab("it is to be closed")
        held = self._sequencer.state.sessions.get(SessionId(session_id))
        if held is None or held.slab is not None:
            return
        if held.state in (SessionState.IDLE, SessionState.COLD, SessionState.QUARANTINED):
            self._close(session_id, reason)
