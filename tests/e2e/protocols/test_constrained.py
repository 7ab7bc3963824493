"""
Constrained answers over the wire: a model with random weights, which never writes JSON by itself,
and the official client, which relies on it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from cairn.journal import events as ev
from tests.e2e.conftest import servers
from tests.support.models.random_model import make_random_model
from tests.support.processes.subprocess_server import DEADLINE_S, Serving, run_ops, together, user

STONE: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "weight": {"type": "integer", "minimum": -5, "maximum": 900},
        "kind": {"enum": ["granite", "slate", "Über-石"]},
        "marks": {
            "type": "array",
            "items": {"$ref": "#/$defs/mark"},
            "minItems": 1,
            "maxItems": 3,
        },
    },
    "required": ["name", "weight", "kind", "marks"],
    "additionalProperties": False,
    "$defs": {
        "mark": {
            "type": "object",
            "properties": {"wet": {"type": "boolean"}, "of": {"enum": ["rain", "lichen", None]}},
            "required": ["wet", "of"],
            "additionalProperties": False,
        }
    },
}
FORMAT: dict[str, Any] = {
    "type": "json_schema",
    "json_schema": {"name": "stone", "strict": True, "schema": STONE},
}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {name[0]: {"type": "string", "maxLength": 8}},
                "required": [name[0]],
                "additionalProperties": False,
            },
        },
    }
    for name in ("look", "go")
]
GO = {"type": "function", "function": {"name": "go"}}
NO_THOUGHTS = {"enable_thinking": False}
ASKED = [user("Tell me of a stone.")]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """A server with the random model."""
    folder = tmp_path_factory.mktemp("constrained")
    with servers(folder, make_random_model(folder / "model")) as start:
        yield start("--block-tokens", 16)


@pytest.fixture(scope="module")
def client(server: Serving) -> openai.OpenAI:
    """The official client."""
    return server.client()


def create(client: openai.OpenAI, **body: Any) -> Any:
    """A completion without thinking, at a high temperature."""
    asked = {
        "model": "any",
        "messages": ASKED,
        "temperature": 1.5,
        "seed": 1,
        "max_tokens": 400,
        "extra_body": NO_THOUGHTS,
        **body,
    }
    return client.chat.completions.create(**asked)


def check_stone(text: str) -> None:
    """Assert that a text is JSON of the schema."""
    found = json.loads(text)
    assert ["name", "weight", "kind", "marks"] == list(found)
    assert len(found["name"]) <= 12
    assert type(found["weight"]) is int
    assert -5 <= found["weight"] <= 900
    assert found["kind"] in STONE["properties"]["kind"]["enum"]
    assert 1 <= len(found["marks"]) <= 3
    for mark in found["marks"]:
        assert ["wet", "of"] == list(mark)
        assert isinstance(mark["wet"], bool)
        assert mark["of"] in ("rain", "lichen", None)


@pytest.mark.long_but("0")
@pytest.mark.parametrize("temperature", [0, 1, 3])
def test_every_answer_is_json_of_the_schema(client: openai.OpenAI, temperature: float):
    """Whatever is sampled, four answers at a time: JSON of the schema, and each ends by itself."""

    def one(seed: int) -> Any:
        return create(client, response_format=FORMAT, temperature=temperature, seed=seed)

    for completion in together([lambda seed=seed: one(seed) for seed in range(4)]):  # type: ignore[misc]
        (choice,) = completion.choices
        assert "stop" == choice.finish_reason
        check_stone(choice.message.content)


def test_without_the_format_the_answer_is_no_json(client: openai.OpenAI):
    """The control: without the format, the answer is not JSON."""
    (choice,) = create(client).choices
    with pytest.raises(ValueError, match="Expecting"):
        json.loads(choice.message.content)


@pytest.mark.long
def test_a_stream_and_a_cold_path_give_the_same_answer(client: openai.OpenAI):
    """Streamed, and without any reuse, the answer is the same to the last log-probability."""
    body: dict[str, Any] = {"response_format": FORMAT, "logprobs": True, "seed": 5}
    warm = create(client, **body)
    again = create(client, **body)
    cold = create(client, **body, extra_body={**NO_THOUGHTS, "cache_prompt": False})
    assert cold.model_extra["cairn"]["reused_tokens"] == 0
    assert warm.choices == again.choices == cold.choices
    pieces = create(client, **body, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in pieces)
    assert warm.choices[0].message.content == text
    check_stone(text)


def test_log_probabilities_are_not_affected(client: openai.OpenAI):
    """The format does not change log-probabilities: alternatives are the same as without it."""
    body: dict[str, Any] = {"logprobs": True, "top_logprobs": 20, "max_tokens": 1}
    free, held = (
        create(client, **body, response_format=kind).choices[0].logprobs.content[0]
        for kind in ({"type": "text"}, FORMAT)
    )
    assert free.top_logprobs == held.top_logprobs
    assert "{" == held.token[0]
    assert held.logprob < free.top_logprobs[0].logprob


@pytest.mark.long
def test_any_object(client: openai.OpenAI):
    """A complete answer is an object, and one that was cut off says so."""
    for seed in range(4):
        body = {"response_format": {"type": "json_object"}, "seed": seed, "max_tokens": 60}
        (choice,) = create(client, **body).choices
        assert "{" == choice.message.content[0]
        if choice.finish_reason == "stop":
            assert isinstance(json.loads(choice.message.content), dict)
        else:
            assert "length" == choice.finish_reason


def test_an_answer_that_is_cut_off_says_so(client: openai.OpenAI):
    """Half an object is not valid: the finish reason tells the client."""
    (choice,) = create(client, response_format=FORMAT, max_tokens=7).choices
    assert "length" == choice.finish_reason
    with pytest.raises(ValueError, match=r"Expecting|Unterminated"):
        json.loads(choice.message.content)


@pytest.mark.long
def test_thoughts_come_first(client: openai.OpenAI):
    """Reasoning is unconstrained, and the format applies after it."""

    def one(seed: int) -> Any:
        # A bias makes reasoning and its end likely, within about fifty tokens.
        bias = {str(_token("<think>")): 9, str(_token("</think>")): 6}
        return create(client, response_format=FORMAT, seed=seed, extra_body={}, logit_bias=bias)

    found = 0
    for completion in together([lambda seed=seed: one(seed) for seed in range(8)]):  # type: ignore[misc]
        (choice,) = completion.choices
        if choice.finish_reason == "stop":
            found += bool(choice.message.model_extra.get("reasoning"))
            check_stone(choice.message.content)
    assert found


@pytest.mark.long_but("required-False", "required-True")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", GO])
def test_a_required_call(client: openai.OpenAI, choice: Any, stream: bool):
    """There is a call of an allowed tool, and its arguments follow the tool's parameters."""
    for seed in range(4):
        body: dict[str, Any] = {"tools": TOOLS, "tool_choice": choice, "seed": seed}
        if stream:
            asked: dict[str, Any] = {"model": "any", "messages": ASKED, "max_tokens": 200}
            with client.chat.completions.stream(
                **asked, **body, temperature=1.5, extra_body=NO_THOUGHTS
            ) as events:
                for _ in events:
                    pass
                (answer,) = events.get_final_completion().choices
        else:
            (answer,) = create(client, **body, max_tokens=200).choices
        calls = answer.message.tool_calls
        assert calls
        for call in calls:
            arguments = json.loads(call.function.arguments)
            assert [call.function.name[0]] == list(arguments)
        if choice is GO:
            assert ["go"] == [call.function.name for call in calls]
            assert not answer.message.content
        assert answer.finish_reason == "tool_calls" or len(calls) > 1


