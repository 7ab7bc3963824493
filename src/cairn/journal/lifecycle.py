"""
The legal steps of a session, as one table.

Rules of this module:

1. Everything that says which step may follow which stands in ``STEPS``.
2. The table knows kinds of events, not their contents. What an event means is in ``state.py``.

A step that is not in the table is a violation of INV-6. Terminal steps have an empty table:
nothing may follow.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType


class SessionState(StrEnum):
    """Where a session stands."""

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

_REST = {
    "request_received": SessionState.RESTORING,
    "session_quarantined": SessionState.QUARANTINED,
    "session_closed": SessionState.CLOSED,
}

STEPS: Mapping[SessionState, Mapping[str, SessionState]] = MappingProxyType(
    {
        SessionState.COLD: {
            **_REST,
            "invariant_violated": SessionState.COLD,
            "blocks_quarantined": SessionState.COLD,
            "admission_closed": SessionState.COLD,
        },
        SessionState.RESTORING: {
            **_ENDS,
            "path_selected": SessionState.RESTORING,
            "slab_acquired": SessionState.RESTORING,
            "slab_released": SessionState.RESTORING,
            "cache_trimmed": SessionState.RESTORING,
            "blocks_restored": SessionState.RESTORING,
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
            **_REST,
            "slab_released": SessionState.IDLE,
            "invariant_violated": SessionState.IDLE,
            "blocks_quarantined": SessionState.IDLE,
            "admission_closed": SessionState.IDLE,
        },
        # A quarantined session's slab is given back, and it may be forgotten; nothing else.
        SessionState.QUARANTINED: {
            "slab_released": SessionState.QUARANTINED,
            "invariant_violated": SessionState.QUARANTINED,
            "session_closed": SessionState.CLOSED,
        },
        SessionState.CLOSED: {},
    }
)


def next_state(state: SessionState, trigger: str) -> SessionState | None:
    """
    The step that follows, or None where ``trigger`` is not legal. Changes nothing.

    Args:
        trigger: the kind of an event; for ``cache_extended`` with its step behind a slash.
    """
    return STEPS[state].get(trigger)
