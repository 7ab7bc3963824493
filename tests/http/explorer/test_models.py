"""The page of models: what the operator sees and may do, and that no other page can do it."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from cairn.actors.errors import ModelBusy
from cairn.actors.models.size import ModelSize
from cairn.http.app import create_app
from tests.http.explorer.test_login import FORM, HERE, KEYS
from tests.http.fake_service import FACTS, FakeService

pytestmark = pytest.mark.trio

MODELS = "/explorer/models"
OPERATOR = {"x-api-key": "k" * 16}
ALICE = {"x-api-key": "a" * 16}


def serving() -> tuple[FakeService, Any]:
    """A service with two models, and a client of it."""
    service = FakeService()
    service.others = {"large": attrs.evolve(FACTS, model="large")}
    return service, create_app(service, keys=KEYS).test_client(use_cookies=False)


async def text_of(client: Any, **headers: str) -> str:
    """The page."""
    response = await client.get(MODELS, headers={**FORM, **headers})
    assert 200 == response.status_code
    found: str = await response.get_data(as_text=True)
    return found


async def test_what_fits() -> None:
    """Weights and memory of each, and what is wrong; for the operator alone."""
    service, client = serving()
    gib = 1 << 30
    service.sizes = {
        FACTS.model: ModelSize(weights_bytes=2 * gib, memory_bytes=16 * gib, fault=None),
        "large": ModelSize(weights_bytes=40 * gib, memory_bytes=16 * gib, fault="it is <large>"),
    }
    for headers, seen in ((OPERATOR, True), (ALICE, False)):
        text = await text_of(client, **headers)
        for words in (
            *("2.0 GiB of weights, 16.0 GiB in the machine", "it is &lt;large&gt;"),
            *(">Load<", ">Unload<", "does not fit"),
        ):
            assert seen == (words in text), words
    service.sizes["large"] = ModelSize(weights_bytes=None, memory_bytes=1, fault="no files")
    assert "cannot be loaded" in await text_of(client, **OPERATOR)


async def test_load_and_unload() -> None:
    """A form of the page does it, by the operator's key."""
    service, client = serving()
    headers = {**FORM, **OPERATOR, "origin": HERE}
    for path, data in (("load", "model=large"), ("unload", "")):
        response = await client.post(f"{MODELS}/{path}", headers=headers, data=data)
        assert (303, MODELS) == (response.status_code, response.headers["location"])
        assert 405 == (await client.get(f"{MODELS}/{path}", headers=headers)).status_code
    assert ["large", None] == service.loads
    response = await client.post(f"{MODELS}/load", headers=headers, data="model=no<b>")
    assert 404 == response.status_code
    assert "no&lt;b&gt;" in await response.get_data(as_text=True)
    service.refusal = ModelBusy("requests are in flight")
    response = await client.post(f"{MODELS}/unload", headers=headers)
    assert 409 == response.status_code
    assert "requests are in flight" in await response.get_data(as_text=True)


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        (ALICE, 403),
        ({"x-api-key": ""}, 401),
        ({"origin": "http://localhost:3000"}, 403),
        ({"origin": ""}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-site"}, 403),
    ],
)
async def test_who_may_not(changes: dict[str, str], status: int) -> None:
    """Another key, and another page, be it one of the same host."""
    service, client = serving()
    headers = {**FORM, **OPERATOR, "origin": HERE, **changes}
    for path in ("load", "unload"):
        response = await client.post(f"{MODELS}/{path}", headers=headers, data="model=large")
        assert status == response.status_code
    assert [] == service.loads
