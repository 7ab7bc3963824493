"""Constraints on answers to Anthropic's clients: from the wire, and errors in them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cairn.actors.errors import FormatRefused
from cairn.engine.answer.grammar import Constraint
from cairn.http.app import create_app
from tests.http.fake_service import ACCEPTED, DELTAS, FakeService
from tests.http.messages.test_request import HELLO, OFFERED, body_of, read, refused, result

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"b": {}, "a": {}}}
FORMAT: dict[str, Any] = {"type": "json_schema", "schema": SCHEMA}
CONFIG: dict[str, Any] = {"output_config": {"format": FORMAT}}
HELD = Constraint(schema=SCHEMA, strict=True)


def tool(name: str, **more: Any) -> dict[str, Any]:
    """A tool."""
    return {"name": name, "input_schema": {"type": "object"}, **more}


TOOLS = [tool("look"), tool("bash", type="bash_20250124"), tool("go")]
BOTH = ("look", "go")
ONE: dict[str, Any] = {"disable_parallel_tool_use": True}
LATER: dict[str, Any] = {
    "tools": [tool("look"), tool("later", defer_loading=True), tool("never", defer_loading=True)],
    "messages": [
        {"role": "user", "content": [result([{"type": "tool_reference", "tool_name": "later"}])]}
    ],
}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"tools": TOOLS}, None),
        ({"tools": TOOLS, "tool_choice": {"type": "auto", **ONE}}, None),
        ({"tools": TOOLS, "tool_choice": {"type": "none"}}, None),
        ({"output_config": {"effort": "low"}}, None),
        (CONFIG, HELD),
        ({"output_format": FORMAT}, HELD),
        ({**CONFIG, "tools": TOOLS}, Constraint(schema=SCHEMA, strict=True, calls=BOTH)),
        (
            {**CONFIG, "tools": TOOLS, "tool_choice": {"type": "auto", **ONE}},
            Constraint(schema=SCHEMA, strict=True, calls=BOTH, one_call=True),
        ),
        ({**CONFIG, "tools": TOOLS, "tool_choice": {"type": "none"}}, HELD),
        ({"tools": TOOLS, "tool_choice": {"type": "any"}}, Constraint(calls=BOTH)),
        ({**CONFIG, "tools": TOOLS, "tool_choice": {"type": "any"}}, Constraint(calls=BOTH)),
        (
            {"tools": TOOLS, "tool_choice": {"type": "any", **ONE}},
            Constraint(calls=BOTH, one_call=True),
        ),
        (
            {"tools": TOOLS, "tool_choice": {"type": "tool", "name": "go"}},
            Constraint(calls=("go",), one_call=True),
        ),
        ({**LATER, "tool_choice": {"type": "any"}}, Constraint(calls=("look", "later"))),
        (
            {**LATER, "tool_choice": {"type": "tool", "name": "later"}},
            Constraint(calls=("later",), one_call=True),
        ),
    ],
)
def test_the_constraint_on_an_answer(fields: dict[str, Any], expected: Constraint | None):
    """The format applies to answers in text; the choice decides whether text is allowed."""
    asked = read(**fields)
    assert expected == asked.command.constraint
    assert asked.command.conversation is not None
    # A named tool stays among the others, so that the prompt is the same as in other turns. So do
    # all tools when none may be called.
    choice = fields.get("tool_choice", {"type": "auto"})["type"]
    shown = [tool["function"]["name"] for tool in asked.command.conversation.tools]
    known = [one["name"] for one in fields.get("tools", []) if one["name"] in BOTH]
    assert known == shown
    assert (choice != "none") == asked.command.conversation.calls


def test_a_tool_that_was_withdrawn_is_none_that_has_to_be_called():
    """The last mention of a tool counts: one that is offered again may be called again."""
    named = {"type": "tool_reference", "name": "look"}
    removal, addition = (
        {"type": kind, "tool": named} for kind in ("tool_removal", "tool_addition")
    )
    for words, calls in (((removal,), ("go",)), ((removal, addition), BOTH)):
        found = read(
            messages=[*HELLO, {"role": "system", "content": words}],
            tools=TOOLS,
            tool_choice={"type": "any"},
        )
        assert Constraint(calls=calls) == found.command.constraint
        assert found.command.conversation is not None
        assert 2 == len(found.command.conversation.tools)


def test_one_call_at_most_is_ignored_without_a_constraint():
    """Only a constrained answer can be limited to one call."""
    names = ("tool_choice.disable_parallel_tool_use",)
    asked: dict[str, Any] = {"tools": [tool("look")], "tool_choice": {"type": "auto", **ONE}}
    assert names == read(**asked).ignored
    assert () == read(**asked, **CONFIG).ignored
    choice = {"type": "any", **ONE}
    assert () == read(tools=[tool("look")], tool_choice=choice).ignored


def test_a_format_next_to_required_calls_is_reported():
    """The answer is a call, so the format has no effect and is reported as ignored."""
    asked: dict[str, Any] = {"tools": TOOLS[:1], "tool_choice": {"type": "any"}}
    assert ("output_config.format",) == read(**asked, **CONFIG).ignored
    assert ("output_format",) == read(**asked, output_format=FORMAT).ignored
    assert () == read(tools=TOOLS[:1], output_format=FORMAT).ignored


def test_a_strict_tool():
    """
    Its calls are constrained if they are required; otherwise ``strict`` is reported as ignored.
    """
    asked: dict[str, Any] = {"tools": [tool("look", strict=True), tool("go", strict=False)]}
    free, held = read(**asked), read(**asked, tool_choice={"type": "any"})
    for found in (free, held):
        assert found.command.conversation is not None
        functions = [one["function"] for one in found.command.conversation.tools]
        assert [True, None] == [function.get("strict") for function in functions]
    assert (("tools.strict",), ()) == (free.ignored, held.ignored)
    assert () == read(**asked, **CONFIG).ignored
    other = {"type": "tool", "name": "go"}
    assert ("tools.strict",) == read(**asked, tool_choice=other).ignored


def test_the_order_of_properties_is_kept():
    """Properties are written in the order of the schema."""
    constraint = read(**CONFIG).command.constraint
    assert constraint is not None
    assert constraint.schema is not None
    assert ["b", "a"] == list(constraint.schema["properties"])


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"tool_choice": {"type": "any"}}, "invalid_value", "tool_choice"),
        (
            {"tools": [tool("x", type="bash_1")], "tool_choice": {"type": "any"}},
            "invalid_value",
            "tool_choice",
        ),
        (
            {"tools": TOOLS, "tool_choice": {"type": "tool", "name": "bash"}},
            "invalid_value",
            "tool_choice.name",
        ),
        (
            {**LATER, "tool_choice": {"type": "tool", "name": "never"}},
            "invalid_value",
            "tool_choice.name",
        ),
        (
            {"tools": TOOLS, "tool_choice": {"type": "tool"}},
            "missing_required_parameter",
            "tool_choice.name",
        ),
        (
            {"tools": TOOLS, "tool_choice": {"type": "tool", "name": 1}},
            "invalid_type",
            "tool_choice.name",
        ),
        (
            {"output_config": {"format": {"type": "regex"}}},
            "unsupported_value",
            "output_config.format.type",
        ),
        ({"output_format": {}}, "unsupported_value", "output_format.type"),
        (
            {"output_config": {"format": {"type": "json_schema"}}},
            "missing_required_parameter",
            "output_config.format.schema",
        ),
        (
            {"output_format": {"type": "json_schema", "schema": "{}"}},
            "invalid_type",
            "output_format.schema",
        ),
        (
            {"output_format": {"type": "json_schema", "schema": {"a": 2**70}}},
            "invalid_value",
            "output_format.schema",
        ),
        ({**CONFIG, "output_format": FORMAT}, "invalid_value", "output_format"),
    ],
)
def test_a_constraint_that_is_invalid(fields: dict[str, Any], code: str, param: str):
    """A required call without a tool, or an unknown format, is refused with its path."""
    assert (code, param) == refused(**fields)


@pytest.mark.parametrize(
    ("about", "tool", "param"),
    [
        ("schema", None, "output_config.format.schema"),
        ("schema", (2, "look"), "tools.look.input_schema"),
        ("calls", None, "tool_choice"),
        ("answer", None, "output_config.format"),
    ],
)
@pytest.mark.trio
async def test_a_constraint_that_is_impossible_is_the_clients_error(
    about: str, tool: tuple[int, str] | None, param: str
):
    """The error says what is wrong, and where in the body; a tool is identified by its name."""
    service = FakeService(refusal=FormatRefused("it is odd", about, tool))
    response = await create_app(service).test_client().post("/v1/messages", data=body_of())
    error = json.loads(await response.get_data(as_text=True))["error"]
    assert (400, "invalid_request_error", "format_refused", param) == (
        response.status_code,
        error["type"],
        error["code"],
        error["param"],
    )
    assert error["message"].startswith(
        f"{param}: an answer cannot be constrained to this: it is odd; "
    )
    assert "response_format" not in error["message"]


@pytest.mark.trio
async def test_a_constraint_that_fails_in_mid_answer():
    """A stream ends with the error and no end event: the text so far is not JSON."""
    script = (ACCEPTED, DELTAS[0], FormatRefused("too much", "answer"))
    client = create_app(FakeService(script)).test_client()
    response = await client.post("/v1/messages", data=body_of(stream=True))
    events = (await response.get_data(as_text=True)).strip().split("\n\n")
    last = json.loads(events[-1].partition("\ndata: ")[2])
    assert ("error", "format_refused") == (last["type"], last["error"]["code"])
    assert "too much" in last["error"]["message"]


# --- limits on a request ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": HELLO * 10_001}, "messages"),
        (
            {"messages": [{"role": "user", "content": [result("x")] * 6000}] * 2},
            "messages",
        ),
        ({"tools": [tool("look")] * 1025}, "tools"),
        (
            {
                "messages": [
                    *HELLO,
                    {
                        "role": "assistant",
                        "content": [{"type": "tool_use", "name": "look", "input": {}}] * 1025,
                    },
                    *HELLO,
                ]
            },
            "messages[1].content",
        ),
    ],
    ids=["messages", "results", "tools", "calls"],
)
def test_too_many(fields: dict[str, Any], param: str):
    """A request over one of the server's limits is refused as in the other protocol."""
    assert ("invalid_value", param) == refused(**fields)


def test_a_tool_that_is_named_again_and_again():
    """
    A few bytes can name a long definition; all of them together may not be longer than a body.
    """
    long = {"description": "x" * (1 << 20), "defer_loading": True}
    named = {"type": "tool_reference", "tool_name": "look"}
    asked: Any = {"tools": [tool("look", **long)]}
    times = (32 << 20) // (len(OFFERED) + (1 << 20))
    for count in (times, times + 1):
        content = [result([named] * count)]
        asked["messages"] = [{"role": "user", "content": content}]
        if count == times:
            assert read(**asked).command.conversation is not None
    assert ("invalid_value", f"messages[0].content[0].content[{times}]") == refused(**asked)
