"""A start that can be given up, before the server serves anything."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import attrs


class StartGivenUp(Exception):
    """
    The server was stopped before it served anything. If the journal records the start, it records
    the stop too.
    """


@attrs.define
class Starting:
    """
    Whether a server that starts is still needed. For trio's thread.

    Attributes:
        given_up: whether the start was given up.
    """

    given_up: bool = False
    _abandon: Callable[[], None] | None = None

    def give_up(self) -> None:
        """Abandon the start. Does not wait for a long step."""
        self.given_up = True
        self.leave_step()

    def leave_step(self) -> None:
        """Abandon the long step that runs now, if there is one, as for a load at a stop."""
        if self._abandon is not None:
            self._abandon()

    @contextlib.contextmanager
    def lasts(self, abandon: Callable[[], None]) -> Iterator[None]:
        """
        Run a long step.

        Args:
            abandon: called if the start is abandoned meanwhile.
        """
        self._abandon = abandon
        try:
            yield
        finally:
            self._abandon = None

    def check(self) -> None:
        """
        Raises:
            StartGivenUp: the start was given up.
        """
        if self.given_up:
            raise StartGivenUp
