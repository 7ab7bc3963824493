"""OpenAI's responses: the command that a body becomes, what is ignored, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import attrs
import pytest

from cairn.actors.requests.messages import Generate, StoredTurn
from cairn.engine.answer.grammar import ANY_OBJECT, Constraint
from cairn.engine.answer.parts import Called
from cairn.engine.prompt.template import Message
from cairn.http.responses.form import ResponsesRequest
from cairn.http.responses.request import read_responses_request
from cairn.http.wire import placeholders as placeholders
from cairn.http.wire.checks import ClientError
from cairn.http.wire.parameters import Ignored
from tests.http.fake_service import FACTS, FINISHED

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
LOOK = {"type": "function", "name": "look", "description": "Looks.", "parameters": SCHEMA}
GO = {"type": "function", "name": "go", "parameters": None, "strict": True}
HELLO = {"type": "message", "role": "user", "content": "Hello"}


def request(headers: dict[str, str] | None = None, **fields: Any) -> ResponsesRequest:
    """The request with these fields, as it was read."""
    body = json.dumps({"input": "Hello", **fields}).encode()
    return read_responses_request(body, headers or {}, Ignored(), FACTS).complete((), {})


def command(**fields: Any) -> Generate:
    """The command of a request."""
    return request(**fields).command


def messages(*items: Any, **fields: Any) -> tuple[Message, ...]:
    """The messages of an input."""
    conversation = command(input=list(items), **fields).conversation
    assert conversation is not None
    return conversation.messages


def refused(**fields: Any) -> ClientError:
    """The error with which a request is refused."""
    with pytest.raises(ClientError) as caught:
        request(**fields)
    return caught.value


def test_a_text_is_a_users_message():
    """A string, a message with a string and one with parts are the same, with or without a type."""
    parts = [{"type": "input_text", "text": "Hel"}, {"type": "input_text", "text": "lo"}]
    found = [
        messages(HELLO),
        messages({"role": "user", "content": "Hello"}),
        messages({**HELLO, "content": parts, "id": "msg_1", "status": "completed"}),
        attrs.asdict(command(), recurse=False)["conversation"].messages,
    ]
    assert [(Message(role="user", content="Hello"),)] * 4 == found


def test_instructions_come_first():
    """Instructions and system or developer messages become system messages, each in its place."""
    inserted = {"role": "developer", "content": "Today is a Sunday."}
    assert ["system:Be brief.", "user:Hello", "system:Today is a Sunday."] == [
        f"{one.role}:{one.content}" for one in messages(HELLO, inserted, instructions="Be brief.")
    ]
    assert messages(HELLO) == messages(HELLO, instructions="")


def call(call_id: str, name: str = "look", arguments: str = '{"city": "Rom"}') -> dict[str, Any]:
    """An item that is a function call."""
    return {"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments}


def test_what_an_assistant_did_is_one_message():
    """Consecutive reasoning, text and calls are one message; results are tool messages."""
    found = messages(
        HELLO,
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        call("a1"),
        call("b2", "go", "broken"),
        {"type": "function_call_output", "call_id": "a1", "output": "Rain."},
        {
            "type": "function_call_output",
            "call_id": "b2",
            "output": [{"type": "input_text", "text": "7 km"}],
        },
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
    )
    look = {"name": "look", "arguments": {"city": "Rom"}}
    go = {"name": "go", "arguments": "broken"}
    assert (
        Message(role="user", content="Hello"),
        Message(
            role="assistant",
            content="I look.",
            reasoning="Hm",
            tool_calls=(
                {"id": "a1", "type": "function", "function": look},
                {"id": "b2", "type": "function", "function": go},
            ),
        ),
        Message(role="tool", content="Rain.", tool_call_id="a1"),
        Message(role="tool", content="7 km", tool_call_id="b2"),
        Message(role="assistant", content="No."),
    ) == found


@pytest.mark.parametrize(
    ("fields", "thought"),
    [
        ({"summary": [], "encrypted_content": "cairn:Hm"}, "Hm"),
        ({"summary": [{"type": "summary_text", "text": "Hm"}]}, "Hm"),
        ({"summary": [{"type": "summary_text", "text": "Hm"}], "encrypted_content": "gAAA"}, "Hm"),
        ({"summary": [], "content": None, "encrypted_content": "gAAA"}, None),
        (
            {
                "summary": [{"type": "summary_text", "text": "no"}],
                "content": [{"type": "reasoning_text", "text": "no"}],
                "encrypted_content": "cairn:Hm",
            },
            "Hm",
        ),
    ],
)
def test_thoughts_that_come_back(fields: dict[str, Any], thought: str | None):
    """
    Our reasoning is read from any field that a client kept; other servers' sealed reasoning is left
    out.
    """
    _, found = messages(HELLO, {"type": "reasoning", **fields})
    assert ("assistant", "", thought) == (found.role, found.content, found.reasoning)


def test_functions_are_put_into_the_prompt():
    """Tools have the form of chat completions; empty fields are left out."""
    found = command(tools=[LOOK, GO]).conversation
    assert found is not None
    look = {"name": "look", "description": "Looks.", "parameters": SCHEMA}
    assert [
        {"type": "function", "function": look},
        {"type": "function", "function": {"name": "go", "strict": True}},
    ] == list(found.tools)
    loose = command(tools=[{**LOOK, "strict": False}]).conversation
    assert loose is not None
    assert {"type": "function", "function": look} == loose.tools[0]


OTHERS: list[dict[str, Any]] = [
    {"type": "web_search"},
    {"type": "local_shell"},
    {"type": "custom", "name": "apply_patch", "format": {"type": "grammar"}},
    {"type": "namespace", "name": "mail", "tools": [LOOK]},
]


def test_tools_that_are_not_run_here_are_left_out():
    """They are not in the prompt, and are reported as ignored."""
    found = request(tools=[*OTHERS, LOOK])
    assert found.command.conversation == command(tools=[LOOK]).conversation
    assert (
        "tools.custom",
        "tools.local_shell",
        "tools.namespace",
        "tools.web_search",
    ) == found.ignored


def test_items_of_unknown_types_are_left_out():
    """Items of other servers' tools are not in the prompt, and are reported as ignored."""
    other = {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"a": 1}}
    shell = {"type": "local_shell_call_output", "output": {"stdout": "x"}}
    found = request(input=[HELLO, other, shell])
    assert found.command.conversation == command().conversation
    assert ("input.local_shell_call_output", "input.web_search_call") == found.ignored


