"""
How much of the prompts was reused, and from where: metrics of the prefix cache.

A projection of the committed events. A *query* is a prompt that may be reused, in tokens; a *hit*
is what of it was in the session's slab already, or was copied from a sealed block, in memory or
just read from its file. Both are counted with the first pass over the prompt, so that the hits of
all tiers come to what the ratio says: who goes away before it, or finds no memory, reused nothing.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import Final

import attrs
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from cairn.journal.events import (
    BlockLoaded,
    BlocksRestored,
    CacheExtended,
    Event,
    PathSelected,
    RequestReceived,
)

TIERS: Final = ("slab", "memory", "disk")

_DEPTHS: Final = (0, 64, 256, 1024, 4096, 16_384, 65_536)
_NEVER: Final = "cache_disabled"


@attrs.define
class _Query:
    """
    A prompt whose first pass has not run yet.

    Attributes:
        path: once it is decided.
        from_files: the blocks that were read from their files for it.
        tiers: tokens that it reuses, by where their KV lay.
    """

    prompt_tokens: int
    path: PathSelected | None = None
    from_files: AbstractSet[str] = frozenset()
    tiers: dict[str, int] = attrs.field(factory=lambda: dict.fromkeys(TIERS, 0))


class ReuseMetrics:
    """The metrics of the prefix cache, in a given registry."""

    def __init__(self, registry: CollectorRegistry, min_cache_tokens: int = 0) -> None:
        """
        Args:
            min_cache_tokens: of a shorter prompt nothing is kept.
        """
        self._min_cache_tokens = min_cache_tokens
        self._begun: dict[str, _Query] = {}
        self._just_loaded: set[str] = set()
        self._queried = self._reused = 0
        self._queries = Counter(
            "cairn_prefix_cache_query_tokens_total",
            "Prompt tokens of requests that may use the prefix cache",
            registry=registry,
        )
        self._hits = Counter(
            "cairn_prefix_cache_tokens_total",
            "Prompt tokens served from the cache, by where their KV was",
            ["tier"],
            registry=registry,
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
        self._rerendered = Counter(
            "cairn_rerendered_tokens_total",
            "Tokens in a session's slab that the template rendered differently for the next turn",
            registry=registry,
        )
        self._short = Counter(
            "cairn_prefix_cache_too_short_total",
            "Prompts that were not cached because they are shorter than --min-cache-tokens",
            registry=registry,
        )
        for tier in TIERS:
            self._hits.labels(tier)

    def observe(self, event: Event) -> None:
        """Count a committed event."""
        match event:
            case RequestReceived():
                self._begun[event.request] = _Query(event.prompt_tokens)
                if event.prompt_tokens < self._min_cache_tokens:
                    self._short.inc()
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
        """A request came to its end, perhaps before its first pass."""
        self._begun.pop(request, None)

    def _select(self, event: PathSelected) -> None:
        self._rerendered.inc(event.rerendered_tokens)
        query = self._begun.get(event.request)
        if query is not None:
            query.path = event
            # Blocks are read right before the decision that they are read for; the next one finds
            # them in memory.
            query.from_files = frozenset(self._just_loaded)
            if event.blocks_from_slab:
                blocks = event.blocks_from_slab + event.blocks_from_pool
                query.tiers["slab"] = event.reused_tokens * event.blocks_from_slab // blocks
        self._just_loaded.clear()

    def _share(self, event: BlocksRestored) -> None:
        # What is copied for the next turn is counted when that comes, and finds it in its slab.
        query = self._begun.get(event.request or "")
        if query is None:
            return
        tokens = event.end - event.start
        # What lies before a window is of no use to a pass, and was not copied.
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
