"""
Traces: the spans of requests, sent by OpenTelemetry's SDK where its standard variables say.

The spans are made from the journal's events (``journal/spans.py``). The SDK collects them in a
bounded queue, and a thread of its own sends them. If the collector is away, spans are dropped, and
no request waits.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

import structlog
import trio
from cachetools import LRUCache

import cairn
from cairn.journal.spans import Span, prewarm_span, request_span
from cairn.journal.timelines import Prewarmed, Timeline

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import SpanKind

log = structlog.get_logger("cairn")

LAST_S = 5.0
"""How long the last spans may take at the stop, in seconds."""

REPEAT_S = 60.0
"""A failure of the exporter that goes on is logged once in this time, in seconds."""

_CONTEXTS_MAX = 4096
"""Of how many of the last requests the span is known, for the prewarm that follows."""

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_PACKAGES = {
    "otlp_proto_http": "the extra `traces`",
    "otlp_proto_grpc": "the package opentelemetry-exporter-otlp-proto-grpc",
}


class TracesFault(Exception):
    """Traces were asked for and cannot be sent."""


def exporters_of(environ: Mapping[str, str]) -> tuple[str, ...]:
    """
    The exporters that the standard variables ask for, by the names of their entry points; empty if
    traces are off. They are off unless an exporter or an endpoint is set. Changes nothing.

    Raises:
        TracesFault: a variable has a value that is not known.
    """
    if _value(environ, "OTEL_SDK_DISABLED").lower() == "true":
        return ()
    asked = _value(environ, "OTEL_TRACES_EXPORTER")
    if not asked and any(_value(environ, name) for name in _ENDPOINTS):
        asked = "otlp"
    names = [name.strip() for name in asked.split(",") if name.strip()]
    return tuple(_entry_point(name, environ) for name in names if name != "none")


def _value(environ: Mapping[str, str], *names: str) -> str:
    """The first of these variables that is set; an empty one is not."""
    return next(filter(None, (environ.get(name, "").strip() for name in names)), "")


def _entry_point(name: str, environ: Mapping[str, str]) -> str:
    if name != "otlp":
        return name
    protocol = _value(environ, *_PROTOCOLS) or "http/protobuf"
    known = {"http/protobuf": "otlp_proto_http", "grpc": "otlp_proto_grpc"}
    if protocol not in known:
        raise TracesFault(
            f"OTEL_EXPORTER_OTLP_PROTOCOL is {protocol!r}; set it to http/protobuf or grpc"
        )
    return known[protocol]


class Traces:
    """Sends the spans of requests and prewarms. ``follow`` is given each once it ended."""

    def __init__(self, provider: TracerProvider, exporters: Sequence[str]) -> None:
        """
        Args:
            exporters: the names of those that send them.
        """
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self.exporters = exporters
        self._provider = provider
        self._tracer = provider.get_tracer("cairn", cairn.__version__)
        self._propagator = TraceContextTextMapPropagator()
        self._contexts: LRUCache[str, Context] = LRUCache(_CONTEXTS_MAX)

    def follow(self, ended: Timeline | Prewarmed) -> None:
        """Send the spans of what ended. Never waits."""
        from opentelemetry.context import Context
        from opentelemetry.trace import SpanKind

        if isinstance(ended, Prewarmed):
            parent = self._contexts.get(ended.request or "", Context())
            self._send(prewarm_span(ended), parent, SpanKind.INTERNAL)
            return
        caller = ended.received.traceparent
        parent = Context()
        if caller is not None:
            parent = self._propagator.extract({"traceparent": caller}, context=parent)
        own = self._send(request_span(ended), parent, SpanKind.SERVER)
        self._contexts[ended.received.request] = own

    def _send(self, span: Span, parent: Context, kind: SpanKind) -> Context:
        """
        Send a span with its parts.

        Returns:
            The context for spans within it.
        """
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        sent = self._tracer.start_span(
            span.name, parent, kind, span.attributes, start_time=1000 * span.began_us
        )
        if span.error is not None:
            sent.set_status(Status(StatusCode.ERROR, span.error))
        within = set_span_in_context(sent, parent)
        for part in span.parts:
            self._send(part, within, SpanKind.INTERNAL)
        sent.end(1000 * max(span.began_us, span.ended_us))
        return within

    def shutdown(self) -> None:
        """Send what is left. Waits for the collector."""
        self._provider.shutdown()


def open_traces(environ: Mapping[str, str]) -> Traces | None:
    """
    Begin to send traces, if the standard variables ask for them.

    Args:
        environ: the variables; the SDK reads the process's own, too.

    Raises:
        TracesFault: they cannot be sent as they are asked for.
    """
    names = exporters_of(environ)
    if not names:
        return None
    try:
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ModuleNotFoundError as error:
        raise TracesFault(
            f"OpenTelemetry's package {error.name} is not installed; install the extra `traces` "
            "(pip install 'cairn-server[traces]')"
        ) from error
    exporters = [_exporter(name) for name in names]
    resource = Resource.create({"service.version": cairn.__version__})
    if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):
        resource = resource.merge(Resource({SERVICE_NAME: "cairn"}))
    try:
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        for exporter in exporters:
            provider.add_span_processor(BatchSpanProcessor(exporter))
    except ValueError as error:
        raise TracesFault(f"a variable OTEL_BSP_... cannot be used: {error}") from error
    _log_failures_seldom()
    return Traces(provider, names)


def _exporter(name: str) -> SpanExporter:
    for found in entry_points(group="opentelemetry_traces_exporter", name=name):
        try:
            exporter: SpanExporter = found.load()()
        except Exception as error:  # the exporter's own: what it says is all that is known
            raise TracesFault(f"the exporter {name} cannot be used: {error}") from error
        return exporter
    package = _PACKAGES.get(name)
    if package is None:
        raise TracesFault(
            f"OTEL_TRACES_EXPORTER names {name!r}, which no installed package has; set it to otlp, "
            "console or none"
        )
    raise TracesFault(f"the exporter {name} is not installed; install {package}")


class Seldom(logging.Filter):
    """Lets each line of a module pass once in a while."""

    def __init__(self) -> None:
        super().__init__()
        self._last: dict[tuple[str, int], float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the line was not logged lately."""
        place, now_s = (record.name, record.lineno), time.monotonic()
        if now_s - self._last.get(place, -REPEAT_S) < REPEAT_S:
            return False
        self._last[place] = now_s
        return True


def _log_failures_seldom() -> None:
    """A collector that is away fails each batch, and would fill the log."""
    seldom = Seldom()
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("opentelemetry."):
            logging.getLogger(name).addFilter(seldom)


@contextlib.asynccontextmanager
async def tracing(environ: Mapping[str, str]) -> AsyncIterator[Traces | None]:
    """
    As ``open_traces``, while the context lasts. On leaving it, the last spans are sent, within a
    limit. If traces cannot be sent, the server serves without them, as the specification of
    OpenTelemetry has it: its variables may be set for all programs of a machine.
    """
    try:
        traces = open_traces(environ)
    except TracesFault as fault:
        log.warning("traces are off", fact=str(fault))
        yield None
        return
    try:
        yield traces
    finally:
        if traces is not None:
            await _close(traces)


async def _close(traces: Traces) -> None:
    with trio.CancelScope(shield=True), trio.move_on_after(LAST_S) as limit:
        await trio.to_thread.run_sync(traces.shutdown, abandon_on_cancel=True)
    if limit.cancelled_caught:
        log.warning(
            "the last spans were not sent, because the collector does not answer", limit_s=LAST_S
        )
