"""
From a request to Anthropic's messages to a command: canonical form, parameters, ignored fields.
"""

from __future__ import annotations

import json
from typing import Any

import attrs
import pytest
import structlog

from cairn.actors.requests.messages import Generate
from cairn.engine.prompt.template import Conversation, Message, conversation_parts
from cairn.engine.sampling import Sampling
from cairn.http.messages.request import read_count_request, read_messages_request
from cairn.http.wire import placeholders as placeholders
from cairn.http.wire.checks import ClientError
from cairn.http.wire.parameters import Ignored, ReadRequest
from tests.http.fake_service import FACTS

HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
LOOK = {"name": "look", "input_schema": {"type": "object"}}
TAKEN = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
OFFERED = f"This function can be called from here on:\n{json.dumps(TAKEN)}\n"


def body_of(**fields: Any) -> bytes:
    """A body with one good message, a limit, and these fields."""
    return json.dumps({"max_tokens": 100, "messages": HELLO, **fields}).encode()


def read(headers: dict[str, str] | None = None, **fields: Any) -> ReadRequest:
    """Read a request of these fields."""
    return read_messages_request(body_of(**fields), headers or {}, Ignored(), FACTS)


def conversation(**fields: Any) -> Conversation:
    """The conversation of a request."""
    found = read(**fields).command.conversation
    assert found is not None
    return found


def said(*blocks: Any, role: str = "user") -> tuple[Message, ...]:
    """The messages that one of these blocks becomes, after a user message."""
    wire = [*HELLO, {"role": role, "content": list(blocks)}, *HELLO]
    return conversation(messages=wire, tools=[LOOK]).messages[1:-1]


def text(words: str, **more: Any) -> dict[str, Any]:
    """A block of text."""
    return {"type": "text", "text": words, **more}


def refused(**fields: Any) -> tuple[str, str | None]:
    """The code and the parameter with which a request is refused."""
    with pytest.raises(ClientError) as found:
        read(**fields)
    assert 400 == found.value.status
    return found.value.code, found.value.param


def test_plain_request():
    """
    Fields that are left out have the server's defaults; without ``thinking``, thinking is off.
    """
    assert ReadRequest(
        command=Generate(
            protocol="anthropic.messages",
            conversation=Conversation(
                messages=(Message(role="user", content="Hello"),),
                template={"enable_thinking": False},
            ),
            prompt=None,
            sampling=Sampling(),
            seed=None,
            max_tokens=100,
            requested_model="m",
        ),
        stream=False,
    ) == read(model="m")


def test_all_parameters():
    """The command has each supported parameter."""
    found = read(
        headers={"x-claude-code-session-id": "group-1"},
        model="m",
        system="Be brief.",
        stream=True,
        temperature=0,
        top_p=0.9,
        top_k=40,
        stop_sequences=["a", "b"],
        thinking={"type": "enabled", "budget_tokens": 2000},
        tools=[{**LOOK, "type": "custom", "description": "Looks."}],
        tool_choice={"type": "auto"},
        seed=7,
        cache_prompt=False,
        session_id="mine",
    )
    looks = {"name": "look", "description": "Looks.", "parameters": {"type": "object"}}
    assert (
        ReadRequest(
            command=Generate(
                protocol="anthropic.messages",
                conversation=Conversation(
                    messages=(
                        Message(role="system", content="Be brief."),
                        Message(role="user", content="Hello"),
                    ),
                    tools=({"type": "function", "function": looks},),
                    template={"enable_thinking": True},
                ),
                prompt=None,
                sampling=Sampling(temperature=0.0, top_p=0.9, top_k=40),
                seed=7,
                max_tokens=100,
                stop=("a", "b"),
                session_name="mine",
                group="group-1",
                cache_prompt=False,
                requested_model="m",
            ),
            stream=True,
            ignored=("thinking.budget_tokens",),
        )
        == found
    )


