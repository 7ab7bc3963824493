"""
Prometheus metrics: counters of the committed events, and the server's statistics at a scrape.

Counters follow from events, so they agree with the journal for this run of the server. Two do not:
most refused requests have no event, and are counted as they are answered; and the work of
tokenising prompts is not an event. That, and the gauges, are read at each scrape.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import get_args

import attrs
from prometheus_client import (
    CollectorRegistry,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from cairn import __version__
from cairn.actors.requests.messages import DELAYS_S, Delays
from cairn.http.metrics.counters import counters_in
from cairn.http.metrics.latencies import LatencyMetrics
from cairn.http.metrics.prefix_cache import ReuseMetrics
from cairn.http.models import answering
from cairn.http.service import Server
from cairn.journal.events import (
    AbandonReason,
    BlockAdopted,
    BlockEvicted,
    BlockFileRejected,
    BlockFileRemoved,
    BlockLoaded,
    BlockSealed,
    BlockSpilled,
    BlocksRestored,
    CacheExtended,
    EmbeddingsComputed,
    FileFault,
    FinishReason,
    InvariantViolated,
    ModelLoaded,
    Path,
    PathSelected,
    PrewarmAbandoned,
    PrewarmFinished,
    PrewarmStarted,
    Recorded,
    RequestCancelled,
    RequestFinished,
    RequestReceived,
    RequestRejected,
    SessionQuarantined,
    ShadowEnded,
    ShadowSkipped,
    StallReason,
    TokensEmitted,
)
from cairn.journal.invariants import SENTENCES
from cairn.journal.lifecycle import SessionState
from cairn.journal.paths import Reason
from cairn.journal.tenants import session_tenant

# Without this, each series would have a second sample with its creation time; the journal has the
# time of the first event. The setting belongs to the library and applies to the whole process.
disable_created_metrics()  # type: ignore[no-untyped-call]

#: Every kind of violation: an alert on a rate needs the series to exist before the first one.
VIOLATIONS = (*(name.lower().replace("-", "") for name in SENTENCES), "crash")
OUTCOMES = (*get_args(FinishReason), "cancelled", "rejected", "broken", "refused")

_PREFILL_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


@attrs.define
class _Prefill:
    path: str
    duration_us: int = 0
    is_observed: bool = False


class MetricsByTenant:
    """The metrics of a server, and those that each of its tenants may see: of its own requests."""

    def __init__(self, server: Server, tenants: Iterable[str] = ()) -> None:
        """
        Args:
            tenants: those that do not see the metrics of all.
        """
        self.of_all = Metrics(server)
        self._own = {tenant: Metrics(server, of_tenant=True) for tenant in tenants}
        server.observe(self.observe)

    def of(self, tenant: str) -> Metrics:
        """The metrics that a tenant may see."""
        return self._own.get(tenant, self.of_all)

    def latencies_of(self, tenant: str) -> tuple[LatencyMetrics, ...]:
        """Where the latencies of a tenant's requests are counted."""
        own = self._own.get(tenant)
        return (self.of_all.latencies, *([own.latencies] if own is not None else []))

    def observe(self, recorded: Recorded) -> None:
        """Count a committed event, also for the tenant whose request or session it is of."""
        self.of_all.observe(recorded)
        event = recorded.event
        session: str | None = getattr(event, "session", None)
        if isinstance(event, RequestRejected | EmbeddingsComputed):
            own = self._own.get(event.tenant)
        else:
            own = self._own.get(session_tenant(session)) if session is not None else None
        if own is not None:
            own.observe(recorded)

    def count_refusal(self, tenant: str | None) -> None:
        """Count an error answer to a tenant, or to a caller without a key."""
        self.of_all.count_refusal()
        if tenant is not None and (own := self._own.get(tenant)) is not None:
            own.count_refusal()


