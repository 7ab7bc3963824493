"""What people look at, on a server whose journal is sealed."""

from __future__ import annotations

import httpx

from tests.e2e.conftest import Start
from tests.support.processes.subprocess_server import ask, user


def test_the_texts_of_events(start: Start) -> None:
    """Each event is sent with its texts opened; a log of them is JSON line by line."""
    server = start()
    said = ask(server, user("The stone is grey."), max_tokens=4)
    server.wait_idle()
    answer = httpx.get(f"{server.url}/v1/sessions/{said.session}/events", params={"texts": "true"})
    assert 200 == answer.status_code
    events = {event["kind"]: event for event in answer.json()["data"]}
    assert "The stone is grey." == events["request_received"]["private"]["words"]
    assert None is events["request_finished"]["private"]
