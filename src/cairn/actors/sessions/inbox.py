"""
What others want of a session: that it serves a request, gives up its slab, leaves service, or ends.

Whatever a session does for itself, it does in its own time: as long as nobody wants anything.
"""

from __future__ import annotations

import attrs
import trio

from cairn.actors.requests.ticket import Ticket
from cairn.journal import events as ev


@attrs.frozen
class Serve:
    """Serve a request."""

    ticket: Ticket

    @property
    def done(self) -> trio.Event:
        """Set when the request has left the session's hands."""
        return self.ticket.left_turn


@attrs.frozen
class GiveUpSlab:
    """
    Release the slab. Of no concern any more where ``done`` is set.

    Attributes:
        to_system: whether its memory is to leave the process, since nobody here asks for it.
    """

    done: trio.Event
    reason: str
    to_system: bool = False


@attrs.frozen
class LeaveService:
    """Give back what the session holds: a bug has taken it out of service."""

    done: trio.Event = attrs.field(factory=trio.Event)


Command = Serve | GiveUpSlab | LeaveService


class Inbox:
    """
    The commands of a session, in the order in which they came.

    Attributes:
        requests_waiting: requests that the session has not taken out yet.
        asked_for_slab: who waits for its slab, each until it is set.
        idle_time: around what the session does for itself and may leave where it is; whoever wants
            something cancels it.
    """

    def __init__(self) -> None:
        self.requests_waiting = 0
        self.asked_for_slab: list[trio.Event] = []
        self.idle_time = trio.CancelScope()
        self._leaving = False
        self._closed = False
        self._send, self._receive = trio.open_memory_channel[Command](float("inf"))

    # --- for other tasks -------------------------------------------------------------------------

    async def serve(self, ticket: Ticket) -> None:
        """Put a request in, and wait until it has left the session's hands."""
        ticket.left_turn = trio.Event()
        self._send.send_nowait(Serve(ticket))
        self.requests_waiting += 1
        self.idle_time.cancel()
        await ticket.left_turn.wait()

    async def give_up_slab(self, reason: str) -> None:
        """Ask for the slab, and wait until it is given up, or a request is taken that needs it."""
        if self._closed:
            return  # who ends gives it up
        done = trio.Event()
        self.asked_for_slab.append(done)
        self._send.send_nowait(GiveUpSlab(done, reason))
        self.idle_time.cancel()
        await done.wait()

    def leave_service(self) -> None:
        """Tell of a bug that broke no step of the session's own and took it out of service."""
        if self._closed:
            return  # who ends serves nobody any more
        self._send.send_nowait(LeaveService())
        self._leaving = True
        self.idle_time.cancel()

    def close(self) -> None:
        """Take no more commands. Those that are in can still be had."""
        self._closed = True
        self._send.close()
        self.idle_time.cancel()

    # --- for the session -------------------------------------------------------------------------

    def __aiter__(self) -> Inbox:
        return self

    async def __anext__(self) -> Command:
        """The next command, until it is closed and empty."""
        try:
            return self._taken(await self._receive.receive())
        except trio.EndOfChannel:
            raise StopAsyncIteration from None

    def left_over(self) -> list[Command]:
        """Take out what is still in."""
        commands: list[Command] = []
        while True:
            try:
                commands.append(self._taken(self._receive.receive_nowait()))
            except (trio.WouldBlock, trio.EndOfChannel, trio.ClosedResourceError):
                return commands

    def keep_slab(self) -> None:
        """Tell who asked for the slab that a request needs it."""
        while self.asked_for_slab:
            self.asked_for_slab.pop().set()

    @property
    def undisturbed(self) -> bool:
        """Whether nobody wants anything. Asked on the engine's thread too."""
        disturbed = self.requests_waiting or self.asked_for_slab or self._leaving or self._closed
        return not disturbed

    @property
    def wanted_by(self) -> ev.GivenUp:
        """Who disturbs."""
        if self._leaving:
            return "bug"
        if self.requests_waiting:
            return "request"
        return "slab_needed" if self.asked_for_slab else "closing"

    def _taken(self, command: Command) -> Command:
        if isinstance(command, Serve):
            self.requests_waiting -= 1
        elif isinstance(command, LeaveService):
            self._leaving = False
        elif command.done in self.asked_for_slab:
            self.asked_for_slab.remove(command.done)
        return command
