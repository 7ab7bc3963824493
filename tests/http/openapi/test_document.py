"""The server's description of itself: every route and body, and answers that match it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import attrs
import msgspec
import pytest

from cairn.actors.errors import CannotRecord
from cairn.actors.requests.messages import Delta, StoredTurn
from cairn.engine.answer.parts import Called, Said, Thought
from cairn.engine.prompt.template import Message
from cairn.http.access.keys import Keys
from cairn.http.app import create_app
from cairn.http.health import HealthWithoutKey
from cairn.http.messages.objects import MessagesErrorEnvelope
from cairn.http.ollama.objects import OllamaErrorEnvelope
from cairn.http.openapi.document import OPERATIONS, description
from cairn.http.responses.form import Form
from cairn.http.responses.objects import Echo
from cairn.http.wire.errors import ErrorEnvelope
from cairn.journal.tenants import LOCAL
from tests.http.agents.fake_agents import TURN
from tests.http.fake_service import ACCEPTED, DELTAS, EMBEDS, FINISHED, FakeService

pytestmark = pytest.mark.trio

SPOKEN = (
    ACCEPTED,
    Delta(parts=(Thought("Hm"),)),
    *DELTAS,
    Delta(parts=(Called(index=0, id="c", name="look", arguments="{}"),)),
    FINISHED,
)
TEXT = (ACCEPTED, *DELTAS, FINISHED)
TWO = (*TEXT, attrs.evolve(ACCEPTED, choice=1), attrs.evolve(FINISHED, choice=1))
KEPT = StoredTurn(
    request="r1",
    previous=None,
    created_s=1,
    asked=(Message(role="user", content="Hello"),),
    parts=(Said("Hi"),),
    note=Form(echo=Echo(), model="cairn/small-1").note(),
    finished=FINISHED,
)


def addresses() -> set[tuple[str, str]]:
    """The methods and addresses of the application. Of the explorer's pages, only the first."""
    rules = [
        rule
        for rule in create_app(FakeService()).url_map.iter_rules()
        if not rule.rule.startswith("/explorer/") and rule.rule != "/favicon.ico"
    ]
    return {
        (method, re.sub(r"<(?:\w+:)?(\w+)>", r"{\1}", rule.rule))
        for rule in rules
        for method in (rule.methods or set()) - {"HEAD", "OPTIONS"}
    }


async def test_every_route_is_described_and_no_other():
    """The table of operations has exactly the routes."""
    assert addresses() == set(OPERATIONS)


def references(value: Any) -> Iterator[str]:
    """The references in a document."""
    match value:
        case {"$ref": str(ref)}:
            yield ref
        case dict():
            for one in value.values():
                yield from references(one)
        case list():
            for one in value:
                yield from references(one)
        case _:
            pass


async def test_it_is_served_and_consistent():
    """It is JSON, has its version, and every reference resolves to a component that is used."""
    response = await create_app(FakeService()).test_client().get("/openapi.json")
    document = json.loads(await response.get_data(as_text=True))
    assert "3.1.0" == document["openapi"]
    schemas = document["components"]["schemas"]
    assert {f"#/components/schemas/{name}" for name in schemas} == set(references(document))
    assert "security" not in document
    assert set() == {name for name in schemas if "cairn" in name.lower().split(".")[:-1]}
    assert document["paths"]["/v1/models/{name}"]["get"]["parameters"][0]["name"] == "name"


async def test_fields_that_are_always_sent_are_required():
    """A field with a default is always sent, so it is required; one that may be absent is not."""
    chat = description(with_keys=False)["components"]["schemas"]["ChatCompletion"]
    assert {"timings"} == set(chat["properties"]) - set(chat["required"])
    schemas = description(with_keys=False)["components"]["schemas"]
    message = schemas["AssistantMessage"]
    absent = set(message["properties"]) - set(message["required"])
    assert {"reasoning_content", "reasoning", "tool_calls"} == absent
    assert "default" not in message["properties"]["role"]


WITH_BODIES = [place for place, operation in OPERATIONS.items() if operation.body is not None]


