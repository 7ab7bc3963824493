"""Ollama's answers, whole and as lines, and what it reports of models."""

from __future__ import annotations

import json
from typing import Any

import attrs
import pytest

from cairn.actors.errors import Broken, ModelBusy
from cairn.actors.models.size import ModelSize
from cairn.actors.requests.messages import Delta
from cairn.engine.answer.parts import Called, Calling, Said, Thought
from cairn.http.access.keys import Keys
from cairn.http.app import create_app
from cairn.http.ollama.models import API_VERSION
from cairn.journal.summaries import TurnCounts
from tests.http.fake_service import (
    ACCEPTED,
    EMBEDS,
    FACTS,
    FINISHED,
    PREFILLING,
    QUEUED,
    FakeService,
    Step,
)

pytestmark = pytest.mark.trio

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
TEXT: dict[str, Any] = {"prompt": "Hi"}
BODIES = {"chat": CHAT, "generate": TEXT}
AT = "2023-11-14T22:15:00Z"
HEAD = {"model": FACTS.model, "created_at": AT}
COUNTS = {"prompt_eval_count": 2048, "eval_count": 3}
CAIRN = {
    "session": "sess-1",
    "path": "new_session",
    "reason": "cold_start",
    "reused_tokens": 128,
    "seed": 42,
}
END = {"done": True, "done_reason": "stop", **COUNTS, "cairn": CAIRN}
TURN = TurnCounts(
    **{field.name: 0 for field in attrs.fields(TurnCounts)}
    | {"received_us": 1_000, "first_us": 3_000, "ended_us": 10_000}
)
LOOK = Called(index=0, id="c1", name="look", arguments='{"city": "Rom"}')
CUT = Called(index=1, id="c2", name="go", arguments='{"to', cut='{"to')
SPOKEN: tuple[Step, ...] = (
    ACCEPTED,
    Delta(parts=(Thought("Hm"),)),
    Delta(parts=(Said("Grüße"),)),
    Delta(parts=(), calling=Calling(index=0, id="c1", name="look", arguments="{")),
    Delta(parts=(LOOK, CUT)),
    attrs.evolve(FINISHED, turn=TURN),
)


async def sent(path: str, *script: Step, **fields: Any) -> tuple[str, str]:
    """The content type and the text of an answer."""
    client = create_app(FakeService(script)).test_client()
    body = json.dumps({**BODIES[path], **fields})
    response = await client.post(f"/api/{path}", data=body)
    assert 200 == response.status_code
    return str(response.content_type), await response.get_data(as_text=True)


async def lines(path: str, *script: Step) -> list[Any]:
    """The lines of a streamed answer."""
    kind, text = await sent(path, *script)
    assert "application/x-ndjson" == kind
    assert text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


async def whole(path: str, *script: Step) -> Any:
    """An answer that is sent as a whole."""
    kind, text = await sent(path, *script, stream=False)
    assert "application/json" == kind
    return json.loads(text)


DURATIONS = {
    "total_duration": 9_000_000,
    "load_duration": 0,
    "prompt_eval_duration": 2_000_000,
    "eval_duration": 7_000_000,
}
CALL = {"id": "c1", "function": {"index": 0, "name": "look", "arguments": {"city": "Rom"}}}


async def test_a_whole_conversation():
    """Thoughts, text and complete calls; how it ended, counts, and times in nanoseconds."""
    message = {
        "role": "assistant",
        "content": "Grüße",
        "thinking": "Hm",
        "tool_calls": [CALL],
    }
    assert {**HEAD, **END, **DURATIONS, "message": message} == await whole("chat", *SPOKEN)


async def test_a_streamed_conversation():
    """A line for each piece; a call is one once it is complete; the last line has the rest."""
    role = {"role": "assistant", "content": ""}
    assert [
        {**HEAD, "done": False, "message": {**role, "thinking": "Hm"}},
        {**HEAD, "done": False, "message": {**role, "content": "Grüße"}},
        {**HEAD, "done": False, "message": {**role, "tool_calls": [CALL]}},
        {**HEAD, **END, **DURATIONS, "message": role},
    ] == await lines("chat", *SPOKEN)


async def test_an_answer_to_a_prompt():
    """The same in the fields of generate, which has no calls."""
    expected = {**HEAD, **END, **DURATIONS, "response": "Grüße", "thinking": "Hm"}
    assert expected == await whole("generate", *SPOKEN)
    found = await lines("generate", *SPOKEN)
    assert ["", "Grüße", "", ""] == [one["response"] for one in found]
    assert {**HEAD, **END, **DURATIONS, "response": ""} == found[-1]


