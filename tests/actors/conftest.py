"""Fixtures of the tests of actors."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.prewarm_conversation import Journaled
from tests.support.self_tests import self_tests_run_once


@pytest.fixture(name="setup")
def setup_() -> Journaled:
    """A journal, and servers without a model that use it."""
    return Journaled()


@pytest.fixture(autouse=True)
def _self_tests_run_once() -> Iterator[None]:
    """Run the self-test of each model once, not in each server."""
    with self_tests_run_once():
        yield
