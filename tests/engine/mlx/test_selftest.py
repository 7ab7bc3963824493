"""What the self-test reports about an exception that ended a check."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from cairn.engine.mlx import selftest
from cairn.engine.mlx.engine import MlxEngine
from cairn.engine.mlx.model import load_model
from cairn.engine.mlx.selftest import CHECKS, run_self_test
from cairn.engine.reports import SelfTestReport


def measured(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch, *, alone: bool
) -> SelfTestReport:
    """
    The self-test of a model with several rows, in which every pass fails that uses a row other than
    the first, or with ``alone`` every pass.
    """
    loaded = load_model(str(model_directory))
    engine = MlxEngine(loaded, decode_rows=2)
    decode = engine.decode

    def fails(rows: Any) -> Any:
        if alone or any(rows[1:]):
            raise ValueError("rows are not kept apart")
        return decode(rows)

    monkeypatch.setattr(engine, "decode", fails)
    return run_self_test(loaded, engine, 16)


@pytest.mark.parametrize(
    ("alone", "found"),
    [
        pytest.param(True, ("rows_do_not_matter",), id="the first answer"),
        pytest.param(False, CHECKS, id="the check of rows"),
    ],
)
def test_what_was_raised_is_kept(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch, alone: bool, found: tuple[str, ...]
) -> None:
    """The check of rows fails, so one row may work. The report has the error and its place."""
    tested = measured(model_directory, monkeypatch, alone=alone)

    assert (found, False) == (tuple(tested.findings), tested.passed)
    failed = [name for name in CHECKS[:4] if not tested.findings.get(name, True)]
    assert ["rows_do_not_matter"] == failed
    assert tested.fault is not None
    assert "ValueError: rows are not kept apart" == tested.fault.text
    assert "in fails" in tested.fault.traceback


class Raised(Exception):
    """An exception that shows whether it is still alive."""

    def __init__(self, held: list[weakref.ref[Raised]]) -> None:
        super().__init__("rows are not kept apart")
        held.append(weakref.ref(self))


def test_nothing_that_was_raised_is_held(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exception's traceback references frames, and these the engine with all its memory."""
    held: list[weakref.ref[Raised]] = []

    loaded = load_model(str(model_directory))
    engine = MlxEngine(loaded, decode_rows=2)

    def fails(rows: Any) -> Any:
        raise Raised(held)

    monkeypatch.setattr(engine, "decode", fails)
    tested = run_self_test(loaded, engine, 16)

    assert tested.fault is not None
    assert {None} == {one() for one in held}


def test_without_a_fault(model_directory: Path) -> None:
    """If nothing is raised, all checks run and no fault is reported."""
    loaded = load_model(str(model_directory))
    tested = run_self_test(loaded, MlxEngine(loaded, decode_rows=2), 16)

    assert (CHECKS, None) == (tuple(tested.findings), tested.fault)
    assert tested.passed


@pytest.mark.long
def test_rounded_products_may_differ_more(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    What TF32 makes of a float32 model's log-probabilities is accepted where the device rounds the
    factors of products, and nowhere else. A wrong computation is accepted nowhere.
    """
    loaded = load_model(str(model_directory))

    def accepted(error: float, *, rounds: bool) -> bool:
        monkeypatch.setattr(selftest, "rounds_products", lambda: rounds)
        monkeypatch.setattr(selftest.SelfTest, "error", lambda test: error)
        tested = run_self_test(loaded, MlxEngine(loaded, decode_rows=1), 16)
        return tested.findings["numbers_are_right"]

    of_tf32 = 8.8e-4  # this model's, on an H200
    assert accepted(of_tf32, rounds=True)
    assert not accepted(of_tf32, rounds=False)
    assert not accepted(0.1, rounds=True)


def test_rounding_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product whose factors have eleven significant bits is found; one of float32 is not."""
    is_cpu = mx.default_device().type == mx.DeviceType.cpu
    assert not (is_cpu and selftest.rounds_products())
    matmul = mx.array.__matmul__

    def rounded(one: mx.array, other: mx.array) -> mx.array:
        return matmul(*(x.astype(mx.float16).astype(mx.float32) for x in (one, other)))

    monkeypatch.setattr(mx.array, "__matmul__", rounded)
    assert selftest.rounds_products()
