"""What the engine's own measurement keeps of what was raised in the midst of it."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest

from cairn.engine.mlx.engine import MlxEngine
from cairn.engine.mlx.model import load_model
from cairn.engine.mlx.selftest import CHECKS, run_self_test
from cairn.engine.reports import SelfTestReport


def measured(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch, *, alone: bool
) -> SelfTestReport:
    """
    The self-test of a model that decodes several at once, where passes fail that have anything in
    another row than the first, or with ``alone`` all.
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
    """Rows are not kept apart then: one may do. What was raised is told, and where."""
    tested = measured(model_directory, monkeypatch, alone=alone)

    assert (found, False) == (tuple(tested.findings), tested.passed)
    failed = [name for name in CHECKS[:4] if not tested.findings.get(name, True)]
    assert ["rows_do_not_matter"] == failed
    assert tested.fault is not None
    assert "ValueError: rows are not kept apart" == tested.fault.text
    assert "in fails" in tested.fault.traceback


class Raised(Exception):
    """One of which is told whether it is still there."""

    def __init__(self, held: list[weakref.ref[Raised]]) -> None:
        super().__init__("rows are not kept apart")
        held.append(weakref.ref(self))


def test_nothing_that_was_raised_is_held(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error knows the frames that it went through, and these the engine with all its memory."""
    held: list[weakref.ref[Raised]] = []

    loaded = load_model(str(model_directory))
    engine = MlxEngine(loaded, decode_rows=2)

    def fails(rows: Any) -> Any:
        raise Raised(held)

    monkeypatch.setattr(engine, "decode", fails)
    tested = run_self_test(loaded, engine, 16)

    assert tested.fault is not None
    assert [None] == [one() for one in held]


def test_without_a_fault(model_directory: Path) -> None:
    """Nothing was raised: all is looked at, and nothing else is told."""
    loaded = load_model(str(model_directory))
    tested = run_self_test(loaded, MlxEngine(loaded, decode_rows=2), 16)

    assert (CHECKS, None) == (tuple(tested.findings), tested.fault)
    assert tested.passed
