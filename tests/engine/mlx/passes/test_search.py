"""The search for a row class: what it accepts, what it leaves in the engine, and how it ends."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from cairn.engine.errors import EngineFault
from cairn.engine.mlx import selftest
from cairn.engine.mlx.engine import MlxEngine
from cairn.engine.mlx.model import LoadedModel, load_model
from cairn.engine.mlx.passes import search
from cairn.engine.mlx.passes.search import (
    FAILED,
    Found,
    candidates,
    measured_row_class,
    one_shape,
)
from cairn.engine.row_class import RowClass
from cairn.journal.cache.windows import SinkWindow
from tests.support.models.model_families import config_of, make_family_model

BLOCK = 16


@pytest.fixture(scope="module")
def loaded(model_directory: Path) -> LoadedModel:
    """A model with random weights."""
    return load_model(str(model_directory))


@pytest.fixture
def engine(loaded: LoadedModel) -> MlxEngine:
    """An engine over it."""
    return MlxEngine(loaded, decode_rows=2)


def searched(engine: MlxEngine, **more: Any) -> Found:
    """What the search finds."""
    return measured_row_class(engine, vocabulary_tokens=500, block_tokens=BLOCK, **more)


def differing(engine: MlxEngine, wrong: Callable[[RowClass, int, int], bool]) -> None:
    """Let passes change a row of the last layer's keys if they are wrong for a class."""
    run = engine.run_chunk

    def ran(slab: int, ids: Any, draw: Any) -> Any:
        start, report = engine.held_tokens(slab), run(slab, ids, draw)
        assert engine.row_class is not None
        if wrong(engine.row_class, start, len(ids)):
            cache = engine.pool.get(slab).caches[-1]
            cache.keys[:, :, cache.offset - 1] = cache.keys[:, :, cache.offset - 1] + 1e-3
            mx.eval(cache.keys)
        return report

    engine.run_chunk = ran  # type: ignore[method-assign,assignment]


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        pytest.param(lambda one, start, tokens: one.least < 8, (1, 8), id="few rows"),
        pytest.param(lambda one, start, tokens: one.quantum < 12, (12, 12), id="places"),
        pytest.param(lambda one, start, tokens: one.quantum < BLOCK, (16, 16), id="one shape"),
        pytest.param(
            lambda one, start, tokens: one.quantum < 8 and tokens == 11,
            (8, 8),
            id="a single number of rows",
        ),
        pytest.param(
            lambda one, start, tokens: (
                one.quantum < 4 and (start + tokens) % BLOCK == 0 < tokens % 5
            ),
            (4, 4),
            id="some passes that end with a block",
        ),
    ],
)
def test_a_class_with_a_difference_is_not_accepted(
    engine: MlxEngine, wrong: Callable[[RowClass, int, int], bool], expected: tuple[int, int]
) -> None:
    """Even if only one kind of pass differs. The cheapest class without one is found."""
    differing(engine, wrong)
    vars(search)["PRODUCT"], before = 0, search.PRODUCT
    try:
        found = searched(engine).row_class
    finally:
        vars(search)["PRODUCT"] = before
    assert found is not None
    assert expected <= (found.quantum, found.least)
    assert not expected[0] > found.quantum


def test_no_class_at_all(engine: MlxEngine) -> None:
    """If even one shape differs, passes stay canonical, and the reason says so."""
    differing(engine, lambda one, start, tokens: tokens == 3)
    assert Found(row_class=None, reason="even passes of one shape have different bits") == searched(
        engine
    )


def clock(step_s: float) -> Callable[[], float]:
    """A clock that goes on at each look."""
    times: Iterator[float] = iter(step_s * number for number in range(1 << 30))
    return lambda: next(times)


@pytest.mark.parametrize(
    ("step_s", "expected"),
    [
        (
            1,
            Found(
                row_class=one_shape(BLOCK), reason="the search took longer than 200 s", late=True
            ),
        ),
        (
            50,
            Found(
                row_class=None,
                reason="the search took longer than 200 s, and one shape more than half of that",
                late=True,
            ),
        ),
    ],
    ids=["one shape", "none"],
)
def test_the_limit_of_time(engine: MlxEngine, step_s: float, expected: Found) -> None:
    """One shape is tried once more, for half as long."""
    differing(engine, lambda one, start, tokens: one.quantum < BLOCK and start > 4 * BLOCK)
    fewer = {"_QUANTA": (4, 8, 12) * 12}
    before = {name: vars(search)[name] for name in fewer}
    vars(search).update(fewer)
    try:
        assert expected == searched(engine, limit_s=200, clock=clock(step_s))
    finally:
        vars(search).update(before)


