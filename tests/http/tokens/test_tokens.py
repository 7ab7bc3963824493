"""``/tokenize``, ``/detokenize`` and ``/props``."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cairn.http.app import create_app
from tests.http.fake_service import FACTS, FakeService

pytestmark = pytest.mark.trio

HELLO = [{"role": "user", "content": "Hi"}]


async def post(path: str, service: FakeService | None = None, **fields: Any) -> tuple[int, Any]:
    """The status and the body of the answer to a request of these fields."""
    client = create_app(service or FakeService()).test_client()
    response = await client.post(path, data=json.dumps(fields))
    return response.status_code, json.loads(await response.get_data(as_text=True))


@pytest.mark.parametrize("fields", [{"content": "Hi"}, {"prompt": "Hi"}, {"messages": HELLO}])
async def test_tokens_of_a_text(fields: dict[str, Any]):
    """A text under either name, or a conversation as in chat completions."""
    service = FakeService()
    expected = {"tokens": [72, 105], "count": 2, "max_model_len": 4096}
    assert (200, expected) == await post("/tokenize", service, **fields)
    (command,) = service.commands
    assert ("messages" in fields) == (command.conversation is not None)


async def test_what_is_ignored_of_a_text():
    """A field without effect is reported."""
    _, found = await post("/tokenize", content="Hi", with_pieces=True)
    assert ["with_pieces"] == found["ignored"]


async def test_the_text_of_tokens():
    """The tokens are decoded; none are an empty text."""
    assert (200, {"content": "Hi", "prompt": "Hi"}) == await post("/detokenize", tokens=[72, 105])
    assert (200, {"content": "", "prompt": ""}) == await post("/detokenize", tokens=[])


@pytest.mark.parametrize(
    ("path", "fields", "param", "code"),
    [
        ("/tokenize", {}, "content", "missing_required_parameter"),
        ("/tokenize", {"content": 1}, "content", "invalid_type"),
        ("/tokenize", {"messages": []}, "messages", "invalid_value"),
        ("/detokenize", {}, "tokens", "missing_required_parameter"),
        ("/detokenize", {"tokens": [2000]}, "tokens", "invalid_value"),
        ("/detokenize", {"tokens": [1], "model": "x" * 201}, "model", "invalid_value"),
    ],
)
async def test_what_cannot_be_used(path: str, fields: dict[str, Any], param: str, code: str):
    """Each is refused with its parameter."""
    status, found = await post(path, **fields)
    assert (400, param, code) == (status, found["error"]["param"], found["error"]["code"])


async def test_props():
    """The loaded model, its context and the defaults of a request, under llama.cpp's names."""
    response = await create_app(FakeService()).test_client().get("/props")
    found = json.loads(await response.get_data(as_text=True))
    settings = found["default_generation_settings"]
    assert (4096, 512, 1.0) == (
        settings["n_ctx"],
        settings["params"]["n_predict"],
        settings["params"]["repeat_penalty"],
    )
    assert (4, FACTS.model) == (found["total_slots"], found["model_alias"])
    assert {"vision": False, "audio": False} == found["modalities"]
    assert found["build_info"].startswith("cairn ")
