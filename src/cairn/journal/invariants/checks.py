"""Which checks an event must pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from cairn.journal import events as ev
from cairn.journal.invariants import answers, blocks, cache, decisions, memory, records
from cairn.journal.invariants.sentences import Violation, broken
from cairn.journal.lifecycle import illegal_steps
from cairn.journal.state import State


def check(state: State, recorded: ev.Recorded) -> list[Violation]:
    """The violations of an event on ``state``; empty if all invariants hold."""
    illegal = check_step(state, recorded)
    if illegal:
        return illegal
    event = recorded.event
    return [found for one in CHECKS.get(type(event), ()) for found in one(state, event)]


def check_step(state: State, recorded: ev.Recorded) -> list[Violation]:
    """The violations of INV-6 alone, which needs no private field."""
    return [broken("INV-6", *step) for step in illegal_steps(state, recorded)]


CHECKS: dict[type[ev.Event], tuple[Callable[[State, object], Iterator[Violation]], ...]] = {
    ev.ModelLoaded: (records.loaded,),  # type: ignore[dict-item]  # each takes its key
    ev.SelfTestFinished: (records.tested,),  # type: ignore[dict-item]  # likewise, to the end
    ev.SessionOpened: (decisions.opened,),  # type: ignore[dict-item]
    ev.RequestReceived: (decisions.received, records.served),  # type: ignore[dict-item]
    ev.PrefixJoined: (decisions.decided,),  # type: ignore[dict-item]
    ev.PathSelected: (decisions.decided,),  # type: ignore[dict-item]
    ev.SlabAcquired: (memory.acquired,),  # type: ignore[dict-item]
    ev.SlabReleased: (memory.released,),  # type: ignore[dict-item]
    ev.BlocksRestored: (cache.restored,),  # type: ignore[dict-item]
    ev.RowChecked: (cache.row,),  # type: ignore[dict-item]
    ev.CacheExtended: (cache.extended, answers.emitted_with),  # type: ignore[dict-item]
    ev.CacheTrimmed: (cache.trimmed,),  # type: ignore[dict-item]
    ev.BlockSealed: (blocks.sealed,),  # type: ignore[dict-item]
    ev.BlockEvicted: (memory.evicted,),  # type: ignore[dict-item]
    ev.BlockFilesScanned: (memory.found,),  # type: ignore[dict-item]
    ev.BlockSpilled: (blocks.spilled,),  # type: ignore[dict-item]
    ev.BlockLoaded: (blocks.loaded,),  # type: ignore[dict-item]
    ev.BlockFileRejected: (memory.rejected,),  # type: ignore[dict-item]
    ev.BlockFileRemoved: (memory.dropped,),  # type: ignore[dict-item]
    ev.BlockAdopted: (blocks.adopted,),  # type: ignore[dict-item]
    ev.AdoptionDeclined: (decisions.declined,),  # type: ignore[dict-item]
    ev.TokensEmitted: (answers.emitted,),  # type: ignore[dict-item]
    ev.CallRejected: (records.rejected,),  # type: ignore[dict-item]
    ev.TurnStored: (records.stored,),  # type: ignore[dict-item]
    ev.TurnForgotten: (records.forgotten,),  # type: ignore[dict-item]
    ev.SessionForgotten: (records.session_forgotten,),  # type: ignore[dict-item]
    ev.AgentCreated: (records.created,),  # type: ignore[dict-item]
    ev.AgentDeleted: (records.deleted,),  # type: ignore[dict-item]
    ev.SessionReleased: (records.released,),  # type: ignore[dict-item]
    ev.SessionAdopted: (records.adopted,),  # type: ignore[dict-item]
    ev.TurnAdopted: (records.turn_adopted,),  # type: ignore[dict-item]
    ev.RequestFinished: (answers.finished,),  # type: ignore[dict-item]
    ev.PrewarmStarted: (decisions.prewarm_started,),  # type: ignore[dict-item]
    ev.PrewarmFinished: (decisions.prewarm_ended,),  # type: ignore[dict-item]
    ev.PrewarmAbandoned: (decisions.prewarm_ended,),  # type: ignore[dict-item]
    ev.SessionSettled: (cache.settled,),  # type: ignore[dict-item]
    ev.SessionClosed: (memory.closed,),  # type: ignore[dict-item]
    ev.ShadowStarted: (memory.opened,),  # type: ignore[dict-item]
    ev.ShadowChecked: (blocks.shadowed,),  # type: ignore[dict-item]
    ev.ShadowEnded: (memory.gave_back,),  # type: ignore[dict-item]
}
