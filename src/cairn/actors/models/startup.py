"""A start that may be given up: whoever started the server stops it before it serves anything."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import attrs


class StartGivenUp(Exception):
    """
    The server was stopped before it served anything. The journal has that it stopped, where it has
    that it began.
    """


@attrs.define
class Starting:
    """
    Whether a server that starts is still wanted. For trio's thread.

    Attributes:
        given_up: that it is not.
    """

    given_up: bool = False
    _abandon: Callable[[], None] | None = None

    def give_up(self) -> None:
        """Have the start come to nothing: what lasts is not waited for."""
        self.given_up = True
        if self._abandon is not None:
            self._abandon()

    @contextlib.contextmanager
    def lasts(self, abandon: Callable[[], None]) -> Iterator[None]:
        """
        Do something that lasts.

        Args:
            abandon: how it is left, where the start is given up meanwhile.
        """
        self._abandon = abandon
        try:
            yield
        finally:
            self._abandon = None

    def check(self) -> None:
        """
        Go on only where the server is wanted.

        Raises:
            StartGivenUp: it is not.
        """
        if self.given_up:
            raise StartGivenUp
