"""The order of a run. Pure."""

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
    Run each scenario with each pause on all servers, one right after the other.

    Changes of the machine over an hour then affect all servers alike. The first server rotates,
    because the first may find the machine in a different state than the last.
    """
    rounds = [(scenario, pause_s) for scenario in scenarios for pause_s in pauses_s]
    for place, (scenario, pause_s) in enumerate(rounds):
        first = place % len(servers)
        for server in (*servers[first:], *servers[:first]):
            yield Step(scenario, pause_s, server)
