"""How a draw is described from token to token, and what a model's facts say of its slabs."""

from __future__ import annotations

from typing import Any, cast

import attrs
import pytest

from cairn.engine import schedule
from cairn.engine.growth import Growth, LayerGrowth
from cairn.engine.reports import (
    DrawSpec,
    GrammarMatcher,
    ModelFacts,
    SelfTestFault,
    SelfTestReport,
)
from cairn.engine.sampling import Sampling
from cairn.journal.cache.checkpoints import Checkpoints
from cairn.journal.cache.windows import SinkWindow

C = 64
FACTS = ModelFacts(
    name="a",
    fingerprint="f",
    fields={},
    layers=2,
    kv_token_bytes=1024,
    block_tokens=C,
    decode_rows=2,
    context_tokens=8192,
    reusable=True,
    eos_ids=frozenset({1}),
    vocabulary_tokens=100,
)


def test_a_draw_keeps_only_what_it_depends_on() -> None:
    """The prompt for a repetition penalty, the answer for penalties and grammars, else neither."""
    plain = DrawSpec.first(Sampling(), seed=3, prompt_ids=[5, 6], top=2)
    assert (frozenset(), 2, 3) == (plain.prompt, plain.top, plain.seed)
    assert plain is plain.after(7, 8)
    repeated = DrawSpec.first(Sampling(repetition_penalty=1.1), seed=3, prompt_ids=[5, 6])
    assert frozenset({5, 6}) == repeated.prompt
    assert (7, 8, 9) == repeated.after(7).after(8, 9).answer
    matcher = cast(GrammarMatcher, object())
    matched = DrawSpec.first(Sampling(), seed=3, prompt_ids=[5], matcher=matcher)
    assert (7,) == matched.after(7).answer


@pytest.mark.parametrize(
    ("changes", "tokens", "expected"),
    [
        ({}, 600, 1024),
        ({"policy": SinkWindow.of(4, 512, C)}, 500, 512),
        ({"policy": SinkWindow.of(4, 512, C)}, 2000, 8192),
        ({"growth": Growth(layers=(LayerGrowth(step_bytes=1),))}, 600, 640),
    ],
    ids=["full", "within the window", "beyond the window", "growing"],
)
def test_the_capacity_for_a_sequence(changes: dict[str, Any], tokens: int, expected: int) -> None:
    """A power of two; with a window one size for all beyond it; growing caches need no room."""
    assert expected == attrs.evolve(FACTS, **changes).capacity_for(tokens)


def test_the_blocks_that_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """In parts of a limited size, which end where a slab can continue; of a window, its blocks."""
    monkeypatch.setattr(schedule, "COPIED_AT_ONCE_BYTES", 3 * C * FACTS.kv_token_bytes)
    assert [[2, 3, 4], [5, 6]] == list(FACTS.copies(2, 7))
    states = attrs.evolve(FACTS, checkpoints=Checkpoints(block_tokens=C, blocks=2))
    assert [[2, 3], [4, 5, 6]] == list(states.copies(2, 7))
    windowed = attrs.evolve(FACTS, policy=SinkWindow.of(4, 4 * C, C))
    places = [place for part in windowed.copies(0, 20) for place in part]
    assert 0 in places
    assert 10 not in places
    assert 19 == places[-1]


def test_what_a_self_test_needs_to_pass() -> None:
    """Every check but the one that shows a difference, and no fault."""
    report = SelfTestReport(
        findings={"warm_equals_cold": True, "naive_differs": False}, error_max=0.0, duration_us=1
    )
    assert report.passed
    assert not attrs.evolve(report, findings={"warm_equals_cold": False}).passed
    assert not attrs.evolve(report, fault=SelfTestFault.of(ValueError())).passed
    assert "ValueError" == SelfTestFault.of(ValueError()).text
    assert "ValueError: no" == SelfTestFault.of(ValueError("no")).text
