"""Anthropic's messages over HTTP: whole, streamed, counted, refused."""

from __future__ import annotations

import json
from typing import Any

import attrs
import httpx
import pytest
import structlog
import trio
from werkzeug.exceptions import RequestEntityTooLarge

from cairn.actors.errors import (
    Broken,
    CannotRecord,
    NoMemory,
    PromptRefused,
    PromptTooLong,
    QueueFull,
    RefusalError,
    Stopping,
    TimedOut,
)
from cairn.actors.requests.messages import Delta
from cairn.engine.answer.parts import Called, Calling, Said, Thought
from cairn.http.app import create_app
from cairn.http.messages.answers import MessagesStream
from cairn.http.messages.request import read_messages_request
from cairn.http.wire.answers import UnfinishedAnswer
from cairn.http.wire.parameters import Ignored
from tests.http.conftest import Serve
from tests.http.fake_service import (
    ACCEPTED,
    ANSWER,
    FACTS,
    FINISHED,
    PREFILLING,
    QUEUED,
    FakeService,
    Hold,
    Step,
)

pytestmark = pytest.mark.trio

ASK: dict[str, Any] = {"max_tokens": 100, "messages": [{"role": "user", "content": "Hello"}]}
MESSAGES = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
BUG = "0f8fad5b-d9cb-469f-a165-70867728950e"
LOOK = Called(index=0, id="a1", name="look", arguments='{"city": "Öslo"}')
GO = Called(index=1, id="b2", name="go", arguments="{}")
SCRIPT: tuple[Step, ...] = (
    ACCEPTED,
    Delta(parts=(Thought("Two"),)),
    Delta(parts=(Thought(" cities."),)),
    Delta(parts=(Said("I "),)),
    Delta(parts=(Said("look."), LOOK, GO)),
    Delta(parts=(Said("\nDone."),)),
    attrs.evolve(FINISHED, sealed_tokens=1856),
)
CAIRN = {
    "session": "sess-1",
    "path": "new_session",
    "reason": "cold_start",
    "reused_tokens": 128,
    "seed": 42,
}
USAGE = {
    "input_tokens": 64,
    "cache_creation_input_tokens": 1856,
    "cache_read_input_tokens": 128,
    "output_tokens": 3,
}
KNOWN = {
    "x-cairn-session": "sess-1",
    "x-cairn-path": "new_session",
    "x-cairn-context-left": "2048",
    "x-request-id": "req-1",
    "request-id": "req-1",
}


async def post(service: FakeService, path: str = MESSAGES, **fields: Any) -> Any:
    """The response to a request of these fields."""
    client = create_app(service).test_client()
    return await client.post(path, data=json.dumps({**ASK, **fields}))


async def whole(*script: Step, **fields: Any) -> dict[str, Any]:
    """The answer as one object."""
    response = await post(FakeService(script), **fields)
    assert (200, "application/json") == (response.status_code, response.content_type)
    found = json.loads(await response.get_data(as_text=True))
    assert isinstance(found, dict)
    return found


async def events(*script: Step, **fields: Any) -> list[dict[str, Any]]:
    """The events of a stream, each named by its type."""
    response = await post(FakeService(script), stream=True, **fields)
    assert (200, "text/event-stream; charset=utf-8") == (
        response.status_code,
        response.content_type,
    )
    text = await response.get_data(as_text=True)
    found = []
    for event in text.removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert f"event: {found[-1]['type']}" == name
    return found


async def test_a_message_with_everything():
    """Reasoning, text and calls are blocks in their order, and the usage adds up to the prompt."""
    assert {
        "id": "msg_req-1",
        "type": "message",
        "role": "assistant",
        "model": "cairn/small-1",
        "content": [
            {"type": "thinking", "thinking": "Two cities.", "signature": "unsigned"},
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "a1", "name": "look", "input": {"city": "Öslo"}},
            {"type": "tool_use", "id": "b2", "name": "go", "input": {}},
            {"type": "text", "text": "\nDone."},
        ],
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "usage": USAGE,
        "cairn": CAIRN,
    } == await whole(*SCRIPT)


