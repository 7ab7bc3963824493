"""In which order a run is held. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs

from cairn_bench.scenarios import Scenario


@attrs.frozen
class Step:
    """One scenario on one server."""

    scenario: Scenario
    pause_s: float
    server: str


def planned(
    scenarios: Sequence[Scenario], pauses_s: Sequence[float], servers: Sequence[str]
) -> Iterator[Step]:
    """
    Each scenario with each pause on all servers, one right after the other: what a machine does in
    the course of an hour then falls on all of them alike. Who begins goes round, since the first
    may find the machine otherwise than the last.
    """
    rounds = [(scenario, pause_s) for scenario in scenarios for pause_s in pauses_s]
    for place, (scenario, pause_s) in enumerate(rounds):
        first = place % len(servers)
        for server in (*servers[first:], *servers[:first]):
            yield Step(scenario, pause_s, server)