def test_null_is_absent():
    """Null means the same as leaving the parameter out."""
    names = (
        "model system stream temperature top_p top_k stop_sequences thinking tools tool_choice "
        "output_config output_format cache_control seed cache_prompt session_id metadata"
    )
    assert read() == read(**dict.fromkeys(names.split()))


@pytest.mark.parametrize(
    ("wire", "thinks"),
    [
        (None, False),
        ({"type": "disabled"}, False),
        ({"type": "adaptive"}, True),
        ({"type": "adaptive", "display": "summarized"}, True),
        ({"type": "enabled", "budget_tokens": 1024}, True),
    ],
)
def test_thinking(wire: Any, thinks: bool):
    """The template's setting follows the request; the model's other settings stay."""
    facts = attrs.evolve(FACTS, template={"enable_thinking": not thinks, "mood": "calm"})
    asked = read_messages_request(body_of(thinking=wire), {}, Ignored(), facts)
    assert asked.command.conversation is not None
    assert {"enable_thinking": thinks, "mood": "calm"} == asked.command.conversation.template


def test_only_a_count_may_leave_the_limit_out():
    """A message needs ``max_tokens``; a count of tokens does not, but accepts it."""
    assert ("missing_required_parameter", "max_tokens") == refused(max_tokens=None)
    plain = read_count_request(json.dumps({"messages": HELLO}).encode(), {}, Ignored(), FACTS)
    assert plain.command.max_tokens is None
    assert read() == read_count_request(body_of(), {}, Ignored(), FACTS)


def test_an_answer_of_no_tokens():
    """Zero is a valid limit that only prefills the prompt; no default replaces it."""
    assert 0 == read(max_tokens=0).command.max_tokens


def test_a_limit_that_is_misspelt():
    """The refusal suggests the right name."""
    with pytest.raises(ClientError) as failed:
        read(max_tokens=None, maxTokens=100)
    hint = "Did you mean `max_tokens` instead of `maxTokens`?"
    assert f"Missing required field `max_tokens`. {hint}" == failed.value.message


def test_an_answer_that_the_client_began():
    """The model continues it. One with calls is only counted: no text continues a call."""
    history = [*HELLO, {"role": "assistant", "content": "The answer is ("}]
    calls = [{"type": "tool_use", "id": "toolu_1", "name": "look", "input": {}}]
    called = [*HELLO, {"role": "assistant", "content": calls}]
    counted = read_count_request(body_of(messages=history), {}, Ignored(), FACTS).command
    begun = read(messages=history).command.conversation
    assert begun is not None
    assert (begun, True) == (counted.conversation, begun.continued)
    assert ["user", "assistant"] == [one.role for one in begun.messages]
    counted = read_count_request(body_of(messages=called), {}, Ignored(), FACTS).command
    assert counted.conversation is not None
    assert not counted.conversation.continued
    assert ("unsupported_value", "messages[1].content") == refused(messages=called)


# --- canonical form --------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["user", "assistant", "system"])
@pytest.mark.parametrize(
    "blocks",
    [
        [text("Hello")],
        [text("Hel"), text("lo")],
        [text("Hello", cache_control={"type": "ephemeral"}, citations=None)],
    ],
    ids=["one", "two", "hint"],
)
def test_content_as_string_or_blocks(role: str, blocks: list[Any]):
    """A string and text blocks are one conversation, with the same chain."""
    one = conversation(messages=[*HELLO, {"role": role, "content": "Hello"}, *HELLO])
    other = conversation(messages=[*HELLO, {"role": role, "content": blocks}, *HELLO])
    assert one == other
    assert conversation_parts(one) == conversation_parts(other)


def test_neighbours_of_one_role_stay_apart():
    """A user message without an answer stays the same when another user message follows it."""
    before = conversation_parts(conversation(messages=HELLO))
    parts = conversation_parts(conversation(messages=[*HELLO, *HELLO]))
    assert (*before, *before) == parts


