"""Fixtures of the tests of actors."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.prewarm_conversation import Journaled


@pytest.fixture(name="setup")
def setup_() -> Journaled:
    """A journal, and servers without a model that use it."""
    return Journaled()


@pytest.fixture(autouse=True)
def _self_tests_run_once(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run the self-test of each model once, not in each server."""
    if request.node.get_closest_marker("model") is None:
        yield
        return
    from tests.support.self_tests import self_tests_run_once  # the other tests need no MLX

    with self_tests_run_once():
        yield
