"""Streams on the wire: keep-alives, headers, incomplete ends, clients that disconnect."""

from __future__ import annotations

import json
from typing import Any

import attrs
import httpx
import pytest
import structlog
import trio

from cairn.actors.errors import Broken
from cairn.actors.requests.messages import Waiting
from cairn.engine.answer.parts import Said
from cairn.http.app import create_app
from cairn.http.wire.answers import UnfinishedAnswer
from tests.http.conftest import Serve
from tests.http.fake_service import (
    ACCEPTED,
    ANSWER,
    DELTAS,
    FINISHED,
    PREFILLING,
    QUEUED,
    FakeService,
    Hold,
    Step,
)

pytestmark = pytest.mark.trio

ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}]}
STREAM: dict[str, Any] = {**ASK, "stream": True}
CHAT = "/v1/chat/completions"
BUG = "0f8fad5b-d9cb-469f-a165-70867728950e"


async def events(service: FakeService, ask: dict[str, Any] | None = None) -> list[str]:
    """The events of a stream, from the app in this process."""
    client = create_app(service).test_client()
    response = await client.post(CHAT, data=json.dumps(ask or STREAM))
    assert (200, "text/event-stream; charset=utf-8") == (
        response.status_code,
        response.content_type,
    )
    text = await response.get_data(as_text=True)
    assert text.endswith("\n\n")
    return text[:-2].split("\n\n")


def content(event: str) -> Any:
    """The JSON of an event."""
    assert event.startswith("data: ")
    return json.loads(event.removeprefix("data: "))


async def test_keep_alives_are_comments():
    """
    Comments report the waiting and the progress of the prefill, and fill the silence of a model.
    """
    writing = Waiting(queued=False, prefilled_tokens=2048)
    script = (QUEUED, PREFILLING, ACCEPTED, PREFILLING, writing, FINISHED)
    found = await events(FakeService(script))
    assert [": waiting", ": prefill 512"] == found[:2]
    assert "assistant" == content(found[2])["choices"][0]["delta"]["role"]
    assert [": prefill 512/2048", ": writing"] == found[3:5]
    assert "data: [DONE]" == found[-1]


async def test_chunks_of_a_stream():
    """The exact fields of each chunk."""
    found = await events(FakeService())
    head = {
        "id": "chatcmpl-req-1",
        "object": "chat.completion.chunk",
        "created": ACCEPTED.created_s,
        "model": "cairn/small-1",
        "system_fingerprint": "f" * 16,
    }

    def choice(delta: dict[str, str], finish_reason: str | None = None) -> list[dict[str, Any]]:
        return [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}]

    cairn = {
        "session": "sess-1",
        "path": "new_session",
        "reason": "cold_start",
        "reused_tokens": 128,
        "seed": 42,
    }
    assert [
        {**head, "choices": choice({"role": "assistant", "content": ""}), "cairn": cairn},
        {**head, "choices": choice({"content": "Grüße"})},
        {**head, "choices": choice({"content": "!"})},
        {**head, "choices": choice({}, "stop")},
    ] == [content(event) for event in found[:-1]]
    assert "data: [DONE]" == found[-1]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_ignored_parameters_are_reported(stream: bool):
    """Cairn's object names the ignored parameters; in a stream, with the first chunk."""
    ask = {**ASK, "stream": stream, "user": "me", "best_of": 1, "made_up": None}
    client = create_app(FakeService()).test_client()
    text = await (await client.post(CHAT, data=json.dumps(ask))).get_data(as_text=True)
    answer = content(text.split("\n\n")[0]) if stream else json.loads(text)
    assert ["best_of", "user"] == answer["cairn"]["ignored"]


async def test_usage_is_null_until_the_end():
    """
    If usage is requested, each chunk has the field, and the last one before the end has the value.
    """
    found = await events(FakeService(), {**STREAM, "stream_options": {"include_usage": True}})
    *others, last = [content(event) for event in found[:-1]]
    assert [None] * 4 == [chunk["usage"] for chunk in others]
    assert [] == last["choices"]
    assert {
        "prompt_tokens": 2048,
        "completion_tokens": 3,
        "total_tokens": 2051,
        "prompt_tokens_details": {"cached_tokens": 128},
    } == last["usage"]


KNOWN = {
    "x-cairn-session": "sess-1",
    "x-cairn-path": "new_session",
    "x-cairn-context-left": "2048",
    "x-request-id": "req-1",
}


