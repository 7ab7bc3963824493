"""Limits that an operator sets."""

from __future__ import annotations

import attrs


@attrs.frozen(kw_only=True)
class Limits:
    """
    Limits that an operator sets.

    Attributes:
        queue: requests that may wait for a session.
        sessions: sessions that are kept.
        max_tokens: the longest answer if the client sets no limit.
        heartbeat_s: how often a client that waits gets a keep-alive.
        drain_s: how long running answers may continue when the server stops.
        slab_idle_s: how long an idle session keeps its slab if its full blocks are in memory.
        patience_s: how long a session that settles after an answer waits, in total, for moments
            without a request in flight. Then it becomes idle with what it has.
        ttl_s: how long a conversation and its blocks are kept after their last use, in seconds, if
            the client sets no TTL; the budgets may end them earlier.
        request_s: how long a request may take, from its arrival to the end of its answer.
    """

    queue: int = 64
    sessions: int = 1000
    max_tokens: int = 1024
    heartbeat_s: float = 10.0
    drain_s: float = 30.0
    slab_idle_s: float = 60.0
    patience_s: float = 120.0
    request_s: float = 3600.0
    ttl_s: int = 86_400