def test_where_no_tool_may_be_called():
    """With `none` they stay in the prompt, which begins with them."""
    free = command(tools=[LOOK]).conversation
    assert free is not None
    assert attrs.evolve(free, calls=False) == command(tools=[LOOK], tool_choice="none").conversation


@pytest.mark.parametrize(
    ("fields", "constraint"),
    [
        ({}, None),
        ({"tool_choice": "auto", "tools": [LOOK, GO]}, None),
        ({"text": {"format": {"type": "text"}}}, None),
        ({"text": {"format": {"type": "json_object"}}}, Constraint(schema=ANY_OBJECT)),
        (
            {"text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}},
            Constraint(schema=SCHEMA),
        ),
        (
            {
                "text": {"format": {"type": "json_schema", "schema": SCHEMA, "strict": True}},
                "tools": [LOOK],
                "parallel_tool_calls": False,
            },
            Constraint(schema=SCHEMA, strict=True, calls=("look",), one_call=True),
        ),
        (
            {"tool_choice": "required", "tools": [LOOK, GO]},
            Constraint(calls=("look", "go")),
        ),
        (
            {"tool_choice": {"type": "function", "name": "go"}, "tools": [LOOK, GO]},
            Constraint(calls=("go",), one_call=True),
        ),
        (
            {
                "tool_choice": {
                    "type": "allowed_tools",
                    "mode": "required",
                    "tools": [{"type": "function", "name": "go"}],
                },
                "tools": [LOOK, GO],
            },
            Constraint(calls=("go",)),
        ),
    ],
)
def test_the_constraint_on_an_answer(fields: dict[str, Any], constraint: Constraint | None):
    """Formats and choices become the constraint that all protocols share."""
    assert constraint == command(**fields).constraint


@pytest.mark.parametrize(
    ("effort", "thinks"), [("none", False), ("minimal", True), ("high", True), (None, None)]
)
def test_effort(effort: str | None, thinks: bool | None):
    """
    The effort decides whether the template lets the model think; without it, the server's default
    applies.
    """
    conversation = command(reasoning={"effort": effort}).conversation
    assert conversation is not None
    assert thinks == conversation.template.get("enable_thinking")


def test_parameters():
    """Sampling, length, session and cache settings are in the command."""
    found = command(
        temperature=0.5,
        top_p=0.25,
        max_output_tokens=7,
        seed=3,
        cache_prompt=False,
        session_id="notes",
        model="gpt",
    )
    assert (0.5, 0.25, 7, 3, False, "notes", "gpt") == (
        found.sampling.temperature,
        found.sampling.top_p,
        found.max_tokens,
        found.seed,
        found.cache_prompt,
        found.session_name,
        found.requested_model,
    )


def test_a_cache_key_names_a_group():
    """A header takes precedence, and an invalid name is ignored."""
    assert "talk-1" == command(prompt_cache_key="talk-1").group
    assert "one" == command(headers={"session-id": "one"}, prompt_cache_key="talk-1").group
    assert command(prompt_cache_key="x" * 201).group is None


def test_a_format_next_to_required_calls_is_reported():
    """The answer is a call, so the format has no effect and is reported as ignored."""
    asked: dict[str, Any] = {"tools": [LOOK], "text": {"format": {"type": "json_object"}}}
    assert ("text.format",) == request(**asked, tool_choice="required").ignored
    assert () == request(**asked).ignored


def test_what_is_stored():
    """The input of a request is stored, unless the request says otherwise."""
    assert command(store=False).keep is None
    for fields in ({}, {"store": True}, {"store": None}):
        keep = command(**fields).keep
        assert keep is not None
        assert (None, (Message(role="user", content="Hello"),)) == (keep.previous, keep.asked)
        assert {} == keep.texts
    long = {"instructions": "Be brief. " * 20, "tools": [{**LOOK, "description": "x" * 200}]}
    keep = command(**long).keep
    assert keep is not None
    assert long == {name: json.loads(text) for name, text in keep.texts.items()}


@pytest.mark.parametrize("more", [{}, {"call_id": None}, {"call_id": ""}])
def test_a_result_that_names_no_call(more: dict[str, Any]):
    """It is still a tool message; clients may leave the id out."""
    item = {"type": "function_call_output", "output": "Rain.", **more}
    assert (Message(role="tool", content="Rain."),) == messages(item)


def test_an_image_that_a_tool_returned_does_not_end_the_conversation():
    """A constant text replaces the image, and the answer reports it as ignored."""

    def asked(data: str) -> ResponsesRequest:
        parts = [
            {"type": "input_text", "text": "A map: "},
            {"type": "input_image", "image_url": data},
            {"type": "input_file", "file_data": data},
        ]
        return request(
            input=[HELLO, {"type": "function_call_output", "call_id": "a", "output": parts}]
        )

    one, other = asked("AAAA"), asked("BBBB")
    assert one.command.conversation is not None
    said = one.command.conversation.messages[1].content
    assert f"A map: {placeholders.IMAGE}{placeholders.DOCUMENT}" == said
    assert ("input.input_file", "input.input_image") == one.ignored
    assert one.command.conversation == other.command.conversation


@pytest.mark.parametrize(
    "answer",
    [
        [{"role": "assistant", "content": "A hill."}],
        [{"type": "reasoning", "summary": []}],
        [{"type": "function_call", "call_id": "a", "name": "look", "arguments": "{}"}],
    ],
    ids=["words", "thoughts", "a call"],
)
def test_an_image_in_a_turn_that_was_answered(answer: list[Any]):
    """
    A constant text replaces the image, and the answer reports it; in the current turn it is
    refused.
    """
    seen = {"role": "user", "content": [{"type": "input_image", "image_url": "AAAA"}]}
    past = request(input=[seen, *answer, HELLO])
    assert past.command.conversation is not None
    assert placeholders.IMAGE == past.command.conversation.messages[0].content
    assert ("input.input_image",) == past.ignored
    for items in ([seen], [seen, HELLO], [HELLO, *answer, seen], [seen, *answer, seen]):
        with pytest.raises(ClientError) as refused:
            request(input=items)
        assert "unsupported_content" == refused.value.code


@pytest.mark.parametrize("output", [["x"], [{"type": []}], [{"type": "input_video"}]])
def test_parts_of_a_tools_result_that_are_none(output: list[Any]):
    """They are refused, wherever they are in the list."""
    item = {"type": "function_call_output", "call_id": "a", "output": output}
    assert (refused(input=[HELLO, item]).param or "").startswith("input[1].output[0]")


def test_what_is_ignored():
    """Fields without effect are reported as ignored; a part of a field by its path."""
    found = request(
        user="me",
        truncation="auto",
        text={"verbosity": "low"},
        reasoning={"generate_summary": "auto"},
        include=["reasoning.encrypted_content", "file_search_call.results"],
        parallel_tool_calls=False,
        tools=[LOOK],
        tool_choice={"type": "allowed_tools", "mode": "auto", "tools": []},
        service_tier="flex",
        top_logprobs=None,
    )
    assert (
        "include.file_search_call.results",
        "parallel_tool_calls",
        "reasoning.generate_summary",
        "service_tier",
        "text.verbosity",
        "tool_choice.tools",
        "truncation",
        "user",
    ) == found.ignored
    assert () == request(truncation="disabled", parallel_tool_calls=True, store=False).ignored


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"input": None}, "input", "missing_required_parameter"),
    ({"input": []}, "input", "missing_required_parameter"),
    ({"input": 7}, "input", "invalid_type"),
    ({"input": ["x"]}, "input[0]", "invalid_type"),
    ({"input": [{}]}, "input[0].type", "missing_required_parameter"),
    ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role", "invalid_value"),
    ({"input": [{"role": "user"}]}, "input[0].content", "missing_required_parameter"),
    ({"input": [{"role": "user", "content": 7}]}, "input[0].content", "invalid_type"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
        "input[0].content[0].type",
        "unsupported_content",
    ),
    (
        {"input": [{"role": "user", "content": [{"type": "input_text"}]}]},
        "input[0].content[0].text",
        "missing_required_parameter",
    ),
    (
        {"input": [HELLO, {"type": "function_call", "call_id": "a", "name": "b"}]},
        "input[1].arguments",
        "missing_required_parameter",
    ),
    (
        {"input": [{"type": "function_call_output", "call_id": "a", "output": 7}]},
        "input[0].output",
        "invalid_type",
    ),
    (
        {"input": [HELLO, {"type": "reasoning", "summary": [{"type": "summary_text"}]}]},
        "input[1].summary[0].text",
        "missing_required_parameter",
    ),
    ({"input": [{"type": "item_reference", "id": "msg_x_0"}]}, "input[0].id", "item_not_found"),
    ({"input": [HELLO] * 10_001}, "input", "invalid_value"),
    ({"tools": [{"type": "function"}]}, "tools[0].name", "missing_required_parameter"),
    ({"tools": [{**LOOK, "name": ""}]}, "tools[0].name", "invalid_value"),
    ({"tools": [{**LOOK, "parameters": 7}]}, "tools[0].parameters", "invalid_type"),
    ({"tools": [LOOK] * 1025}, "tools", "invalid_value"),
    ({"tool_choice": "any"}, "tool_choice", "invalid_value"),
    ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
    ({"tool_choice": {"type": "web_search"}}, "tool_choice", "unsupported_value"),
    (
        {"tool_choice": {"type": "function", "name": "x"}, "tools": [LOOK]},
        "tool_choice.name",
        "invalid_value",
    ),
    (
        {"tool_choice": {"type": "allowed_tools", "mode": "x", "tools": []}},
        "tool_choice.mode",
        "invalid_value",
    ),
    (
        {"tool_choice": {"type": "allowed_tools", "mode": "auto"}},
        "tool_choice.tools",
        "invalid_type",
    ),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type", "unsupported_value"),
    (
        {"text": {"format": {"type": "json_object", "schema": []}}},
        "text.format.schema",
        "invalid_type",
    ),
    (
        {"text": {"format": {"type": "json_schema"}}},
        "text.format.schema",
        "missing_required_parameter",
    ),
    (
        {"text": {"format": {"type": "json_schema", "schema": {}, "strict": 1}}},
        "text.format.strict",
        "invalid_type",
    ),
    ({"reasoning": {"effort": "huge"}}, "reasoning.effort", "invalid_value"),
    ({"max_output_tokens": 0}, "max_output_tokens", "invalid_value"),
    ({"temperature": -1}, "temperature", "invalid_value"),
    ({"metadata": {"a": 1}}, "metadata", "invalid_type"),
    ({"conversation": "conv_1"}, "conversation", "unsupported_value"),
    ({"prompt": {"id": "p"}}, "prompt", "unsupported_value"),
    ({"background": True}, "background", "unsupported_value"),
]


