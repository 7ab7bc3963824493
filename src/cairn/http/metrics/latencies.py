"""
Metrics of what clients wait for: time to first token, time per output token, queue and whole
requests, by model and protocol, with the buckets of vLLM, so that its boards and alerts fit.

They are measured where replies leave for the client, which is after the rows of a reply are
committed. ``timings`` and traces have the times of the rows themselves. A request counts once its
first reply came; one that was refused before has no latency.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Final, Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram

from cairn.actors.requests.messages import Accepted, Delta, Finished, Generate, Reply

_FIRST_S: Final = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_PER_TOKEN_S: Final = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0),
)
_WHOLE_S: Final = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0),
    *(240.0, 480.0, 960.0, 1920.0, 7680.0),
)

PROTOCOLS: Final = (
    *("openai.chat", "openai.responses", "openai.completions"),
    *("anthropic.messages", "cairn.agents", "ollama.chat", "ollama.generate"),
)

Clock = Callable[[], float]


class Generating(Protocol):
    """Serves requests, as ``service.Service`` does."""

    def generate(self, command: Generate) -> AbstractAsyncContextManager[AsyncIterator[Reply]]:
        """See ``service.Service.generate``."""


class LatencyMetrics:
    """The latencies of one server, or of one of its tenants."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def histogram(name: str, help_text: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(
                name, help_text, ["model", "protocol"], buckets=buckets, registry=registry
            )

        def counter(name: str, help_text: str) -> Counter:
            return Counter(name, help_text, ["model", "protocol"], registry=registry)

        self.first = histogram(
            "cairn_time_to_first_token_seconds",
            "Time from the arrival of a request to the first piece of its answer",
            _FIRST_S,
        )
        self.per_token = histogram(
            "cairn_time_per_output_token_seconds",
            "Time for each token of an answer after the first one, averaged over the answer",
            _PER_TOKEN_S,
        )
        self.whole = histogram(
            "cairn_request_duration_seconds",
            "Time from the arrival of a request to the end of its answer",
            _WHOLE_S,
        )
        self.queue = histogram(
            "cairn_request_queue_seconds",
            "Time from the arrival of a request until a session takes it",
            _WHOLE_S,
        )
        self.prompt = counter("cairn_prompt_tokens_total", "Tokens of prompts")
        self.generated = counter("cairn_generation_tokens_total", "Tokens of answers")

    def know(self, models: Iterable[str]) -> None:
        """Make the series of these models, so that they exist before the first request."""
        made = self.first, self.per_token, self.whole, self.queue, self.prompt, self.generated
        for model in models:
            for protocol in PROTOCOLS:
                for one in made:
                    one.labels(model, protocol)


class _Timer:
    """The times of one request, from its arrival on."""

    def __init__(self, metrics: Sequence[LatencyMetrics], protocol: str, clock: Clock) -> None:
        self._metrics = metrics
        self._protocol = protocol
        self._clock = clock
        self._began = clock()
        self._model: str | None = None
        self._first: float | None = None

    def take(self, reply: Reply) -> None:
        """Observe a reply. Further answers to the same request are not counted as requests."""
        now = self._clock()
        match reply:
            case Accepted() if self._model is None:
                self._model = reply.model
                for one in self._metrics:
                    one.queue.labels(reply.model, self._protocol).observe(now - self._began)
            case Delta() if self._first is None and self._model is not None:
                self._first = now
                for one in self._metrics:
                    one.first.labels(self._model, self._protocol).observe(now - self._began)
            case Finished() if self._model is not None and reply.choice == 0:
                self._finish(reply, now, self._model)
            case _:
                pass

    def _finish(self, reply: Finished, now: float, model: str) -> None:
        more = reply.completion_tokens - 1
        for one in self._metrics:
            one.whole.labels(model, self._protocol).observe(now - self._began)
            one.prompt.labels(model, self._protocol).inc(reply.prompt_tokens)
            one.generated.labels(model, self._protocol).inc(reply.completion_tokens)
            if more > 0 and self._first is not None:
                each = (now - self._first) / more
                one.per_token.labels(model, self._protocol).observe(each)


class Timed:
    """A service whose answers are timed."""

    def __init__(
        self,
        service: Generating,
        metrics: Sequence[LatencyMetrics],
        clock: Clock = time.monotonic,
    ) -> None:
        self._service = service
        self._metrics = metrics
        self._clock = clock

    @contextlib.asynccontextmanager
    async def generate(self, command: Generate) -> AsyncIterator[AsyncIterator[Reply]]:
        """As that of the service."""
        timer = _Timer(self._metrics, command.protocol, self._clock)
        async with self._service.generate(command) as replies:
            yield _timed(replies, timer)


async def _timed(replies: AsyncIterator[Reply], timer: _Timer) -> AsyncIterator[Reply]:
    async for reply in replies:
        timer.take(reply)
        yield reply
