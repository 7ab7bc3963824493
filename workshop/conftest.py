"""The fixtures that the workshop's tests share with the product's."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import (
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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Do not measure these tests either."""
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here):
            item.add_marker(pytest.mark.unmeasured)


@pytest.fixture(autouse=True)
def _servers_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not measure the coverage of the servers that these tests start: the product's tests do."""
    monkeypatch.delenv("COVERAGE_PROCESS_CONFIG", raising=False)
