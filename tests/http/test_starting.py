"""A server that starts: what every request is answered, until the server is there."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from cairn.http.access.keys import Keys
from cairn.http.app import create_app
from cairn.http.health import HealthWithoutKey, StartingHealth
from cairn.http.openapi.document import OPERATIONS
from cairn.http.starting import StartingServer
from tests.http.fake_service import FACTS, FakeService

pytestmark = pytest.mark.trio

KEY = "k" * 20


class Clock:
    """A clock that a test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


async def test_health_says_how_far_the_start_is():
    """With 503, because load balancers look at the status alone, and with a time to ask again."""
    clock = Clock()
    front = StartingServer(clock)
    client = create_app(front).test_client()
    for step, done, total, at, retry_after in (
        (None, 0, 0, 0.0, "1"),
        ("reading", 0, 100, 10.0, "1"),
        ("reading", 25, 100, 15.0, "15"),
        ("reading", 99, 100, 20.0, "1"),
        ("reading", 1, 10_000, 20.0, "60"),
        ("loading", 1, 3, 30.0, "1"),
        ("loading", 1, 3, 34.0, "8"),
    ):
        clock.now = at
        if step is not None:
            front.progress(step, done, total)
        response = await client.get("/health")
        assert 503 == response.status_code
        due = {"status": "starting", "step": step or "starting", "done": done, "total": total}
        text = await response.get_data(as_text=True)
        assert due == json.loads(text)
        msgspec.json.decode(text, type=StartingHealth)
        assert retry_after == response.headers["retry-after"]


async def test_who_has_no_key_is_shown_the_status_alone():
    """As of a server that runs; and the key is asked for at every other address."""
    client = create_app(StartingServer(), keys=Keys([("alice", KEY)])).test_client()
    text = await (await client.get("/health")).get_data(as_text=True)
    assert {"status": "starting", "api_key": "required"} == json.loads(text)
    msgspec.json.decode(text, type=HealthWithoutKey)
    assert 401 == (await client.get("/v1/models")).status_code
    given = {"authorization": f"Bearer {KEY}"}
    assert 503 == (await client.get("/v1/models", headers=given)).status_code


ASKED = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1, "model": "m"}


@pytest.mark.parametrize(("method", "address"), OPERATIONS)
async def test_every_other_route_says_when_to_try_again(method: str, address: str):
    """In the form of errors of its protocol, whichever address it is."""
    front = StartingServer()
    front.progress("reading the journal", 3, 10)
    operation = OPERATIONS[method, address]
    sent: dict[str, Any] = {}
    if operation.body is not None:
        sent = {"data": json.dumps(operation.example or ASKED)}
    path = address.format(**dict.fromkeys(("name", "agent", "turn", "turn_id", "agent_id"), "x"))
    client = create_app(front).test_client()
    response = await getattr(client, method.lower())(path, **sent)
    text = await response.get_data(as_text=True)
    if address in ("/health", "/openapi.json", "/api/version"):
        return
    # Anthropic's clients know another status for the same.
    assert (529 if address.startswith("/v1/messages") else 503) == response.status_code, text
    assert int(response.headers["retry-after"]) >= 1
    error = json.loads(text)["error"]
    message = error if address.startswith("/api/") else error["message"]
    assert "the server is starting: reading the journal (3 of 10)" in message


async def test_the_server_takes_over():
    """From then on the same application answers for it, and counts its events."""
    front, service = StartingServer(), FakeService()
    client = create_app(front).test_client()
    assert 503 == (await client.get("/v1/models")).status_code
    assert not service.observers
    front.open(service)
    assert 2 == len(service.observers)
    front.observe(lambda _: None)
    assert 3 == len(service.observers)
    response = await client.get("/health")
    assert (200, FACTS.model) == (response.status_code, (await response.get_json())["model"])
    assert 200 == (await client.get("/v1/models")).status_code
    assert 200 == (await client.get("/metrics")).status_code
