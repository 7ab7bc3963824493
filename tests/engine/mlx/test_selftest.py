"""What the self-test reports about an exception that ended a check."""

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
