"""Misspelt fields: which one is suggested for a missing required field."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from cairn.http.app import create_app
from cairn.http.wire.suggestions import slip_for
from tests.http.fake_service import FakeService

HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}]}

REQUIRED = [
    ("/v1/chat/completions", {}, "messages", "mesages"),
    ("/v1/completions", {}, "prompt", "promt"),
    ("/v1/responses", {}, "input", "inputs"),
    ("/v1/responses", {"previous_response_id": "resp_1"}, "input", "inptu"),
    ("/v1/messages", {"max_tokens": 9}, "messages", "message"),
    ("/v1/messages", HELLO, "max_tokens", "max_token"),
    ("/v1/messages/count_tokens", {}, "messages", "Messages"),
    ("/v1/agents/notes/generate", {}, "messages", "mesages"),
]


@pytest.mark.trio
@pytest.mark.parametrize(
    ("address", "body", "wanted", "slip"),
    REQUIRED,
    ids=[f"{address} {wanted}" for address, _, wanted, _ in REQUIRED],
)
async def test_a_required_field_that_is_missing(
    address: str, body: dict[str, Any], wanted: str, slip: str
):
    """
    The refusal names it, and the field that was probably sent instead; the service is not called.
    """
    service = FakeService()
    service.agents.have("notes")
    client = create_app(service).test_client()
    response = await client.post(address, data=json.dumps({**body, slip: "x"}))
    error = json.loads(await response.get_data(as_text=True))["error"]
    assert (400, "missing_required_parameter", wanted) == (
        response.status_code,
        error["code"],
        error["param"],
    )
    assert (
        f"Missing required field `{wanted}`. Did you mean `{wanted}` instead of `{slip}`?"
        == error["message"]
    )
    assert [] == service.commands


class Counting(dict[str, Any]):
    """Fields that count how many of them were read."""

    looked = 0

    def items(self) -> Any:
        """Each field, counted."""
        return self._counted()

    def _counted(self) -> Iterator[tuple[str, Any]]:
        for item in super().items():
            self.looked += 1
            yield item


@pytest.mark.slow
def test_a_body_of_very_many_fields():
    """Only a limited number is compared, and none with a long name."""
    noise: Mapping[str, Any] = {f"x{number}": 1 for number in range(20_000)}
    assert "inptu" == slip_for("input", {"inptu": 1, **noise}, ())
    fields = Counting(noise)
    assert slip_for("input", fields, ()) is None
    assert fields.looked < 100
    assert slip_for("input", {f"inp{'_' * 10**6}tu": 1}, ()) is None
    long = {f"{number}{'_' * 100}": 1 for number in range(99)}
    assert "inptu" == slip_for("input", {**long, "inptu": 1}, ())
