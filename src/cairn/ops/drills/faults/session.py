"""Damage to decisions, counters and the order of events."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import attrs

from cairn.engine.reports import PassReport
from cairn.journal import events as ev
from cairn.ops.drills.faults.damage import Damage, Method, wrap


async def stale_decision(damage: Damage) -> None:
    """A path is decided on a state that does not know what is in the session's slab."""
    sequencer = damage.server.loaded.sequencer

    def around(decided: Method) -> Method:
        def deciding(name: str, around_token: Any) -> Any:
            session = damage.session
            if name != damage.victim or session is None:
                return decided(name, around_token)
            damage.strike()
            ledger = sequencer._ledger
            forgetful = attrs.evolve(session, slab_keys=())
            sessions = ledger.state.sessions.set(session.id, forgetful)
            stale = attrs.evolve(ledger.state, sessions=sessions)
            sequencer._ledger = SimpleNamespace(state=stale)  # type: ignore[assignment]
            try:
                return decided(name, around_token)
            finally:
                sequencer._ledger = ledger

        return deciding

    wrap(sequencer, "_decided", around)


async def sequence_gap(damage: Damage) -> None:
    """A session skips a number in its own events."""
    cache = damage.actor.cache

    def around(append: Method) -> Method:
        def appending(*events: ev.Event) -> Any:
            if any(isinstance(event, ev.CacheExtended) for event in events):
                damage.strike()
                cache.seq += 1
            return append(*events)

        return appending

    wrap(cache, "append", around)


async def event_out_of_order(damage: Damage) -> None:
    """A session reports a pass after reporting its result."""
    held: list[ev.Event] = []

    def around(append: Method) -> Method:
        def appending(*events: ev.Event) -> Any:
            passes = [e for e in events if isinstance(e, ev.CacheExtended) and e.step == "prefill"]
            if passes:
                damage.strike()
                held.extend(passes)
                rest = [event for event in events if event not in passes]
                return append(*rest) if rest else 0  # of nothing, so the session does not wait
            late = held.copy()
            held.clear()
            receipt = append(*events)
            for event in late:
                append(event)
            return receipt

        return appending

    wrap(damage.actor.cache, "append", around)


async def emission_early(damage: Damage) -> None:
    """Tokens are sent before the pass that made them is recorded."""
    cache = damage.actor.cache

    def around(decoded: Method) -> Method:
        def decoding(batch: Sequence[PassReport], request: str, emitted: int, text: str) -> Any:
            damage.strike()
            first = cache.request.emitted
            drawn = (one.token for report in batch for one in report.all_drawn)
            ids = (*cache.request.sampled, *drawn)[first : first + emitted]
            sent = ev.TokensEmitted(
                session=cache.id,
                request=request,
                first=first,
                emitted=len(ids),
                ids=ids,
                text=text,
            )
            cache.append(sent)
            return decoded(batch, request, 0, "")

        return decoding

    wrap(cache, "decoded", around)


async def answer_rewritten(damage: Damage) -> None:
    """A session stores another answer than it released."""
    cache = damage.actor.cache

    def around(append: Method) -> Method:
        def appending(*events: ev.Event) -> Any:
            for event in events:
                if isinstance(event, ev.RequestFinished):
                    damage.strike()
                    append(_rewritten(event, cache.session.tenant))
            return append(*events)

        return appending

    wrap(cache, "append", around)


def _rewritten(event: ev.RequestFinished, tenant: str) -> ev.TurnStored:
    return ev.TurnStored(
        session=event.session,
        request=event.request,
        tenant=tenant,
        agent=None,
        previous=None,
        created_s=0,
        question="[]",
        answer='[{"said":{"text":"Something else."}}]',
        note="",
        texts={},
        texts_at={},
    )


async def session_dies(damage: Damage) -> None:
    """A session's own code fails while it answers."""

    def around(decoded: Method) -> Method:
        def dying(*args: Any) -> Any:
            damage.strike()
            raise RuntimeError("the session died")

        return dying

    wrap(damage.actor.cache, "decoded", around)
