"""
Metrics of the prefix cache: how much of the prompts was reused, and from where.

They follow from the committed events. A *query* is the tokens of a prompt that may be reused. A
*hit* is those tokens that were already in the session's slab, or were copied from a sealed block,
which was in memory or just read from its file. Both are counted with the first pass over the
prompt, so that the hits of all tiers add up to the ratio. A request that ends earlier reuses
nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Set as AbstractSet
from typing import Final

import attrs
from prometheus_client import CollectorRegistry, Gauge, Histogram

from cairn.http.metrics.counters import counters_in
from cairn.journal.events import (
    BlockLoaded,
    BlocksRestored,
    CacheExtended,
    Event,
    PathSelected,
    PrefixJoined,
    RequestReceived,
)

TIERS: Final = ("slab", "memory", "disk")

_DEPTHS: Final = (0, 64, 256, 1024, 4096, 16_384, 65_536)
_NEVER: Final = "cache_disabled"


@attrs.define
class _Query:
    """
    A prompt before its first pass.

    Attributes:
        path: once it is selected.
        from_files: the blocks that were read from their files for it.
        tiers: the reused tokens, by where their KV was.
    """

    prompt_tokens: int
    path: PathSelected | None = None
    from_files: AbstractSet[str] = frozenset()
    tiers: dict[str, int] = attrs.field(factory=lambda: dict.fromkeys(TIERS, 0))


class ReuseMetrics:
    """The metrics of the prefix cache, in a registry."""

    def __init__(
        self, registry: CollectorRegistry, min_cache_tokens: Callable[[], int] = lambda: 0
    ) -> None:
        """
        Args:
            min_cache_tokens: gives how many tokens a prompt needs to be cached.
        """
        self._min_cache_tokens = min_cache_tokens
        self._begun: dict[str, _Query] = {}
        self._just_loaded: set[str] = set()
        self._queried = self._reused = 0
        counter = counters_in(registry)
        self._queries = counter(
            "cairn_prefix_cache_query_tokens_total",
            "Prompt tokens of requests that may use the prefix cache",
        )
        self._hits = counter(
            "cairn_prefix_cache_tokens_total",
            "Prompt tokens served from the cache, by where their KV was",
            tier=TIERS,
        )
        self._ratio = Gauge(
            "cairn_prefix_cache_ratio",
            "Share of prompt tokens served from the cache since the server started",
            registry=registry,
        )
        self._depth = Histogram(
            "cairn_prefix_match_depth_tokens",
            "Prompt tokens served from the cache",
            buckets=_DEPTHS,
            registry=registry,
        )
        self._rerendered = counter(
            "cairn_rerendered_tokens_total",
            "Tokens in a session's slab that the template rendered differently for the next turn",
        )
        self._short = counter(
            "cairn_prefix_cache_too_short_total",
            "Prompts that were not cached because they are shorter than --min-cache-tokens",
        )

        self._joined = counter(
            "cairn_prefix_joined_total",
            "Times that a request waited for blocks of its prompt that another one computed",
        )

    def observe(self, event: Event) -> None:
        """Count a committed event."""
        match event:
            case RequestReceived():
                self._begun[event.request] = _Query(event.prompt_tokens)
                if event.prompt_tokens < self._min_cache_tokens():
                    self._short.inc()
            case PrefixJoined():
                self._joined.inc()
            case PathSelected():
                self._select(event)
            case BlockLoaded():
                self._just_loaded.add(event.key)
            case BlocksRestored():
                self._share(event)
            case CacheExtended() if event.step == "prefill":
                self._count(self._begun.pop(event.request or "", None))
            case _:
                pass

    def forget(self, request: str) -> None:
        """Forget a request that ended, perhaps before its first pass."""
        self._begun.pop(request, None)

    def _select(self, event: PathSelected) -> None:
        self._rerendered.inc(event.rerendered_tokens)
        query = self._begun.get(event.request)
        if query is not None:
            query.path = event
            # Blocks are read right before the selection that needs them; for the next one they are
            # in memory.
            query.from_files = frozenset(self._just_loaded)
            query.tiers["slab"] = event.tokens_from_slab
        self._just_loaded.clear()

    def _share(self, event: BlocksRestored) -> None:
        # Blocks copied for the next turn are counted with that turn, as part of its slab.
        query = self._begun.get(event.request or "")
        if query is None:
            return
        tokens = event.end - event.start
        # Blocks before a window are not needed for a pass, and were not copied.
        from_files = sum(key in query.from_files for key in event.keys)
        from_disk = tokens * from_files // len(event.keys)
        query.tiers["disk"] += from_disk
        query.tiers["memory"] += tokens - from_disk

    def _count(self, query: _Query | None) -> None:
        if query is None or query.path is None or query.path.reason == _NEVER:
            return
        self._queries.inc(query.prompt_tokens)
        self._depth.observe(query.path.reused_tokens)
        self._queried += query.prompt_tokens
        self._reused += query.path.reused_tokens
        self._ratio.set(self._reused / self._queried if self._queried else 0.0)
        for tier, tokens in query.tiers.items():
            self._hits.labels(tier).inc(tokens)