def test_no_content_is_an_empty_text():
    """A list without blocks is a message with empty text."""
    assert (Message(role="user", content=""),) == said()
    assert (Message(role="assistant", content=""),) == said(role="assistant")


@pytest.mark.parametrize(
    ("system", "expected"),
    [
        ("", None),
        ([], None),
        ("A", "A"),
        ([text("A"), text("B")], "AB"),
        ("x-anthropic-billing-header: v=1; h=2;", None),
        ("x-anthropic-billing-header: v=1; h=2;\nA", "A"),
        ([text("x-anthropic-billing-header: v=1;"), text("A")], "A"),
        ([text("A\nx-anthropic-billing-header: v=1;")], "A\nx-anthropic-billing-header: v=1;"),
    ],
)
def test_the_system_prompt(system: Any, expected: str | None):
    """It comes first, without the billing header; if nothing is left, there is none."""
    first = (Message(role="system", content=expected),) if expected is not None else ()
    assert (*first, Message(role="user", content="Hello")) == conversation(system=system).messages


def test_an_assistants_blocks():
    """
    Reasoning, text and calls are read separately; sealed reasoning of other models is left out.
    """
    assert (
        Message(
            role="assistant",
            content="I look.\nDone.",
            reasoning="Hm. So.",
            tool_calls=(
                {
                    "id": "toolu_1",
                    "type": "function",
                    "function": {"name": "look", "arguments": {"city": "Öslo"}},
                },
            ),
        ),
    ) == said(
        {"type": "thinking", "thinking": "Hm.", "signature": "unsigned"},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "thinking", "thinking": " So.", "signature": ""},
        text("I look."),
        {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"city": "Öslo"}},
        text("\nDone."),
        role="assistant",
    )


@pytest.mark.parametrize(
    "given", [{"a": 2**70}, {"a": json.loads("[" * 80 + "]" * 80)}], ids=["big", "deep"]
)
def test_a_call_that_templates_cannot_take_as_an_object(given: dict[str, Any]):
    """Its arguments stay text: the model wrote them, so they must not end the conversation."""
    (found,) = said(
        {"type": "tool_use", "id": "1", "name": "look", "input": given}, role="assistant"
    )
    (call,) = found.tool_calls
    assert given == json.loads(call["function"]["arguments"])


def test_a_call_with_arguments_of_any_depth():
    """They stay text, or the body is refused as nested too deeply; nothing else is raised."""
    ends = set()
    for depth in range(900, 1001):
        given = b'{"a":' * depth + b"1" + b"}" * depth
        block = b'{"type":"tool_use","id":"1","name":"look","input":%s}' % given
        messages = b'[{"role":"user","content":"a"},{"role":"assistant","content":[%s]}]' % block
        body = b'{"max_tokens":1,"messages":%s}' % messages
        try:
            read_count_request(body, {}, Ignored(), FACTS)
        except ClientError as error:
            ends.add(error.message)
    where = "messages[1].content[0].input"
    assert ends <= {"the body is nested too deeply", f"{where} is nested too deeply"}


def user(*blocks: Any) -> list[Any]:
    """The only message with these blocks."""
    return [{"role": "user", "content": list(blocks)}]


def result(content: Any, **more: Any) -> dict[str, Any]:
    """A block of a tool's result."""
    return {"type": "tool_result", "tool_use_id": "toolu_1", "content": content, **more}


PDF = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf"}}


