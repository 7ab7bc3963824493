"""
What happens in the server, for live pages: the requests in flight, and what the engine's passes
computed.

Rules of this module:

1. A tenant is shown its own alone: not even how many changes there were elsewhere.
2. A frame is made once for all pages of a tenant, and only while one is open.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator
from typing import Any

import attrs
import trio

from cairn.http.explorer.shown import brief, decision
from cairn.http.service import Server
from cairn.http.wire.json import encode
from cairn.journal import events as ev
from cairn.journal.tenants import session_name, session_tenant

TICK_S = 0.5
ENDED_MAX = 20
_KEEP_ALIVE_TICKS = 30

PASSES = ("prefill", "decode", "settle")
"""The steps whose tokens are counted; ``settle`` is what is computed while idle (prewarm)."""


@attrs.define(kw_only=True)
class Flight:
    """
    A request in flight, or one that ended.

    Attributes:
        client: the program that sent it, by its own word; None if it gave no name.
        words: the first words of what was asked; private.
        end: how it ended; None while it goes on.
    """

    request: str
    session: str
    tenant: str
    protocol: str
    client: str | None
    words: str
    received_us: int
    prompt: int
    reused: int = 0
    computed: int = 0
    generated: int = 0
    phase: str = "queued"
    path: str | None = None
    reason: str | None = None
    end: str | None = None
    ended_us: int | None = None


@attrs.define
class _Tenant:
    """What is shown to a tenant."""

    changes: int = 0
    tokens: dict[str, int] = attrs.field(factory=lambda: dict.fromkeys(PASSES, 0))
    flights: dict[str, Flight] = attrs.field(factory=dict)
    ended: deque[Flight] = attrs.field(factory=lambda: deque(maxlen=ENDED_MAX))


class Feed:
    """Follows committed events."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._tenants: dict[str, _Tenant] = {}
        self._frames: dict[tuple[str, bool], tuple[object, bytes]] = {}
        server.observe(self._see)

    def frame(self, tenant: str, *, of_all: bool) -> dict[str, Any]:
        """
        The server at this moment.

        Args:
            of_all: whether the reader may see the requests of all tenants.
        """
        seen = self._seen(tenant, of_all=of_all)
        flights = sorted(
            (one for each in seen for one in each.flights.values()), key=lambda f: f.received_us
        )
        ended = sorted(
            (one for each in seen for one in each.ended), key=lambda f: -(f.ended_us or 0)
        )
        shown: dict[str, Any] = {
            "changes": sum(each.changes for each in seen),
            "models": self._models(),
            "tokens": {step: sum(each.tokens[step] for each in seen) for step in PASSES},
            "flights": [_shown(one, tenant) for one in flights],
            "ended": [_shown(one, tenant) for one in ended[:ENDED_MAX]],
        }
        if of_all:
            now = self._server.statistics()
            shown["queued"], shown["running"] = now.queued, now.running
        return shown

    async def stream(self, tenant: str, *, of_all: bool) -> AsyncIterator[bytes]:
        """Frames as server-sent events, at most one a tick, and only where something changed."""
        last, quiet = b"", 0
        yield b": connected\n\n"
        while True:
            encoded = self._encoded(tenant, of_all=of_all)
            quiet = 0 if encoded != last else quiet + 1
            if not quiet:
                yield b"event: frame\ndata: %s\n\n" % encoded
            elif quiet % _KEEP_ALIVE_TICKS == 0:
                yield b"event: alive\ndata: {}\n\n"  # a script is not told of comments
            last = encoded
            await trio.sleep(TICK_S)

    def _models(self) -> dict[str, str]:
        """The state of each model, which all tenants may know."""
        return {one.facts.model: one.state for one in self._server.models}

    def _seen(self, tenant: str, *, of_all: bool) -> list[_Tenant]:
        if of_all:
            return list(self._tenants.values())
        found = self._tenants.get(tenant)
        return [found] if found is not None else []

    def _encoded(self, tenant: str, *, of_all: bool) -> bytes:
        now = self._server.statistics() if of_all else None
        version = (
            *self._models().items(),
            *(sum(each.changes for each in self._seen(tenant, of_all=of_all)),),
            *((now.queued, now.running) if now is not None else ()),
        )
        held = self._frames.get((tenant, of_all))
        if held is None or held[0] != version:
            held = (version, encode(self.frame(tenant, of_all=of_all)))
            self._frames[tenant, of_all] = held
        return held[1]

    def _see(self, recorded: ev.Recorded) -> None:
        if isinstance(recorded.event, ev.SessionForgotten):
            self._forget(recorded.event.of_session)
        session = getattr(recorded.event, "session", None)
        if session is None:
            return
        tenant = self._tenants.setdefault(session_tenant(session), _Tenant())
        if _take(tenant, recorded):
            tenant.changes += 1

    def _forget(self, session: str) -> None:
        """Drop the words of a session, also from frames that were made."""
        tenant = self._tenants.get(session_tenant(session), _Tenant())
        for flight in tenant.ended:
            if flight.session == session:
                flight.words = ""
        tenant.changes += 1
        self._frames.clear()


def _take(tenant: _Tenant, recorded: ev.Recorded) -> bool:
    """Take an event over; whether a page would show it."""
    event = recorded.event
    match event:
        case ev.RequestReceived():
            tenant.flights[event.request] = Flight(
                request=event.request,
                session=event.session,
                tenant=event.tenant,
                protocol=event.protocol,
                client=event.client,
                words=event.words or "",
                received_us=recorded.time_us,
                prompt=event.prompt_tokens,
            )
        case ev.PathSelected():
            flight = tenant.flights.get(event.request)
            if flight is not None:
                flight.phase = "prefill"
                flight.path, flight.reason = event.path, event.reason
                flight.reused = event.reused_tokens
        case ev.CacheExtended():
            # A prefill may draw the first token of the answer, too.
            drawn, computed = len(event.sampled), event.end - event.start
            tenant.tokens["decode"] += drawn
            if event.step != "decode":
                tenant.tokens[event.step] += computed
            flight = tenant.flights.get(event.request or "")
            if flight is not None:
                flight.computed += computed if event.step == "prefill" else 0
                flight.generated += drawn
                flight.phase = "decode" if flight.generated else "prefill"
        case ev.RequestFinished():
            _end(tenant, recorded, event.request, event.finish_reason)
        case ev.RequestCancelled():
            _end(tenant, recorded, event.request, f"cancelled ({event.stage})")
        case ev.InvariantViolated():
            _end(tenant, recorded, event.request, event.invariant)
        case ev.SessionQuarantined():
            for flight in list(tenant.flights.values()):
                if flight.session == event.session:
                    _end(tenant, recorded, flight.request, "quarantined")
        case ev.SessionOpened() | ev.SessionClosed():
            pass
        case _:
            return False
    return True


def _end(tenant: _Tenant, recorded: ev.Recorded, request: str | None, end: str) -> None:
    flight = tenant.flights.pop(request or "", None)
    if flight is not None:
        flight.end, flight.ended_us, flight.phase = end, recorded.time_us, "ended"
        tenant.ended.append(flight)


def _shown(flight: Flight, tenant: str) -> dict[str, Any]:
    """A request as a page shows it: without its words to a reader of another tenant."""
    own = flight.tenant == tenant
    found = attrs.asdict(flight)
    found["decision"] = decision(flight.path, flight.reason) if flight.path is not None else None
    found["words"] = brief(flight.words) if own else ""
    found["session"] = session_name(flight.session) if own else flight.session
    return found
