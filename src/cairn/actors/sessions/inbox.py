"""
The commands to a session: serve a request, give up its slab, or release everything after a bug.

A session does idle-time work only while its inbox is empty.
"""

from __future__ import annotations

import attrs
import trio

from cairn.actors.requests.ticket import Ticket
from cairn.journal import events as ev


@attrs.frozen
class Serve:
    """Serve a request. ``done`` is set once its client has the whole answer, or none will come."""

    ticket: Ticket
    done: trio.Event = attrs.field(factory=trio.Event)


@attrs.frozen
class GiveUpSlab:
    """
    Release the slab. Obsolete once ``done`` is set.

    Attributes:
        to_system: whether freed memory is returned to the operating system.
    """

    done: trio.Event
    reason: str
    to_system: bool = False


@attrs.frozen
class LeaveService:
    """Release what the session holds: a bug found elsewhere has quarantined it."""

    done: trio.Event = attrs.field(factory=trio.Event)


Command = Serve | GiveUpSlab | LeaveService


class Inbox:
    """
    The commands of a session, first in, first out.

    Attributes:
        requests_waiting: requests that the session has not taken out yet.
        slab_requests: of those that wait for its slab; each is set when the wait is over.
        idle_time: the scope around work that the session may break off; every command cancels it.
    """

    def __init__(self) -> None:
        self.requests_waiting = 0
        self.slab_requests: list[trio.Event] = []
        self.idle_time = trio.CancelScope()
        self._leaving = False
        self._closed = False
        self._send, self._receive = trio.open_memory_channel[Command](float("inf"))

    # --- for other tasks -------------------------------------------------------------------------

    async def serve(self, ticket: Ticket) -> None:
        """Put a request in, and wait until the session has done with it."""
        command = Serve(ticket)
        self._send.send_nowait(command)
        self.requests_waiting += 1
        self.idle_time.cancel()
        await command.done.wait()

    async def give_up_slab(self, reason: str) -> None:
        """
        Ask for the slab, and wait until it is released or the session takes a request that needs
        it.
        """
        if self._closed:
            return  # a session that ends releases it
        done = trio.Event()
        self.slab_requests.append(done)
        self._send.send_nowait(GiveUpSlab(done, reason))
        self.idle_time.cancel()
        await done.wait()

    def leave_service(self) -> None:
        """Report that a bug found elsewhere has quarantined the session."""
        if self._closed:
            return  # a session that ends serves no request
        self._send.send_nowait(LeaveService())
        self._leaving = True
        self.idle_time.cancel()

    def close(self) -> None:
        """Take no more commands. Those that are in can still be taken out."""
        self._closed = True
        self._send.close()
        self.idle_time.cancel()

    # --- for the session -------------------------------------------------------------------------

    def __aiter__(self) -> Inbox:
        return self

    async def __anext__(self) -> Command:
        """The next command, until the inbox is closed and empty."""
        try:
            return self._taken(await self._receive.receive())
        except trio.EndOfChannel:
            raise StopAsyncIteration from None

    def left_over(self) -> list[Command]:
        """Take out all commands that are still in."""
        commands: list[Command] = []
        while True:
            try:
                commands.append(self._taken(self._receive.receive_nowait()))
            except (trio.WouldBlock, trio.EndOfChannel, trio.ClosedResourceError):
                return commands

    def keep_slab(self) -> None:
        """End the waits of sessions that requested the slab, because a request needs it."""
        while self.slab_requests:
            self.slab_requests.pop().set()

    @property
    def is_empty(self) -> bool:
        """Whether no command waits that still matters. For any thread."""
        return not (self.requests_waiting or self.slab_requests or self._leaving or self._closed)

    @property
    def waiting_for(self) -> ev.AbandonReason:
        """The command that comes first; the inbox must not be empty."""
        if self._leaving:
            return "bug"
        if self.requests_waiting:
            return "request"
        return "slab_needed" if self.slab_requests else "closing"

    def _taken(self, command: Command) -> Command:
        if isinstance(command, Serve):
            self.requests_waiting -= 1
        elif isinstance(command, LeaveService):
            self._leaving = False
        elif command.done in self.slab_requests:
            self.slab_requests.remove(command.done)
        return command