async def test_an_answer_that_was_cut_off_or_has_no_times():
    """The reason is its length; without a turn in the journal, there are no durations."""
    end = attrs.evolve(FINISHED, finish_reason="length")
    found = await whole("chat", ACCEPTED, end)
    assert ("length", False) == (found["done_reason"], "total_duration" in found)
    silent = attrs.evolve(FINISHED, turn=attrs.evolve(TURN, first_us=0))
    found = await whole("chat", ACCEPTED, silent)
    assert (9_000_000, 0) == (found["prompt_eval_duration"], found["eval_duration"])


@pytest.mark.parametrize("path", BODIES)
async def test_keep_alives_are_lines_or_white_space(path: str):
    """So that a client that reads line by line sees only answers."""
    kind, text = await sent(path, QUEUED, ACCEPTED, PREFILLING, FINISHED)
    assert text.startswith(' {"model"')
    first, last = (json.loads(line) for line in text.splitlines())
    assert ("application/x-ndjson", False, True) == (kind, first["done"], last["done"])


@pytest.mark.parametrize("path", BODIES)
async def test_a_stream_that_breaks_off(path: str):
    """Its last line is the error, and there is none that looks like an end."""
    first, last = await lines(path, ACCEPTED, Delta(parts=(Said("a"),)), Broken("b1"), FINISHED)
    assert not first["done"]
    assert {"error", "code", "param"} == last.keys()
    assert "kv_cache_inv_violation" == last["code"]


@pytest.mark.parametrize("stream", [True, False])
async def test_what_is_ignored_is_in_a_header(stream: bool):
    """And in the last line; the headers describe the request as in other protocols."""
    client = create_app(FakeService()).test_client()
    body = json.dumps({**CHAT, "stream": stream, "options": {"num_ctx": 1}})
    response = await client.post("/api/chat", data=body)
    last = json.loads((await response.get_data(as_text=True)).splitlines()[-1])
    assert ["options.num_ctx"] == last["cairn"]["ignored"]
    assert "ignored: options.num_ctx" == response.headers["x-cairn-warning"]
    assert "sess-1" == response.headers["x-cairn-session"]


# --- models ------------------------------------------------------------------------------------


def two_models() -> FakeService:
    """A service with one model that is loaded and one that is not."""
    service = FakeService()
    thinks = frozenset({"enable_thinking"})
    service.facts = attrs.evolve(FACTS, switches=thinks, infill=("a", "b", "c"))
    other = attrs.evolve(FACTS, model="other", fingerprint="", switches=frozenset())
    service.others = {"other": other}
    service.sizes = {
        FACTS.model: ModelSize(weights_bytes=1100, memory_bytes=1, fault=None),
        "other": ModelSize(weights_bytes=None, memory_bytes=1, fault="gone"),
    }
    return service


async def asked(service: FakeService, method: str, path: str, **fields: Any) -> tuple[int, Any]:
    """The status and the body of an answer."""
    client = create_app(service).test_client()
    data = json.dumps(fields) if method == "post" else None
    response = await getattr(client, method)(f"/api/{path}", data=data)
    return response.status_code, json.loads(await response.get_data(as_text=True))


async def test_models_that_are_served():
    """All of them, with what is known; a file that cannot be read has no size."""
    _, found = await asked(two_models(), "get", "tags")
    first, second = found["models"]
    assert (FACTS.model, FACTS.model, 1100) == (first["name"], first["model"], first["size"])
    assert ("other", 0) == (second["name"], second["size"])
    assert ["completion", "tools", "thinking", "insert"] == first["capabilities"]
    assert ["completion", "tools"] == second["capabilities"]
    assert "mlx" == first["details"]["format"]
    assert first["modified_at"].endswith("Z")
    assert first["digest"] != second["digest"]
    assert 64 == len(first["digest"])


async def test_models_in_memory():
    """Only those that are loaded, with their context; they stay."""
    service = two_models()
    service.sizes = {}
    (found,) = (await asked(service, "get", "ps"))[1]["models"]
    assert (FACTS.model, 4096, 0, 0) == (
        found["name"],
        found["context_length"],
        found["size"],
        found["size_vram"],
    )
    assert found["expires_at"].startswith("9999-")


@pytest.mark.parametrize("fields", [{"model": "other:latest"}, {"name": "other"}])
async def test_facts_about_a_model(fields: dict[str, str]):
    """Its context, defaults and capabilities, by either name of the field."""
    status, found = await asked(two_models(), "post", "show", **fields)
    assert 200 == status
    assert "num_ctx 4096" in found["parameters"].splitlines()
    info = found["model_info"]
    assert 4096 == info[f"{info['general.architecture']}.context_length"]
    assert "other" == info["general.basename"]
    assert ["completion", "tools"] == found["capabilities"]