@pytest.mark.parametrize(
    ("ask", "script", "expected"),
    [
        (STREAM, ANSWER, KNOWN),
        (STREAM, (QUEUED, *ANSWER), {}),
        (ASK, ANSWER, KNOWN),
        (ASK, (QUEUED, *ANSWER), KNOWN),
    ],
    ids=["stream", "stream that waits", "whole", "whole that waits"],
)
async def test_headers_of_the_session(
    ask: dict[str, Any], script: tuple[Step, ...], expected: dict[str, str]
):
    """The headers have session, path and request, once they are known."""
    client = create_app(FakeService(script)).test_client()
    response = await client.post(CHAT, data=json.dumps(ask))
    await response.get_data(as_text=True)
    assert expected == {name: response.headers[name] for name in KNOWN if name in response.headers}


async def test_session_of_any_script_in_a_header(serve: Serve, client: httpx.AsyncClient):
    """A session's name in another script, or with a line break, becomes a legal header."""
    accepted = attrs.evolve(ACCEPTED, session=" größe 大\r\n")
    url = await serve(FakeService((accepted, FINISHED)))
    response = await client.post(url + CHAT, json=ASK)
    assert "%20gr%C3%B6%C3%9Fe%20%E5%A4%A7%0D%0A" == response.headers["x-cairn-session"]
    assert " größe 大\r\n" == response.json()["cairn"]["session"]


async def test_headers_go_out_with_the_first_sign(serve: Serve, client: httpx.AsyncClient):
    """A waiting request gets its headers and a comment long before it is accepted."""
    hold = Hold()
    url = await serve(FakeService((QUEUED, hold, *ANSWER)))
    with trio.fail_after(60):
        async with client.stream("POST", url + CHAT, json=STREAM) as response:
            lines = response.aiter_lines()
            assert ": waiting" == await anext(lines)
            hold.released.set()
            assert "data: [DONE]" == [line async for line in lines if line][-1]


async def test_stream_has_no_timeout():
    """Quart's own limit, which would cut a stream silently, is off."""
    app = create_app(FakeService())
    app.config["RESPONSE_TIMEOUT"] = 0
    response = await app.test_client().post(CHAT, data=json.dumps(STREAM))
    assert (await response.get_data(as_text=True)).endswith("data: [DONE]\n\n")


async def test_violation_in_mid_stream_ends_it_without_done():
    """The envelope is the last event: no end that looks complete, and no finish reason."""
    found = await events(FakeService((ACCEPTED, DELTAS[0], Broken(BUG), FINISHED)))
    assert 3 == len(found)
    assert {
        "error": {
            "message": f"internal cache invariant violation; bug id {BUG}",
            "type": "internal_error",
            "param": None,
            "code": "kv_cache_inv_violation",
        }
    } == content(found[-1])


async def test_violation_while_waiting():
    """The status is sent with the first keep-alive, so a later refusal is an event."""
    found = await events(FakeService((QUEUED, Broken(BUG))))
    assert 2 == len(found)
    assert "kv_cache_inv_violation" == content(found[1])["error"]["code"]


UNFINISHED: list[tuple[Step, ...]] = [
    (ACCEPTED,),
    (ACCEPTED, DELTAS[0]),
    (QUEUED, DELTAS[0], FINISHED),
    (DELTAS[0], FINISHED),
]


async def test_a_failure_is_reported_without_its_text():
    """An unexpected error is an error id for the client, and a traceback in the log."""
    failure = RuntimeError("a secret of the house")
    script = (QUEUED, ACCEPTED, DELTAS[0], failure)
    with structlog.testing.capture_logs() as logs:
        found = await events(FakeService(script))
    (entry,) = logs
    assert ("error", failure) == (entry["log_level"], entry["exc_info"])
    assert entry["error_id"] in found[-1]
    assert "secret" not in found[-1]


@pytest.mark.parametrize("script", UNFINISHED)
async def test_an_unfinished_answer_does_not_look_complete(script: tuple[Step, ...]):
    """
    Replies that stop early, or lack their start, are a server error and never a complete answer.
    """
    with structlog.testing.capture_logs() as logs:
        streamed, whole = [
            await (await client.post(CHAT, data=json.dumps(ask))).get_data(as_text=True)
            for ask in (STREAM, ASK)
            for client in [create_app(FakeService(script)).test_client()]
        ]
    last = streamed.strip().rsplit("data: ", 1)[-1]
    failures = [entry for entry in logs if entry["log_level"] == "error"]
    for entry, answer in zip(failures, (last, whole), strict=True):
        assert UnfinishedAnswer is type(entry["exc_info"])
        error = json.loads(answer)["error"]
        assert "internal_error" == error["code"]
        assert entry["error_id"] in error["message"]


@pytest.mark.parametrize("ask", [STREAM, ASK], ids=["stream", "whole"])
async def test_no_reply_at_all(ask: dict[str, Any]):
    """A service without replies is a 500, not an empty stream."""
    response = await create_app(FakeService(())).test_client().post(CHAT, data=json.dumps(ask))
    assert 500 == response.status_code
    assert "false" == response.headers["x-should-retry"]


