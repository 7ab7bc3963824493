"""Holds an engine in the middle of a call, for tests of what happens in the meantime."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import attrs
import trio

from cairn.actors.server import Server


@attrs.define
class Hold:
    """
    Holds the engine in calls of one of its methods until it is released.

    Attributes:
        method: the method's name.
        holds: called with a call's arguments; whether to hold in that call.
        reached: set when the engine is first held, and stays set.
        go: set it to release the engine for good.
        count: how many calls ``holds`` accepted, including those after the release.
    """

    server: Server
    method: str
    holds: Callable[..., bool] = lambda *_: True
    reached: threading.Event = attrs.field(factory=threading.Event)
    go: threading.Event = attrs.field(factory=threading.Event)
    count: int = 0

    def __attrs_post_init__(self) -> None:
        device: Any = self.server.loaded.engine.device
        call = getattr(device, self.method)

        def held(*given: Any, **named: Any) -> Any:
            if self.holds(*given):
                self.count += 1
                self.reached.set()
                assert self.go.wait(120)
            return call(*given, **named)

        setattr(device, self.method, held)

    async def wait(self) -> None:
        """Wait until the engine is held."""
        assert await trio.to_thread.run_sync(self.reached.wait, 120)


def hold_in_copy(server: Server) -> Hold:
    """Hold the engine in the second part of a copy."""
    parts = itertools.count(1)
    return Hold(server, "share", lambda *_: next(parts) == 2)


def hold_prewarm(server: Server) -> Hold:
    """Hold the engine in a prewarm pass."""

    def is_ahead(slab: int, *_: Any) -> bool:
        sessions = server.loaded.sequencer.state.sessions.values()
        return any(s.prewarm is not None and s.slab and s.slab.id == slab for s in sessions)

    return Hold(server, "run_chunk", is_ahead)