@pytest.mark.parametrize(
    ("fields", "param", "code"), REFUSED, ids=[f"{row[1]}-{row[2]}" for row in REFUSED]
)
def test_what_is_refused(fields: dict[str, Any], param: str, code: str):
    """The error names the path, also in its message."""
    error = refused(**fields)
    assert (param, code) == (error.param, error.code)
    assert param.rpartition(".")[2] in error.message


def test_an_input_that_is_misspelt():
    """The refusal suggests the right name, also if there is an earlier response to continue."""
    for more in ({}, {"previous_response_id": "resp_1"}):
        error = refused(input=None, inptu="x", **more)
        assert error.message.endswith(". Did you mean `input` instead of `inptu`?")
        assert ("input", "missing_required_parameter") == (error.param, error.code)
    assert "meant" not in refused(input=None, inbox="x").message
    assert "meant" not in refused(input=[], inptu="x").message


def test_parameters_of_a_tool_that_are_nested_too_deeply():
    """They are refused, with their path."""
    schema: dict[str, Any] = {}
    for _ in range(300):
        schema = {"items": schema}
    error = refused(tools=[{**LOOK, "parameters": schema}])
    assert "tools[0].parameters" == error.param


def test_a_reference_to_a_call_that_was_cut_off_is_its_text():
    """The model's text of the call is text, as it is in an answer that is sent back."""
    turn = StoredTurn(
        request="r1",
        previous=None,
        created_s=1,
        asked=(),
        parts=(Called(index=0, id="c", name="look", arguments="{", cut="<call>{"),),
        note="",
        finished=FINISHED,
    )
    body = json.dumps({"input": [{"type": "item_reference", "id": "fc_r1_0"}, HELLO]}).encode()
    draft = read_responses_request(body, {}, Ignored(), FACTS)
    conversation = draft.complete((), {"r1": turn}).command.conversation
    assert conversation is not None
    assert Message(role="assistant", content="<call>{") == conversation.messages[0]
