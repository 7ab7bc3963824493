"""The front page shows the state of the server."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from cairn.http.pages import front_page
from tests.http.fake_service import FACTS, STATISTICS


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "<td>serving</td>"),
        ({"admission_bug": "<bug>"}, "admission is closed; bug id &lt;bug&gt;"),
        ({"journal_stall": "disk_full"}, "the journal's disk is full; no requests are answered"),
    ],
)
def test_the_state_of_the_server(changes: dict[str, Any], expected: str):
    """A server that admits no requests says why."""
    statistics = attrs.evolve(STATISTICS, **changes)
    page = front_page(FACTS, statistics, "http://here", sessions=4, with_keys=False)
    assert expected in page
    assert "<tr><th>sessions</th><td>4</td></tr>" in page
    page = front_page(FACTS, statistics, "http://here", sessions=None, with_keys=True)
    assert expected in page
    assert "sessions</th>" not in page
