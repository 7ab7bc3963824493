"""
Metrics of the prefix cache: what the committed events come to, in tokens.
"""

from __future__ import annotations

from typing import Any

from attrs import evolve

from cairn.journal.events import Event
from tests.http.test_metrics import (
    EVICTED,
    LOADED,
    cancelled,
    finished,
    received,
    selected,
    shared,
    values,
)

HITS = "cairn_prefix_cache_tokens_total"


def asked(prompt_tokens: int, path: Any, reason: str | None, **reuse: Any) -> tuple[Event, Event]:
    """A request with so long a prompt, and what of it is reused."""
    return (
        evolve(received(), prompt_tokens=prompt_tokens),
        evolve(selected(path, reason), **reuse),
    )


def test_every_series_is_there_from_the_start():
    """A rate can be alerted on before the first event of its kind."""
    read = values()
    assert [0, 0, 0] == [read(HITS, tier=tier) for tier in ("slab", "memory", "disk")]
    assert 0 == read("cairn_prefix_cache_query_tokens_total")
    assert 0 == read("cairn_prefix_cache_ratio")
    assert 0 == read("cairn_prefix_match_depth_tokens_count")
    assert 0 == read("cairn_rerendered_tokens_total")


def test_tokens_by_tier():
    """
    Two blocks lie in the slab, one is copied from memory and one from its file; of a block that was
    read from its file for one request the next one finds a copy in memory.
    """
    copied = shared(1)
    read = values(
        *asked(
            300,
            "continuation",
            None,
            kept_blocks=2,
            shared_blocks=2,
            reused_tokens=256,
            rerendered_tokens=40,
        ),
        evolve(LOADED, key="k2"),
        evolve(copied, start=128, end=256, keys=("k1", "k2"), digests=("d", "d")),
        finished(),
        *asked(100, "new_session", "diverged", shared_blocks=1, reused_tokens=64),
        evolve(copied, keys=("k2",)),
    )
    assert [128, 128, 64] == [read(HITS, tier=tier) for tier in ("slab", "memory", "disk")]
    assert 400 == read("cairn_prefix_cache_query_tokens_total")
    assert 0.8 == read("cairn_prefix_cache_ratio")
    assert 40 == read("cairn_rerendered_tokens_total")
    assert 2 == read("cairn_prefix_match_depth_tokens_count")
    assert 320 == read("cairn_prefix_match_depth_tokens_sum")
    assert 0 == read("cairn_prefix_match_depth_tokens_bucket", le="0.0")
    assert 1 == read("cairn_prefix_match_depth_tokens_bucket", le="64.0")


def test_a_block_that_left_memory_again():
    """
    A block that was read, evicted, and sealed anew is one of memory.
    """
    read = values(
        evolve(LOADED, key="d"),
        evolve(EVICTED, key="d"),
        *asked(100, "new_session", "diverged", shared_blocks=1, reused_tokens=64),
        evolve(shared(1), keys=("d",)),
    )
    assert [64, 0] == [read(HITS, tier=tier) for tier in ("memory", "disk")]


def test_who_wants_no_cache_makes_no_query():
    """
    The cold path is no miss.
    """
    read = values(*asked(300, "new_session", "cache_disabled"))
    assert 0 == read("cairn_prefix_cache_query_tokens_total")
    assert 0 == read("cairn_prefix_match_depth_tokens_count")


def test_a_request_without_a_path_makes_no_query():
    """
    A client that went away before its path was decided leaves nothing behind.
    """
    read = values(
        evolve(received(), prompt_tokens=300), cancelled(), selected("new_session", "diverged")
    )
    assert 0 == read("cairn_prefix_cache_query_tokens_total")


def test_prompts_that_are_too_short_to_be_kept():
    """
    Those below the operator's least one are counted, whatever path they take.
    """
    prompts = [
        *asked(99, "new_session", "cold_start"),
        *asked(100, "new_session", "diverged"),
        *asked(64, "new_session", "too_short"),
    ]
    assert 2 == values(*prompts, min_cache_tokens=100)("cairn_prefix_cache_too_short_total")
    assert 0 == values(*prompts)("cairn_prefix_cache_too_short_total")
