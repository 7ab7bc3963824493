"""Models that an operator has loaded and unloaded over HTTP."""

from __future__ import annotations

import json
from typing import Any

import attrs
import pytest

from cairn.actors.errors import ModelBusy
from cairn.http.app import create_app
from tests.http.explorer.test_login import KEYS
from tests.http.fake_service import FACTS, FakeService

pytestmark = pytest.mark.trio

OPERATOR = {"x-api-key": "k" * 16}
ALICE = {"x-api-key": "a" * 16}


def serving(keys: Any = None) -> tuple[FakeService, Any]:
    """A service with two models, and a client of it."""
    service = FakeService()
    service.others = {"owner/large": attrs.evolve(FACTS, model="owner/large")}
    return service, create_app(service, keys=keys).test_client(use_cookies=False)


async def posted(client: Any, path: str, **headers: str) -> tuple[int, Any]:
    """The status and the body of the answer to a POST without a body."""
    response = await client.post(f"/v1/models/{path}", headers=headers)
    return response.status_code, json.loads(await response.get_data(as_text=True))


async def test_load_and_unload() -> None:
    """By the name of a model; the answer is the model. What is not loaded is not unloaded."""
    service, client = serving()
    for path, name in (("owner/large/load", "owner/large"), (f"{FACTS.model}/unload", FACTS.model)):
        status, body = await posted(client, path)
        assert (200, name) == (status, body["id"])
        assert body["cairn"]["state"] in ("loaded", "not_loaded")
    status, body = await posted(client, "owner/large/unload")
    assert (200, "not_loaded") == (status, body["cairn"]["state"])
    assert ["owner/large", None] == service.loads


async def test_what_cannot_be_loaded() -> None:
    """A model that is not served, one at work, and another's wish."""
    service, client = serving()
    status, body = await posted(client, "none/load")
    assert (404, "model_not_found") == (status, body["error"]["code"])
    service.refusal = ModelBusy("requests are in flight")
    status, body = await posted(client, f"{FACTS.model}/unload")
    assert (409, "model_busy") == (status, body["error"]["code"])
    service, client = serving(KEYS)
    for what in ("load", "unload"):
        status, body = await posted(client, f"{FACTS.model}/{what}", **ALICE)
        assert (403, "operator_only") == (status, body["error"]["code"])
        status, _ = await posted(client, f"{FACTS.model}/{what}")
        assert 401 == status
        page = {**OPERATOR, "origin": "http://elsewhere.test"}
        status, _ = await posted(client, f"{FACTS.model}/{what}", **page)
        assert 403 == status
    assert [] == service.loads
    assert 200 == (await posted(client, f"{FACTS.model}/load", **OPERATOR))[0]
