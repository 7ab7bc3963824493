"""Traces: when they are sent, what a collector gets, and what becomes of serving without one."""

from __future__ import annotations

import contextlib
import logging
import socket
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import attrs
import httpx
import pytest
import trio
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from structlog.testing import capture_logs

from cairn.ops.serve import traces as module
from cairn.ops.serve.traces import Traces, TracesFault, exporters_of, open_traces, tracing
from tests.journal.test_timelines import (
    ANSWERED,
    fold,
    prewarm_ended,
    prewarm_started,
    received,
    recorded,
    violated,
)
from tests.support.processes.subprocess_server import ask, eventually, started

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CALLER = f"00-{TRACE}-{PARENT}-01"
ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
USER = {"role": "user", "content": "Hello"}
STEPS = {"queue", "decision", "prefill", "decode"}


@attrs.define
class Collector:
    """
    A collector of OTLP over HTTP on a loopback port.

    Attributes:
        url: its address.
        paths: where requests were sent.
        resources: the attributes of the resources that were sent.
        spans: all that were sent.
        raw: all bytes that were sent.
    """

    url: str = ""
    paths: set[str] = attrs.field(factory=set)
    resources: dict[str, str] = attrs.field(factory=dict)
    spans: list[Span] = attrs.field(factory=list)
    raw: bytes = b""

    def take(self, path: str, body: bytes) -> None:
        """Take in a request."""
        self.raw += body
        self.paths.add(path)
        for sent in ExportTraceServiceRequest.FromString(body).resource_spans:
            for one in sent.resource.attributes:
                self.resources[one.key] = one.value.string_value
            for scope in sent.scope_spans:
                self.spans.extend(scope.spans)

    def roots(self) -> list[Span]:
        """The spans of requests."""
        return [span for span in self.spans if span.kind == Span.SPAN_KIND_SERVER]

    def within(self, span: Span) -> list[Span]:
        """The spans whose parent a span is."""
        return [one for one in self.spans if one.parent_span_id == span.span_id]


