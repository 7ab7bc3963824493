"""Metrics: what committed events add up to, and what a scrape reads."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import evolve

from cairn.actors.requests.messages import Delays
from cairn.http.app import create_app
from cairn.http.metrics.registry import MetricsByTenant
from cairn.journal.events import (
    BlockAdopted,
    BlockEvicted,
    BlockFileRejected,
    BlockFileRemoved,
    BlockLoaded,
    BlockSealed,
    BlockSpilled,
    BlocksRestored,
    CacheExtended,
    Event,
    InvariantViolated,
    PathSelected,
    PrefixJoined,
    PrewarmAbandoned,
    PrewarmFinished,
    PrewarmStarted,
    RequestCancelled,
    RequestFinished,
    RequestReceived,
    RequestRejected,
    SessionClosed,
    SessionQuarantined,
    ShadowEnded,
    ShadowSkipped,
    TokensEmitted,
)
from cairn.journal.invariants import SENTENCES
from tests.http.fake_service import FakeService

Labels = dict[str, str]


def received(request: str = "r1") -> RequestReceived:
    """A session takes a request."""
    return RequestReceived(
        session="s1",
        request=request,
        protocol="openai.chat",
        client=None,
        tenant="local",
        fingerprint="f",
        session_name=None,
        group=None,
        cache_prompt=True,
        base_request=None,
        base_parts=0,
        new_parts=(),
        base_tokens=0,
        new_ids=(1, 2),
        base_keys=0,
        new_keys=(),
        prompt_tokens=2,
        max_tokens=10,
        sampling={},
        seed=1,
        seed_given=False,
        thoughts=0,
        requested_model="",
        grammar=None,
        words=None,
        waited_us=0,
        traceparent=None,
        cache_mode="full",
        ttl_s=None,
    )


def selected(path: Any, reason: str | None, request: str = "r1", reused: int = 0) -> PathSelected:
    """A path is decided."""
    return PathSelected(
        session="s1",
        request=request,
        rules_version=1,
        decided_at=1,
        path=path,
        reason=reason,
        tokens_from_slab=0,
        blocks_from_slab=0,
        blocks_from_pool=0,
        partial_key=None,
        tokens_from_partial=0,
        reused_tokens=reused,
        prewarmed_tokens=reused,
        rerendered_tokens=0,
        nearest=None,
        diverged_part=None,
        diverged_token=None,
        diverged_text=None,
        diverged_from=None,
    )


def shared(duration_us: int, request: str = "r1") -> BlocksRestored:
    """Blocks are copied in."""
    return BlocksRestored(
        session="s1",
        request=request,
        start=0,
        end=64,
        keys=("k",),
        digests=("d",),
        coverage=((1, 0, 64),),
        duration_us=duration_us,
    )


def extended(
    step: Any, duration_us: int, request: str | None = "r1", **counts: Any
) -> CacheExtended:
    """A pass is run."""
    return CacheExtended(
        session="s1",
        request=request,
        step=step,
        start=0,
        end=64,
        input_hash="h",
        coverage=((1, 0, 64),),
        sampled=(),
        logprobs=(),
        duration_us=duration_us,
        **counts,
    )


def emitted(*ids: int, request: str = "r1") -> TokensEmitted:
    """Tokens are released."""
    return TokensEmitted(
        session="s1", request=request, first=0, emitted=len(ids), ids=ids, text="x"
    )


def finished(request: str = "r1", reason: Any = "stop") -> RequestFinished:
    """An answer is complete."""
    return RequestFinished(
        session="s1",
        request=request,
        finish_reason=reason,
        prompt_tokens=2,
        cached_tokens=0,
        answer_tokens=1,
        completion_tokens=1,
    )


def cancelled(request: str = "r1") -> RequestCancelled:
    """A client disconnected."""
    return RequestCancelled(session="s1", request=request, stage="prefill")


def violated(invariant: str, request: str | None = "r1") -> InvariantViolated:
    """An invariant was violated."""
    return InvariantViolated(
        bug_id="b",
        invariant=invariant,
        at_position=1,
        session="s1",
        of_session=None,
        request=request,
        fingerprint=None,
        cairn_version="0",
        message="",
        expected="",
        actual="",
        trace="",
    )


def sealed(again: bool = False) -> BlockSealed:
    """A chunk was sealed as a block."""
    return BlockSealed(
        session="s1",
        key="k",
        parent=None,
        digest="d",
        start=0,
        end=64,
        bytes=10,
        resealed=again,
        stored=True,
        memory_blocks=1,
        memory_bytes=10,
    )


SPILLED = BlockSpilled(key="k", digest="d", bytes=12, disk_blocks=1, disk_bytes=12)
LOADED = BlockLoaded(key="k", digest="d", bytes=10, memory_blocks=1, memory_bytes=10, duration_us=5)
DROPPED = BlockFileRemoved(key="k", bytes=12, disk_blocks=0, disk_bytes=0, reason="space")
EVICTED = BlockEvicted(key="k", bytes=10, memory_blocks=0, memory_bytes=0, reason="space")


def values(*events: Event, min_cache_tokens: int = 0) -> Any:
    """A function that reads a sample after these events."""
    service = FakeService()
    service.facts = evolve(service.facts, min_cache_tokens=min_cache_tokens)
    metrics = MetricsByTenant(service).of_all
    service.commit(*events)

    def read(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(name, labels)

    return read


def test_every_series_is_there_from_the_start():
    """An alert on a rate needs the series to exist before the first event."""
    read = values()
    for path in ("continuation", "new_session"):
        assert 0 == read("cairn_path_selection_total", path=path)
        assert 0 == read("cairn_prefill_duration_seconds_count", path=path)
    for reason in ("cold_start", "shorter_history", "diverged", "evicted", "too_short"):
        assert 0 == read("cairn_path_selection_reason_total", reason=reason)
    for kind in (*(f"inv{number}" for number in range(1, 9)), "crash"):
        assert 0 == read("cairn_cache_invariant_violations_total", kind=kind)
    for outcome in ("stop", "length", "cancelled", "rejected", "broken", "refused"):
        assert 0 == read("cairn_requests_total", outcome=outcome)
    for name in (
        "cairn_continuation_tokens_skipped_total",
        "cairn_prewarmed_tokens_total",
        "cairn_prewarmed_tokens_used_total",
        "cairn_tokens_emitted_total",
        "cairn_draft_tokens_total",
        "cairn_draft_tokens_accepted_total",
        "cairn_blocks_sealed_total",
        "cairn_blocks_evicted_total",
        "cairn_blocks_spilled_total",
        "cairn_blocks_loaded_total",
        "cairn_blocks_adopted_total",
        "cairn_adopted_tokens_total",
        "cairn_blocks_dropped_total",
    ):
        assert 0 == read(name)
    for reason in ("missing", "unreadable", "foreign", "digest"):
        assert 0 == read("cairn_blocks_rejected_total", reason=reason)
    for tier in ("slab", "memory"):
        assert 0 == read("cairn_blocks_reused_total", tier=tier)
    for reason in ("request", "slab_needed", "closing", "render_failed", "quarantined"):
        assert 0 == read("cairn_prewarm_abandoned_total", reason=reason)
    for result in ("same", "differs", "skipped"):
        assert 0 == read("cairn_shadow_checks_total", result=result)


def test_shadow_checks():
    """The result of each sampled answer; a check that starts again is not counted twice."""

    def ended(result: Any) -> ShadowEnded:
        of: dict[str, Any] = {"of_session": "s1", "request": "r1", "slab": 1, "bytes": 1}
        return ShadowEnded(result=result, pool_slabs=0, pool_bytes=0, **of)

    skipped = ShadowSkipped(of_session="s1", request="r1", reason="interrupted")
    read = values(
        *(ended("interrupted") for _ in range(3)),
        skipped,
        ended("interrupted"),
        ended("same"),
        ended("same"),
        ended("differs"),
        ended("failed"),
        evolve(skipped, reason="failed"),
    )
    counted = {"same": 2, "differs": 1, "skipped": 2}
    assert counted == {
        result: read("cairn_shadow_checks_total", result=result) for result in counted
    }


def test_every_invariant_has_its_series():
    """The kinds are those of the journal."""
    read = values(*(violated(name) for name in (*SENTENCES, "CRASH")))
    kinds = [name.lower().replace("-", "") for name in SENTENCES]
    assert [1] * 10 == [
        read("cairn_cache_invariant_violations_total", kind=kind) for kind in (*kinds, "crash")
    ]


def test_paths():
    """Paths are counted, with the reasons of new sessions and the tokens that continuing saved."""
    read = values(
        selected("new_session", "cold_start", reused=64),
        selected("continuation", None, reused=128),
        selected("continuation", None, reused=64),
        selected("new_session", "diverged"),
    )
    assert 2 == read("cairn_path_selection_total", path="continuation")
    assert 2 == read("cairn_path_selection_total", path="new_session")
    assert 1 == read("cairn_path_selection_reason_total", reason="cold_start")
    assert 1 == read("cairn_path_selection_reason_total", reason="diverged")
    assert 192 == read("cairn_continuation_tokens_skipped_total")


def settling(session: str) -> CacheExtended:
    """A settling pass over a chunk of 64."""
    return CacheExtended(
        session=session,
        request=None,
        step="settle",
        start=0,
        end=64,
        input_hash="h",
        coverage=((1, 0, 64),),
        sampled=(),
        logprobs=(),
        duration_us=1,
    )


def begun_and_run(session: str, passes: int) -> list[Any]:
    """A prewarm that begins and runs some passes."""
    begun = PrewarmStarted(
        session=session,
        next_role="user",
        rules_version=1,
        tokens=640,
        base_tokens=0,
        new_ids=(),
        base_keys=0,
        new_keys=(),
        tokens_from_slab=0,
        blocks_from_slab=0,
        blocks_from_pool=0,
        partial_key=None,
        tokens_from_partial=0,
    )
    return [begun, *[settling(session)] * passes]


def test_prewarm():
    """
    Prewarm is counted with each pass, whether or not it completes, and so is what of it is used.
    Other settling is not counted.
    """
    read = values(
        *begun_and_run("s1", 4),
        PrewarmFinished(session="s1", tokens=640, computed_tokens=256),
        settling("s1"),
        *begun_and_run("s2", 1),
        PrewarmAbandoned(session="s2", reason="request", computed_tokens=64),
        settling("s2"),
        *begun_and_run("s3", 0),
        PrewarmAbandoned(session="s3", reason="request", computed_tokens=0),
        *begun_and_run("s4", 1),
        SessionQuarantined(session="s4", bug_id="b"),
        settling("s4"),
        *begun_and_run("s5", 2),
        selected("continuation", None, reused=128),
        selected("new_session", "diverged", reused=64),
    )
    assert 512 == read("cairn_prewarmed_tokens_total")
    assert 192 == read("cairn_prewarmed_tokens_used_total")
    assert 2 == read("cairn_prewarm_abandoned_total", reason="request")


def test_prefill_is_summed_until_the_first_token():
    """
    Copies and prefill passes of one request are one observation; other passes are not counted.
    """
    read = values(
        received(),
        selected("continuation", None),
        shared(1_000_000),
        extended("prefill", 2_000_000),
        received("r2"),
        selected("new_session", "cold_start", request="r2"),
        extended("prefill", 64_000_000, request="r2"),
        extended("settle", 128_000_000, request=None),
        extended("prefill", 500_000),
        extended("decode", 256_000_000),
        emitted(1, 2),
        extended("decode", 256_000_000, drafted=3, accepted=2, emitted=2),
        emitted(1),
        finished(),
    )
    name = "cairn_prefill_duration_seconds"
    assert (1, 3.5) == (
        read(f"{name}_count", path="continuation"),
        read(f"{name}_sum", path="continuation"),
    )
    assert 0 == read(f"{name}_count", path="new_session")
    assert 5 == read("cairn_tokens_emitted_total")
    assert 3 == read("cairn_draft_tokens_total")
    assert 2 == read("cairn_draft_tokens_accepted_total")


def test_prefill_of_an_answer_without_tokens():
    """An answer without tokens is observed when it finishes."""
    read = values(
        received(), selected("new_session", "evicted"), extended("prefill", 250_000), finished()
    )
    name = "cairn_prefill_duration_seconds"
    assert (1, 0.25) == (
        read(f"{name}_count", path="new_session"),
        read(f"{name}_sum", path="new_session"),
    )


def test_prefill_that_was_cut_off_is_no_observation():
    """The duration of a prefill that did not complete is not observed."""
    read = values(
        received(),
        selected("new_session", "cold_start"),
        extended("prefill", 1),
        cancelled(),
        finished(),
    )
    assert 0 == read("cairn_prefill_duration_seconds_count", path="new_session")


@pytest.mark.parametrize(
    ("ends", "outcome"),
    [
        ((finished(),), "stop"),
        ((finished(reason="length"),), "length"),
        ((cancelled(),), "cancelled"),
        ((violated("INV-1"),), "broken"),
        ((violated("INV-1"), violated("INV-5")), "broken"),
    ],
)
def test_outcomes(ends: tuple[Event, ...], outcome: str):
    """A request has one outcome, however many invariants it violated."""
    read = values(received(), selected("new_session", "cold_start"), *ends)
    found = {
        name: read("cairn_requests_total", outcome=name)
        for name in ("stop", "length", "cancelled", "rejected", "broken")
    }
    assert {**dict.fromkeys(found, 0), outcome: 1} == found


def test_rejected_requests():
    """A rejected request is an outcome too; if the client disconnected, it is a cancellation."""
    read = values(RequestRejected(request="r1", tenant="local", status=429, code="queue_full"))
    assert 1 == read("cairn_requests_total", outcome="rejected")
    assert 0 == read("cairn_requests_total", outcome="cancelled")
    read = values(RequestRejected(request="r1", tenant="local", status=499, code="client_gone"))
    assert 0 == read("cairn_requests_total", outcome="rejected")
    assert 1 == read("cairn_requests_total", outcome="cancelled")


def test_violation_without_a_request():
    """A session that breaks while it settles ends no request."""
    read = values(received(), finished(), violated("INV-3", None), violated("INV-3", "r1"))
    assert 2 == read("cairn_cache_invariant_violations_total", kind="inv3")
    assert 0 == read("cairn_requests_total", outcome="broken")


def test_violation_before_a_path():
    """A request that breaks before its path is decided counts as broken, and has no prefill."""
    read = values(received(), violated("CRASH"))
    assert 1 == read("cairn_requests_total", outcome="broken")


def test_blocks():
    """Chunks sealed and blocks evicted are counted; other events are not."""
    closed = SessionClosed(session="s1", reason="expired")
    read = values(sealed(), sealed(again=True), EVICTED, closed)
    assert (2, 1) == (read("cairn_blocks_sealed_total"), read("cairn_blocks_evicted_total"))


def test_expired_blocks():
    """Blocks whose TTL is over are counted as expired, not as evicted."""
    over = (evolve(EVICTED, reason="expired"), evolve(DROPPED, reason="expired"))
    read = values(*over, EVICTED, over[1])
    assert [1, 2] == [read("cairn_expired_total", what=what) for what in ("memory", "file")]
    assert [1, 0] == [read(f"cairn_blocks_{name}_total") for name in ("evicted", "dropped")]
    assert 9 == read("cairn_prefix_index_blocks")


def test_block_files():
    """Blocks written, read and removed are counted, and rejected ones by their reason."""
    rejected = BlockFileRejected(key="k", reason="digest", moved_to="k.safetensors.rejected")
    read = values(SPILLED, LOADED, SPILLED, rejected, DROPPED, SPILLED)
    names = ("spilled", "loaded", "dropped")
    assert [3, 1, 1] == [read(f"cairn_blocks_{name}_total") for name in names]
    assert 1 == read("cairn_blocks_rejected_total", reason="digest")
    assert 0 == read("cairn_blocks_rejected_total", reason="missing")


def test_blocks_of_other_nodes():
    """What was adopted is counted in blocks and in tokens."""
    one = BlockAdopted(
        key="k",
        parent=None,
        digest="d",
        start=64,
        end=128,
        bytes=10,
        node="n2",
        position=1,
        row_hash="h",
        ttl_s=None,
        memory_blocks=1,
        memory_bytes=10,
        duration_us=5,
    )
    read = values(one, one)
    assert (2, 128) == (read("cairn_blocks_adopted_total"), read("cairn_adopted_tokens_total"))


def test_reuse_by_tier():
    """The tokens that a request reuses are counted by where they were."""
    path = evolve(
        selected("continuation", None, reused=192), blocks_from_slab=1, blocks_from_pool=2
    )
    read = values(received(), path)
    assert (1, 2) == tuple(
        read("cairn_blocks_reused_total", tier=tier) for tier in ("slab", "memory")
    )


def test_joins_are_counted():
    """Each time that a request waits for blocks of another one counts, also of one request."""
    joined = PrefixJoined(
        session="s1",
        request="r1",
        rules_version=1,
        decided_at=1,
        leader="r0",
        blocks=3,
        reused_blocks=0,
    )
    assert 0 == values(received())("cairn_prefix_joined_total")
    read = values(received(), joined, joined, selected("new_session", None, reused=192))
    assert 2 == read("cairn_prefix_joined_total")


def test_gauges_are_read_at_the_scrape():
    """Gauges are the server's statistics at the time of the scrape."""
    service = FakeService()
    metrics = MetricsByTenant(service).of_all

    def read(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(name, labels)

    assert 4 == read("cairn_scheduler_pool_in_use")
    delays = Delays(tokens=(1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 3), sum_s=0.5)
    service.change(
        slabs=5,
        queued=9,
        sessions={"quarantined": 1},
        journal_log_bytes=4096,
        gather_delays=delays,
    )
    assert 5 == read("cairn_scheduler_pool_in_use")
    assert 8 == read("cairn_scheduler_pool_slabs")
    assert 400 == read("cairn_scheduler_pool_bytes", state="in_use")
    assert 600 == read("cairn_scheduler_pool_bytes", state="free")
    assert 390 == read("cairn_kv_live_bytes")
    assert 380 == read("cairn_kv_expected_bytes")
    assert 1500 == read("cairn_device_memory_bytes", what="active")
    assert 20 == read("cairn_device_memory_bytes", what="cache")
    assert 1100 == read("cairn_device_memory_bytes", what="weights")
    assert 1 == read("cairn_sessions", state="quarantined")
    assert 0 == read("cairn_sessions", state="idle")
    assert 9 == read("cairn_queue_depth")
    assert 5 == read("cairn_blocks")
    assert 500 == read("cairn_block_bytes")
    assert 6 == read("cairn_disk_blocks")
    assert 600 == read("cairn_disk_block_bytes")
    assert 77 == read("cairn_journal_position")
    assert 4096 == read("cairn_journal_log_bytes")
    gather = "cairn_journal_gather_seconds"
    assert [2, 2, 5] == [read(f"{gather}_bucket", le=le) for le in ("0.005", "0.02", "+Inf")]
    assert (5, 0.5) == (read(f"{gather}_count"), read(f"{gather}_sum"))
    assert 700 == read("cairn_prompt_characters_total", source="tokenizer")
    assert 7000 == read("cairn_prompt_characters_total", source="memory")
    assert 70 == read("cairn_prompt_memory_bytes")


@pytest.mark.trio
async def test_scrape():
    """The page has the names that dashboards use, each with its type, and no name twice."""
    service = FakeService()
    app = create_app(service)
    service.commit(received(), selected("continuation", None, reused=64), emitted(1), finished())
    response = await app.test_client().get("/metrics")
    text = await response.get_data(as_text=True)
    assert response.content_type.startswith("text/plain; version=")
    lines = text.splitlines()
    assert 'cairn_path_selection_total{path="continuation"} 1.0' in lines
    assert "cairn_continuation_tokens_skipped_total 64.0" in lines
    assert 'cairn_requests_total{outcome="stop"} 1.0' in lines
    types = dict(line.split()[2:4] for line in lines if line.startswith("# TYPE"))
    assert "gauge" == types.pop("process_resident_memory_bytes", "gauge")
    types = {name: kind for name, kind in types.items() if not name.startswith("process_")}
    assert {
        "cairn_path_selection_total": "counter",
        "cairn_path_selection_reason_total": "counter",
        "cairn_continuation_tokens_skipped_total": "counter",
        "cairn_prefix_cache_query_tokens_total": "counter",
        "cairn_prefix_cache_tokens_total": "counter",
        "cairn_prefix_cache_ratio": "gauge",
        "cairn_prefix_match_depth_tokens": "histogram",
        "cairn_prefix_cache_too_short_total": "counter",
        "cairn_prefix_joined_total": "counter",
        "cairn_rerendered_tokens_total": "counter",
        "cairn_prewarmed_tokens_total": "counter",
        "cairn_prewarmed_tokens_used_total": "counter",
        "cairn_prewarm_abandoned_total": "counter",
        "cairn_prefill_duration_seconds": "histogram",
        "cairn_cache_invariant_violations_total": "counter",
        "cairn_tokens_emitted_total": "counter",
        "cairn_draft_tokens_total": "counter",
        "cairn_draft_tokens_accepted_total": "counter",
        "cairn_embedding_requests_total": "counter",
        "cairn_embedding_inputs_total": "counter",
        "cairn_embedding_tokens_total": "counter",
        "cairn_requests_total": "counter",
        "cairn_blocks_sealed_total": "counter",
        "cairn_blocks_evicted_total": "counter",
        "cairn_blocks_spilled_total": "counter",
        "cairn_blocks_loaded_total": "counter",
        "cairn_blocks_adopted_total": "counter",
        "cairn_adopted_tokens_total": "counter",
        "cairn_blocks_dropped_total": "counter",
        "cairn_blocks_rejected_total": "counter",
        "cairn_expired_total": "counter",
        "cairn_blocks_reused_total": "counter",
        "cairn_shadow_checks_total": "counter",
        "cairn_scheduler_pool_in_use": "gauge",
        "cairn_scheduler_pool_slabs": "gauge",
        "cairn_scheduler_pool_bytes": "gauge",
        "cairn_kv_live_bytes": "gauge",
        "cairn_kv_expected_bytes": "gauge",
        "cairn_device_memory_bytes": "gauge",
        "cairn_sessions": "gauge",
        "cairn_queue_depth": "gauge",
        "cairn_blocks": "gauge",
        "cairn_block_bytes": "gauge",
        "cairn_prefix_index_blocks": "gauge",
        "cairn_disk_blocks": "gauge",
        "cairn_disk_block_bytes": "gauge",
        "cairn_journal_position": "gauge",
        "cairn_journal_stalled": "gauge",
        "cairn_journal_checkpoint_info": "gauge",
        "cairn_journal_log_bytes": "gauge",
        "cairn_journal_gather_seconds": "histogram",
        "cairn_prompt_characters_total": "counter",
        "cairn_prompt_memory_bytes": "gauge",
        "cairn_time_to_first_token_seconds": "histogram",
        "cairn_time_per_output_token_seconds": "histogram",
        "cairn_request_duration_seconds": "histogram",
        "cairn_request_queue_seconds": "histogram",
        "cairn_prompt_tokens_total": "counter",
        "cairn_generation_tokens_total": "counter",
        "cairn_prefix_cache_requests_total": "counter",
        "cairn_model_loads_total": "counter",
        "cairn_requests_running": "gauge",
        "cairn_requests_waiting": "gauge",
        "cairn_kv_capacity_bytes": "gauge",
        "cairn_kv_usage_ratio": "gauge",
        "cairn_build_info": "gauge",
    } == types
    series = [line.rsplit(" ", 1)[0] for line in lines if not line.startswith("#")]
    assert len(series) == len(set(series))


@pytest.mark.trio
async def test_apps_do_not_share_metrics():
    """Two servers in one process have separate counters."""
    one, other = FakeService(), FakeService()
    create_app(one)
    app = create_app(other)
    one.commit(emitted(1))
    text = await (await app.test_client().get("/metrics")).get_data(as_text=True)
    assert "cairn_tokens_emitted_total 0.0" in text.splitlines()
