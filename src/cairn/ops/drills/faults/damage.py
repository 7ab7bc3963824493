"""
How a running server is damaged: wrappers around the methods of its own instances.

They go with the server: nothing that a drill does outlives it, and no class is changed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import attrs

from cairn.actors.server import Server
from cairn.actors.sessions.session import SessionActor
from cairn.journal.state import Session, SessionId

Method = Callable[..., Any]


@attrs.define
class Damage:
    """
    A server that is about to be damaged, and the session at which it is aimed.

    Attributes:
        struck_s: by the monotonic clock, when the damage first did something; None before.
    """

    server: Server
    victim: str
    struck_s: float | None = None

    def strike(self) -> None:
        """Take down that the damage does something now."""
        if self.struck_s is None:
            self.struck_s = time.monotonic()

    @property
    def engine(self) -> Any:
        """The engine itself. Its methods run on its own thread."""
        return self.server.loaded.engine._device

    @property
    def session(self) -> Session | None:
        """The victim, as the journal has it."""
        return self.server.loaded.sequencer.state.sessions.get(SessionId(self.victim))

    @property
    def slab(self) -> int | None:
        """The slab that the victim holds."""
        session = self.session
        return session.slab.id if session is not None and session.slab is not None else None

    @property
    def actor(self) -> SessionActor:
        """The victim's actor; the victim must have been served."""
        return self.server.loaded.sessions.actors[self.victim]


def wrap(owner: object, name: str, around: Callable[[Method], Method]) -> None:
    """
    Put another method in the place of one, on this instance alone.

    Args:
        around: is given the method as it was.
    """
    setattr(owner, name, around(getattr(owner, name)))
