"""
The legal steps: which event may happen now. All of INV-6.

Rules of this module:

1. Everything that decides whether an event may happen now is in this file. What follows from the
   state of a session alone is in the table ``STEPS``. What a table cannot express is below it, as
   marked special cases.
2. This module looks at which event happened, to whom, and after what. What an event means is in
   ``state.py``; whether its figures are right is in ``invariants/``.

A step that is not in the table violates INV-6. A terminal state has an empty table: no step may
follow.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING

from cairn.journal import events as ev

if TYPE_CHECKING:
    from cairn.journal.state import Session, State

Illegal = tuple[str, object, object]
"""Why a step is not legal: (message, expected, actual)"""


class SessionState(StrEnum):
    """What a session is doing."""

    COLD = "cold"
    RESTORING = "restoring"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    SETTLING = "settling"
    IDLE = "idle"
    QUARANTINED = "quarantined"
    CLOSED = "closed"


_ENDS = {
    "request_cancelled": SessionState.SETTLING,
    "invariant_violated": SessionState.SETTLING,
}

_WAITING = {
    "request_received": SessionState.RESTORING,
    "session_quarantined": SessionState.QUARANTINED,
    "session_closed": SessionState.CLOSED,
}

STEPS: Mapping[SessionState, Mapping[str, SessionState]] = MappingProxyType(
    {
        SessionState.COLD: {
            **_WAITING,
            "invariant_violated": SessionState.COLD,
            "blocks_quarantined": SessionState.COLD,
            "admission_closed": SessionState.COLD,
        },
        SessionState.RESTORING: {
            **_ENDS,
            "prefix_joined": SessionState.RESTORING,
            "path_selected": SessionState.RESTORING,
            "slab_acquired": SessionState.RESTORING,
            "slab_released": SessionState.RESTORING,
            "cache_trimmed": SessionState.RESTORING,
            "blocks_restored": SessionState.RESTORING,
            "row_checked": SessionState.RESTORING,
            "cache_extended/prefill": SessionState.PREFILLING,
            "session_quarantined": SessionState.QUARANTINED,
        },
        SessionState.PREFILLING: {
            **_ENDS,
            "cache_extended/prefill": SessionState.PREFILLING,
            "block_sealed": SessionState.PREFILLING,
            "tokens_emitted": SessionState.DECODING,
            "cache_extended/decode": SessionState.DECODING,
            "turn_stored": SessionState.PREFILLING,
            "request_finished": SessionState.SETTLING,
            "session_quarantined": SessionState.QUARANTINED,
        },
        SessionState.DECODING: {
            **_ENDS,
            "cache_extended/decode": SessionState.DECODING,
            "tokens_emitted": SessionState.DECODING,
            "call_rejected": SessionState.DECODING,
            "turn_stored": SessionState.DECODING,
            "request_finished": SessionState.SETTLING,
            "session_quarantined": SessionState.QUARANTINED,
        },
        SessionState.SETTLING: {
            "prewarm_started": SessionState.SETTLING,
            "prewarm_finished": SessionState.SETTLING,
            "prewarm_abandoned": SessionState.SETTLING,
            "cache_trimmed": SessionState.SETTLING,
            "blocks_restored": SessionState.SETTLING,
            "cache_extended/settle": SessionState.SETTLING,
            "block_sealed": SessionState.SETTLING,
            "slab_released": SessionState.SETTLING,
            "session_settled": SessionState.IDLE,
            "invariant_violated": SessionState.SETTLING,
            "blocks_quarantined": SessionState.SETTLING,
            "admission_closed": SessionState.SETTLING,
            "session_quarantined": SessionState.QUARANTINED,
        },
        SessionState.IDLE: {
            **_WAITING,
            "slab_released": SessionState.IDLE,
            "invariant_violated": SessionState.IDLE,
            "blocks_quarantined": SessionState.IDLE,
            "admission_closed": SessionState.IDLE,
        },
        # A quarantined session releases its slab and may be closed. No other step is legal.
        SessionState.QUARANTINED: {
            "slab_released": SessionState.QUARANTINED,
            "invariant_violated": SessionState.QUARANTINED,
            "session_closed": SessionState.CLOSED,
        },
        SessionState.CLOSED: {},
    }
)


def trigger(event: ev.Event) -> str:
    """The name of an event in ``STEPS``: its kind, for ``cache_extended`` followed by /step."""
    if isinstance(event, ev.CacheExtended):
        return f"{event.kind}/{event.step}"
    return event.kind


def next_state(state: SessionState, trigger: str) -> SessionState | None:
    """The state after a step, or None if the step is not legal. Changes nothing."""
    return STEPS[state].get(trigger)


def illegal_steps(state: State, recorded: ev.Recorded) -> Iterator[Illegal]:
    """Why an event may not happen on ``state``; nothing if it may. Changes nothing."""
    event = recorded.event
    yield from _numbering(state, recorded)
    session_id = getattr(event, "session", None)
    if session_id is None:
        yield from _of_the_server(state, event)
        return
    session = state.sessions.get(session_id)
    if isinstance(event, ev.SessionOpened):
        if session is not None:
            yield "a session was opened twice", "a new id", session_id
    elif session is None:
        yield f"{event.kind} on a session that is not open", "one", session_id
    elif next_state(session.state, trigger(event)) is None:
        yield (
            f"{trigger(event)} is not a legal step of a {session.state} session",
            f"one of those that follow {session.state}",
            trigger(event),
        )
    else:
        yield from _of_a_request(state, session, event)
        yield from _of_a_prewarm(session, event)


# --- special cases: what the table cannot express ------------------------------------------------
# The table knows the state of one session and the kind of an event. These also look at numbers of
# rows, at ids, and at what is open: a run, a model, a request, a path, a prewarm, a shadow check.


def _numbering(state: State, recorded: ev.Recorded) -> Iterator[Illegal]:
    """Rows are numbered without gaps, in the journal and in each stream."""
    event = recorded.event
    if recorded.position != state.position + 1:
        yield "gap in the journal", state.position + 1, recorded.position
    if recorded.stream != event.stream:
        yield "an event in the wrong stream", event.stream, recorded.stream
    expected = state.streams.get(recorded.stream, 0) + 1
    if recorded.seq != expected:
        yield f"gap in the stream {recorded.stream}", expected, recorded.seq


def _of_a_request(state: State, session: Session, event: ev.Event) -> Iterator[Illegal]:
    """A session serves one request at a time, and decides its path first and once."""
    if isinstance(event, ev.InvariantViolated):
        return  # it names the request that was open when the invariant broke
    if isinstance(event, ev.RequestReceived):
        if event.request in state.requests:
            yield "a request id was used twice", "a new id", event.request
        return
    named = getattr(event, "request", None)
    open_request = session.request.ask.request if session.request is not None else None
    if isinstance(event, ev.BlocksRestored) and session.request is None is session.prewarm:
        yield "blocks were restored without a request or a prewarm", "a request", None
        return
    # These may leave the request out: a pass of settling, and blocks restored for a prewarm.
    needs = isinstance(event, ev.CacheExtended) and event.step != "settle"
    needs = needs or (isinstance(event, ev.BlocksRestored) and session.prewarm is None)
    if (named is not None or needs) and named != open_request:
        yield f"{event.kind} for another request", open_request, named
        return
    if session.request is None or isinstance(event, ev.RequestCancelled):
        return
    chosen = session.request.path is not None
    if isinstance(event, ev.PathSelected) and chosen:
        yield "a path was selected twice", "one decision", event.path
    if isinstance(event, ev.PrefixJoined) and chosen:
        yield "a prefix was joined after the path was selected", None, event.leader
    early = ev.PrefixJoined | ev.PathSelected | ev.SessionQuarantined
    if not isinstance(event, early) and not chosen:
        yield f"{event.kind} before a path was selected", "path_selected", None


def _of_a_prewarm(session: Session, event: ev.Event) -> Iterator[Illegal]:
    """A prewarm starts before it ends, and ends before the next one or before settling does."""
    open_prewarm = session.prewarm is not None
    match event:
        case ev.PrewarmStarted() if open_prewarm:
            yield "a prewarm started during another", None, event.tokens
        case ev.PrewarmAbandoned(reason="render_failed") if open_prewarm:
            yield "a prewarm that had started was not rendered", "not started", "started"
        case ev.PrewarmAbandoned(reason="render_failed"):
            pass  # it could not start
        case ev.PrewarmFinished() | ev.PrewarmAbandoned() if not open_prewarm:
            yield "a prewarm ended that had not started", "started", "not started"
        case ev.SessionSettled() if open_prewarm:
            yield "a session settled during a prewarm", "the end of the prewarm", None


_OF_A_BLOCK = (
    ev.BlockEvicted,
    ev.BlockSpilled,
    ev.BlockSpillFailed,
    ev.BlockLoaded,
    ev.BlockFileRejected,
    ev.BlockFileRemoved,
)
"""Steps of a block that was sealed before; another node may have sealed one that it rejects."""


def _of_the_server(state: State, event: ev.Event) -> Iterator[Illegal]:
    """Steps of no session: of a run, its model, its blocks and its shadow check."""
    match event:
        case ev.ServerStarted() if state.boot is not None:
            yield "a server started while another was running", None, state.boot
        case ev.ServerStopped() | ev.ServerLost() if state.boot != event.boot:
            yield "a run ended that had not started", state.boot, event.boot
        case ev.NodeTakenOver():
            if state.boot is not None:
                yield "a node was taken over during a run", "the run's end", state.boot
            if event.token <= state.lease:
                yield "a lease was taken twice", f"> {state.lease}", event.token
        case ev.HeadsSeen(heads=heads):
            last = {node: at for node, (at, _) in state.heads_seen.items()}
            for node, at, _ in heads:
                if at <= (before := last.get(node, 0)):
                    yield "a head was seen that is not after the last one", f"> {before}", at
                last[node] = at
        case ev.LossSeen(node=node, lost=lost):
            at, row_hash = state.heads_seen.get(node, (0, ""))
            if lost != (head := f"{at}:{row_hash}"):
                yield "a loss was seen of another head than the last one", head, lost
        case ev.ModelLoaded():
            if state.model is not None:
                yield "a model was loaded beside another", None, state.model.name
            if event.block_tokens < 1:
                yield "a model with empty blocks", ">= 1", event.block_tokens
        case ev.ModelUnloaded():
            loaded = state.model.fingerprint if state.model is not None else None
            if loaded != event.fingerprint:
                yield "a model was unloaded that was not loaded", loaded, event.fingerprint
            if state.requests:
                yield "a model was unloaded during a request", None, min(state.requests)
        case ev.SessionForgotten(of_session=session) if session in state.sessions:
            yield "a session was forgotten that is open", "a closed one", session
        case ev.BlockFilesScanned() if state.model is None:
            yield "block files were scanned without a model", "a model", None
        case ev.BlockAdopted() | ev.AdoptionDeclined() if state.model is None:
            yield f"{event.kind} without a model", "a model", None
        case ev.ShadowStarted():
            if state.model is None:
                yield "a shadow check started without a model", "a model", None
            if state.shadow is not None:
                yield "a shadow check started during another", None, state.shadow
        case ev.ShadowChecked() | ev.ShadowEnded():
            yield from _of_the_check(state, event)
        case _:
            pass
    of_other = isinstance(event, ev.BlockFileRejected) and event.node is not None
    if isinstance(event, _OF_A_BLOCK) and not of_other and event.key not in state.blocks:
        yield f"{event.kind} of a block that was never sealed", "a key", event.key


def _of_the_check(state: State, event: ev.ShadowChecked | ev.ShadowEnded) -> Iterator[Illegal]:
    """A shadow check has one result at most, and ends with it."""
    if isinstance(event, ev.ShadowChecked):
        for key in event.keys:
            if key not in state.blocks:
                yield f"{event.kind} of a block that was never sealed", "a key", key
    shadow = state.shadow
    running = (shadow.of_session, shadow.request) if shadow is not None else None
    named = (event.of_session, event.request)
    if shadow is None or running != named:
        yield f"{event.kind} of a shadow check that is not running", running, named
    elif isinstance(event, ev.ShadowChecked) and shadow.checked:
        yield "a shadow check with two results", "one result", event.kind
    elif isinstance(event, ev.ShadowEnded) and shadow.checked != (event.result == "same"):
        found = "same" if shadow.checked else "another result"
        yield "a shadow check ended with a result that it did not find", found, event.result
