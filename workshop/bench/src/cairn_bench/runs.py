"""One scenario on one server, and the checks that make it a result."""

from __future__ import annotations

import statistics
import time

import attrs

from cairn_bench.scenarios import Scenario
from cairn_bench.servers.asking import NoResult, Sample, asked, compared_with_cold, unhit
from cairn_bench.servers.processes import Running, Settled


@attrs.frozen(kw_only=True)
class Run:
    """
    A scenario on a server.

    Attributes:
        server: its name.
        pause_s: how long the client waited before each request but the first.
        samples: in the order of the requests.
        settled: what was computed ahead of requests meanwhile; None if that is not reported.
        cold_equal: how many warm answers were compared with the cold path, all of them equal; None
            if the server has no such path.
    """

    scenario: str
    server: str
    pause_s: float
    samples: tuple[Sample, ...]
    settled: Settled | None = None
    cold_equal: int | None = None

    @property
    def warm(self) -> tuple[Sample, ...]:
        """The samples that count."""
        return tuple(sample for sample in self.samples if sample.request.warm)

    @property
    def first_s(self) -> float:
        """The median time to the first token of the warm requests."""
        return statistics.median(sample.first_s for sample in self.warm)

    @property
    def hit_rate(self) -> float | None:
        """The reused share of the warm prompts' tokens; None if the server reports none."""
        told = [
            (answer.cached_tokens, answer.prompt_tokens)
            for answer in (sample.answer for sample in self.warm)
            if answer.cached_tokens is not None
        ]
        prompts = sum(prompt or 0 for _, prompt in told)
        return sum(cached for cached, _ in told) / prompts if prompts else None


def hold(scenario: Scenario, server: Running, salt: str, *, pause_s: float) -> Run:
    """
    Hold a scenario's conversations with a server, and leave it idle.

    Args:
        salt: of the texts; different for each run, so that none finds another one's cache.
        pause_s: how long the client waits before each request but the first.

    Raises:
        NoAnswer: the server did not answer one of them.
        NoResult: nothing was reused, or an answer depends on what was reused.
        NeverAtRest: the server did not become idle.
    """
    server.wait_at_rest()
    before = server.settled()
    steps = scenario.steps(salt)
    samples: list[Sample] = []
    request = next(steps)
    while True:
        samples.append(Sample(request=request, answer=asked(server, request)))
        try:
            request = steps.send(samples[-1].answer)
        except StopIteration:
            break
        time.sleep(pause_s)
    server.wait_at_rest()
    after = server.settled()
    run = Run(
        scenario=scenario.name,
        server=server.kind.name,
        pause_s=pause_s,
        samples=tuple(samples),
        settled=after.since(before) if after is not None and before is not None else None,
    )
    if not server.kind.is_ours:
        return run
    _require_hits(run, server.block_tokens())
    run = attrs.evolve(run, cold_equal=len(compared_with_cold(run.scenario, run.warm, server)))
    server.wait_at_rest()
    return run


def _require_hits(run: Run, block_tokens: int | None) -> None:
    """
    Args:
        block_tokens: see ``unhit``.

    Raises:
        NoResult: the cache was not hit, or not as far as it could have been.
    """
    if not run.hit_rate:
        raise NoResult(f"{run.scenario}: nothing was reused, so there is no hit to measure")
    for sample, there in unhit(run.samples, block_tokens):
        raise NoResult(
            f"{run.scenario}: the cache was hardly hit: {sample.answer.cached_tokens or 0} of "
            f"{sample.answer.prompt_tokens} tokens were reused; {there:.0f} had been sent before"
        )