@pytest.mark.parametrize(
    ("blocks", "expected", "ignored"),
    [
        (
            [text("A map: "), {"type": "image", "source": {"type": "base64", "data": "AAAA"}}],
            f"A map: {placeholders.IMAGE}",
            ("messages.image",),
        ),
        ([PDF, text(" Read.")], f"{placeholders.DOCUMENT} Read.", ("messages.document",)),
        (
            [{"type": "document", "source": {"type": "text", "data": "Words."}}],
            "Words.\n",
            (),
        ),
        (
            [text("Open: "), {"type": "browser_state", "tabs": [{"tab_id": "1"}]}],
            f"Open: {placeholders.UNKNOWN}",
            ("messages.browser_state",),
        ),
        ([{"type": "tool_use", "name": "x"}], placeholders.UNKNOWN, ("messages.tool_use",)),
    ],
)
def test_what_a_tool_returned_does_not_end_the_conversation(
    blocks: list[Any], expected: str, ignored: tuple[str, ...]
):
    """A constant text replaces what is not text, and the answer reports it as ignored."""
    asked = read(messages=user(result(blocks)))
    assert asked.command.conversation is not None
    assert [expected] == [one.content for one in asked.command.conversation.messages]
    assert ignored == asked.ignored


IMAGE = {"type": "image", "source": {"type": "base64", "data": "AAAA"}}
READ_RESULT = result("PDF file read")


@pytest.mark.parametrize(
    "turn",
    [
        [user(READ_RESULT), user(PDF)],
        [user(READ_RESULT), user(PDF), user(IMAGE)],
        [user(READ_RESULT, PDF)],
        [user(IMAGE, READ_RESULT)],
        [user(READ_RESULT), [{"role": "system", "content": "Be brief."}], user(IMAGE)],
    ],
    ids=["after it", "both after it", "next to it", "before it", "after a system's"],
)
def test_pages_that_come_along_with_a_result(turn: list[list[Any]]):
    """
    Pages that a client puts into the user message are treated like pages in the tool's result.
    """
    messages = [message for part in turn for message in part]
    asked = read(messages=[*HELLO, *messages])
    assert asked.command.conversation is not None
    kinds = {"image": placeholders.IMAGE, "document": placeholders.DOCUMENT}
    sent = [
        block["type"]
        for message in messages
        if message["role"] == "user"
        for block in message["content"]
        if block["type"] in kinds
    ]
    users = [one.content for one in asked.command.conversation.messages if one.role == "user"]
    assert ["Hello", *(kinds[kind] for kind in sent)] == users
    assert tuple(sorted(f"messages.{kind}" for kind in sent)) == asked.ignored


def test_pages_that_are_a_users_own():
    """After the next assistant message, or without a result, they are refused."""
    said = {"role": "assistant", "content": "I see."}
    for block in (PDF, IMAGE):
        assert "unsupported_content" == refused(messages=[*HELLO, *user(block)])[0]
        own = [*HELLO, *user(READ_RESULT), said, *user(block)]
        assert "unsupported_content" == refused(messages=own)[0]
        own = [*HELLO, *user(block), *user(READ_RESULT)]
        assert "unsupported_content" == refused(messages=own)[0]


@pytest.mark.parametrize(("block", "kind"), [(PDF, "document"), (IMAGE, "image")])
def test_pages_in_a_turn_that_was_answered(block: Any, kind: str):
    """A constant text replaces them, and the answer reports them as ignored."""
    said = {"role": "assistant", "content": "I see."}
    asked = read(messages=[*user(block), said, *HELLO])
    assert asked.command.conversation is not None
    stood_in = {"image": placeholders.IMAGE, "document": placeholders.DOCUMENT}[kind]
    assert stood_in == asked.command.conversation.messages[0].content
    assert (f"messages.{kind}",) == asked.ignored


def test_blocks_that_are_shown_to_no_model():
    """They become nothing, and the answer reports them as ignored."""
    blocks = [
        {"type": "mcp_tool_listing", "mcp_server_name": "s", "tools": [{"name": "look"}]},
        text("It "),
        {"type": "fallback", "from": {"model": "a"}, "to": {"model": "b"}},
        text("rains."),
    ]
    asked = read(messages=[*HELLO, {"role": "assistant", "content": blocks}, *HELLO])
    assert asked.command.conversation is not None
    assert "It rains." == asked.command.conversation.messages[1].content
    assert ("messages.fallback", "messages.mcp_tool_listing") == asked.ignored


