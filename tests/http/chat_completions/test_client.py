"""The official client, unmodified, against a served app."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import attrs
import openai
import pytest
import trio

from cairn.actors.errors import (
    Broken,
    NoMemory,
    PromptRefused,
    PromptTooLong,
    QueueFull,
    Stopping,
    TimedOut,
    TooManyAnswers,
)
from tests.http.conftest import Serve
from tests.http.fake_service import (
    ACCEPTED,
    ANSWER,
    DELTAS,
    FACTS,
    FINISHED,
    PREFILLING,
    QUEUED,
    FakeService,
    Hold,
)

pytestmark = pytest.mark.trio

T = TypeVar("T")
BUG = "0f8fad5b-d9cb-469f-a165-70867728950e"
ASK: dict[str, Any] = {"model": "any", "messages": [{"role": "user", "content": "Hello"}]}


async def ask(url: str, call: Callable[[openai.OpenAI], T]) -> T:
    """Call the client in a thread, because it does not know trio."""

    def run() -> T:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as api:
            return call(api)

    return await trio.to_thread.run_sync(run)


async def test_completion(serve: Serve):
    """A completion is parsed with its text, usage, fingerprint and path."""
    url = await serve(FakeService())
    answer = await ask(url, lambda api: api.chat.completions.create(**ASK))
    assert "chatcmpl-req-1" == answer.id
    assert "chat.completion" == answer.object
    assert ACCEPTED.created_s == answer.created
    assert FACTS.model == answer.model
    assert FACTS.fingerprint == answer.system_fingerprint
    (choice,) = answer.choices
    assert ("assistant", "Grüße!", "stop") == (
        choice.message.role,
        choice.message.content,
        choice.finish_reason,
    )
    assert choice.logprobs is None
    assert answer.usage is not None
    assert (2048, 3, 2051) == (
        answer.usage.prompt_tokens,
        answer.usage.completion_tokens,
        answer.usage.total_tokens,
    )
    assert answer.usage.prompt_tokens_details is not None
    assert 128 == answer.usage.prompt_tokens_details.cached_tokens
    assert answer.model_extra is not None
    assert {
        "session": "sess-1",
        "path": "new_session",
        "reason": "cold_start",
        "reused_tokens": 128,
        "seed": 42,
    } == answer.model_extra["cairn"]
    assert "req-1" == answer._request_id


async def test_cached_tokens_are_there_when_zero(serve: Serve):
    """A cold answer reports zero cached tokens rather than leaving the field out."""
    cold = (ACCEPTED, attrs.evolve(FINISHED, cached_tokens=0))
    url = await serve(FakeService(cold))
    answer = await ask(url, lambda api: api.chat.completions.create(**ASK))
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert 0 == answer.usage.prompt_tokens_details.cached_tokens


async def test_stream(serve: Serve):
    """A stream begins with the role, has the text, and ends with the reason."""
    url = await serve(FakeService())
    chunks = await ask(url, lambda api: list(api.chat.completions.create(**ASK, stream=True)))
    assert {"chatcmpl-req-1"} == {chunk.id for chunk in chunks}
    assert {"chat.completion.chunk"} == {chunk.object for chunk in chunks}
    assert {FACTS.fingerprint} == {chunk.system_fingerprint for chunk in chunks}
    first, *middle, last = chunks
    assert "assistant" == first.choices[0].delta.role
    assert first.model_extra is not None
    assert "sess-1" == first.model_extra["cairn"]["session"]
    assert ["Grüße", "!"] == [chunk.choices[0].delta.content for chunk in middle]
    assert [None] * 3 == [chunk.choices[0].finish_reason for chunk in (first, *middle)]
    assert "stop" == last.choices[0].finish_reason
    assert [None] * 4 == [chunk.usage for chunk in chunks]


async def test_stream_with_usage(serve: Serve):
    """If requested, usage comes in a last chunk without choices."""
    url = await serve(FakeService())
    options = {"include_usage": True}
    chunks = await ask(
        url,
        lambda api: list(
            api.chat.completions.create(**ASK, stream=True, stream_options=options)  # type: ignore[call-overload]
        ),
    )
    *others, last = chunks
    assert [] == last.choices
    assert (2048, 3, 128) == (
        last.usage.prompt_tokens,
        last.usage.completion_tokens,
        last.usage.prompt_tokens_details.cached_tokens,
    )
    assert {None} == {chunk.usage for chunk in others}


async def test_logprobs(serve: Serve):
    """Each token has its log-probability, bytes and alternatives; infinity is never sent."""
    service = FakeService()
    url = await serve(service)
    answer = await ask(
        url, lambda api: api.chat.completions.create(**ASK, logprobs=True, top_logprobs=2)
    )
    assert 2 == service.commands[0].top_logprobs
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content
    assert content is not None
    assert ["Gr", "üße", "", "!"] == [entry.token for entry in content]
    assert [-0.25, -0.5, -0.75, -1.0] == [entry.logprob for entry in content]
    assert list("üße".encode()) == content[1].bytes
    assert [("Gr", -0.25), ("<s>", -9999.0)] == [
        (top.token, top.logprob) for top in content[0].top_logprobs
    ]


async def test_logprobs_in_a_stream(serve: Serve):
    """A stream reports the log-probability of each token, also of tokens that add no text yet."""
    url = await serve(FakeService())
    chunks = await ask(
        url, lambda api: list(api.chat.completions.create(**ASK, stream=True, logprobs=True))
    )
    found = [
        entry.token
        for chunk in chunks
        if chunk.choices[0].logprobs is not None
        for entry in chunk.choices[0].logprobs.content or ()
    ]
    assert ["Gr", "üße", "", "!"] == found


async def test_waiting_is_no_chunk(serve: Serve):
    """Keep-alives are comments, which the client does not see."""
    script = (QUEUED, PREFILLING, ACCEPTED, PREFILLING, *DELTAS, FINISHED)
    url = await serve(FakeService(script))
    chunks = await ask(url, lambda api: list(api.chat.completions.create(**ASK, stream=True)))
    assert 4 == len(chunks)
    answer = await ask(url, lambda api: api.chat.completions.create(**ASK))
    assert "Grüße!" == answer.choices[0].message.content


async def test_models(serve: Serve):
    """The only model is listed and found by its name; no other is found."""
    url = await serve(FakeService())
    assert [FACTS.model] == [m.id for m in await ask(url, lambda api: list(api.models.list()))]
    found = await ask(url, lambda api: api.models.retrieve(FACTS.model))
    assert ("model", FACTS.started_s) == (found.object, found.created)
    with pytest.raises(openai.NotFoundError) as caught:
        await ask(url, lambda api: api.models.retrieve("other"))
    assert "model_not_found" == caught.value.code


REFUSALS = [
    (
        PromptTooLong(5000, 4096),
        openai.BadRequestError,
        400,
        "context_length_exceeded",
        "prompt is too long: 5000 tokens > 4095 maximum",
        {},
    ),
    (PromptRefused("no such role"), openai.BadRequestError, 400, "prompt_refused", "no such", {}),
    (
        TooManyAnswers(16, 9),
        openai.BadRequestError,
        400,
        "invalid_value",
        "n is 16; at most 9 answers can run and wait at the same time",
        {},
    ),
    (
        QueueFull("64 requests wait", 7),
        openai.RateLimitError,
        429,
        "queue_full",
        "64 requests wait",
        {"retry-after": "7"},
    ),
    (
        TimedOut(90.0),
        openai.InternalServerError,
        504,
        "timed_out",
        "timed out after 90 seconds",
        {"x-should-retry": "false"},
    ),
    (
        NoMemory("no slab", 0),
        openai.InternalServerError,
        503,
        "no_memory",
        "no slab",
        {"retry-after": "1"},
    ),
    (
        Stopping("the server is stopping"),
        openai.InternalServerError,
        503,
        "server_stopping",
        "stopping",
        {"retry-after": "5"},
    ),
    (
        Broken(BUG),
        openai.InternalServerError,
        500,
        "kv_cache_inv_violation",
        f"internal cache invariant violation; bug id {BUG}",
        {"x-should-retry": "false"},
    ),
]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("where", ["entering", "first reply"])
@pytest.mark.parametrize(
    ("refusal", "kind", "status", "code", "text", "headers"),
    REFUSALS,
    ids=[type(row[0]).__name__ for row in REFUSALS],
)
async def test_refusals(
    serve: Serve, refusal, kind, status, code, text, headers, where: str, stream: bool
):
    """Each refusal before an answer has its status, code and headers."""
    service = FakeService(refusal=refusal) if where == "entering" else FakeService([refusal])
    url = await serve(service)
    with pytest.raises(kind) as caught:
        await ask(url, lambda api: api.chat.completions.create(**ASK, stream=stream))
    error = caught.value
    assert (status, code) == (error.status_code, error.code)
    assert text in error.body["message"]
    assert {"message", "type", "param", "code"} == error.body.keys()
    assert headers == {key: error.response.headers[key] for key in headers}


async def test_broken_is_typed_as_internal(serve: Serve):
    """A violated invariant has the type that the operator's page names."""
    url = await serve(FakeService(refusal=Broken(BUG)))
    with pytest.raises(openai.InternalServerError) as caught:
        await ask(url, lambda api: api.chat.completions.create(**ASK))
    assert "internal_error" == caught.value.type