@pytest.mark.parametrize("wrapped", [False, True], ids=["bare", "in groups"])
async def test_a_failure_on_leaving_is_reported(wrapped: bool):
    """A failure while the request is left is an error event in place of the end."""
    service = FakeService()
    error: Exception = Broken(BUG)
    service.on_leaving = ExceptionGroup("", [ExceptionGroup("", [error])]) if wrapped else error
    found = await events(service)
    assert "kv_cache_inv_violation" == content(found[-1])["error"]["code"]
    assert 1 == service.left


@pytest.mark.parametrize("ask", [STREAM, ASK], ids=["stream", "whole"])
async def test_refusal_in_groups(ask: dict[str, Any]):
    """A refusal that nurseries wrapped in groups is treated like the refusal itself."""
    refusal = ExceptionGroup("", [ExceptionGroup("", [Broken(BUG)])])
    client = create_app(FakeService(refusal=refusal)).test_client()
    response = await client.post(CHAT, data=json.dumps(ask))
    error = json.loads(await response.get_data(as_text=True))["error"]
    assert (500, "kv_cache_inv_violation") == (response.status_code, error["code"])


SCRIPTS = {
    "before any reply": ((), ()),
    "while queued": ((QUEUED,), (ACCEPTED,)),
    "in prefill": ((ACCEPTED, PREFILLING), (FINISHED,)),
    "while decoding": ((ACCEPTED, DELTAS[0]), (FINISHED,)),
}


@pytest.mark.parametrize("ask", [STREAM, ASK], ids=["stream", "whole"])
@pytest.mark.parametrize(("before", "after"), SCRIPTS.values(), ids=SCRIPTS)
async def test_client_that_goes_away_cancels(
    serve: Serve,
    nursery: trio.Nursery,
    before: tuple[Step, ...],
    after: tuple[Step, ...],
    ask: dict[str, Any],
):
    """
    Whenever a client disconnects, its request is cancelled, once, and the server serves the next.
    """
    hold = Hold()
    service = FakeService((*before, hold, *after), ANSWER)
    url = await serve(service)

    async def call(task_status: trio.TaskStatus[trio.CancelScope]) -> None:
        with trio.CancelScope() as scope:
            task_status.started(scope)
            async with httpx.AsyncClient(timeout=60) as client:
                await client.post(url + CHAT, json=ask)

    scope = await nursery.start(call)
    with trio.fail_after(60):
        await hold.reached.wait()
        assert 0 == service.left
        scope.cancel()
        await service.leaves.wait()
        async with httpx.AsyncClient(timeout=60) as client:
            response = await client.post(url + CHAT, json=ASK)
    assert "Grüße!" == response.json()["choices"][0]["message"]["content"]
    assert (2, 2) == (service.entered, service.left)


async def test_client_that_goes_before_the_response_starts():
    """A request is left even if sending its response fails before the body begins."""
    service = FakeService((ACCEPTED, Hold()))
    app = create_app(service)
    body = json.dumps(STREAM).encode()
    scope: dict[str, Any] = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": CHAT,
        "raw_path": CHAT.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"host", b"localhost")],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
        "extensions": {},
    }
    messages = [{"type": "http.request", "body": body, "more_body": False}]
    gone = trio.Event()

    async def receive() -> Any:
        if messages:
            return messages.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        assert "http.response.start" == message["type"]
        gone.set()
        await trio.sleep_forever()

    with trio.fail_after(60):
        await app(scope, receive, send)  # type: ignore[arg-type]
    assert (1, 1) == (service.entered, service.left)


async def test_slow_reader_then_gone(serve: Serve):
    """
    A client that stops reading holds the answer back; when it disconnects, the request is
    cancelled.
    """
    long = attrs.evolve(DELTAS[0], parts=(Said("x" * 10_000),))
    service = FakeService((ACCEPTED, *[long] * 5000, FINISHED))
    url = await serve(service)
    host, port = url.removeprefix("http://").split(":")
    body = json.dumps(STREAM)
    with trio.fail_after(60):
        stream = await trio.open_tcp_stream(host, int(port))
        head = f"POST {CHAT} HTTP/1.1\r\nhost: {host}\r\ncontent-length: {len(body)}\r\n\r\n"
        await stream.send_all((head + body).encode())
        assert (await stream.receive_some(100)).startswith(b"HTTP/1.1 200")
        await trio.sleep(0.2)
        assert 0 == service.left
        await stream.aclose()
        await service.leaves.wait()
    assert (1, 1) == (service.entered, service.left)
