"""What signals do to a chat: Ctrl-C stops what goes on, and others end the chat cleanly."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from typing import Any

# Signals that end a process by default. SIGQUIT is Ctrl-\ on a terminal.
_LEAVE = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class Interrupts:
    """
    Ctrl-C on a terminal, while the context lasts: it stops what goes on, and never ends the chat by
    chance. One between a line and its answer stops the answer.
    """

    def __init__(self) -> None:
        self._act: Callable[[], object] | None = None
        self._came = False
        self._before: Any = None

    def __enter__(self) -> Interrupts:
        self._before = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        signal.signal(signal.SIGINT, self._before or signal.default_int_handler)

    def forget(self) -> None:
        """A prompt is shown: what was pressed before it is over."""
        self._came = False

    @contextlib.contextmanager
    def during(self, act: Callable[[], object]) -> Iterator[None]:
        """Call a function at Ctrl-C while the context lasts, or at once if it was pressed."""
        before, self._act = self._act, act
        try:
            if self._came:
                act()
            yield
        finally:
            self._act = before

    def _handle(self, *_: object) -> None:
        self._came = True
        if self._act is not None:
            self._act()


def interrupt() -> None:
    """Raise what Ctrl-C raises by default."""
    raise KeyboardInterrupt


@contextlib.contextmanager
def on_interrupt(act: Callable[[], object]) -> Iterator[None]:
    """
    Call a function at Ctrl-C while the context lasts. A KeyboardInterrupt at any point could leave
    half a line, or a server running.
    """
    before = signal.signal(signal.SIGINT, lambda *_: act())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before or signal.default_int_handler)


@contextlib.contextmanager
def signals_that_leave() -> Iterator[None]:
    """Turn the signals that end a process into SystemExit, so that the chat's server is stopped."""

    def leave(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    with _handled(_LEAVE, leave):
        yield


@contextlib.contextmanager
def signals_later() -> Iterator[None]:
    """
    Delay signals until the context ends: one between the start of a server and the assignment of
    its process would leave the server running.
    """
    came: list[int] = []
    with _handled((signal.SIGINT, *_LEAVE), lambda number, _: came.append(number)):
        yield
    for number in came:
        signal.raise_signal(number)


@contextlib.contextmanager
def _handled(
    numbers: tuple[signal.Signals, ...], handler: Callable[[int, Any], object]
) -> Iterator[None]:
    """
    Handle signals while the context lasts. Signals that are ignored, as with `nohup`, stay ignored.
    """
    heard = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    before = [(number, signal.signal(number, handler)) for number in heard]
    try:
        yield
    finally:
        for number, was in before:
            signal.signal(number, was or signal.SIG_DFL)
