"""What a server takes on, as its operator wants it."""

from __future__ import annotations

import attrs


@attrs.frozen(kw_only=True)
class Limits:
    """
    What the server takes on.

    Attributes:
        queue: requests that may wait for a session.
        sessions: sessions that are remembered.
        max_tokens: the longest answer where the client names none.
        heartbeat_s: how often a client that waits hears that it still does.
        drain_s: how long running answers may go on when the server is told to stop.
        slab_idle_s: how long a session at rest keeps its slab, where all of it lies in blocks too.
        patience_s: how long a session that settles waits, behind one answer and all in all, for
            moments in which no request is under way. Then it comes to rest with what it has.
        ttl_s: how long a conversation and its blocks are kept after their last use, in seconds,
            where a client does not say; within the budgets.
        request_s: how long a request may take, from its coming to the end of its answer.
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