async def test_violation_in_mid_stream(serve: Serve):
    """
    A violation in mid-stream raises an error with the bug id in the client, after the text so far.
    """
    service = FakeService([ACCEPTED, DELTAS[0], Broken(BUG)])
    url = await serve(service)
    texts: list[str | None] = []

    def read(api: openai.OpenAI) -> None:
        for chunk in api.chat.completions.create(**ASK, stream=True):
            texts.append(chunk.choices[0].delta.content)

    with pytest.raises(openai.APIError) as caught:
        await ask(url, read)
    assert ["", "Grüße"] == texts
    assert f"internal cache invariant violation; bug id {BUG}" == caught.value.message
    assert ("internal_error", "kv_cache_inv_violation") == (caught.value.type, caught.value.code)


async def test_violation_in_mid_answer(serve: Serve):
    """A violation during an answer that is sent whole makes it an error."""
    url = await serve(FakeService([ACCEPTED, DELTAS[0], Broken(BUG)]))
    with pytest.raises(openai.InternalServerError) as caught:
        await ask(url, lambda api: api.chat.completions.create(**ASK))
    assert BUG in caught.value.message


async def test_client_that_stops_reading_cancels(serve: Serve):
    """When a client closes its stream, its request is cancelled."""
    hold = Hold()
    service = FakeService([ACCEPTED, DELTAS[0], hold, FINISHED])
    url = await serve(service)

    def read_one(api: openai.OpenAI) -> None:
        with api.chat.completions.create(**ASK, stream=True) as stream:
            next(stream)

    await ask(url, read_one)
    with trio.fail_after(60):
        await service.leaves.wait()
    assert (1, 1) == (service.entered, service.left)


async def test_connection_is_used_again(serve: Serve):
    """One connection serves whole answers, streams and errors in sequence."""
    service = FakeService(ANSWER, [ACCEPTED, Broken(BUG)], ANSWER, ANSWER)
    url = await serve(service)

    def several(api: openai.OpenAI) -> list[str | None]:
        texts = [api.chat.completions.create(**ASK).choices[0].message.content]
        with pytest.raises(openai.InternalServerError):
            api.chat.completions.create(**ASK)
        chunks = list(api.chat.completions.create(**ASK, stream=True))
        texts.append("".join(chunk.choices[0].delta.content or "" for chunk in chunks))
        texts.append(api.chat.completions.create(**ASK).choices[0].message.content)
        return texts

    assert ["Grüße!"] * 3 == await ask(url, several)
    assert 4 == service.left
