"""Damage to the order of things: decisions, counts, and which event is told first."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import attrs

from cairn.journal import events as ev
from cairn.ops.drills.faults.damage import Damage, Method, wrap


async def stale_decision(damage: Damage) -> None:
    """A path is decided on a state that has forgotten what the session's slab holds."""
    sequencer = damage.server.loaded.sequencer

    def around(selected: Method) -> Method:
        def deciding(received: ev.RequestReceived, around_token: Any) -> Any:
            session = damage.session
            if received.session != damage.victim or session is None:
                return selected(received, around_token)
            damage.strike()
            ledger = sequencer._ledger
            forgetful = attrs.evolve(session, slab_keys=())
            sessions = ledger.state.sessions.set(session.id, forgetful)
            stale = attrs.evolve(ledger.state, sessions=sessions)
            sequencer._ledger = SimpleNamespace(state=stale)  # type: ignore[assignment]
            try:
                return selected(received, around_token)
            finally:
                sequencer._ledger = ledger

        return deciding

    wrap(sequencer, "_selected", around)


async def sequence_gap(damage: Damage) -> None:
    """A session loses count of its own events."""
    cache = damage.actor.cache

    def around(append: Method) -> Method:
        def appending(*events: ev.Event) -> Any:
            if isinstance(events[0], ev.CacheExtended):
                damage.strike()
                cache.seq += 1
            return append(*events)

        return appending

    wrap(cache, "append", around)


async def event_out_of_order(damage: Damage) -> None:
    """A session tells of a pass after it told what came of it."""
    _reported_late(damage, "prefill")


async def emission_early(damage: Damage) -> None:
    """Tokens are released before the pass that made them is on record."""
    _reported_late(damage, "decode")


def _reported_late(damage: Damage, step: ev.Step) -> None:
    """Have a session hold its passes of one kind back until it has told the next thing."""
    held: list[ev.Event] = []

    def around(append: Method) -> Method:
        def appending(*events: ev.Event) -> Any:
            event = events[0]
            if isinstance(event, ev.CacheExtended) and event.step == step:
                damage.strike()
                held.append(event)
                return 0  # a receipt for what is not on record: nothing waits for it
            late = held.copy()
            held.clear()
            receipt = append(*events)
            for event in late:
                append(event)
            return receipt

        return appending

    wrap(damage.actor.cache, "append", around)


async def session_dies(damage: Damage) -> None:
    """A session's own code fails while it answers."""

    def around(decoded: Method) -> Method:
        def dying(*args: Any) -> Any:
            damage.strike()
            raise RuntimeError("the session died")

        return dying

    wrap(damage.actor.cache, "decoded", around)
