"""
How much of the prompts was reused, and from where: metrics of the prefix cache.

A projection of the committed events. A *query* is a prompt that may be reused, in tokens; a *hit*
is what of it was in the session's slab already, or was copied from a sealed block, in memory or
just read from its file.
"""

from __future__ import annotations

from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from cairn.journal.events import (
    BlockEvicted,
    BlockLoaded,
    BlocksShared,
    Event,
    PathSelected,
    RequestReceived,
)

TIERS: Final = ("slab", "memory", "disk")

_DEPTHS: Final = (0, 64, 256, 1024, 4096, 16_384, 65_536)
_NEVER: Final = "cache_disabled"


class ReuseMetrics:
    """
    The metrics of the prefix cache, in a given registry.
    """

    def __init__(self, registry: CollectorRegistry, min_cache_tokens: int = 0) -> None:
        """
        Args:
            min_cache_tokens: of a shorter prompt nothing is kept.
        """
        self._min_cache_tokens = min_cache_tokens
        self._prompt_tokens: dict[str, int] = {}
        self._just_loaded: set[str] = set()
        self._queried = self._reused = 0
        self._queries = Counter(
            "cairn_prefix_cache_query_tokens_total",
            "Prompt tokens of requests that may reuse",
            registry=registry,
        )
        self._hits = Counter(
            "cairn_prefix_cache_tokens_total",
            "Prompt tokens reused, by where their KV lay",
            ["tier"],
            registry=registry,
        )
        self._ratio = Gauge(
            "cairn_prefix_cache_ratio",
            "Tokens reused to tokens queried, since the start",
            registry=registry,
        )
        self._depth = Histogram(
            "cairn_prefix_match_depth_tokens",
            "Tokens reused by a request that may",
            buckets=_DEPTHS,
            registry=registry,
        )
        self._rerendered = Counter(
            "cairn_rerendered_tokens_total",
            "Tokens that a session held and the template rendered differently for its next turn",
            registry=registry,
        )
        self._short = Counter(
            "cairn_prefix_cache_too_short_total",
            "Prompts of which nothing was kept, since they were shorter than --min-cache-tokens",
            registry=registry,
        )
        for tier in TIERS:
            self._hits.labels(tier)

    def observe(self, event: Event) -> None:
        """
        Count a committed event.
        """
        match event:
            case RequestReceived():
                self._prompt_tokens[event.request] = event.prompt_tokens
                if event.prompt_tokens < self._min_cache_tokens:
                    self._short.inc()
            case PathSelected():
                self._select(event, self._prompt_tokens.pop(event.request, 0))
            case BlockLoaded():
                self._just_loaded.add(event.key)
            case BlockEvicted():
                self._just_loaded.discard(event.key)
            case BlocksShared():
                self._share(event)
            case _:
                pass

    def forget(self, request: str) -> None:
        """
        A request came to its end, perhaps without a path.
        """
        self._prompt_tokens.pop(request, None)

    def _select(self, event: PathSelected, prompt_tokens: int) -> None:
        self._rerendered.inc(event.rerendered_tokens)
        if event.reason == _NEVER:
            return
        self._queries.inc(prompt_tokens)
        self._depth.observe(event.reused_tokens)
        self._queried += prompt_tokens
        self._reused += event.reused_tokens
        self._ratio.set(self._reused / self._queried if self._queried else 0.0)
        if event.kept_blocks:
            blocks = event.kept_blocks + event.shared_blocks
            self._hits.labels("slab").inc(event.reused_tokens * event.kept_blocks // blocks)

    def _share(self, event: BlocksShared) -> None:
        # Read for this request: the next one finds it in memory.
        read = self._just_loaded.intersection(event.keys)
        self._just_loaded -= read
        tokens = event.end - event.start
        # What lies before a window is of no use to a pass, and was not copied.
        from_disk = tokens * len(read) // len(event.keys)
        self._hits.labels("disk").inc(from_disk)
        self._hits.labels("memory").inc(tokens - from_disk)