def fields_described(method: str, address: str) -> set[str]:
    """The fields of a body in the document that is served."""
    document = description(with_keys=False)
    body = document["paths"][address][method.lower()]["requestBody"]
    ref = body["content"]["application/json"]["schema"]["$ref"]
    assert ref.startswith("#/components/schemas/")
    schema = document["components"]["schemas"][ref.rpartition("/")[2]]
    assert set(body["content"]["application/json"]["example"]) <= set(schema["properties"])
    return set(schema["properties"])


@pytest.mark.parametrize(("method", "address"), WITH_BODIES)
async def test_the_fields_of_a_body_are_those_that_are_read(method: str, address: str):
    """The document has the fields of the struct that reads the body."""
    body = OPERATIONS[method, address].body
    assert body is not None
    assert {field.name for field in msgspec.structs.fields(body)} == fields_described(
        method, address
    )


async def test_what_is_the_agents_own_is_no_field_of_its_requests():
    """Fields that are refused or have no effect there are left out; a fork may be empty."""
    chat = fields_described("POST", "/v1/chat/completions")
    own = {"tools", "session_id", "n", "prompt_cache_key"}
    assert chat - own == fields_described("POST", f"{AGENT}/generate")
    paths = description(with_keys=False)["paths"]
    assert [False, True] == [
        paths[f"{AGENT}/{what}"]["post"]["requestBody"]["required"] for what in ("fork", "generate")
    ]


async def test_keys_are_described_where_they_are_needed():
    """A key may come in either header."""
    document = description(with_keys=True)
    assert [{"bearer": []}, {"key": []}] == document["security"]
    assert {"bearer", "key"} == set(document["components"]["securitySchemes"])


AGENTS, AGENT = "/v1/agents", "/v1/agents/{name}"
NOTES = "/v1/agents/notes"
CHAT, TEXTS, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
RESPONSES = "/v1/responses"
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 9}


@pytest.mark.parametrize(
    ("method", "address", "path", "body", "script"),
    [
        ("POST", CHAT, CHAT, HELLO, TEXT),
        ("POST", CHAT, CHAT, {**HELLO, "user": "me"}, SPOKEN),
        ("POST", CHAT, CHAT, {**HELLO, "n": 2, "logprobs": True, "top_logprobs": 1}, TWO),
        ("POST", TEXTS, TEXTS, {"prompt": "a"}, TEXT),
        ("POST", TEXTS, TEXTS, {"prompt": "a", "n": 2, "logprobs": 1}, TWO),
        ("POST", RESPONSES, RESPONSES, {"input": "Hello"}, SPOKEN),
        ("POST", f"{RESPONSES}/compact", f"{RESPONSES}/compact", {"input": "Hello"}, SPOKEN),
        ("POST", f"{RESPONSES}/input_tokens", f"{RESPONSES}/input_tokens", {"input": "a"}, TEXT),
        ("POST", "/tokenize", "/tokenize", {"content": "Hello", "add_special": True}, TEXT),
        ("POST", "/detokenize", "/detokenize", {"tokens": [72]}, TEXT),
        ("GET", "/props", "/props", None, TEXT),
        ("GET", f"{RESPONSES}/{{name}}", f"{RESPONSES}/resp_r1", None, TEXT),
        (
            "GET",
            f"{RESPONSES}/{{name}}/input_items",
            f"{RESPONSES}/resp_r1/input_items",
            None,
            TEXT,
        ),
        ("DELETE", f"{RESPONSES}/{{name}}", f"{RESPONSES}/resp_r1", None, TEXT),
        ("POST", MESSAGES, MESSAGES, HELLO, SPOKEN),
        ("POST", f"{MESSAGES}/count_tokens", f"{MESSAGES}/count_tokens", HELLO, TEXT),
        ("POST", AGENTS, AGENTS, {"agent_id": "new", "colour": "red"}, TEXT),
        ("GET", AGENTS, AGENTS, None, TEXT),
        ("GET", AGENT, NOTES, None, TEXT),
        ("GET", f"{AGENT}/turns", f"{NOTES}/turns", None, TEXT),
        ("POST", f"{AGENT}/fork", f"{NOTES}/fork", {"agent_id": "other"}, TEXT),
        ("POST", f"{AGENT}/generate", f"{NOTES}/generate", HELLO, TEXT),
        ("DELETE", AGENT, NOTES, None, TEXT),
        ("GET", "/v1/models", "/v1/models", None, TEXT),
        ("GET", "/v1/models/{name}", "/v1/models/cairn/small-1", None, TEXT),
        ("POST", "/v1/models/{name}/load", "/v1/models/cairn/small-1/load", None, TEXT),
        ("POST", "/v1/models/{name}/unload", "/v1/models/cairn/small-1/unload", None, TEXT),
        ("POST", "/api/chat", "/api/chat", {**HELLO, "stream": False}, SPOKEN),
        ("POST", "/api/generate", "/api/generate", {"prompt": "a", "stream": False}, SPOKEN),
        ("POST", "/api/embed", "/api/embed", {"input": ["a"]}, TEXT),
        ("POST", "/api/embeddings", "/api/embeddings", {"prompt": "a"}, TEXT),
        ("POST", "/api/show", "/api/show", {"model": "cairn/small-1"}, TEXT),
        ("GET", "/api/tags", "/api/tags", None, TEXT),
        ("GET", "/api/ps", "/api/ps", None, TEXT),
        ("GET", "/api/version", "/api/version", None, TEXT),
        ("GET", "/health", "/health", None, TEXT),
        ("GET", "/openapi.json", "/openapi.json", None, TEXT),
        ("GET", "/metrics", "/metrics", None, TEXT),
        ("GET", "/", "/", None, TEXT),
    ],
)
async def test_an_answer_is_as_described(
    method: str, address: str, path: str, body: Any, script: Any
):
    """An answer has all required fields, and no others where the schema is closed."""
    service = FakeService(script)
    service.turns[LOCAL, "r1"] = KEPT
    service.agents.have("notes", TURN)
    service.embeds = EMBEDS
    client = create_app(service).test_client()
    data = None if body is None else json.dumps(body)
    response = await getattr(client, method.lower())(path, data=data)
    text = await response.get_data(as_text=True)
    assert 200 == response.status_code
    operation = OPERATIONS[method, address]
    if operation.answer is None:
        assert operation.text == response.content_type.partition(";")[0]
    else:
        msgspec.json.decode(text, type=operation.answer)


