"""Fixtures of the tests of bit-identity."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.self_tests import self_tests_run_once


@pytest.fixture(autouse=True)
def _self_tests_run_once() -> Iterator[None]:
    """Run the self-test of each model once, not in each server."""
    with self_tests_run_once():
        yield
