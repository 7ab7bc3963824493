"""Reasoning and tool calls in answers: the fields that they are in, whole and as a stream."""

from __future__ import annotations

import json
from typing import Any

import attrs
import openai
import pytest
import trio

from cairn.actors.requests.messages import Delta
from cairn.engine.answer.parts import Called, Calling, Said, Thought
from cairn.http.app import create_app
from tests.http.conftest import Serve
from tests.http.fake_service import ACCEPTED, FINISHED, FakeService, Step, token

pytestmark = pytest.mark.trio

ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}]}
LOOK = Called(index=0, id="a1", name="look", arguments='{"city": "Öslo"}')
GO = Called(index=1, id="b2", name="go", arguments="{}")
SCRIPT: tuple[Step, ...] = (
    ACCEPTED,
    Delta(parts=(Thought("Two"),)),
    Delta(parts=(Thought(" cities."),)),
    Delta(parts=(Said("I look."), LOOK, GO)),
    FINISHED,
)


def calling(index: int, id_: str, name: str, arguments: str) -> Calling:
    """More of an open call."""
    return Calling(index=index, id=id_, name=name, arguments=arguments)


def changed(script: tuple[Step, ...], **finished: Any) -> tuple[Step, ...]:
    """The script with a different end."""
    return (*script[:-1], attrs.evolve(FINISHED, **finished))


async def text_of(script: tuple[Step, ...], **body: Any) -> str:
    """The text of an answer."""
    client = create_app(FakeService(script)).test_client()
    response = await client.post("/v1/chat/completions", data=json.dumps({**ASK, **body}))
    assert 200 == response.status_code
    return await response.get_data(as_text=True)


async def choice_of(script: tuple[Step, ...], **body: Any) -> dict[str, Any]:
    """The only choice of an answer that is sent as a whole."""
    (choice,) = json.loads(await text_of(script, **body))["choices"]
    assert isinstance(choice, dict)
    return choice


async def choices_of(script: tuple[Step, ...], **body: Any) -> list[dict[str, Any]]:
    """The choices of a stream's chunks, without the first, which has the role."""
    events = (await text_of(script, stream=True, **body)).split("\n\n")
    chunks = [json.loads(e.removeprefix("data: ")) for e in events if e.startswith("data: {")]
    return [choice for chunk in chunks[1:] for choice in chunk["choices"]]


async def test_a_message_with_everything():
    """Reasoning is under both names, calls have OpenAI's form and are the reason for the end."""
    choice = await choice_of(SCRIPT)
    assert {
        "role": "assistant",
        "content": "I look.",
        "refusal": None,
        "reasoning_content": "Two cities.",
        "reasoning": "Two cities.",
        "tool_calls": [
            {
                "id": "a1",
                "type": "function",
                "function": {"name": "look", "arguments": '{"city": "Öslo"}'},
            },
            {"id": "b2", "type": "function", "function": {"name": "go", "arguments": "{}"}},
        ],
    } == choice["message"]
    assert "tool_calls" == choice["finish_reason"]


async def test_a_message_without_text():
    """Its content is null if there are calls, otherwise empty; absent fields are left out."""
    calls = await choice_of((ACCEPTED, Delta(parts=(GO,)), FINISHED))
    assert {"role", "content", "refusal", "tool_calls"} == calls["message"].keys()
    assert None is calls["message"]["content"]
    thoughts = await choice_of((ACCEPTED, Delta(parts=(Thought("x"),)), FINISHED))
    assert {"role", "content", "refusal", "reasoning_content", "reasoning"} == (
        thoughts["message"].keys()
    )
    assert ("", "stop") == (thoughts["message"]["content"], thoughts["finish_reason"])


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_an_answer_cut_off_after_a_call(stream: bool):
    """The finish reason is the cut-off: the client must not take the answer for complete."""
    script = changed(SCRIPT, finish_reason="length")
    last = (await choices_of(script))[-1] if stream else await choice_of(script)
    assert "length" == last["finish_reason"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_an_answer_that_ended_in_a_call(stream: bool):
    """A stop text may cut a second call off: the client must not act on the first alone."""
    script = changed(SCRIPT, ended_in_call=True)
    last = (await choices_of(script))[-1] if stream else await choice_of(script)
    assert "stop" == last["finish_reason"]


async def test_deltas_of_a_stream():
    """A call begins with index, id, type, name and no arguments; these follow under its index."""
    choices = await choices_of(SCRIPT)
    head = {"type": "function"}
    assert [
        {"reasoning_content": "Two", "reasoning": "Two"},
        {"reasoning_content": " cities.", "reasoning": " cities."},
        {"content": "I look."},
        {
            "tool_calls": [
                {**head, "index": 0, "id": "a1", "function": {"name": "look", "arguments": ""}}
            ]
        },
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"city": "Öslo"}'}}]},
        {
            "tool_calls": [
                {**head, "index": 1, "id": "b2", "function": {"name": "go", "arguments": ""}}
            ]
        },
        {"tool_calls": [{"index": 1, "function": {"arguments": "{}"}}]},
        {},
    ] == [choice["delta"] for choice in choices]
    assert [None] * 7 + ["tool_calls"] == [choice["finish_reason"] for choice in choices]


