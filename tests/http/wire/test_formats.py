"""Constraints on answers: from the wire to a constraint, and the errors that a client gets."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cairn.actors.errors import FormatRefused
from cairn.engine.answer.grammar import ANY_OBJECT, Constraint
from cairn.http.app import create_app
from cairn.http.chat_completions.request import read_chat_request
from cairn.http.wire.checks import ClientError
from cairn.http.wire.errors import describe
from cairn.http.wire.parameters import Ignored
from tests.http.chat_completions.test_request import command, read
from tests.http.fake_service import ACCEPTED, DELTAS, FACTS, FakeService

TOOLS = [{"type": "function", "function": {"name": name}} for name in ("look", "go")]
BOTH = ("look", "go")
SCHEMA = {"type": "object", "properties": {"b": {}, "a": {}}}


def json_format(schema: Any = SCHEMA, **more: Any) -> dict[str, Any]:
    """A format that asks for JSON of a schema."""
    return {"type": "json_schema", "json_schema": {"name": "s", "schema": schema, **more}}


GO = {"type": "function", "function": {"name": "go"}}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {}, "tools": TOOLS, "tool_choice": "auto"}, None),
        ({"tools": TOOLS, "tool_choice": "none"}, None),
        ({"response_format": {"type": "json_object"}}, Constraint(schema=ANY_OBJECT)),
        (
            {"response_format": {"type": "json_object", "schema": {}}},
            Constraint(schema=ANY_OBJECT),
        ),
        (
            {"response_format": {"type": "json_object", "schema": SCHEMA}},
            Constraint(schema=SCHEMA),
        ),
        ({"response_format": json_format()}, Constraint(schema=SCHEMA)),
        ({"response_format": json_format(strict=None)}, Constraint(schema=SCHEMA)),
        ({"response_format": json_format(strict=True)}, Constraint(schema=SCHEMA, strict=True)),
        ({"response_format": json_format(), "tools": TOOLS}, Constraint(schema=SCHEMA, calls=BOTH)),
        (
            {"response_format": json_format(), "tools": TOOLS, "tool_choice": "none"},
            Constraint(schema=SCHEMA),
        ),
        ({"tools": TOOLS, "tool_choice": "required"}, Constraint(calls=BOTH)),
        (
            {"tools": TOOLS, "tool_choice": "required", "response_format": json_format()},
            Constraint(calls=BOTH),
        ),
        ({"tools": TOOLS, "tool_choice": GO}, Constraint(calls=("go",), one_call=True)),
        ({"tools": TOOLS, "parallel_tool_calls": False}, None),
        (
            {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": True},
            Constraint(calls=BOTH),
        ),
        (
            {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False},
            Constraint(calls=BOTH, one_call=True),
        ),
        (
            {"response_format": json_format(), "tools": TOOLS, "parallel_tool_calls": False},
            Constraint(schema=SCHEMA, calls=BOTH, one_call=True),
        ),
    ],
)
def test_the_constraint_on_an_answer(fields: dict[str, Any], expected: Constraint | None):
    """The format applies to answers in text; the choice decides whether text is allowed."""
    asked = command(**fields)
    assert expected == asked.constraint
    assert asked.conversation is not None
    # A named tool stays among the others, so that the prompt is the same as in other turns. So do
    # all tools when none may be called.
    assert len(fields.get("tools", ())) == len(asked.conversation.tools)
    assert (fields.get("tool_choice") != "none") == asked.conversation.calls


@pytest.mark.parametrize(
    ("fields", "ignored"),
    [
        ({"tools": TOOLS, "parallel_tool_calls": False}, True),
        ({"tools": TOOLS, "parallel_tool_calls": True}, False),
        ({"tools": TOOLS, "tool_choice": "none", "parallel_tool_calls": False}, False),
        ({"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}, False),
        ({"parallel_tool_calls": False}, False),
    ],
)
def test_one_call_at_most_is_ignored_without_a_constraint(fields: dict[str, Any], ignored: bool):
    """It is reported as ignored where several calls are still possible."""
    body = json.dumps({"messages": [{"role": "user", "content": "Hello"}], **fields}).encode()
    expected = ("parallel_tool_calls",) if ignored else ()
    assert expected == read_chat_request(body, {}, Ignored(), FACTS).ignored


def allowed(mode: Any, *names: str) -> dict[str, Any]:
    """A choice of some of the tools."""
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def test_a_choice_of_several_tools():
    """Required calls are limited to these; if calls are free, the list is reported as ignored."""
    found = read(tools=TOOLS, tool_choice=allowed("required", "go"))
    assert Constraint(calls=("go",)) == found.command.constraint
    assert () == found.ignored
    assert found.command.conversation is not None
    assert 2 == len(found.command.conversation.tools)
    found = read(tools=TOOLS, tool_choice=allowed("auto", "go"))
    assert (None, ("tool_choice.allowed_tools.tools",)) == (found.command.constraint, found.ignored)


@pytest.mark.parametrize(
    ("choice", "param"),
    [
        (allowed("some", "go"), "tool_choice.allowed_tools.mode"),
        ({"type": "allowed_tools"}, "tool_choice.allowed_tools"),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto"}},
            "tool_choice.allowed_tools.tools",
        ),
        (allowed("required", "fly"), "tool_choice"),
    ],
)
def test_a_choice_of_several_tools_that_is_none(choice: Any, param: str):
    """It is refused, and the error names the path."""
    with pytest.raises(ClientError) as caught:
        read(tools=TOOLS, tool_choice=choice)
    assert param == caught.value.param


def test_a_format_next_to_required_calls_is_reported():
    """The answer is a call, so the format has no effect and is reported as ignored."""
    asked: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required"}
    for given in (json_format(), {"type": "json_object"}):
        found = read(response_format=given, **asked)
        assert ("response_format",) == found.ignored
        assert () == read(response_format=given, tools=TOOLS).ignored
    assert () == read(response_format={"type": "text"}, **asked).ignored


def test_the_order_of_properties_is_kept():
    """Properties are written in the order of the schema."""
    constraint = command(response_format=json_format()).constraint
    assert constraint is not None
    assert constraint.schema is not None
    assert ["b", "a"] == list(constraint.schema["properties"])


@pytest.mark.parametrize(
    ("about", "tool", "param"),
    [
        ("schema", None, "response_format.json_schema.schema"),
        ("schema", (2, "look"), "tools[2].function.parameters"),
        ("calls", None, "tool_choice"),
        ("calls_beside", None, "response_format"),
        ("answer", None, "response_format"),
    ],
)
@pytest.mark.trio
async def test_a_constraint_that_is_impossible_is_the_clients_error(
    about: str, tool: tuple[int, str] | None, param: str
):
    """The error says what is wrong, and where in the body."""
    service = FakeService(refusal=FormatRefused("it is odd", about, tool))
    response = await (
        create_app(service)
        .test_client()
        .post(
            "/v1/chat/completions",
            data=json.dumps({"messages": [{"role": "user", "content": "Hello"}]}),
        )
    )
    error = json.loads(await response.get_data(as_text=True))["error"]
    assert (400, "invalid_request_error", "format_refused", param) == (
        response.status_code,
        error["type"],
        error["code"],
        error["param"],
    )
    assert f"{param}: an answer cannot be constrained to this: it is odd; " in error["message"]


@pytest.mark.trio
async def test_a_constraint_that_fails_in_mid_answer():
    """A stream ends with the error and is not done: the text so far is not JSON."""
    script = (ACCEPTED, DELTAS[0], FormatRefused("too much", "answer"))
    ask = {"messages": [{"role": "user", "content": "Hello"}], "stream": True}
    client = create_app(FakeService(script)).test_client()
    response = await client.post("/v1/chat/completions", data=json.dumps(ask))
    events = (await response.get_data(as_text=True)).strip().split("\n\n")
    last = json.loads(events[-1].removeprefix("data: "))
    assert ("format_refused", 400) == (last["error"]["code"], 400)
    assert "too much" in last["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "ignored_names"),
    [
        ({}, ("tools.strict",)),
        ({"tool_choice": "auto"}, ("tools.strict",)),
        ({"tool_choice": "none"}, ()),
        ({"tool_choice": "required"}, ()),
        ({"tool_choice": GO}, ("tools.strict",)),
        ({"response_format": json_format()}, ()),
    ],
)
def test_a_strict_tool_whose_calls_are_free_is_reported(
    fields: dict[str, Any], ignored_names: tuple[str, ...]
):
    """
    Free calls are not constrained to a schema; if calls are constrained, strict has an effect.
    """
    strict = [{"type": "function", "function": {"name": "look", "strict": True}}, GO]
    assert ignored_names == read(tools=strict, **fields).ignored


def test_a_format_beside_free_calls_is_not_the_fault_of_a_choice():
    """The hint names what the client can leave out: it did not send a choice."""
    error = describe(FormatRefused("it is odd", "calls_beside"))
    assert "send response_format without tools, or tools without it" in error.message
