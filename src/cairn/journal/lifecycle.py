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


class Life(StrEnum):
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
    "request_cancelled": Life.SETTLING,
    "invariant_violated": Life.SETTLING,
}

_REST = {
    "request_received": Life.RESTORING,
    "session_quarantined": Life.QUARANTINED,
    "session_closed": Life.CLOSED,
}

STEPS: Mapping[Life, Mapping[str, Life]] = MappingProxyType(
    {
        Life.COLD: {
            **_REST,
            "invariant_violated": Life.COLD,
            "blocks_quarantined": Life.COLD,
            "admission_closed": Life.COLD,
        },
        Life.RESTORING: {
            **_ENDS,
            "path_selected": Life.RESTORING,
            "slab_acquired": Life.RESTORING,
            "slab_released": Life.RESTORING,
            "cache_trimmed": Life.RESTORING,
            "blocks_shared": Life.RESTORING,
            "cache_extended/prefill": Life.PREFILLING,
            "session_quarantined": Life.QUARANTINED,
        },
        Life.PREFILLING: {
            **_ENDS,
            "cache_extended/prefill": Life.PREFILLING,
            "block_sealed": Life.PREFILLING,
            "tokens_emitted": Life.DECODING,
            "cache_extended/decode": Life.DECODING,
            "turn_kept": Life.PREFILLING,
            "request_finished": Life.SETTLING,
            "session_quarantined": Life.QUARANTINED,
        },
        Life.DECODING: {
            **_ENDS,
            "cache_extended/decode": Life.DECODING,
            "tokens_emitted": Life.DECODING,
            "call_rejected": Life.DECODING,
            "turn_kept": Life.DECODING,
            "request_finished": Life.SETTLING,
            "session_quarantined": Life.QUARANTINED,
        },
        Life.SETTLING: {
            "anticipation_begun": Life.SETTLING,
            "anticipation_settled": Life.SETTLING,
            "anticipation_given_up": Life.SETTLING,
            "cache_trimmed": Life.SETTLING,
            "blocks_shared": Life.SETTLING,
            "cache_extended/settle": Life.SETTLING,
            "block_sealed": Life.SETTLING,
            "slab_released": Life.SETTLING,
            "session_settled": Life.IDLE,
            "invariant_violated": Life.SETTLING,
            "blocks_quarantined": Life.SETTLING,
            "admission_closed": Life.SETTLING,
            "session_quarantined": Life.QUARANTINED,
        },
        Life.IDLE: {
            **_REST,
            "slab_released": Life.IDLE,
            "invariant_violated": Life.IDLE,
            "blocks_quarantined": Life.IDLE,
            "admission_closed": Life.IDLE,
        },
        # A quarantined session's slab is given back, and it may be forgotten; nothing else.
        Life.QUARANTINED: {
            "slab_released": Life.QUARANTINED,
            "invariant_violated": Life.QUARANTINED,
            "session_closed": Life.CLOSED,
        },
        Life.CLOSED: {},
    }
)


def next_life(life: Life, trigger: str) -> Life | None:
    """
    The step that follows, or None where ``trigger`` is not legal. Changes nothing.

    Args:
        trigger: the kind of an event; for ``cache_extended`` with its step behind a slash.
    """
    return STEPS[life].get(trigger)
