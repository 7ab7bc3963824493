"""Several answers to one request, with the official client."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from cairn.actors.requests.messages import Delta, Reply
from cairn.engine.answer.parts import Called, Said
from tests.http.chat_completions.test_client import ASK, ask
from tests.http.conftest import Serve
from tests.http.fake_service import ACCEPTED, DELTAS, FINISHED, FakeService

pytestmark = pytest.mark.trio

OTHER = attrs.evolve(ACCEPTED, request="req-2", session="sess-2", seed=43, choice=1)
CALL = Called(index=0, id="c1", name="look", arguments="{}")
#: Two answers that are interleaved; the second one ends first.
SCRIPT: tuple[Reply, ...] = (
    ACCEPTED,
    DELTAS[0],
    OTHER,
    Delta(parts=(Said("Well"),), choice=1),
    DELTAS[1],
    Delta(parts=(CALL,), choice=1),
    attrs.evolve(FINISHED, choice=1, completion_tokens=9),
    DELTAS[2],
    FINISHED,
)
COLD = {"path": "new_session", "reason": "cold_start", "reused_tokens": 128}


async def test_whole(serve: Serve):
    """
    Each has its own text, calls and end; the usage has the prompt once and all answers together.
    """
    service = FakeService(SCRIPT)
    url = await serve(service)
    answer = await ask(url, lambda api: api.chat.completions.create(**ASK, n=2))
    assert [2] == [command.choices for command in service.commands]
    assert [(0, "Grüße!", "stop"), (1, "Well", "tool_calls")] == [
        (one.index, one.message.content, one.finish_reason) for one in answer.choices
    ]
    assert [None, ["look"]] == [
        one.message.tool_calls and [call.function.name for call in one.message.tool_calls]
        for one in answer.choices
    ]
    assert answer.usage is not None
    assert (2048, 12, 2060) == (
        answer.usage.prompt_tokens,
        answer.usage.completion_tokens,
        answer.usage.total_tokens,
    )
    assert answer.model_extra is not None
    assert [
        {"request": "req-1", "session": "sess-1", **COLD, "seed": 42},
        {"request": "req-2", "session": "sess-2", **COLD, "seed": 43},
    ] == answer.model_extra["cairn"]["choices"]


async def test_stream(serve: Serve):
    """Chunks have one id and the index of their answer; the usage comes once, at the end."""
    url = await serve(FakeService(SCRIPT))
    asked: dict[str, Any] = {**ASK, "n": 2, "stream_options": {"include_usage": True}}
    chunks = await ask(url, lambda api: list(api.chat.completions.create(**asked, stream=True)))
    assert {"chatcmpl-req-1"} == {chunk.id for chunk in chunks}
    texts, ends = ["", ""], {}
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            if choice.finish_reason:
                ends[choice.index] = choice.finish_reason
    assert ["Grüße!", "Well"] == texts
    assert {0: "stop", 1: "tool_calls"} == ends
    assert [12] == [chunk.usage.completion_tokens for chunk in chunks if chunk.usage]
    assert chunks[-1].usage is not None
    seeds = [chunk.model_extra["cairn"]["seed"] for chunk in chunks if chunk.model_extra]
    assert [42, 43] == seeds
