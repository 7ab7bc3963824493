"""The fixtures that the workshop's tests share with the product's."""

from __future__ import annotations

from tests.conftest import model_directory, other_directory, pytest_runtest_setup
from tests.ops.conftest import run, stored

__all__ = ["model_directory", "other_directory", "pytest_runtest_setup", "run", "stored"]
