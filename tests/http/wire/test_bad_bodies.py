"""A body that cannot be used is a 400 with its path in the envelope, and reaches no session."""

from __future__ import annotations

import json

import pytest

from cairn.http.app import CairnApp, create_app
from tests.http.fake_service import FakeService
from tests.http.wire.bad_bodies import BAD, ODD, Bad, say, streamed

pytestmark = pytest.mark.trio


@pytest.fixture(scope="module")
def served() -> tuple[FakeService, CairnApp]:
    """One application for all bodies, because making it takes longer than refusing one."""
    service = FakeService()
    return service, create_app(service)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("bad", BAD, ids=[bad.name for bad in BAD])
async def test_bad_body(bad: Bad, stream: bool, served: tuple[FakeService, CairnApp]):
    """Each is refused with 400, its parameter and a message, before the service is called."""
    service, app = served
    client = app.test_client()
    body = streamed(bad.body) if stream else bad.body
    response = await client.post("/v1/chat/completions", data=body)
    bad.check(response.status_code, json.loads(await response.get_data(as_text=True)))
    assert "application/json" == response.content_type
    assert [] == service.commands


@pytest.mark.parametrize("body", [say(), *ODD.values()], ids=["good", *ODD])
async def test_odd_body_is_served(body: bytes):
    """The control: valid bodies are served, and so are those that only look wrong."""
    service = FakeService()
    client = create_app(service).test_client()
    response = await client.post("/v1/chat/completions", data=body)
    assert 200 == response.status_code
    assert 1 == len(service.commands)