async def test_events_of_a_stream():
    """The exact content of each event: blocks begin, grow and end one after the other."""
    found = await events(*SCRIPT)
    start: dict[str, Any] = {
        "id": "msg_req-1",
        "type": "message",
        "role": "assistant",
        "model": "cairn/small-1",
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {
            "input_tokens": 1920,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 128,
            "output_tokens": 0,
        },
        "cairn": CAIRN,
    }

    def begin(index: int, **block: Any) -> dict[str, Any]:
        return {"type": "content_block_start", "index": index, "content_block": block}

    def grow(index: int, kind: str, **delta: str) -> dict[str, Any]:
        return {
            "type": "content_block_delta",
            "index": index,
            "delta": {"type": f"{kind}_delta", **delta},
        }

    def end(index: int) -> dict[str, Any]:
        return {"type": "content_block_stop", "index": index}

    assert [
        {"type": "message_start", "message": start},
        begin(0, type="thinking", thinking="", signature=""),
        grow(0, "thinking", thinking="Two"),
        grow(0, "thinking", thinking=" cities."),
        grow(0, "signature", signature="unsigned"),
        end(0),
        begin(1, type="text", text=""),
        grow(1, "text", text="I "),
        grow(1, "text", text="look."),
        end(1),
        begin(2, type="tool_use", id="a1", name="look", input={}),
        grow(2, "input_json", partial_json='{"city": "Öslo"}'),
        end(2),
        begin(3, type="tool_use", id="b2", name="go", input={}),
        grow(3, "input_json", partial_json="{}"),
        end(3),
        begin(4, type="text", text=""),
        grow(4, "text", text="\nDone."),
        end(4),
        {
            "type": "message_delta",
            "delta": {"stop_reason": "tool_use", "stop_sequence": None},
            "usage": USAGE,
        },
        {"type": "message_stop"},
    ] == found


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("finished", "parts", "reason"),
    [
        ({}, (Said("x"),), "end_turn"),
        ({}, (), "end_turn"),
        ({}, (Thought("x"),), "end_turn"),
        ({"stop_text": "END"}, (Said("x"),), "stop_sequence"),
        ({}, (GO,), "tool_use"),
        ({"stop_text": "END"}, (GO,), "tool_use"),
        # A second call was cut off, so acting on the first alone may be wrong.
        ({"ended_in_call": True}, (GO, Said("x")), "end_turn"),
        ({"ended_in_call": True, "stop_text": "END"}, (GO, Said("x")), "stop_sequence"),
        ({"finish_reason": "length", "completion_tokens": 100}, (Said("x"),), "max_tokens"),
        ({"finish_reason": "length", "completion_tokens": 100}, (GO,), "max_tokens"),
        (
            {"finish_reason": "length", "completion_tokens": 99},
            (Said("x"),),
            "model_context_window_exceeded",
        ),
        ({"finish_reason": "repetition", "completion_tokens": 40}, (Said("x"),), "max_tokens"),
    ],
)
async def test_why_an_answer_ended(
    stream: bool, finished: dict[str, Any], parts: tuple[Any, ...], reason: str
):
    """Complete calls take precedence over a stop text, and a cut-off over both."""
    script = (ACCEPTED, Delta(parts=parts), attrs.evolve(FINISHED, **finished))
    end = (await events(*script))[-2]["delta"] if stream else await whole(*script)
    assert (reason, finished.get("stop_text")) == (end["stop_reason"], end["stop_sequence"])


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_an_answer_without_text(stream: bool):
    """It has no block at all."""
    script = (ACCEPTED, FINISHED)
    if stream:
        kinds = [event["type"] for event in await events(*script)]
        assert ["message_start", "message_delta", "message_stop"] == kinds
    else:
        assert [] == (await whole(*script))["content"]


@pytest.mark.parametrize(
    ("agent", "expected"),
    [("claude-cli/2.1.330 (external, cli)", 2), ("Anthropic/Python 2.12.0", 0)],
)
async def test_claude_code_in_a_long_prefill(agent: str, expected: int):
    """
    It gets an event without effect with every third ping once the message has begun, because it
    drops a stream of pings alone. Other clients get pings alone.
    """
    body = json.dumps({**ASK, "stream": True}).encode()
    read = read_messages_request(body, {"user-agent": agent}, Ignored(), FACTS)
    stream = MessagesStream(read)
    for _ in range(3):
        assert b'event: ping\ndata: {"type":"ping"}\n\n' == stream.take(QUEUED)
    stream.take(ACCEPTED)
    sent = [stream.take(PREFILLING).decode().removesuffix("\n\n") for _ in range(6)]
    begun = [one.split("\n\n")[1] for one in sent if "message_delta" in one]
    assert expected == len(begun)
    assert all(one.startswith("event: ping\n") for one in sent)
    if begun:
        assert ["message_delta" in one for one in sent] == [False, False, True] * 2
    for one in begun:
        found = json.loads(one.partition("data: ")[2])
        assert {"stop_reason": None, "stop_sequence": None} == found["delta"]
        assert 0 == found["usage"]["output_tokens"]