async def test_logprobs_come_once():
    """
    The log-probabilities of a piece go with its first delta; those of held-back text go alone.
    """
    held = Delta(parts=(), tokens=(token(1, "<tool_call>", -0.5),))
    both = Delta(parts=(Said("Hm."), GO), tokens=(token(2, "…", -0.25),))
    choices = await choices_of((ACCEPTED, held, both, FINISHED), logprobs=True)
    assert [{"content": ""}, {"content": "Hm."}] == [choice["delta"] for choice in choices[:2]]
    found = [
        [one["token"] for one in choice["logprobs"]["content"]] if choice["logprobs"] else None
        for choice in choices
    ]
    assert [["<tool_call>"], ["…"], None, None, None] == found
    silent = await choices_of((ACCEPTED, attrs.evolve(held, tokens=()), both, FINISHED))
    assert {"content": "Hm."} == silent[0]["delta"]


async def test_the_official_client_adds_up(serve: Serve):
    """Its stream ends with the same message as a whole answer."""
    url = await serve(FakeService(SCRIPT))

    def both() -> tuple[Any, Any]:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as api:
            whole = api.chat.completions.create(model="any", **ASK)
            with api.chat.completions.stream(model="any", **ASK) as stream:
                for _ in stream:
                    pass
                return whole.choices[0], stream.get_final_completion().choices[0]

    whole, added = await trio.to_thread.run_sync(both)
    assert "tool_calls" == whole.finish_reason == added.finish_reason
    assert [("a1", "look", '{"city": "Öslo"}'), ("b2", "go", "{}")] == [
        (one.id, one.function.name, one.function.arguments) for one in added.message.tool_calls
    ]
    for message in (whole.message, added.message):
        assert ("I look.", "Two cities.") == (message.content, message.model_extra["reasoning"])


PIECES: tuple[Step, ...] = (
    ACCEPTED,
    Delta(parts=(Said("I look."),), calling=calling(0, "a1", "look", "")),
    Delta(parts=(), calling=calling(0, "a1", "look", '{"city": "')),
    Delta(parts=(), calling=calling(0, "a1", "look", "Öslo")),
    Delta(parts=(LOOK,), calling=calling(1, "b2", "go", "{")),
    Delta(parts=(GO,)),
    FINISHED,
)


async def test_arguments_come_in_pieces():
    """
    Each call begins once, and its pieces add up to its arguments; a whole answer has the same.
    """
    deltas = [one["delta"] for one in await choices_of(PIECES)]
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert [(0, "a1"), (1, "b2")] == [(one["index"], one["id"]) for one in calls if "id" in one]
    pieces = [(one["index"], one["function"]["arguments"]) for one in calls if "id" not in one]
    assert [(0, '{"city": "'), (0, "Öslo"), (0, '"}'), (1, "{"), (1, "}")] == pieces
    assert "tool_calls" == (await choices_of(PIECES))[-1]["finish_reason"]
    whole = (await choice_of(PIECES))["message"]["tool_calls"]
    assert [LOOK.arguments, GO.arguments] == [one["function"]["arguments"] for one in whole]


async def test_a_call_that_is_cut_off():
    """It is sent as far as it was written, whole and as a stream; the client must not act on it."""
    cut = attrs.evolve(LOOK, arguments='{"city": "', cut="<tool_call>...")
    end = {"finish_reason": "length", "ended_in_call": True}
    script = changed((*PIECES[:3], Delta(parts=(cut,)), FINISHED), **end)
    whole = await choice_of(script)
    assert '{"city": "' == whole["message"]["tool_calls"][0]["function"]["arguments"]
    choices = await choices_of(script)
    assert {"length"} == {whole["finish_reason"], choices[-1]["finish_reason"]}
    calls = [call for one in choices for call in one["delta"].get("tool_calls", ())]
    assert '{"city": "' == "".join(one["function"]["arguments"] for one in calls)
