"""``timings`` in answers, as llama.cpp's server sends them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import attrs
import httpx
import pytest

from cairn.actors.requests.messages import Finished
from cairn.http.chat_completions.choices import timings_of
from cairn.http.wire.json import encode
from cairn.journal.summaries import TurnCounts
from tests.http.conftest import Serve
from tests.http.fake_service import ACCEPTED, ANSWER, FINISHED, FakeService, Step

pytestmark = pytest.mark.trio

TURN = TurnCounts(
    received=5,
    selected=6,
    ended=9,
    received_us=1_000_000,
    first_us=1_480_000,
    ended_us=1_500_000,
    prompt=2048,
    from_slab=128,
    from_blocks=0,
    from_partial=0,
    prewarmed=0,
    computed=1920,
    generated=3,
    evicted=0,
    expired=0,
    lost=0,
)
DONE = attrs.evolve(FINISHED, turn=TURN)
TIMED = (*ANSWER[:-1], DONE)

TIMINGS = {
    "cache_n": 128,
    "prompt_n": 1920,
    "prompt_ms": 480.0,
    "prompt_per_token_ms": 0.25,
    "prompt_per_second": 4000.0,
    "predicted_n": 3,
    "predicted_ms": 20.0,
    "predicted_per_token_ms": 10.0,
    "predicted_per_second": 100.0,
}

CHAT = "chat/completions", {"messages": [{"role": "user", "content": "Hello"}]}
TEXT = "completions", {"prompt": "Hello"}


async def post(
    serve: Serve, client: httpx.AsyncClient, to: Any, *replies: Step, **more: Any
) -> str:
    """The body of the answer to a request that gets these replies."""
    url = await serve(FakeService(replies))
    address, body = to
    answer = await client.post(f"{url}/v1/{address}", json={**body, **more})
    assert 200 == answer.status_code, answer.text
    return answer.text


def chunks_of(stream: str) -> Sequence[dict[str, Any]]:
    """The events of a stream, but for the one that ends it."""
    lines = [line.removeprefix("data: ") for line in stream.splitlines() if line]
    assert "[DONE]" == lines[-1]
    return [json.loads(line) for line in lines[:-1]]


@pytest.mark.parametrize("to", [CHAT, TEXT])
async def test_a_whole_answer_has_timings(serve: Serve, client: httpx.AsyncClient, to: Any):
    """The tokens and times of the prompt and of the answer, with their rates."""
    assert TIMINGS == json.loads(await post(serve, client, to, *TIMED))["timings"]


@pytest.mark.parametrize("to", [CHAT, TEXT])
async def test_the_last_chunk_of_a_stream_has_timings(
    serve: Serve, client: httpx.AsyncClient, to: Any
):
    """Without usage that is the chunk with the reason why the answer ended; no other has them."""
    *chunks, last = chunks_of(await post(serve, client, to, *TIMED, stream=True))
    assert "stop" == last["choices"][0]["finish_reason"]
    assert TIMINGS == last["timings"]
    assert not [chunk for chunk in chunks if "timings" in chunk]


@pytest.mark.parametrize("to", [CHAT, TEXT])
async def test_the_chunk_with_the_usage_has_timings(
    serve: Serve, client: httpx.AsyncClient, to: Any
):
    """With usage, its chunk is the last one, and has them in place of the one before."""
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = chunks_of(await post(serve, client, to, *TIMED, **usage))
    assert ([], 3, TIMINGS) == (
        last["choices"],
        last["usage"]["completion_tokens"],
        last["timings"],
    )
    assert not [chunk for chunk in chunks if "timings" in chunk]


async def test_of_several_answers_the_first_one_is_timed(serve: Serve, client: httpx.AsyncClient):
    """They come at the end of the last answer, and are those of the first one."""
    other = attrs.evolve(DONE, choice=1, turn=attrs.evolve(TURN, ended_us=9_000_000))
    replies = (ACCEPTED, attrs.evolve(ACCEPTED, choice=1), DONE, other)
    *chunks, last = chunks_of(await post(serve, client, CHAT, *replies, n=2, stream=True))
    assert TIMINGS == last["timings"]
    assert 1 == last["choices"][0]["index"]
    assert not [chunk for chunk in chunks if "timings" in chunk]


async def test_without_its_rows_an_answer_has_no_timings(serve: Serve, client: httpx.AsyncClient):
    """An answer whose rows are gone is complete without them."""
    assert "timings" not in json.loads(await post(serve, client, CHAT, *ANSWER))


@pytest.mark.parametrize(
    ("finished", "turn"),
    [
        ({"completion_tokens": 1}, {}),
        ({"completion_tokens": 0}, {"first_us": 0}),
        ({"cached_tokens": 2048}, {"first_us": 1_000_000, "ended_us": 1_000_000}),
        # A wall clock may be set back.
        ({}, {"first_us": 900_000, "ended_us": 800_000}),
    ],
)
async def test_a_rate_that_does_not_exist_is_zero(finished: Any, turn: Any):
    """Every field is a finite number that is not negative, whatever was measured."""
    end: Finished = attrs.evolve(FINISHED, **finished)
    timings = json.loads(encode(timings_of(end, attrs.evolve(TURN, **turn))))
    assert TIMINGS.keys() == timings.keys()
    assert all(value >= 0 for value in timings.values())
    assert 0 == timings["predicted_per_second"]