def test_a_conversation_with_the_tools_of_a_server_goes_on():
    """Constant texts replace the blocks of another server's tools, whatever they contain."""

    def talk(data: str) -> ReadRequest:
        call = {
            "type": "server_tool_use",
            "id": "srv_1",
            "name": "web_search",
            "input": {"q": data},
        }
        found = {"type": "web_search_result", "url": "u", "title": data, "encrypted_content": data}
        shared = {"tool_use_id": "srv_1"}
        blocks = [
            {"type": "compaction", "content": data},
            call,
            {"type": "web_search_tool_result", "content": [found], **shared},
            {
                "type": "code_execution_tool_result",
                "content": {"type": "code_execution_result", "stdout": data},
                **shared,
            },
            {"type": "mcp_tool_use", "id": "m", "name": "n", "server_name": "s", "input": {}},
            {"type": "mcp_tool_result", "content": [text(data)], **shared},
            text("So it rains."),
        ]
        answer = {"role": "assistant", "content": blocks}
        late = {"role": "user", "content": [blocks[2], text("And then?")]}
        return read(messages=[*HELLO, answer, late])

    one, other = talk("rain"), talk("snow")
    assert one.command.conversation is not None
    assert one.command.conversation == other.command.conversation
    _, answer, late = one.command.conversation.messages
    assert answer.content.endswith(f"{placeholders.of_server_tools('x_tool_result')}So it rains.")
    assert late.content == f"{placeholders.of_server_tools('x_tool_result')}And then?"
    assert (
        "messages.code_execution_tool_result",
        "messages.compaction",
        "messages.mcp_tool_result",
        "messages.mcp_tool_use",
        "messages.server_tool_use",
        "messages.web_search_tool_result",
    ) == one.ignored


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        (result("Rain."), "Rain."),
        (result([text("Rain"), text(".")]), "Rain."),
        (result([]), ""),
        (result(None), ""),
        (result("No city.", is_error=True), "Error: No city."),
        (result("Rain.", is_error=False), "Rain."),
        (result([{"type": "tool_reference", "tool_name": "look"}]), OFFERED),
        (
            result(
                [
                    {
                        "type": "search_result",
                        "title": "Rain",
                        "source": "x.org",
                        "content": [text("It "), text("rains.")],
                    }
                ]
            ),
            "Rain\nx.org\nIt rains.\n",
        ),
    ],
)
def test_a_tools_result(block: dict[str, Any], expected: str):
    """It becomes a tool message; a failure is marked in the text."""
    assert (Message(role="tool", content=expected, tool_call_id="toolu_1"),) == said(block)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ({"type": "text", "media_type": "text/plain", "data": "Words."}, "Words."),
        ({"type": "content", "content": "Words."}, "Words."),
        ({"type": "content", "content": [text("Wor"), text("ds.")]}, "Words."),
    ],
)
def test_a_document_of_text(source: Any, expected: str):
    """Its title, context and text are on lines of their own."""
    block = {"type": "document", "source": source, "title": "Notes", "context": "Old ones."}
    assert (Message(role="user", content=f"Notes\nOld ones.\n{expected}\nAnd?"),) == said(
        block, text("And?")
    )


def test_a_users_message_of_several_kinds():
    """Results, text and system text become messages of their own, in the order of the blocks."""
    roles = [
        (one.role, one.content)
        for one in said(
            text("First. "),
            text("Second."),
            result("Rain."),
            result("Sun."),
            text("Third."),
            {"type": "mid_conv_system", "content": [text("Be brief.")]},
            text("Fourth."),
        )
    ]
    assert [
        ("user", "First. Second."),
        ("tool", "Rain."),
        ("tool", "Sun."),
        ("user", "Third."),
        ("system", "Be brief."),
        ("user", "Fourth."),
    ] == roles


# --- tools -----------------------------------------------------------------------------------


