"""``/v1/embeddings``: what is read, and what is sent."""

from __future__ import annotations

import json
from typing import Any

import attrs
import openai
import pytest
import trio

from cairn.actors.errors import Broken, InputTooLong, PromptRefused, QueueFull
from cairn.actors.requests.messages import Embed
from cairn.engine.model.embedding_files import Matryoshka
from cairn.http.app import create_app
from cairn.journal.events import EmbeddingsComputed
from tests.http.conftest import Serve
from tests.http.explorer.test_login import KEYS
from tests.http.fake_service import EMBEDS, FACTS, FakeService

pytestmark = pytest.mark.trio


def embedding(matryoshka: Matryoshka | None = None) -> FakeService:
    """A service with an embedding model."""
    service = FakeService()
    service.embeds = attrs.evolve(EMBEDS, matryoshka=matryoshka or Matryoshka())
    return service


async def post(
    service: FakeService, path: str = "/v1/embeddings", keys: Any = None, **fields: Any
) -> tuple[int, Any]:
    """The status and the body of the answer to a request of these fields."""
    headers = {"x-api-key": "a" * 16} if keys is not None else {}
    client = create_app(service, keys=keys).test_client()
    response = await client.post(path, data=json.dumps(fields), headers=headers)
    return response.status_code, json.loads(await response.get_data(as_text=True))


async def test_vectors_as_numbers():
    """In the order of the texts, with usage, and under the model's own name."""
    service = embedding()
    status, found = await post(service, input=["a", "b"], model="small", user="u", best=1)
    assert 200 == status
    assert {
        "object": "list",
        "data": [
            {"object": "embedding", "index": 0, "embedding": [0.0, 0.5]},
            {"object": "embedding", "index": 1, "embedding": [1.0, 0.5]},
        ],
        "model": "vectors",
        "usage": {"prompt_tokens": 7, "total_tokens": 7},
        "cairn": {"request": "req-1", "fingerprint": "e" * 16, "ignored": ["best"]},
    } == found
    assert [Embed(model="vectors", inputs=("a", "b"))] == service.embedded


@pytest.mark.parametrize(
    ("given", "inputs"),
    [
        ("a text", ("a text",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], ((1, 2),)),
        ([[1, 2], [3]], ((1, 2), (3,))),
        (["a", [3]], ("a", (3,))),
    ],
)
async def test_kinds_of_input(given: Any, inputs: Any):
    """A text, texts, token ids, several lists of them, and both."""
    service = embedding()
    status, _ = await post(service, input=given)
    assert (200, inputs) == (status, service.embedded[0].inputs)


async def test_the_openai_client(serve: Serve):
    """It asks for base64 by itself, and reads the same numbers either way."""
    address = await serve(embedding())

    def ask(**more: Any) -> list[list[float]]:
        with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
            found = client.embeddings.create(model="vectors", input=["a", "b"], **more)
        return [one.embedding for one in found.data]

    assert [[0.0, 0.5], [1.0, 0.5]] == await trio.to_thread.run_sync(ask)
    again = await trio.to_thread.run_sync(lambda: ask(encoding_format="float"))
    assert [[0.0, 0.5], [1.0, 0.5]] == again


@pytest.mark.parametrize(
    ("matryoshka", "wanted", "passed"),
    [
        (Matryoshka(), 256, None),
        (Matryoshka(any_length=True), 8, 8),
        (Matryoshka(lengths=(64, 128)), 64, 64),
    ],
)
async def test_dimensions(matryoshka: Matryoshka, wanted: int, passed: int | None):
    """All of them, or as many as the model allows."""
    service = embedding(matryoshka)
    status, _ = await post(service, input="a", dimensions=wanted)
    assert (200, passed) == (status, service.embedded[0].dimensions)


BAD: list[tuple[dict[str, Any], str, str, str]] = [
    ({}, "input", "missing_required_parameter", "Missing required field `input`"),
    ({"inputs": "a"}, "input", "missing_required_parameter", "instead of `inputs`"),
    ({"input": ""}, "input", "invalid_value", "send a text, or a list of texts"),
    ({"input": []}, "input", "invalid_value", "send a text, or a list of texts"),
    ({"input": 5}, "input", "invalid_type", "must be"),
    ({"input": ["a", ""]}, "input[1]", "invalid_value", "input[1] is empty"),
    ({"input": ["a", []]}, "input[1]", "invalid_value", "input[1] is empty"),
    ({"input": ["a", 3]}, "input", "invalid_type", "input[1] is a token id beside"),
    ({"input": [1, 100]}, "input", "invalid_value", "this model's are 0 to 99"),
    ({"input": [[1], [-1]]}, "input[1]", "invalid_value", "this model's are 0 to 99"),
    ({"input": ["a"] * 2049}, "input", "invalid_value", "send at most 2048"),
    ({"input": "a", "encoding_format": "int8"}, "encoding_format", "invalid_value", "base64"),
    ({"input": "a", "dimensions": 8}, "dimensions", "unsupported_value", "cannot be cut"),
    ({"input": "a", "dimensions": 0}, "dimensions", "unsupported_value", "256 numbers"),
    ({"input": "a", "model": FACTS.model}, "model", "wrong_kind_of_model", "use 'vectors' here"),
]