async def test_pings():
    """
    A ping is sent each time a client waits: in the queue, in prefill or in the middle of a block.
    """
    found = await events(
        QUEUED, PREFILLING, ACCEPTED, PREFILLING, Delta(parts=(Said("x"),)), PREFILLING, FINISHED
    )
    ping = {"type": "ping"}
    assert [ping, ping] == found[:2]
    assert [ping, "content_block_start"] == [found[3], found[4]["type"]]
    assert [ping, "content_block_stop"] == [found[6], found[7]["type"]]


async def test_ignored_parameters_are_reported():
    """In Cairn's object; in a stream, with the first event."""
    fields = {"metadata": {"user_id": "me"}, "cache_control": {"type": "ephemeral", "ttl": "2h"}}
    expected = ["cache_control.ttl", "metadata"]
    assert expected == (await whole(*ANSWER, **fields))["cairn"]["ignored"]
    first = (await events(*ANSWER, **fields))[0]
    assert expected == first["message"]["cairn"]["ignored"]


@pytest.mark.parametrize(
    ("stream", "script", "expected"),
    [
        (True, ANSWER, KNOWN),
        (True, (QUEUED, *ANSWER), {}),
        (False, ANSWER, KNOWN),
        (False, (QUEUED, *ANSWER), KNOWN),
    ],
    ids=["stream", "stream that waits", "whole", "whole that waits"],
)
async def test_headers(stream: bool, script: tuple[Step, ...], expected: dict[str, str]):
    """The request's id is sent under both names, once it is known."""
    response = await post(FakeService(script), stream=stream)
    assert expected == {name: response.headers[name] for name in KNOWN if name in response.headers}


async def test_further_fields_of_clients():
    """Keys, versions, betas and queries are accepted in any form."""
    client = create_app(FakeService()).test_client()
    headers = {
        "x-api-key": "sk-any",
        "authorization": "Bearer sk-other",
        "anthropic-version": "2026-10-21",
        "anthropic-beta": "interleaved-thinking-2025-05-14",
        "x-stainless-lang": "python",
    }
    response = await client.post(f"{MESSAGES}?beta=true", data=json.dumps(ASK), headers=headers)
    assert 200 == response.status_code


# --- counting tokens -------------------------------------------------------------------------


async def test_a_count_of_tokens():
    """
    The answer is a number and nothing else: the length of the prompt that the message would have.
    """
    service = FakeService()
    response = await post(service, COUNT, system="Be brief.", thinking={"type": "adaptive"})
    assert (200, {"input_tokens": 17}) == (
        response.status_code,
        json.loads(await response.get_data(as_text=True)),
    )
    await post(service, system="Be brief.", thinking={"type": "adaptive"})
    counted, asked = service.commands
    assert counted == attrs.evolve(asked, client=None)


async def test_a_count_needs_no_limit_and_gives_no_stream():
    """``max_tokens`` may be left out, and ``stream`` has no effect."""
    response = await post(FakeService(), COUNT, max_tokens=None, stream=True)
    assert 200 == response.status_code


async def test_a_history_that_ends_with_the_assistant():
    """Its tokens are counted, and an answer continues it."""
    history = [*ASK["messages"], {"role": "assistant", "content": "Hello."}]
    for path in (COUNT, MESSAGES):
        assert 200 == (await post(FakeService(), path, messages=history)).status_code


# --- errors ----------------------------------------------------------------------------------


async def error_of(response: Any) -> dict[str, Any]:
    """The error in an envelope, whose request the headers name too."""
    body = json.loads(await response.get_data(as_text=True))
    assert {"type", "error", "request_id"} == body.keys()
    assert "error" == body["type"]
    assert {"type", "message", "param", "code"} == body["error"].keys()
    named = response.headers["request-id"]
    assert {named} == {body["request_id"], response.headers["x-request-id"]}
    assert isinstance(body["error"], dict)
    return body["error"]


def of_request(refusal: RefusalError) -> RefusalError:
    """A refusal that has a request id."""
    refusal.request = "req-9"
    return refusal