@pytest.mark.long
def test_a_call_that_is_sent_back_is_reused(server: Serving, client: openai.OpenAI):
    """Calls are written as the template renders them, so the next turn reuses all of them."""
    first = create(client, tools=TOOLS, tool_choice=GO, seed=3)
    server.wait_idle()
    (choice,) = first.choices
    (call,) = choice.message.tool_calls
    talk = [*ASKED, choice.message.model_dump(exclude_none=True)]
    talk.append({"role": "tool", "tool_call_id": call.id, "content": "gone"})
    second = create(client, messages=talk, tools=TOOLS, response_format=FORMAT)
    assert "continuation" == second.model_extra["cairn"]["path"]
    assert second.choices[0].finish_reason in ("stop", "tool_calls")


@pytest.mark.parametrize(
    ("body", "param", "fact"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}},
            "response_format.json_schema.schema",
            "Invalid type: x",
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"schema": {"not": {}}, "strict": True},
                }
            },
            "response_format.json_schema.schema",
            'Unimplemented keys: ["not"]',
        ),
        (
            {
                "tools": [
                    *TOOLS,
                    {"function": {"name": "x", "parameters": {"properties": {"a": {"type": "x"}}}}},
                ],
                "tool_choice": "required",
                "stream": True,
            },
            "tools[2].function.parameters",
            "Invalid type: x",
        ),
    ],
)
def test_an_impossible_format_is_refused(
    server: Serving, body: dict[str, Any], param: str, fact: str
):
    """It is a 400 that says what is wrong and where, and no session begins."""
    before = server.position()
    response = server.post(messages=ASKED, **body)
    error = response.json()["error"]
    assert (400, "format_refused", param) == (response.status_code, error["code"], error["param"])
    assert fact in error["message"]
    assert [] == server.requests(after=before)