async def test_the_version():
    """That of the API, for clients that refuse an older one, and Cairn's."""
    _, found = await asked(FakeService(), "get", "version")
    assert (API_VERSION, True) == (found["version"], bool(found["cairn"]))


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("model", "keep_alive", "loads", "reason"),
    [
        ("other", None, ["other"], "load"),
        ("other", "5m", ["other"], "load"),
        (FACTS.model, None, [], "load"),
        (FACTS.model, 0, [None], "unload"),
        (FACTS.model, "0s", [None], "unload"),
        ("other", 0, [], "unload"),
    ],
)
async def test_a_request_without_a_prompt(
    path: str, model: str, keep_alive: Any, loads: list[Any], reason: str
):
    """It has the model loaded, or unloaded with a keep_alive of 0, if it is not yet."""
    service = two_models()
    fields = {"model": model, "keep_alive": keep_alive}
    status, found = await asked(service, "post", path, **fields)
    assert (200, loads, []) == (status, service.loads, service.commands)
    assert (model, True, reason) == (found["model"], found["done"], found["done_reason"])
    text = found["message"]["content"] if path == "chat" else found["response"]
    assert "" == text


async def test_a_model_that_is_busy_is_not_unloaded():
    """The refusal is in Ollama's form."""
    service = two_models()
    service.refusal = ModelBusy("busy")
    status, found = await asked(service, "post", "chat", model=FACTS.model, keep_alive=0)
    assert (409, "model_busy") == (status, found["code"])


async def test_only_the_operator_has_models_loaded():
    """Another key is refused, unless there is nothing to do."""
    keys = Keys([("local", "k" * 20), ("alice", "a" * 20)])
    client = create_app(two_models(), keys=keys).test_client()
    for model, status in ((FACTS.model, 200), ("other", 403)):
        body = json.dumps({"model": model})
        headers = {"authorization": f"Bearer {'a' * 20}"}
        response = await client.post("/api/chat", data=body, headers=headers)
        assert status == response.status_code
    response = await client.get("/api/tags")
    assert 401 == response.status_code
    assert "key" in json.loads(await response.get_data(as_text=True))["error"]


# --- embeddings --------------------------------------------------------------------------------


MADE = {"request": "req-1", "fingerprint": "e" * 16}


def with_vectors() -> FakeService:
    """A service with an embedding model."""
    service = FakeService()
    service.embeds = EMBEDS
    return service


async def test_vectors_of_texts():
    """In their order, with the tokens that were computed; what has no effect is reported."""
    service = with_vectors()
    fields = {"model": "vectors:latest", "input": ["a", "b"], "truncate": True}
    assert (
        200,
        {
            "model": "vectors",
            "embeddings": [[0.0, 0.5], [1.0, 0.5]],
            "prompt_eval_count": 7,
            "cairn": {**MADE, "ignored": ["truncate"]},
        },
    ) == await asked(service, "post", "embed", **fields)
    (command,) = service.embedded
    assert ("vectors", ("a", "b")) == (command.model, command.inputs)


async def test_the_vector_of_a_text():
    """For older clients: one text, under another name."""
    expected = {"embedding": [0.0, 0.5], "cairn": MADE}
    assert (200, expected) == await asked(with_vectors(), "post", "embeddings", prompt="a")


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("embed", {}, "input"),
        ("embed", {"input": 1}, "input"),
        ("embeddings", {}, "prompt"),
        ("embeddings", {"prompt": [1]}, "prompt"),
    ],
)
async def test_texts_that_cannot_be_used(path: str, fields: Any, param: str):
    """They are refused in Ollama's form, with the field."""
    status, found = await asked(with_vectors(), "post", path, **fields)
    assert (400, param) == (status, found["param"])
    assert param in found["error"]


async def test_an_embedding_model_embeds_and_stays():
    """It says so, answers nothing, and is not unloaded."""
    service = with_vectors()
    tagged = (await asked(service, "get", "tags"))[1]["models"][-1]
    assert ("vectors", ["embedding"]) == (tagged["name"], tagged["capabilities"])
    shown = (await asked(service, "post", "show", model="vectors"))[1]["model_info"]
    assert (32, 256) == (shown["mlx.context_length"], shown["mlx.embedding_length"])
    for fields in (CHAT, {"keep_alive": 0}):
        status, found = await asked(service, "post", "chat", model="vectors", **fields)
        assert (400, "wrong_kind_of_model") == (status, found["code"])
    assert [] == service.loads
