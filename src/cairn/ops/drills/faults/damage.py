"""
Damages a running server by wrapping the methods of its instances.

No class is changed, so nothing that a drill does outlives its server.
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
    A server to damage, and the session that the damage is aimed at.

    Attributes:
        struck_s: when the damage first took effect, on the monotonic clock; None before.
    """

    server: Server
    victim: str
    struck_s: float | None = None

    def strike(self) -> None:
        """Record that the damage takes effect now."""
        if self.struck_s is None:
            self.struck_s = time.monotonic()

    @property
    def engine(self) -> Any:
        """The engine itself. Its methods run on the engine thread."""
        return self.server.loaded.engine.device

    @property
    def session(self) -> Session | None:
        """The victim's state in the journal."""
        return self.server.loaded.sequencer.state.sessions.get(SessionId(self.victim))

    @property
    def slab(self) -> int | None:
        """The id of the victim's slab; None if it has none."""
        session = self.session
        return session.slab.id if session is not None and session.slab is not None else None

    @property
    def actor(self) -> SessionActor:
        """The victim's actor; it exists after the victim's first request."""
        return self.server.loaded.sessions.actors[self.victim]


def wrap(owner: object, name: str, around: Callable[[Method], Method]) -> None:
    """
    Replace a method on this instance alone.

    Args:
        around: makes the new method from the old one.
    """
    setattr(owner, name, around(getattr(owner, name)))