@pytest.mark.parametrize(
    ("path", "body", "refusal", "shape"),
    [
        (CHAT, {}, None, ErrorEnvelope),
        (CHAT, HELLO, CannotRecord(), ErrorEnvelope),
        (RESPONSES, {}, None, ErrorEnvelope),
        (MESSAGES, {}, None, MessagesErrorEnvelope),
        (MESSAGES, HELLO, CannotRecord(), MessagesErrorEnvelope),
        ("/api/show", {}, None, OllamaErrorEnvelope),
        ("/api/chat", HELLO, CannotRecord(), OllamaErrorEnvelope),
    ],
)
async def test_a_refusal_is_as_described(path: str, body: Any, refusal: Any, shape: Any):
    """Its status is listed for the operation, and its body has the described shape."""
    client = create_app(FakeService(refusal=refusal)).test_client()
    response = await client.post(path, data=json.dumps(body))
    text = await response.get_data(as_text=True)
    msgspec.json.decode(text, type=shape)
    answers = description(with_keys=False)["paths"][path]["post"]["responses"]
    assert str(response.status_code) in answers
    schema = answers[str(response.status_code)]["content"]["application/json"]["schema"]
    assert schema["$ref"].rpartition(".")[2] == shape.__name__ or shape.__name__ in schema["$ref"]


async def test_a_stream_of_lines_is_described_as_one():
    """Those of Ollama's API; the others are streams of events."""
    paths = description(with_keys=False)["paths"]
    for path, kind in (("/api/chat", "application/x-ndjson"), (CHAT, "text/event-stream")):
        content = paths[path]["post"]["responses"]["200"]["content"]
        assert {"application/json", kind} == set(content)


async def test_health_without_a_key_is_as_described():
    """Without a key, the short answer of health has the described shape."""
    keys = Keys([("alice", "k" * 20)])
    response = await create_app(FakeService(), keys=keys).test_client().get("/health")
    msgspec.json.decode(await response.get_data(as_text=True), type=HealthWithoutKey)