def test_hints_of_tools_are_no_part_of_them():
    """Fields about caching, streaming and callers are not in the prompt."""
    hints = {
        "cache_control": {"type": "ephemeral"},
        "eager_input_streaming": True,
        "allowed_callers": ["direct"],
        "type": "custom",
        "strict": False,
    }
    hinted = read(tools=[{**LOOK, **hints}])
    assert 300 == hinted.command.least_ttl_s
    command = attrs.evolve(hinted.command, least_ttl_s=0)
    assert read(tools=[LOOK]) == attrs.evolve(hinted, command=command)


def test_tools_that_others_run_are_left_out():
    """
    Tools that run on the server, and those that only other models know, are reported as ignored.
    """
    found = read(
        tools=[
            {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
            LOOK,
            {"type": "bash_20250124", "name": "bash"},
        ]
    )
    assert found.command.conversation is not None
    assert (TAKEN,) == found.command.conversation.tools
    assert ("tools.bash_20250124", "tools.web_search_20250305") == found.ignored


def test_no_choice_of_tools_leaves_the_prompt_as_it_is():
    """Tools that may not be called stay in the prompt, also in messages that name them."""
    asked: dict[str, Any] = {
        "tools": [LOOK, {**LOOK, "name": "later", "defer_loading": True}],
        "messages": [
            {
                "role": "user",
                "content": [result([{"type": "tool_reference", "tool_name": "later"}])],
            }
        ],
    }
    with_tools = conversation(**asked)
    without = conversation(**asked, tool_choice={"type": "none"})
    assert attrs.evolve(with_tools, calls=False) == without
    assert ["later"] == [tool["function"]["name"] for tool in with_tools.loaded_tools]


def test_a_deferred_tool_is_on_offer_where_it_is_named():
    """
    It is not in the tools of the prompt; a result that names it contains its definition as text.
    """
    later = {**LOOK, "defer_loading": True}
    unnamed = conversation(tools=[later])
    assert ((), ()) == (unnamed.tools, unnamed.loaded_tools)
    wire = {
        "role": "user",
        "content": [result([{"type": "tool_reference", "tool_name": "look"}])],
    }
    named = conversation(tools=[later], messages=[wire])
    assert ((), (TAKEN,)) == (named.tools, named.loaded_tools)
    assert OFFERED == named.messages[0].content
    assert () == conversation(tools=[LOOK], messages=[wire]).loaded_tools


def addition(**tool: Any) -> dict[str, Any]:
    """A block that adds a tool."""
    return {"type": "tool_addition", "tool": tool}


def test_tools_that_the_system_adds_and_takes_away():
    """Additions, by name or by definition, and removals become text in the system message."""
    withdrawn = "This function cannot be called any more: look\n"
    definition = {**LOOK, "description": "Looks.", "cache_control": {"type": "ephemeral"}}
    looks = {"name": "look", "description": "Looks.", "parameters": {"type": "object"}}
    new = {"type": "function", "function": looks}
    found = conversation(
        tools=[{**LOOK, "defer_loading": True}],
        messages=[
            *HELLO,
            {"role": "system", "content": [addition(type="tool_reference", name="look")]},
            {
                "role": "system",
                "content": [
                    {
                        "type": "tool_removal",
                        "tool": {"type": "tool_reference", "name": "look"},
                    },
                    text("Better: "),
                    addition(type="tool_definition", definition=definition),
                ],
            },
        ],
    )
    assert [
        "Hello",
        OFFERED,
        f"{withdrawn}Better: This function can be called from here on:\n{json.dumps(new)}\n",
    ] == [message.content for message in found.messages]
    assert (new,) == found.loaded_tools


# --- what is ignored, and what is refused ----------------------------------------------------

ASIDE = [{"role": "user", "content": [text("Hello", cache_control={"type": "ephemeral"})]}]


@pytest.mark.parametrize(
    ("switches", "fields", "ignored_names"),
    [
        ({"enable_thinking"}, {"thinking": {"type": "enabled"}}, ()),
        (set(), {"thinking": {"type": "enabled"}}, ("thinking",)),
        (set(), {"thinking": {"type": "disabled"}}, ("thinking",)),
        ({"reasoning_effort"}, {"thinking": {"type": "adaptive"}}, ("thinking",)),
        (set(), {"thinking": None}, ()),
        (set(), {}, ()),
    ],
)
def test_thinking_that_the_template_has_no_switch_for(
    switches: set[str], fields: Any, ignored_names: tuple[str, ...]
):
    """It is reported as ignored, in a message and in a count."""
    facts = attrs.evolve(FACTS, switches=frozenset(switches))
    for reads in (read_messages_request, read_count_request):
        assert ignored_names == reads(body_of(**fields), {}, Ignored(), facts).ignored


HOUR = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
AGE = {"cache_control": {"type": "ephemeral", "ttl": "1 age"}}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"cache_control": {"type": "ephemeral"}, "messages": ASIDE}, ()),
        (HOUR, ()),
        (AGE, ("cache_control.ttl",)),
        ({"system": [text("A", **AGE)]}, ("cache_control.ttl",)),
        ({"tools": [{**LOOK, **AGE}]}, ("cache_control.ttl",)),
        (
            {"messages": [{"role": "user", "content": [result([text("x", **AGE)])]}]},
            ("cache_control.ttl",),
        ),
        ({"thinking": {"type": "adaptive", "display": "omitted"}}, ("thinking.display",)),
        (
            {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
            ("tool_choice.disable_parallel_tool_use",),
        ),
        (
            {"output_config": {"effort": "low", "task_budget": {"total": 9}}},
            ("output_config.effort", "output_config.task_budget"),
        ),
        (
            {"tools": [{**LOOK, "strict": True, "input_examples": [{}]}]},
            ("tools.input_examples", "tools.strict"),
        ),
        (
            {"context_management": {"edits": []}, "metadata": {"user_id": "me"}, "speed": "fast"},
            ("context_management", "metadata", "speed"),
        ),
    ],
)
def test_what_is_ignored_is_reported(fields: dict[str, Any], expected: tuple[str, ...]):
    """
    Cache hints are always followed, and their TTL if it is 5m or 1h; others are reported as
    ignored.
    """
    assert expected == read(**fields).ignored