@pytest.mark.long
def test_the_journal_has_the_grammar_and_a_replay_needs_it(server: Serving, client: openai.OpenAI):
    """A session with constrained answers replays to the same tokens."""
    body = {**NO_THOUGHTS, "session_id": "held"}
    for turn in range(2):
        create(client, response_format=FORMAT, seed=turn, extra_body=body)
        create(
            client, tools=TOOLS, tool_choice="required", seed=turn, max_tokens=60, extra_body=body
        )
    server.wait_idle()
    received = server.events(ev.RequestReceived, session="held")
    assert 4 == len(received)
    assert all(one.grammar and "%json" in one.grammar for one in received)
    code, shown, failed = run_ops("replay", "held", "--engine", "--data-dir", server.data_dir)
    assert 0 == code, shown + failed
    assert "same: " in shown


def _token(text: str) -> int:
    """The id of a marker: the random model's control tokens are its last nine, in order."""
    markers = ("<think>", "</think>", "<tool_call>", "</tool_call>")
    return 2048 - 6 + markers.index(text)


# --- Anthropic's clients --------------------------------------------------------------------------


def message(server: Serving, **fields: Any) -> dict[str, Any]:
    """The answer of Anthropic's messages, at a high temperature."""
    body = {"max_tokens": 400, "messages": ASKED, "temperature": 1.5, "seed": 1, **fields}
    response = httpx.post(f"{server.url}/v1/messages", json=body, timeout=DEADLINE_S)
    found: dict[str, Any] = response.json()
    assert 200 == response.status_code, found
    return found


@pytest.mark.long
def test_a_message_of_a_schema(server: Serving):
    """Under either name of the format: JSON of the schema, and each answer ends by itself."""
    kind = {"type": "json_schema", "schema": STONE}
    for seed, name in enumerate(("output_config", "output_format")):
        asked = {name: {"format": kind} if name == "output_config" else kind}
        found = message(server, seed=seed, **asked)
        (block,) = found["content"]
        assert ("end_turn", "text") == (found["stop_reason"], block["type"])
        check_stone(block["text"])
        assert "ignored" not in found["cairn"]


LOOK, GO_THERE = (
    dict[str, Any](name=one["function"]["name"], input_schema=one["function"]["parameters"])
    for one in TOOLS
)


@pytest.mark.long_but("choice0-names0")
@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ({"type": "any"}, {"look", "go"}),
        ({"type": "any", "disable_parallel_tool_use": True}, {"look", "go"}),
        ({"type": "tool", "name": "go"}, {"go"}),
    ],
)
def test_a_required_use_of_a_tool(server: Serving, choice: dict[str, Any], names: set[str]):
    """
    There is a call of an allowed tool, and its input follows the tool's schema; also for a tool
    that is declared in the middle of the conversation.
    """
    named = [{"type": "tool_reference", "tool_name": "go"}]
    result = {"type": "tool_result", "tool_use_id": "123456789", "content": named}
    for seed in range(4):
        found = message(
            server,
            messages=[{"role": "user", "content": [result]}],
            tools=[LOOK, {**GO_THERE, "defer_loading": True}],
            tool_choice=choice,
            seed=seed,
            max_tokens=200,
        )
        uses = found["content"]
        assert uses
        for use in uses:
            assert "tool_use" == use["type"]
            assert use["name"] in names
            assert [use["name"][0]] == list(use["input"])
        if choice["type"] == "tool" or "disable_parallel_tool_use" in choice:
            assert 1 == len(uses)
        assert found["stop_reason"] == "tool_use" or len(uses) > 1


def test_an_impossible_format_is_refused_with_its_field(server: Serving):
    """
    The error names the field as the client sent it; a tool by its name, even if others are left
    out.
    """
    web = {"type": "web_search_20250305", "name": "web_search"}
    broken = {"name": "x", "input_schema": {"type": "object", "properties": {"a": {"type": 1}}}}
    cases: list[tuple[dict[str, Any], str]] = [
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"not": {}}}}},
            "output_config.format.schema",
        ),
        (
            {"tools": [web, LOOK, broken], "tool_choice": {"type": "any"}},
            "tools.x.input_schema",
        ),
    ]
    for asked, param in cases:
        body = {"max_tokens": 10, "messages": ASKED, **asked}
        response = httpx.post(f"{server.url}/v1/messages", json=body, timeout=DEADLINE_S)
        error = response.json()["error"]
        assert (400, "format_refused", param) == (
            response.status_code,
            error["code"],
            error["param"],
        )