@pytest.mark.parametrize("path", [MESSAGES, COUNT])
@pytest.mark.parametrize(
    ("refusal", "status", "kind", "headers"),
    [
        (PromptTooLong(5000, 4096), 400, "invalid_request_error", {}),
        (PromptRefused("no template"), 400, "invalid_request_error", {}),
        (QueueFull("full", 5), 429, "rate_limit_error", {"retry-after": "5"}),
        (NoMemory("none", 7), 529, "overloaded_error", {"retry-after": "7"}),
        (CannotRecord(), 529, "overloaded_error", {"retry-after": "10"}),
        (Stopping("stops"), 529, "overloaded_error", {"retry-after": "5"}),
        (TimedOut(90.0), 504, "timeout_error", {"x-should-retry": "false"}),
        (Broken(BUG), 500, "api_error", {"x-should-retry": "false"}),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, RefusalError) else "",
)
async def test_refusals(
    path: str, refusal: RefusalError, status: int, kind: str, headers: dict[str, str]
):
    """Each has the status and type that clients know, and says when to retry, or not to."""
    response = await post(FakeService(refusal=of_request(refusal)), path)
    error = await error_of(response)
    assert (status, kind, refusal.message) == (
        response.status_code,
        error["type"],
        error["message"],
    )
    names = ("retry-after", "x-should-retry")
    assert headers == {name: response.headers[name] for name in names if name in response.headers}
    assert "req-9" == response.headers["request-id"]


async def test_a_prompt_that_is_too_long():
    """The message has both numbers in the wording that clients look for."""
    response = await post(FakeService(refusal=PromptTooLong(5000, 4096)))
    error = await error_of(response)
    assert error["message"].startswith("prompt is too long: 5000 tokens > 4095 maximum")


@pytest.mark.parametrize(
    ("path", "body", "status", "kind", "code"),
    [
        (MESSAGES, b"{", 400, "invalid_request_error", "invalid_json"),
        (MESSAGES, b"{}", 400, "invalid_request_error", "missing_required_parameter"),
        (COUNT, b"{}", 400, "invalid_request_error", "missing_required_parameter"),
        (MESSAGES, None, 405, "invalid_request_error", "method_not_allowed"),
        (f"{MESSAGES}/batches", None, 404, "not_found_error", "not_found"),
    ],
)
async def test_errors_of_requests(path: str, body: bytes | None, status: int, kind: str, code: str):
    """A request that is refused before it has a session has an id too, which the log contains."""
    client = create_app(FakeService()).test_client()
    with structlog.testing.capture_logs() as logs:
        response = await (client.get(path) if body is None else client.post(path, data=body))
    error = await error_of(response)
    assert (status, kind, code) == (response.status_code, error["type"], error["code"])
    (line,) = [entry for entry in logs if entry["event"] == "request refused"]
    assert response.headers["request-id"] == line["request"]


async def test_names_of_hosts_and_models():
    """A host that may not call is a permission error; an unknown model is not found."""
    client = create_app(FakeService(), strict_model_names=True).test_client()
    response = await client.post(MESSAGES, data=b"{}", headers={"host": "evil.example"})
    assert (403, "permission_error") == (
        response.status_code,
        (await error_of(response))["type"],
    )
    response = await client.post(MESSAGES, data=json.dumps({**ASK, "model": "claude"}))
    error = await error_of(response)
    assert (404, "not_found_error", "model_not_found") == (
        response.status_code,
        error["type"],
        error["code"],
    )


async def test_a_body_that_is_too_large():
    """It has an error type of its own."""
    response = await post(FakeService(refusal=RequestEntityTooLarge()))
    assert (413, "request_too_large") == (
        response.status_code,
        (await error_of(response))["type"],
    )


async def test_an_unexpected_error():
    """The client gets only an id that the log contains."""
    response = await post(FakeService(refusal=RuntimeError("secret")))
    error = await error_of(response)
    assert (500, "api_error", "false") == (
        response.status_code,
        error["type"],
        response.headers["x-should-retry"],
    )
    assert "secret" not in error["message"]


@pytest.mark.parametrize(
    ("error", "kind", "code", "request_id"),
    [
        (of_request(Broken(BUG)), "api_error", "kv_cache_inv_violation", "req-9"),
        (Stopping("stops"), "overloaded_error", "server_stopping", "req-1"),
        (RuntimeError("x"), "api_error", "internal_error", "req-1"),
    ],
)
async def test_an_error_in_mid_stream(error: Exception, kind: str, code: str, request_id: str):
    """The last event is the error envelope: an incomplete stream has no end event."""
    *_, last = await events(ACCEPTED, Delta(parts=(Said("x"),)), error)
    assert ("error", request_id, kind, code) == (
        last["type"],
        last["request_id"],
        last["error"]["type"],
        last["error"]["code"],
    )


