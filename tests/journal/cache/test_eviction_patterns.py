"""
How much is reused with the order of eviction, compared with the order of last use alone. Each
pattern of turns runs twice through the real fold.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.journal.cache import eviction_patterns as patterns
from tests.journal.cache.eviction_patterns import LONG, ByRecency, Memory, Turns


def ratios(turns: Turns, blocks: int) -> tuple[float, float]:
    """The share of the prompts that is reused, and that of the control."""
    return Memory(blocks).play(turns).ratio, Memory(blocks, ByRecency).play(turns).ratio


def test_six_in_turn_over_room_for_five():
    """At least 60 % of what is reused with room for six. By the last use alone, nothing is."""
    turns = patterns.cyclic(6)
    whole = Memory(6 * LONG).play(turns).ratio
    ours, control = ratios(turns, 5 * LONG)
    assert whole > 0.9
    assert ours >= 0.6 * whole
    assert 0 == control


@pytest.mark.long_but("10 in 5", "13 in 12", "growing", "system prompt")
@pytest.mark.slow
@pytest.mark.unmeasured
@pytest.mark.parametrize(
    ("turns", "blocks", "least"),
    [
        (patterns.cyclic(10), 5 * LONG, 0.25),
        (patterns.cyclic(13), 12 * LONG, 0.6),
        (patterns.cyclic_of_many_lengths(), 5 * LONG, 0.5),
        (patterns.growing(), 10 * LONG, 0.9),
        (patterns.scan(1), 5 * LONG, 0.35),
        (patterns.long_among_single(14, 1), 6 * LONG, 0.15),
        (patterns.single_after_system(), 6 * LONG, 0.55),
    ],
    ids=["10 in 5", "13 in 12", "many lengths", "growing", "scan", "long", "system prompt"],
)
def test_what_recency_loses(turns: Turns, blocks: int, least: float):
    """More than a tenth more is reused than by the last use alone."""
    ours, control = ratios(turns, blocks)
    assert ours >= least
    assert ours > 1.1 * control


Drawn = Callable[[int], Turns]


@pytest.mark.long_but("growing", "phases that fit", "scan")
@pytest.mark.slow
@pytest.mark.unmeasured
@pytest.mark.parametrize(
    ("drawn", "blocks"),
    [
        (lambda seed: patterns.by_chance(20, 1.0, 240, seed), 6 * LONG),
        (lambda seed: patterns.by_chance(12, 0.0, 240, seed), 8 * LONG),
        (lambda seed: patterns.long_among_single(6, seed), 5 * LONG),
        (lambda seed: patterns.growing_by_chance(160, seed), 10 * LONG),
        (lambda seed: patterns.phases(5, 40, seed), 5 * LONG),
        (lambda seed: patterns.phases(7, 40, seed), 5 * LONG),
        (lambda seed: patterns.phases(4, 12, seed), 5 * LONG),
        (lambda seed: patterns.sliding(240, seed), 5 * LONG),
        (lambda _: patterns.phases(4, 20), 5 * LONG),
        (lambda _: patterns.scan_at_once(), 5 * LONG),
    ],
    ids=[
        "skewed",
        "even",
        "long",
        "growing",
        "phases that fit",
        "phases that do not",
        "short phases",
        "sliding",
        "phases in turn",
        "scan",
    ],
)
def test_what_recency_does_well(drawn: Drawn, blocks: int):
    """No less is reused than by the last use alone, but for a hundredth that chance explains."""
    pairs = [ratios(drawn(seed), blocks) for seed in range(3)]
    ours, control = (sum(ratio) / len(pairs) for ratio in zip(*pairs, strict=True))
    assert ours >= control - 0.01
