"""One self-test per model and process, for the many tests that start a server of their own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from cairn.engine.mlx.engine import MlxEngine
from cairn.engine.mlx.model import LoadedModel
from cairn.engine.mlx.passes.search import Found
from cairn.engine.mlx.selftest import run_self_test
from cairn.engine.reports import SelfTestReport

# A self-test takes longer than most of these tests do otherwise, and always reports the same.
_passed: dict[object, SelfTestReport] = {}


@contextlib.contextmanager
def self_tests_run_once() -> Iterator[None]:
    """
    While the context is open, a model that has passed its self-test in this process passes again
    without running it, if it is loaded from the same files with the same settings.
    """

    def run_once(loaded: LoadedModel, engine: MlxEngine, block_tokens: int) -> SelfTestReport:
        # What a slab takes differs with the window, and with caches that grow.
        slab_bytes = tuple(map(engine.pool.slab_bytes, (4 * block_tokens, 64 * block_tokens)))
        settings = (loaded.dtype, loaded.shapes, loaded.together, block_tokens, engine.decode_rows)
        key = (loaded.files, settings, slab_bytes, engine.without_cuts)
        if key not in _passed:
            report = run_self_test(loaded, engine, block_tokens)
            if not report.passed:
                return report
            _passed[key] = report
        return _passed[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cairn.engine.mlx.start.run_self_test", run_once)
        yield


@contextlib.contextmanager
def without_row_class() -> Iterator[None]:
    """While the context is open, self-tests search no row class: models have the grain C."""

    def not_searched(engine: MlxEngine, **settings: object) -> Found:
        return Found(row_class=None, reason="not searched")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cairn.engine.mlx.selftest.measured_row_class", not_searched)
        yield