@pytest.mark.parametrize(("fields", "param", "code", "words"), BAD)
async def test_what_cannot_be_used(fields: dict[str, Any], param: str, code: str, words: str):
    """Each is refused with its parameter, and nothing is asked for."""
    service = embedding()
    status, found = await post(service, **fields)
    error = found["error"]
    assert (400, param, code) == (status, error["param"], error["code"])
    assert words in error["message"]
    assert [] == service.embedded


@pytest.mark.parametrize(
    ("matryoshka", "words"),
    [
        (Matryoshka(any_length=True), "any number from 1 to 256"),
        (Matryoshka(lengths=(64, 128)), "cut to 64, 128"),
    ],
)
async def test_dimensions_that_a_model_does_not_have(matryoshka: Matryoshka, words: str):
    """The error says which it has."""
    status, found = await post(embedding(matryoshka), input="a", dimensions=300)
    assert 400 == status
    assert words in found["error"]["message"]


async def test_models_that_do_not_exist():
    """Vectors of another model could not be compared, so no other one takes an unknown name."""
    for service, words in (
        (FakeService(), "with embeddings = true"),
        (embedding(), "send 'vectors', or ask the operator"),
    ):
        status, found = await post(service, input="a", model="text-embedding-3-large")
        assert (404, "model_not_found") == (status, found["error"]["code"])
        assert words in found["error"]["message"]


@pytest.mark.parametrize(
    ("path", "more"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
        ("/v1/completions", {"prompt": "Hi"}),
        ("/v1/responses", {"input": "Hi"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5}),
        ("/tokenize", {"content": "Hi"}),
    ],
)
async def test_an_embedding_model_answers_nothing(path: str, more: dict[str, Any]):
    """A clear error at each protocol, by name and by alias."""
    for name in ("vectors", "small"):
        service = embedding()
        status, found = await post(service, path, model=name, **more)
        assert 400 == status
        assert "send it to /v1/embeddings" in found["error"]["message"]
        assert [] == service.commands


async def test_listed_with_its_kind():
    """The list of models says what each is for; an operator cannot unload it."""
    service = embedding()
    client = create_app(service).test_client()
    listed = await client.get("/v1/models")
    found = json.loads(await listed.get_data(as_text=True))["data"]
    kinds = [(one["cairn"]["kind"], one["cairn"].get("dimensions")) for one in found]
    assert [("chat", None), ("embedding", 256)] == kinds
    for what in ("load", "unload"):
        status, body = await post(service, f"/v1/models/vectors/{what}")
        assert (400, "wrong_kind_of_model") == (status, body["error"]["code"])
    assert [] == service.loads


@pytest.mark.parametrize(
    ("refusal", "status", "code", "param"),
    [
        (InputTooLong("input[0] has 40 tokens"), 400, "context_length_exceeded", "input"),
        (PromptRefused("no tokens"), 400, "prompt_refused", "input"),
        (QueueFull("full", 5), 429, "queue_full", None),
        (Broken("bug-1"), 500, "kv_cache_inv_violation", None),
    ],
)
async def test_refusals(refusal: Exception, status: int, code: str, param: str | None):
    """Each has its status, and names the input."""
    service = embedding()
    service.refusal = refusal
    found, body = await post(service, input="a")
    assert (status, code, param) == (found, body["error"]["code"], body["error"]["param"])


async def test_whose_request_it_is():
    """The tenant of the key; without one, nothing is embedded."""
    service = embedding()
    assert 200 == (await post(service, keys=KEYS, input="a"))[0]
    assert ["alice"] == service.tenants
    client = create_app(service, keys=KEYS).test_client()
    response = await client.post("/v1/embeddings", data=json.dumps({"input": "a"}))
    assert 401 == response.status_code


async def test_metrics():
    """Requests, texts and tokens, by model; a tenant sees its own."""
    service = embedding()
    client = create_app(service, keys=KEYS).test_client()
    for tenant, tokens in (("alice", 5), ("bob", 70)):
        service.commit(
            EmbeddingsComputed(
                request="r",
                tenant=tenant,
                model="vectors",
                fingerprint="e",
                inputs=2,
                tokens=tokens,
                duration_us=1,
            )
        )
    response = await client.get("/metrics", headers={"x-api-key": "a" * 16})
    text = await response.get_data(as_text=True)
    assert 'cairn_embedding_requests_total{model="vectors"} 1.0' in text
    assert 'cairn_embedding_inputs_total{model="vectors"} 2.0' in text
    assert 'cairn_embedding_tokens_total{model="vectors"} 5.0' in text