@contextlib.contextmanager
def collector() -> Iterator[Collector]:
    """A collector, while the context lasts."""
    found = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            found.take(self.path, self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield found
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextlib.contextmanager
def silent_port() -> Iterator[str]:
    """An address that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def values(span: Span) -> dict[str, Any]:
    """The attributes of a span."""
    found: dict[str, Any] = {}
    for one in span.attributes:
        kind = one.value.WhichOneof("value")
        value = getattr(one.value, kind)
        found[one.key] = (
            tuple(item.string_value for item in value.values) if kind == "array_value" else value
        )
    return found


# --- when ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environ", "exporters"),
    [
        ({}, ()),
        ({ENDPOINT: ""}, ()),
        ({ENDPOINT: "http://localhost:4318"}, ("otlp_proto_http",)),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://localhost/x"}, ("otlp_proto_http",)),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, ("otlp_proto_http",)),
        ({"OTEL_TRACES_EXPORTER": "console"}, ("console",)),
        ({"OTEL_TRACES_EXPORTER": "console, otlp"}, ("console", "otlp_proto_http")),
        ({"OTEL_TRACES_EXPORTER": "none", ENDPOINT: "http://localhost:4318"}, ()),
        ({"OTEL_TRACES_EXPORTER": " ", ENDPOINT: "http://localhost:4318"}, ("otlp_proto_http",)),
        ({"OTEL_SDK_DISABLED": "TRUE", "OTEL_TRACES_EXPORTER": "otlp"}, ()),
        (
            {"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
            ("otlp_proto_grpc",),
        ),
        (
            {
                "OTEL_TRACES_EXPORTER": "otlp",
                "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
                "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc",
            },
            ("otlp_proto_http",),
        ),
        # Variables of other signals switch no traces on.
        ({"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://localhost", "OTEL_SERVICE_NAME": "x"}, ()),
    ],
)
def test_the_standard_variables_switch_traces_on(
    environ: dict[str, str], exporters: tuple[str, ...]
) -> None:
    """Traces are off until an exporter or an endpoint is named; an empty variable is not set."""
    assert exporters == exporters_of(environ)


@pytest.mark.parametrize(
    ("environ", "says"),
    [
        ({"OTEL_TRACES_EXPORTER": "zipkin"}, "zipkin.*set it to otlp, console or none"),
        (
            {"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"},
            "http/json.*set it to http/protobuf or grpc",
        ),
        (
            {"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
            "install the package opentelemetry-exporter-otlp-proto-grpc",
        ),
    ],
)
def test_a_variable_that_cannot_be_used_is_explained(environ: dict[str, str], says: str) -> None:
    """What is wrong, and what to do."""
    with pytest.raises(TracesFault, match=says):
        open_traces(environ)


def test_a_queue_that_cannot_be_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    """The SDK refuses a queue without places."""
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "0")
    with pytest.raises(TracesFault, match="OTEL_BSP_"):
        open_traces({"OTEL_TRACES_EXPORTER": "otlp"})


def test_without_the_extra_the_server_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """It serves without traces, and the log names the extra."""
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)

    async def main() -> Traces | None:
        async with tracing({"OTEL_TRACES_EXPORTER": "otlp"}) as traces:
            return traces

    with capture_logs() as lines:
        assert trio.run(main) is None
    (line,) = lines
    assert ("traces are off", "warning") == (line["event"], line["log_level"])
    assert "pip install 'cairn-server[traces]'" in line["fact"]


# --- what a collector gets -----------------------------------------------------------------------


def test_a_request_of_a_served_model_is_a_trace(tmp_path: Path) -> None:
    """
    A request is a span within the one that its client called from, with its steps within it; one
    without a client's span begins a trace. No text of the conversation is sent.
    """
    word = "Zanzibar"
    with collector() as found:
        env = {ENDPOINT: found.url, "OTEL_BSP_SCHEDULE_DELAY": "50"}
        with started(tmp_path, env=env) as serving:
            assert "  traces       sent by otlp_proto_http\n" in serving.greeting()
            body = {"messages": [{"role": "user", "content": f"Say {word}."}], "max_tokens": 8}
            address = f"{serving.url}/v1/chat/completions"
            for headers in ({"traceparent": CALLER}, {"traceparent": f"{CALLER}-no"}):
                answer = httpx.post(address, json=body, headers=headers, timeout=120).json()
            eventually(lambda: len(found.roots()) == 2)
            said = answer["choices"][0]["message"]["content"]
            assert 0 == serving.stop()
    assert {"/v1/traces"} == found.paths
    assert "cairn" == found.resources["service.name"]
    called, own = found.roots()
    assert (TRACE, PARENT) == (called.trace_id.hex(), called.parent_span_id.hex())
    assert b"" == own.parent_span_id
    assert own.trace_id not in (called.trace_id, bytes(16))
    for root in (called, own):
        steps = [span for span in found.within(root) if span.name != "prewarm"]
        assert {span.name for span in steps} >= STEPS
        for span in steps:
            assert root.trace_id == span.trace_id
            assert root.start_time_unix_nano <= span.start_time_unix_nano
            assert span.end_time_unix_nano <= root.end_time_unix_nano
    attributes = values(own)
    assert answer["id"] == f"chatcmpl-{attributes['cairn.request']}"
    assert answer["usage"]["prompt_tokens"] == attributes["gen_ai.usage.input_tokens"]
    assert answer["usage"]["completion_tokens"] == attributes["gen_ai.usage.output_tokens"]
    assert answer["cairn"]["reused_tokens"] == attributes["gen_ai.usage.cache_read.input_tokens"]
    reason = answer["choices"][0]["finish_reason"]
    assert (reason,) == attributes["gen_ai.response.finish_reasons"]
    assert said
    assert word.encode() not in found.raw
    assert said.encode() not in found.raw


def sent(*rows: tuple[int, Any], url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Send the spans of these rows, and wait until they are."""
    monkeypatch.setenv(ENDPOINT, url)

    async def main() -> None:
        async with tracing({ENDPOINT: url}) as traces:
            assert traces is not None
            for ended in fold(recorded(*rows)):
                traces.follow(ended)

    trio.run(main)


def test_the_last_spans_are_sent_at_the_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that no batch was due for; a span has the times of its rows."""
    with collector() as found:
        sent(*ANSWERED, url=found.url, monkeypatch=monkeypatch)
    (root,) = found.roots()
    assert {*STEPS, "restore"} == {span.name for span in found.within(root)}
    (queue,) = (span for span in found.within(root) if span.name == "queue")
    assert 40_000_000 == queue.end_time_unix_nano - queue.start_time_unix_nano
    assert root.start_time_unix_nano == queue.start_time_unix_nano


def test_a_prewarm_is_within_the_span_of_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Although that has ended before."""
    prewarm = (410, prewarm_started()), (450, prewarm_ended())
    with collector() as found:
        sent(*ANSWERED, *prewarm, url=found.url, monkeypatch=monkeypatch)
    (root,) = found.roots()
    assert "prewarm" in {span.name for span in found.within(root)}


def test_a_bug_is_an_error_of_its_span(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the name of the invariant; a request that ended well has no status."""
    with collector() as found:
        sent(*ANSWERED[:3], (140, violated()), url=found.url, monkeypatch=monkeypatch)
        sent(*ANSWERED, url=found.url, monkeypatch=monkeypatch)
    states = [(root.status.code, root.status.message) for root in found.roots()]
    assert [(Status.STATUS_CODE_ERROR, "INV-3"), (Status.STATUS_CODE_UNSET, "")] == states


def test_a_client_that_samples_nothing_is_heeded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client whose trace is not sampled gets no spans of this server."""
    unsampled = (100, received(traceparent=f"{CALLER[:-2]}00"))
    with collector() as found:
        sent(unsampled, *ANSWERED[1:], url=found.url, monkeypatch=monkeypatch)
    assert [] == found.spans


def test_the_operator_names_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    """The standard variable of the service's name holds."""
    monkeypatch.setenv("OTEL_SERVICE_NAME", "cairn in the cellar")
    with collector() as found:
        sent(*ANSWERED, url=found.url, monkeypatch=monkeypatch)
    assert "cairn in the cellar" == found.resources["service.name"]


# --- without a collector -------------------------------------------------------------------------


@pytest.mark.long
def test_serving_goes_on_without_a_collector(tmp_path: Path) -> None:
    """
    Requests are answered while the collector does not answer, and the server stops. That is logged,
    and not for each batch.
    """
    with silent_port() as url:
        env = {ENDPOINT: url, "OTEL_BSP_SCHEDULE_DELAY": "50", "OTEL_EXPORTER_OTLP_TIMEOUT": "1"}
        with started(tmp_path, env=env) as serving:
            for _ in range(3):
                assert "length" == ask(serving, USER, max_tokens=4).finish_reason
            assert 0 == serving.stop()
            failed = [line for line in serving.log() if "export" in line["event"]]
    assert 1 <= len(failed) <= 3


def test_the_stop_does_not_wait_for_a_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spans that are not sent within the limit are dropped, and the log says so."""
    monkeypatch.setattr(module, "LAST_S", 0.1)
    with silent_port() as url, capture_logs() as lines:
        sent(*ANSWERED, url=url, monkeypatch=monkeypatch)
    assert ["the last spans were not sent, because the collector does not answer"] == [
        line["event"] for line in lines
    ]


def test_a_failure_that_goes_on_is_logged_once() -> None:
    """Another failure is logged, too; the same one not again for a while."""
    seldom = module.Seldom()

    def passes(line: int) -> bool:
        return seldom.filter(logging.LogRecord("opentelemetry.x", 30, "", line, "", (), None))

    assert [True, False, True, False] == [passes(1), passes(1), passes(2), passes(1)]
