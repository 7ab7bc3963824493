"""Metrics of the prefix cache: the tokens that committed events add up to."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import evolve

from cairn.actors.errors import NoMemory
from cairn.engine.prompt.template import Conversation, Message
from cairn.http.metrics.registry import MetricsByTenant
from cairn.journal import events as ev
from cairn.journal.events import Event
from tests.http.metrics.test_registry import (
    EVICTED,
    LOADED,
    cancelled,
    extended,
    finished,
    received,
    selected,
    shared,
    values,
)
from tests.support.in_process_server import ask, generate, wait_idle
from tests.support.prewarm_conversation import Journaled

HITS = "cairn_prefix_cache_tokens_total"


RAN = extended("prefill", 1)


def asked(prompt_tokens: int, path: Any, reason: str | None, **reuse: Any) -> tuple[Event, Event]:
    """A request with a prompt of this length, and the part of it that is reused."""
    return (
        evolve(received(), prompt_tokens=prompt_tokens),
        evolve(selected(path, reason), **reuse),
    )


def test_every_series_is_there_from_the_start():
    """An alert on a rate needs the series to exist before the first event."""
    read = values()
    assert [0, 0, 0] == [read(HITS, tier=tier) for tier in ("slab", "memory", "disk")]
    assert 0 == read("cairn_prefix_cache_query_tokens_total")
    assert 0 == read("cairn_prefix_cache_ratio")
    assert 0 == read("cairn_prefix_match_depth_tokens_count")
    assert 0 == read("cairn_rerendered_tokens_total")


def test_tokens_by_tier():
    """
    Two blocks are in the slab, one is copied from memory and one from its file. A block that was
    read from its file for one request is a copy from memory for the next.
    """
    copied = shared(1)
    read = values(
        evolve(LOADED, key="k2"),
        *asked(
            300,
            "continuation",
            None,
            tokens_from_slab=128,
            blocks_from_slab=2,
            blocks_from_pool=2,
            reused_tokens=256,
            rerendered_tokens=40,
        ),
        evolve(copied, start=128, end=256, keys=("k1", "k2"), digests=("d", "d")),
        RAN,
        RAN,
        finished(),
        *asked(100, "new_session", "diverged", blocks_from_pool=1, reused_tokens=64),
        evolve(copied, keys=("k2",)),
        RAN,
    )
    assert [128, 128, 64] == [read(HITS, tier=tier) for tier in ("slab", "memory", "disk")]
    assert 400 == read("cairn_prefix_cache_query_tokens_total")
    assert 0.8 == read("cairn_prefix_cache_ratio")
    assert 40 == read("cairn_rerendered_tokens_total")
    assert 2 == read("cairn_prefix_match_depth_tokens_count")
    assert 320 == read("cairn_prefix_match_depth_tokens_sum")
    assert 0 == read("cairn_prefix_match_depth_tokens_bucket", le="0.0")
    assert 1 == read("cairn_prefix_match_depth_tokens_bucket", le="64.0")


def test_a_block_that_was_read_for_another():
    """
    A block that was read for a request that did not copy it counts as memory for the next request;
    so does one that was evicted in the meantime and sealed again.
    """
    read = values(
        evolve(LOADED, key="d"),
        *asked(100, "new_session", "diverged", blocks_from_pool=1, reused_tokens=64),
        cancelled(),
        evolve(EVICTED, key="d"),
        *asked(100, "new_session", "diverged", blocks_from_pool=1, reused_tokens=64),
        evolve(shared(1), keys=("d",)),
        RAN,
    )
    assert [64, 0] == [read(HITS, tier=tier) for tier in ("memory", "disk")]
    assert 100 == read("cairn_prefix_cache_query_tokens_total")


def test_blocks_copied_by_a_prewarm_are_no_hit():
    """Blocks that are copied for the next turn are counted when that turn comes."""
    read = values(
        evolve(LOADED, key="d"),
        evolve(shared(1), request=None, keys=("d",)),
        *asked(100, "new_session", "diverged", blocks_from_pool=1, reused_tokens=64),
        evolve(shared(1), keys=("d",)),
        RAN,
    )
    assert [0, 0, 64] == [read(HITS, tier=tier) for tier in ("slab", "memory", "disk")]


def test_a_request_that_ends_before_its_first_pass_reuses_nothing():
    """
    A request that found no slab, or whose client disconnected, counts neither as a query nor as a
    hit.
    """
    read = values(
        *asked(300, "new_session", "diverged", blocks_from_pool=1, reused_tokens=64),
        shared(1),
        cancelled(),
    )
    assert 0 == read("cairn_prefix_cache_query_tokens_total")
    assert 0 == read("cairn_prefix_match_depth_tokens_count")
    assert 0 == read(HITS, tier="memory")


@pytest.mark.trio
async def test_tiers_come_to_the_ratio(monkeypatch: pytest.MonkeyPatch):
    """
    In a journal with blocks copied ahead and requests without a slab, the tokens of all tiers add
    up to those that the answers reported, and to the ratio.
    """
    setup = Journaled()
    instructions = Message(role="system", content="stone " * 100)
    first = generate(Conversation(messages=(instructions, Message(role="user", content="a" * 200))))
    said = []
    async with setup.serving() as server:
        metrics = MetricsByTenant(server).of_all
        for max_tokens in (70, 300, 300):
            said.append(await ask(server, evolve(first, max_tokens=max_tokens)))
            await wait_idle(server)
        with monkeypatch.context() as patched:
            patched.setattr("cairn.journal.cache.eviction.slab_fits", lambda *_: False)
            with pytest.raises(NoMemory):
                await ask(server, evolve(first, max_tokens=900))
        await wait_idle(server)

        read = metrics.registry.get_sample_value
        hits = [read(HITS, {"tier": tier}) or 0 for tier in ("slab", "memory")]
        ratio = read("cairn_prefix_cache_ratio") or 0
        asked_for = read("cairn_prefix_cache_query_tokens_total") or 0
    assert any(event.request is None for event in setup.events(ev.BlocksRestored))
    (gone,) = setup.events(ev.RequestCancelled)
    assert "no_memory" == gone.stage
    assert sum(one.accepted.cached_tokens for one in said) == sum(hits)
    assert sum(one.accepted.prompt_tokens for one in said) == asked_for
    assert sum(hits) == round(ratio * asked_for)


def test_a_request_without_the_cache_makes_no_query():
    """A request on the cold path is no miss."""
    read = values(*asked(300, "new_session", "cache_disabled"), RAN)
    assert 0 == read("cairn_prefix_cache_query_tokens_total")
    assert 0 == read("cairn_prefix_match_depth_tokens_count")


def test_a_request_without_a_path_makes_no_query():
    """A client that disconnected before its path was decided leaves no state."""
    read = values(
        evolve(received(), prompt_tokens=300), cancelled(), selected("new_session", "diverged")
    )
    assert 0 == read("cairn_prefix_cache_query_tokens_total")


def test_prompts_that_are_too_short_to_be_cached():
    """Prompts below the operator's minimum are counted, whatever their path."""
    prompts = [
        *asked(99, "new_session", "cold_start"),
        *asked(100, "new_session", "diverged"),
        *asked(64, "new_session", "too_short"),
    ]
    assert 2 == values(*prompts, min_cache_tokens=100)("cairn_prefix_cache_too_short_total")
    assert 0 == values(*prompts)("cairn_prefix_cache_too_short_total")