class Metrics:
    """The metrics of one server, or of one of its tenants, in a registry of their own."""

    def __init__(self, server: Server, *, of_tenant: bool = False) -> None:
        """
        Args:
            of_tenant: whether they are a tenant's: without those of the machine, which all tenants
                share.
        """
        self.registry = CollectorRegistry()
        self._running: dict[str, _Prefill] = {}
        self._prewarming: set[str] = set()
        self._define(server, CollectorRegistry() if of_tenant else self.registry)
        self._server = server
        self.latencies = LatencyMetrics(self.registry)
        if not of_tenant:
            self.registry.register(_ScrapeCollector(server))
            ProcessCollector(registry=self.registry)

    def text(self, accepted: str = "") -> tuple[bytes, str]:
        """
        The metrics, and their content type.

        Args:
            accepted: what the client accepts: OpenMetrics, or else Prometheus' text format.
        """
        self.latencies.know(one.facts.model for one in answering(self._server.models))
        encode, content_type = choose_encoder(accepted)
        return encode(self.registry), content_type

    def observe(self, recorded: Recorded) -> None:
        """Count a committed event."""
        event = recorded.event
        self._reuse.observe(event)
        match event:
            case RequestReceived():
                # Running before its path is selected, because a violation may come in between.
                self._running[event.request] = _Prefill(path="")
            case ModelLoaded():
                self._loads.labels(event.name).inc()
            case PathSelected():
                self._select(event)
            case BlocksRestored():
                self._add_prefill(event.request, event.duration_us)
            case CacheExtended() if event.step == "prefill":
                self._add_prefill(event.request, event.duration_us)
            case CacheExtended() if event.step == "decode":
                self._tokens_emitted.inc(event.emitted)
                self._observe_prefill(event.request or "")
                self._drafted.inc(event.drafted)
                self._accepted.inc(event.accepted)
            case CacheExtended() if event.session in self._prewarming:
                # With each pass, because the end may come late or never.
                self._prewarmed.inc(event.end - event.start)
            case TokensEmitted():
                self._tokens_emitted.inc(len(event.ids))
                self._observe_prefill(event.request)
            case RequestFinished():
                self._observe_prefill(event.request)
                self._end(event.request, event.finish_reason)
            case RequestCancelled():
                self._end(event.request, "cancelled")
            case RequestRejected():
                # 499: the client disconnected before a session was found.
                outcome = "cancelled" if event.status == 499 else "rejected"
                self._requests.labels(outcome).inc()
            case EmbeddingsComputed():
                self._embedding_requests.labels(event.model).inc()
                self._embedding_inputs.labels(event.model).inc(event.inputs)
                self._embedding_tokens.labels(event.model).inc(event.tokens)
            case InvariantViolated():
                self._violations.labels(event.invariant.lower().replace("-", "")).inc()
                # One request may break several invariants, and be cancelled afterwards.
                if event.request in self._running:
                    self._end(event.request, "broken")
            case PrewarmStarted():
                self._prewarming.add(event.session)
            case PrewarmFinished() | SessionQuarantined():
                self._prewarming.discard(event.session)
            case PrewarmAbandoned():
                self._prewarming.discard(event.session)
                self._abandoned.labels(event.reason).inc()
            case BlockSealed():
                self._blocks_sealed.inc()
            case BlockEvicted() if event.reason == "expired":
                self._expired.labels("memory").inc()
            case BlockEvicted():
                self._blocks_evicted.inc()
            case BlockSpilled():
                self._blocks_spilled.inc()
            case BlockLoaded():
                self._blocks_loaded.inc()
            case BlockAdopted():
                self._blocks_adopted.inc()
                self._tokens_adopted.inc(event.end - event.start)
            case BlockFileRemoved() if event.reason == "expired":
                self._expired.labels("file").inc()
            case BlockFileRemoved():
                self._blocks_dropped.inc()
            case BlockFileRejected():
                self._blocks_rejected.labels(event.reason).inc()
            case ShadowEnded() if event.result in ("same", "differs"):
                self._shadow_checks.labels(event.result).inc()
            case ShadowSkipped():
                self._shadow_checks.labels("skipped").inc()
            case _:
                pass

    def count_refusal(self) -> None:
        """Count an error answer, in addition to the outcome in the journal, if there is one."""
        self._requests.labels("refused").inc()

    def _define(self, server: Server, shared: CollectorRegistry) -> None:
        """
        Define the metrics.

        Args:
            shared: the registry of those that are of the machine.
        """
        of_machine = counters_in(shared)
        self._reuse = ReuseMetrics(self.registry, lambda: server.facts.min_cache_tokens)
        counter = counters_in(self.registry)
        self._paths = counter("cairn_path_selection_total", "Path selections", path=get_args(Path))
        self._reasons = counter(
            "cairn_path_selection_reason_total",
            "New sessions, by the reason why no session was continued",
            reason=get_args(Reason),
        )
        self._skipped = counter(
            "cairn_continuation_tokens_skipped_total",
            "Prompt tokens whose KV was reused by continuations",
        )
        self._prewarmed = counter(
            "cairn_prewarmed_tokens_total",
            "Tokens whose KV was computed before their request came",
        )
        self._prewarmed_used = counter(
            "cairn_prewarmed_tokens_used_total",
            "Prewarmed tokens that a request reused, each counted once",
        )
        self._abandoned = counter(
            "cairn_prewarm_abandoned_total",
            "Prewarms that could not start or did not finish, by reason",
            reason=get_args(AbandonReason),
        )
        self._prefill = Histogram(
            "cairn_prefill_duration_seconds",
            "Time spent on prefill passes and block copies before a request's first token",
            ["path"],
            buckets=_PREFILL_BUCKETS_S,
            registry=self.registry,
        )
        for path in get_args(Path):
            self._prefill.labels(path)
        self._hits = counter(
            "cairn_prefix_cache_requests_total",
            "Requests by what they reused: all that their session had, a part, or nothing",
            result=("full", "partial", "missed"),
        )
        self._loads = of_machine("cairn_model_loads_total", "Models loaded", model=())
        self._violations = of_machine(
            "cairn_cache_invariant_violations_total", "Broken invariants, by kind", kind=VIOLATIONS
        )
        self._tokens_emitted = counter("cairn_tokens_emitted_total", "Tokens released to clients")
        self._drafted = counter(
            "cairn_draft_tokens_total", "Tokens of drafts that decode passes computed"
        )
        self._accepted = counter(
            "cairn_draft_tokens_accepted_total", "Tokens of drafts that the model drew too"
        )
        self._requests = counter(
            "cairn_requests_total",
            "Requests by outcome; every error answer also counts as refused",
            outcome=OUTCOMES,
        )
        self._embedding_requests = counter(
            "cairn_embedding_requests_total", "Requests for embeddings that were computed", model=()
        )
        self._embedding_inputs = counter(
            "cairn_embedding_inputs_total", "Texts that were embedded", model=()
        )
        self._embedding_tokens = counter(
            "cairn_embedding_tokens_total", "Tokens of texts that were embedded", model=()
        )
        self._blocks_sealed = counter("cairn_blocks_sealed_total", "Blocks sealed")
        self._blocks_evicted = of_machine(
            "cairn_blocks_evicted_total", "Blocks evicted to make room in memory"
        )
        self._blocks_spilled = of_machine("cairn_blocks_spilled_total", "Blocks written to files")
        self._blocks_loaded = of_machine(
            "cairn_blocks_loaded_total", "Blocks read from files into memory"
        )
        self._blocks_adopted = of_machine(
            "cairn_blocks_adopted_total", "Blocks of other nodes read from their files into memory"
        )
        self._tokens_adopted = of_machine(
            "cairn_adopted_tokens_total", "Tokens of the blocks that were adopted"
        )
        self._blocks_dropped = of_machine(
            "cairn_blocks_dropped_total", "Block files removed to stay within the disk budget"
        )
        self._blocks_rejected = of_machine(
            "cairn_blocks_rejected_total",
            "Block files rejected because their content changed, by fault",
            reason=get_args(FileFault),
        )
        self._expired = of_machine(
            "cairn_expired_total",
            "Blocks and block files removed because their TTL expired",
            what=("memory", "file"),
        )
        self._blocks_reused = counter(
            "cairn_blocks_reused_total",
            "Blocks reused by requests, from the session's slab or from memory",
            tier=("slab", "memory"),
        )
        self._shadow_checks = of_machine(
            "cairn_shadow_checks_total",
            "Shadow checks of answers, by result",
            result=("same", "differs", "skipped"),
        )

    def _select(self, event: PathSelected) -> None:
        self._paths.labels(event.path).inc()
        if event.reason is not None:
            self._reasons.labels(event.reason).inc()
        self._blocks_reused.labels("slab").inc(event.blocks_from_slab)
        self._blocks_reused.labels("memory").inc(event.blocks_from_pool)
        if event.path == "continuation":
            self._skipped.inc(event.reused_tokens)
        result = "missed"
        if event.reused_tokens:
            whole = event.path == "continuation" and not event.rerendered_tokens
            result = "full" if whole else "partial"
        self._hits.labels(result).inc()
        self._prewarmed_used.inc(event.prewarmed_tokens)
        self._running[event.request] = _Prefill(path=event.path)

    def _add_prefill(self, request: str | None, duration_us: int) -> None:
        prefill = self._running.get(request or "")
        if prefill is not None:
            prefill.duration_us += duration_us

    def _observe_prefill(self, request: str) -> None:
        prefill = self._running.get(request)
        if prefill is None or not prefill.path or prefill.is_observed:
            return
        prefill.is_observed = True
        self._prefill.labels(prefill.path).observe(prefill.duration_us / 1_000_000)

    def _end(self, request: str | None, outcome: str) -> None:
        self._requests.labels(outcome).inc()
        self._running.pop(request or "", None)
        self._reuse.forget(request or "")