@pytest.mark.parametrize(
    ("fields", "least_s"),
    [
        ({}, 0),
        ({"messages": ASIDE}, 300),
        ({"messages": ASIDE, "system": [text("A", **HOUR)]}, 3600),
        ({"tools": [{**LOOK, **HOUR}], "cache_control": {"type": "ephemeral"}}, 3600),
        (AGE, 300),
    ],
)
def test_the_ttl_of_a_hint(fields: dict[str, Any], least_s: int):
    """
    The longest of all hints applies; five minutes for one without a TTL. It is only a minimum.
    """
    command = read(**fields).command
    assert (least_s, None) == (command.least_ttl_s, command.ttl_s)


def test_each_ignored_name_is_logged_once():
    """The log has only names that no earlier answer reported."""
    ignored = Ignored()
    with structlog.testing.capture_logs() as logs:
        for _ in range(2):
            read_messages_request(body_of(speed="fast", **AGE), {}, ignored, FACTS)
    assert ["cache_control.ttl", "speed"] == [entry["parameter"] for entry in logs]


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"messages": []}, "invalid_value", "messages"),
        ({"messages": None}, "invalid_type", "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "invalid_value", "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "missing_required_parameter", "messages[0].content"),
        (
            {"messages": user({"type": "image", "source": {"type": "base64"}})},
            "unsupported_content",
            "messages[0].content[0].type",
        ),
        (
            {"messages": user(text("x"), {"type": "document", "source": {"type": "base64"}})},
            "unsupported_content",
            "messages[0].content[1].source",
        ),
        (
            {"messages": user({"type": "document", "title": "Notes"})},
            "missing_required_parameter",
            "messages[0].content[0].source",
        ),
        (
            {"messages": user(result("x"), {"type": "container_upload"})},
            "unsupported_content",
            "messages[0].content[1].type",
        ),
        (
            {"messages": user(result({"type": "text", "text": "x"}))},
            "invalid_type",
            "messages[0].content[0].content",
        ),
        (
            {"messages": user({"type": "thinking", "thinking": "x"})},
            "unsupported_content",
            "messages[0].content[0].type",
        ),
        (
            {"messages": user({"type": "text"})},
            "missing_required_parameter",
            "messages[0].content[0].text",
        ),
        (
            {"messages": user({"type": "tool_result", "content": "x"})},
            "missing_required_parameter",
            "messages[0].content[0].tool_use_id",
        ),
        (
            {"messages": user(result([{"type": "tool_reference", "tool_name": "gone"}]))},
            "invalid_value",
            "messages[0].content[0].content[0].tool_name",
        ),
        (
            {"messages": [*HELLO, {"role": "system", "content": [addition(type="mcp_toolset")]}]},
            "unsupported_value",
            "messages[1].content[0].tool",
        ),
        (
            {
                "messages": [
                    *HELLO,
                    {
                        "role": "system",
                        "content": [addition(type="tool_definition", definition={"name": 1})],
                    },
                ]
            },
            "invalid_type",
            "messages[1].content[0].tool.definition",
        ),
        ({"system": [{"type": "image"}]}, "unsupported_content", "system[0].type"),
        ({"system": 1}, "invalid_type", "system"),
        ({"max_tokens": -1}, "invalid_value", "max_tokens"),
        ({"max_tokens": "x"}, "invalid_type", "max_tokens"),
        ({"temperature": -1}, "invalid_value", "temperature"),
        ({"top_k": -2}, "invalid_value", "top_k"),
        ({"stop_sequences": [""]}, "invalid_value", "stop_sequences"),
        ({"stop_sequences": ["x"] * 65}, "invalid_value", "stop_sequences"),
        ({"thinking": {"type": "much"}}, "invalid_value", "thinking.type"),
        ({"thinking": {}}, "missing_required_parameter", "thinking.type"),
        ({"tool_choice": {"type": "some"}}, "invalid_value", "tool_choice.type"),
        ({"tool_choice": "auto"}, "invalid_type", "tool_choice"),
        ({"tools": [{"input_schema": {}}]}, "missing_required_parameter", "tools[0].name"),
        ({"tools": [{"name": "", "input_schema": {}}]}, "invalid_value", "tools[0].name"),
        ({"tools": [{"name": "x"}]}, "missing_required_parameter", "tools[0].input_schema"),
        (
            {"tools": [{"name": "x", "input_schema": {"a": 2**70}}]},
            "invalid_value",
            "tools[0].input_schema",
        ),
        ({"session_id": ""}, "invalid_value", "session_id"),
        ({"model": "x" * 201}, "invalid_value", "model"),
    ],
)
def test_what_cannot_be_used_is_refused(fields: dict[str, Any], code: str, param: str):
    """The refusal names the path."""
    assert (code, param) == refused(**fields)


def nested(depth: int) -> bytes:
    """A body of results within results."""
    inner = '{"type": "tool_result", "tool_use_id": "1", "content": [' * depth
    return (
        f'{{"max_tokens": 1, "messages": [{{"role": "user", "content": [{inner}{"]}" * depth}]}}]}}'
    ).encode()


def test_results_within_results():
    """A block within a result that cannot be part of one is replaced, at any depth."""
    asked = read_messages_request(nested(300), {}, Ignored(), FACTS)
    assert asked.command.conversation is not None
    assert [placeholders.UNKNOWN] == [one.content for one in asked.command.conversation.messages]


def test_a_body_that_is_nested_too_deep():
    """A body that is nested too deeply to be read is refused."""
    with pytest.raises(ClientError) as found:
        read_messages_request(nested(100_000), {}, Ignored(), FACTS)
    assert "invalid_json" == found.value.code
