"""Fixtures of the tests of actors."""

from __future__ import annotations

import pytest

from tests.support.prewarm_conversation import Journaled


@pytest.fixture(name="setup")
def setup_() -> Journaled:
    """A journal, and servers without a model that use it."""
    return Journaled()