class _ScrapeCollector(Collector):
    """The metrics that are read when they are scraped."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def describe(self) -> Iterator[Metric]:
        """
        Nothing: the names are known at the first scrape, and registering must not ask the server.
        """
        return iter(())

    def _build(self) -> InfoMetricFamily:
        facts = self._server.facts
        build = InfoMetricFamily(
            "cairn_build", "Version of the server, and the model that is loaded"
        )
        build.add_metric(
            [],
            {"version": __version__, "model": facts.model, "fingerprint": facts.fingerprint},
        )
        return build

    def collect(self) -> Iterator[Metric]:
        """One metric family for each value."""
        now = self._server.statistics()
        yield _gauge("cairn_scheduler_pool_in_use", "Slabs in use", now.slabs)
        yield _gauge("cairn_scheduler_pool_slabs", "Slabs available in total", now.slabs_total)
        yield _labelled(
            "cairn_scheduler_pool_bytes",
            "Bytes of slabs in use and of free room for slabs",
            "state",
            {"in_use": now.slab_bytes, "free": max(0, now.slab_bytes_total - now.slab_bytes)},
        )
        yield _gauge(
            "cairn_kv_live_bytes",
            "Measured bytes of slabs and blocks",
            now.kv_live_bytes,
        )
        yield _gauge(
            "cairn_kv_expected_bytes",
            "Expected bytes of the tokens in slabs and blocks, each counted once",
            now.kv_expected_bytes,
        )
        yield _labelled(
            "cairn_device_memory_bytes",
            "Device memory by MLX's count: active arrays, cached free arrays, and model weights",
            "what",
            {
                "active": now.active_bytes,
                "cache": now.cache_bytes,
                "weights": now.weights_bytes,
            },
        )
        states = {str(state): now.sessions.get(state, 0) for state in SessionState}
        yield _labelled("cairn_sessions", "Sessions by state", "state", states)
        yield _gauge("cairn_queue_depth", "Requests in the queue", now.queued)
        yield _gauge("cairn_blocks", "Sealed blocks in memory", now.blocks)
        yield _gauge("cairn_block_bytes", "Bytes of the sealed blocks in memory", now.block_bytes)
        yield _gauge(
            "cairn_prefix_index_blocks",
            "Sealed blocks in memory or in files, each counted once",
            now.index_blocks,
        )
        yield _gauge("cairn_disk_blocks", "Sealed blocks in files", now.disk_blocks)
        yield _gauge("cairn_disk_block_bytes", "Bytes of the block files", now.disk_bytes)
        yield _gauge("cairn_journal_position", "Events in the journal", now.journal_position)
        # The last signed head: each position and hash is a series of its own, and those of all
        # commits would be too many.
        position, _, head = now.journal_checkpoint.partition(":")
        if head:
            checkpoint = InfoMetricFamily(
                "cairn_journal_checkpoint", "Position and hash of the last signed head"
            )
            checkpoint.add_metric([], {"position": position, "hash": head})
            yield checkpoint
        yield _gauge("cairn_requests_running", "Requests that a session serves", now.running)
        yield _gauge("cairn_requests_waiting", "Requests that wait for a session", now.queued)
        used = {
            "slabs": (now.slab_bytes, now.slab_bytes_total),
            "memory": (now.block_bytes, now.block_bytes_total),
            "disk": (now.disk_bytes, now.disk_bytes_total),
        }
        yield _labelled(
            "cairn_kv_capacity_bytes",
            "Bytes that slabs, blocks in memory and block files may take",
            "tier",
            {tier: total for tier, (_, total) in used.items()},
        )
        yield _labelled(
            "cairn_kv_usage_ratio",
            "Bytes of slabs, blocks in memory and block files, divided by what they may take",
            "tier",
            {tier: size / total if total else 0.0 for tier, (size, total) in used.items()},
        )
        yield self._build()
        yield _labelled(
            "cairn_journal_stalled",
            "1 while the journal cannot be written for this reason, else 0",
            "reason",
            {reason: int(reason == now.journal_stall) for reason in get_args(StallReason)},
        )
        yield _gauge(
            "cairn_journal_log_bytes",
            "Bytes of the write-ahead log of the journal's database",
            now.journal_log_bytes,
        )
        yield _delays(
            "cairn_journal_gather_seconds",
            "Time for which tokens of answers waited to be appended to the journal together",
            now.gather_delays,
        )
        characters = CounterMetricFamily(
            "cairn_prompt_characters",
            "Characters of prompts, by the source of their token ids",
            labels=["source"],
        )
        characters.add_metric(["tokenizer"], now.encoded_characters)
        characters.add_metric(["memory"], now.cached_characters)
        yield characters
        yield _gauge(
            "cairn_prompt_memory_bytes",
            "Bytes of the text cache: prompt texts with token ids, and stored turns",
            now.text_cache_bytes,
        )


def _gauge(name: str, help_text: str, value: int) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, help_text, value=value)


def _delays(name: str, help_text: str, delays: Delays) -> HistogramMetricFamily:
    counts = itertools.accumulate(delays.tokens)
    bounds = (*map(floatToGoString, DELAYS_S), "+Inf")
    return HistogramMetricFamily(
        name, help_text, buckets=list(zip(bounds, counts, strict=True)), sum_value=delays.sum_s
    )


def _labelled(
    name: str, help_text: str, label: str, values: Mapping[str, float]
) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, help_text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family
