"""
What is going on in the server: requests in flight, sessions at work, and the moments without any.

Pure bookkeeping. The server and its sessions report here; work that has to wait for an idle server
asks here. Two kinds of work do: that of a session after its answer (``sessions/idle_time.py``),
which waits until no request is in flight, and the server's own upkeep (expiry and shadow checks),
which also waits until no session is at work.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import trio


class Activity:
    """
    Counts requests in flight and sessions at work, and wakes the tasks that wait for a change.

    Properties may be read on any thread; methods are for trio's thread.

    Attributes:
        in_flight: requests from their preparation on, each counted once for each answer it asks
            for.
        arrivals: all answers that were requested and prepared. A check that compares it before and
            after also notices a request that came and ended in between.
        at_work: sessions that execute a command, including the idle-time work after it.
        changes: how often something changed; see ``wait_change``.
        draining: whether the server takes no more requests.
    """

    def __init__(self, upkeep_allowed: Callable[[], bool] = lambda: True) -> None:
        """
        Args:
            upkeep_allowed: whether the journal takes events and no bug has closed admission. Called
                on any thread.
        """
        self.in_flight = 0
        self.arrivals = 0
        self.at_work = 0
        self.changes = 0
        self.draining = False
        self._upkeep_allowed = upkeep_allowed
        self._waiting = trio.lowlevel.ParkingLot()

    # --- what is reported ------------------------------------------------------------------------

    @contextlib.contextmanager
    def preparing(self, answers: int = 1) -> Iterator[None]:
        """A request that is in flight and has no ticket yet."""
        self.in_flight += answers
        try:
            yield
        finally:
            self.leave(answers)

    def arrive(self, answers: int) -> None:
        """A request is prepared and stays in flight until ``leave`` is called for each answer."""
        self.in_flight += answers
        self.arrivals += answers

    def leave(self, answers: int = 1) -> None:
        """Answers are in flight no longer."""
        self.in_flight -= answers
        self.changed()

    @contextlib.contextmanager
    def session_at_work(self) -> Iterator[None]:
        """A session has something to do."""
        self.at_work += 1
        try:
            yield
        finally:
            self.at_work -= 1
            self.changed()

    def changed(self) -> None:
        """Wake all waiting tasks, so that they check again."""
        self.changes += 1
        self._waiting.unpark_all()

    # --- what is asked ---------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Whether no request is in flight."""
        return not self.in_flight

    @property
    def upkeep_may_continue(self) -> bool:
        """Whether upkeep that has begun may take its next step."""
        return self.is_idle and not self.draining and self._upkeep_allowed()

    @property
    def upkeep_may_begin(self) -> bool:
        """Whether upkeep may begin: as ``upkeep_may_continue``, and no session is at work."""
        return self.upkeep_may_continue and not self.at_work

    async def wait_idle(self) -> None:
        """Wait until no request is in flight."""
        while not self.is_idle:
            await self._waiting.park()

    async def wait_change(self, since: int | None = None) -> None:
        """
        Wait until something changes. Callers check their own condition again then.

        Args:
            since: ``changes`` as it was when the caller last looked: a change after that is not
                waited for. Where it is None, only a change from now on counts.
        """
        if since is None or since == self.changes:
            await self._waiting.park()