@pytest.mark.parametrize(
    "script",
    [(ACCEPTED,), (Delta(parts=(Said("x"),)), FINISHED), (FINISHED,)],
    ids=["no end", "no beginning", "neither"],
)
async def test_replies_that_are_not_complete(script: tuple[Step, ...]):
    """They never become an answer, whole or streamed: it is a server error, and it is logged."""
    with structlog.testing.capture_logs() as logs:
        response = await post(FakeService(script))
        *_, last = await events(*script)
    assert 500 == response.status_code
    assert "error" == last["type"]
    assert any(isinstance(entry.get("exc_info"), UnfinishedAnswer) for entry in logs)


async def test_openai_s_addresses_keep_their_envelope():
    """Each protocol has its own envelope."""
    response = await post(FakeService(refusal=NoMemory("none", 7)), "/v1/chat/completions")
    body = json.loads(await response.get_data(as_text=True))
    assert (503, {"error"}) == (response.status_code, body.keys())


# --- over a socket ---------------------------------------------------------------------------


async def test_over_a_socket(serve: Serve, client: httpx.AsyncClient):
    """The status that only Anthropic uses is sent, and a stream arrives as it is made."""
    hold = Hold()
    busy = FakeService(refusal=NoMemory("none", 7))
    refused = await client.post(await serve(busy) + MESSAGES, json=ASK)
    assert (529, "overloaded_error") == (refused.status_code, refused.json()["error"]["type"])
    url = await serve(FakeService((QUEUED, ACCEPTED, hold, FINISHED)))
    async with client.stream("POST", url + MESSAGES, json={**ASK, "stream": True}) as response:
        lines = response.aiter_lines()
        assert ["event: ping", 'data: {"type":"ping"}', "", "event: message_start"] == [
            await anext(lines) for _ in range(4)
        ]
        hold.released.set()
        rest = [line async for line in lines]
    assert 'data: {"type":"message_stop"}' == rest[-2]


async def test_a_client_that_goes_away(serve: Serve, client: httpx.AsyncClient):
    """Its request is cancelled."""
    service = FakeService((ACCEPTED, Hold(), FINISHED))
    url = await serve(service)
    async with client.stream("POST", url + MESSAGES, json={**ASK, "stream": True}) as response:
        await anext(response.aiter_lines())
    with trio.fail_after(60):
        await service.leaves.wait()
    assert (1, 1) == (service.entered, service.left)


async def test_the_input_of_a_call_comes_in_pieces():
    """
    Each call is one block, whose pieces add up to its input; a whole answer has the same input.
    """

    def more(index: int, id_: str, name: str, arguments: str) -> Calling:
        return Calling(index=index, id=id_, name=name, arguments=arguments)

    script = (
        ACCEPTED,
        Delta(parts=(Said("I look."),), calling=more(0, "a1", "look", "")),
        Delta(parts=(), calling=more(0, "a1", "look", '{"city": "')),
        Delta(parts=(), calling=more(0, "a1", "look", "Öslo")),
        Delta(parts=(LOOK,), calling=more(1, "b2", "go", "{")),
        Delta(parts=(GO,)),
        FINISHED,
    )
    found = await events(*script)
    blocks = [one["content_block"] for one in found if one["type"] == "content_block_start"]
    assert ["", "a1", "b2"] == [block.get("id", "") for block in blocks]
    pieces = [
        (one["index"], one["delta"]["partial_json"])
        for one in found
        if one["type"] == "content_block_delta" and "partial_json" in one["delta"]
    ]
    assert [(1, '{"city": "'), (1, "Öslo"), (1, '"}'), (2, "{"), (2, "}")] == pieces
    stops = [one["index"] for one in found if one["type"] == "content_block_stop"]
    assert [0, 1, 2] == stops
    assert [{"city": "Öslo"}, {}] == [
        block["input"] for block in (await whole(*script))["content"][1:]
    ]


async def test_a_call_that_is_cut_off():
    """A whole answer leaves half an object out; a stream has already sent the half."""
    cut = attrs.evolve(LOOK, arguments='{"city": "', cut="<tool_call>...")
    half = Calling(index=0, id="a1", name="look", arguments='{"city"')
    end = attrs.evolve(FINISHED, finish_reason="length", ended_in_call=True, completion_tokens=100)
    script = (ACCEPTED, Delta(parts=(), calling=half), Delta(parts=(cut,)), end)
    answer = await whole(*script)
    assert ({}, "max_tokens") == (answer["content"][0]["input"], answer["stop_reason"])
    pieces = [
        one["delta"].get("partial_json", "") for one in await events(*script) if "delta" in one
    ]
    assert '{"city": "' == "".join(pieces)