def test_the_search_leaves_the_engine_as_it_was(engine: MlxEngine) -> None:
    """No slab stays open, also if the model fails; that it failed is the reason."""
    positions = engine.positions
    searched(engine)
    assert (None, 0, positions) == (engine.row_class, engine.memory().slab_bytes, engine.positions)

    def fails(*_: Any) -> Any:
        raise ValueError("the model went wrong")

    engine.run_chunk = fails  # type: ignore[assignment, method-assign]
    reason = f"{FAILED}ValueError: the model went wrong"
    assert Found(row_class=None, reason=reason) == searched(engine)
    assert (None, 0, positions) == (engine.row_class, engine.memory().slab_bytes, engine.positions)


def test_caches_without_a_class(loaded: LoadedModel) -> None:
    """mlx-lm's own and those that drop tokens are not tried, and take no class."""
    plain = MlxEngine(loaded, decode_rows=2, own_classes=False)
    sinks = MlxEngine(loaded, decode_rows=2, policy=SinkWindow.of(4, 8 * BLOCK, BLOCK))
    for engine, keeps in (
        (plain, "mlx-lm's own caches (--kv-cache mlx-lm)"),
        (sinks, "a window of tokens (--kv-policy sink_window)"),
    ):
        assert Found(row_class=None, reason=f"it keeps {keeps}") == searched(engine)
        refused = re.escape(f"no row class for this model: it keeps {keeps}")
        with pytest.raises(EngineFault, match=refused):
            engine.row_class = one_shape(BLOCK)


def test_a_class_under_which_the_self_test_fails_is_dropped(
    loaded: LoadedModel, engine: MlxEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stable bits can be wrong numbers. The canonical schedule is tested then."""
    right = selftest.SelfTest.error
    monkeypatch.setattr(
        selftest.SelfTest, "error", lambda test: 1.0 if engine.row_class else right(test)
    )
    tested = selftest.run_self_test(loaded, engine, BLOCK)
    assert (True, None) == (tested.passed, tested.row_class)
    assert "with it the self-test failed: numbers_are_right" == tested.row_class_reason
    assert engine.row_class is None


def test_the_checks_run_with_the_class(loaded: LoadedModel, engine: MlxEngine) -> None:
    """And the control without it."""
    shown: list[tuple[int, int]] = []
    tested = selftest.run_self_test(loaded, engine, BLOCK, lambda *step: shown.append(step))
    assert tested.passed
    assert [(place, len(list(candidates(BLOCK)))) for place in range(len(shown))] == shown
    assert tested.row_class is not None
    assert (tested.row_class, "") == (engine.row_class, tested.row_class_reason)
    assert tested.findings["naive_differs"]


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("llama", ""),
        pytest.param("qwen2", "", marks=pytest.mark.long),
        pytest.param("gpt2", "", marks=pytest.mark.long),
        ("gemma3_text", ""),
        pytest.param("gpt_oss", "", marks=pytest.mark.long),
        pytest.param("mixtral", "", marks=pytest.mark.long),
        ("gemma2", f"{FAILED}TypeError: "),
        ("deepseek_v3", f"{FAILED}AttributeError: "),
        ("lfm2", "it keeps states"),
    ],
)
def test_families(family: str, reason: str, model_directory: Path, tmp_path: Path) -> None:
    """
    Windows, sinks, experts and learned positions have a class, with mlx-lm's numbers. Models that
    attend in another way keep canonical passes.
    """
    made = make_family_model(tmp_path / family, model_directory, config_of(family))
    of_family = load_model(str(made))
    engine = MlxEngine(of_family, decode_rows=1)
    found = measured_row_class(engine, vocabulary_tokens=500, block_tokens=64)
    if reason:
        assert found.row_class is None
        assert found.reason.startswith(reason)
        return
    assert found.row_class is not None, found.reason
    engine.row_class = found.row_class
    assert selftest.SelfTest(of_family, engine, 64).error() < 1e-4
