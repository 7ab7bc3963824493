"""The fixtures that the workshop's tests share with the product's."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import (
    mark_long_cases,
    model_directory,
    other_directory,
    pytest_runtest_call,
    pytest_runtest_setup,
)
from tests.ops.conftest import run, stored

__all__ = [
    "model_directory",
    "other_directory",
    "pytest_runtest_call",
    "pytest_runtest_setup",
    "run",
    "stored",
]


@pytest.hookimpl(tryfirst=True)  # before tests are selected by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Do not measure these tests either, and mark the cases that are left to `make long`."""
    mark_long_cases(items)
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here):
            item.add_marker(pytest.mark.unmeasured)


@pytest.fixture(autouse=True)
def _servers_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not measure the coverage of the servers that these tests start: the product's tests do."""
    monkeypatch.delenv("COVERAGE_PROCESS_CONFIG", raising=False)
