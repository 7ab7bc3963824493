"""From a chat request's bytes to a command: canonical form, parameters, headers."""

from __future__ import annotations

import json
from typing import Any

import attrs
import pytest
import structlog

from cairn.actors.requests.messages import Generate
from cairn.engine.prompt.template import Conversation, Message, conversation_parts
from cairn.engine.sampling import Sampling
from cairn.http.chat_completions.request import ChatRequest, read_chat_request
from cairn.http.wire import placeholders as placeholders
from cairn.http.wire.checks import ClientError
from cairn.http.wire.parameters import Ignored
from tests.http.fake_service import FACTS

HELLO = [{"role": "user", "content": "Hello"}]


def read(headers: dict[str, str] | None = None, **fields: Any) -> ChatRequest:
    """Read a request of these fields."""
    body = json.dumps({"messages": HELLO, **fields}).encode()
    return read_chat_request(body, headers or {}, Ignored(), FACTS)


def command(**fields: Any) -> Generate:
    """The command of a request."""
    return read(**fields).command


def message(**fields: Any) -> Message:
    """The only message of a request, in canonical form."""
    conversation = command(messages=[fields]).conversation
    assert conversation is not None
    (only,) = conversation.messages
    return only


def test_plain_request():
    """Fields that are left out have the server's defaults."""
    assert ChatRequest(
        command=Generate(
            protocol="openai.chat",
            conversation=Conversation(messages=(Message(role="user", content="Hello"),)),
            prompt=None,
            sampling=Sampling(),
            seed=None,
            max_tokens=None,
            requested_model="m",
        ),
        stream=False,
        include_usage=False,
    ) == read(model="m")


def test_all_parameters():
    """The command has each supported parameter."""
    asked = read(
        headers={"x-session-id": "group-1"},
        model="m",
        stream=True,
        stream_options={"include_usage": True},
        temperature=0,
        top_p=0.9,
        top_k=40,
        min_p=0.05,
        repetition_penalty=1.1,
        presence_penalty=-1,
        frequency_penalty=0.5,
        logit_bias={"7": -100, "0": 1.5},
        seed=7,
        max_tokens=10,
        max_completion_tokens=20,
        stop=["a", "b"],
        logprobs=True,
        top_logprobs=5,
        n=1,
        tools=[{"type": "function", "function": {"name": "f"}}],
        tool_choice="auto",
        chat_template_kwargs={"style": "plain"},
        enable_thinking=False,
        cache_prompt=False,
        session_id="mine",
    )
    assert (
        ChatRequest(
            command=Generate(
                protocol="openai.chat",
                conversation=Conversation(
                    messages=(Message(role="user", content="Hello"),),
                    tools=({"type": "function", "function": {"name": "f"}},),
                    template={"style": "plain", "enable_thinking": False},
                ),
                prompt=None,
                sampling=Sampling(
                    temperature=0.0,
                    top_p=0.9,
                    top_k=40,
                    min_p=0.05,
                    repetition_penalty=1.1,
                    presence_penalty=-1.0,
                    frequency_penalty=0.5,
                    logit_bias=((0, 1.5), (7, -100.0)),
                ),
                seed=7,
                max_tokens=20,
                stop=("a", "b"),
                top_logprobs=5,
                session_name="mine",
                group="group-1",
                cache_prompt=False,
                requested_model="m",
            ),
            stream=True,
            include_usage=True,
        )
        == asked
    )


@pytest.mark.parametrize(
    ("fields", "field", "expected"),
    [
        ({"max_tokens": -1}, "max_tokens", None),
        ({"max_tokens": 5, "max_completion_tokens": -1}, "max_tokens", None),
        ({"stop": ""}, "stop", ()),
        ({"stop": ["", "a", "", "b", "c", "d"]}, "stop", ("a", "b", "c", "d")),
        ({"top_k": -1}, "sampling", Sampling()),
        ({"top_p": 0}, "sampling", Sampling(top_k=1)),
        ({"top_p": 0.0, "top_k": 40}, "sampling", Sampling(top_k=1)),
    ],
)
def test_values_of_other_servers(fields: dict[str, Any], field: str, expected: object):
    """Values that other servers take mean what they mean there."""
    assert expected == getattr(read(**fields).command, field)


BEGUN = [{"role": "user", "content": "Say."}, {"role": "assistant", "content": "The stone is"}]


def test_an_answer_that_the_client_began():
    """A field says that the answer continues the last message, or the message itself does."""
    fields: dict[str, Any]
    for fields in (
        {"messages": BEGUN, "continue_final_message": True, "add_generation_prompt": False},
        {"messages": [BEGUN[0], {**BEGUN[1], "prefix": True}]},
    ):
        asked = read(**fields)
        assert asked.command.conversation is not None
        assert (True, ()) == (asked.command.conversation.continued, asked.ignored)
    others: tuple[dict[str, Any], ...] = (
        {"messages": BEGUN},
        {"messages": BEGUN, "continue_final_message": False},
        {"messages": [{**BEGUN[1], "prefix": True}, BEGUN[0]]},
    )
    for fields in others:
        found = read(**fields).command.conversation
        assert found is not None
        assert not found.continued
    assert ("add_generation_prompt",) == read(add_generation_prompt=False).ignored


def test_null_is_absent():
    """Null means the same as leaving the parameter out."""
    names = (
        "model stream stream_options temperature top_p top_k min_p seed max_tokens stop logprobs "
        "max_completion_tokens top_logprobs n tools tool_choice chat_template_kwargs "
        "enable_thinking cache_prompt session_id repetition_penalty presence_penalty "
        "frequency_penalty logit_bias"
    )
    assert read() == read(**dict.fromkeys(names.split()))


PARTS_ALIKE = [
    ("Hello", [{"type": "text", "text": "Hello"}]),
    ("Hello", [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]),
    ("Hello", [{"type": "text", "text": "Hello", "cache_control": {"type": "ephemeral"}}]),
    ("", []),
]


@pytest.mark.parametrize(("text", "parts"), PARTS_ALIKE)
@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_content_as_string_or_parts(role: str, text: str, parts: list[dict[str, Any]]):
    """A string and text parts become the same command, with the same chain."""
    one = command(messages=[{"role": role, "content": text}])
    other = command(messages=[{"role": role, "content": parts}])
    assert one == other
    assert one.conversation is not None
    assert other.conversation is not None
    assert conversation_parts(one.conversation) == conversation_parts(other.conversation)


def test_developer_is_system():
    """A developer message becomes a system message in the same place."""
    assert Message(role="system", content="x") == message(role="developer", content="x")


def test_cache_hints_of_messages_and_tools_are_ignored():
    """Moving a cache hint does not change the command."""
    hint = {"cache_control": {"type": "ephemeral"}}
    tool = {"type": "function", "function": {"name": "f"}}
    plain = command(messages=HELLO, tools=[tool])
    assert plain == command(messages=[{**HELLO[0], **hint}], tools=[{**tool, **hint}])
    function = {"name": "f", **hint}
    assert plain == command(messages=HELLO, tools=[{"type": "function", "function": function}])


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning"])
def test_reasoning_under_both_names(key: str):
    """An assistant's reasoning is read from either field."""
    expected = Message(role="assistant", content="x", reasoning="why")
    assert expected == message(role="assistant", content="x", **{key: "why"})


def test_empty_fields_are_none():
    """Empty fields and absent fields become the same command."""
    assert Message(role="assistant", content="x") == message(
        role="assistant", content="x", reasoning_content="", tool_calls=[], name=""
    )


def call(arguments: Any) -> dict[str, Any]:
    """An assistant's message with one tool call."""
    function = {"name": "f", "arguments": arguments}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "call-1", "type": "function", "function": function}],
    }


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"a": [1, {"b": null}]}', {"a": [1, {"b": None}]}),
        ({"a": 1}, {"a": 1}),
        ("{}", {}),
        ("", ""),
        ("[1]", "[1]"),
        ("{broken", "{broken"),
        ('{"a": NaN}', '{"a": NaN}'),
        ('{"a": 123456789012345678901}', '{"a": 123456789012345678901}'),
        ('{"a": ' + "[" * 5000 + "]" * 5000 + "}", '{"a": ' + "[" * 5000 + "]" * 5000 + "}"),
    ],
    ids=["object", "given", "empty", "nothing", "list", "broken", "nan", "big", "deep"],
)
def test_tool_call_arguments(arguments: Any, expected: Any):
    """Arguments become an object if they are JSON for one; otherwise they stay text."""
    (found,) = message(**call(arguments)).tool_calls
    assert {
        "id": "call-1",
        "type": "function",
        "function": {"name": "f", "arguments": expected},
    } == found


def test_tool_result():
    """A tool message names the call that it answers."""
    assert Message(role="tool", content="42", tool_call_id="call-1", name="f") == message(
        role="tool", content="42", tool_call_id="call-1", name="f"
    )


def test_tool_choice_none_leaves_the_prompt_as_it_is():
    """Tools that may not be called stay in the prompt, which begins with them."""
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    with_tools = command(tools=tools).conversation
    assert with_tools is not None
    assert (tuple(tools), True) == (with_tools.tools, with_tools.calls)
    without = command(tools=tools, tool_choice="none").conversation
    assert attrs.evolve(with_tools, calls=False) == without


def test_template_settings_go_before_the_shorthand():
    """``chat_template_kwargs`` takes precedence, because it is more precise."""
    asked = command(enable_thinking=True, chat_template_kwargs={"enable_thinking": False})
    assert asked.conversation is not None
    assert {"enable_thinking": False} == asked.conversation.template


@pytest.mark.parametrize("seed", [0, -1, -(2**63), 2**63, 2**64 - 1])
def test_seeds_of_64_bits(seed: int):
    """Signed and unsigned integers of 64 bits are seeds."""
    assert seed == command(seed=seed).seed


@pytest.mark.parametrize(
    ("stop", "expected"),
    [("a", ("a",)), ([], ()), (["a"], ("a",)), (list("abcd"), ("a", "b", "c", "d"))],
)
def test_stop(stop: Any, expected: tuple[str, ...]):
    """One text or up to four."""
    assert expected == command(stop=stop).stop


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"logprobs": False}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 20}, 20),
        ({"logprobs": False, "top_logprobs": 0}, None),
    ],
)
def test_logprobs(fields: dict[str, Any], expected: int | None):
    """No log-probabilities, those of the tokens, or also those of alternatives."""
    assert expected == command(**fields).top_logprobs


def test_session_name_in_any_script():
    """A session's name is any printable text of up to 200 characters."""
    assert "größe 大" == command(session_id="größe 大").session_name
    assert "x" * 200 == command(session_id="x" * 200).session_name


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, None),
        ({"x-claude-code-session-id": "a", "x-session-id": "b", "session-id": "c"}, "a"),
        ({"x-session-id": " b ", "session-id": "c"}, "b"),
        ({"session-id": "c"}, "c"),
        ({"x-session-id": "", "session-id": "c"}, "c"),
        ({"x-session-id": "x" * 201}, None),
        ({"x-session-id": "a\x01b"}, None),
    ],
)
def test_group_headers(headers: dict[str, str], expected: str | None):
    """The first header with a valid name is the group; an invalid one is not refused."""
    assert expected == read(headers=headers).command.group


def test_an_image_that_a_tool_returned_does_not_end_the_conversation():
    """A constant text replaces the image, and the answer reports it as ignored."""

    def asked(data: str) -> ChatRequest:
        image = {"type": "image_url", "image_url": {"url": data}}
        parts = [{"type": "text", "text": "A map: "}, image, {"type": "file", "file": {}}]
        tool = {"role": "tool", "tool_call_id": "a", "content": parts}
        return read(messages=[{"role": "user", "content": "Look"}, tool])

    one = asked("data:image/png;base64,AAAA")
    assert one.command.conversation is not None
    said = one.command.conversation.messages[1].content
    assert f"A map: {placeholders.IMAGE}{placeholders.DOCUMENT}" == said
    assert ("messages.file", "messages.image_url") == one.ignored
    assert one == asked("data:image/png;base64,BBBB")


def test_an_image_in_a_turn_that_was_answered():
    """
    A constant text replaces the image, and the answer reports it; in the current turn it is
    refused.
    """
    image = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]
    seen, said = {"role": "user", "content": image}, {"role": "assistant", "content": "A hill."}
    past = read(messages=[seen, said, {"role": "user", "content": "How high?"}])
    assert past.command.conversation is not None
    assert placeholders.IMAGE == past.command.conversation.messages[0].content
    assert ("messages.image_url",) == past.ignored
    for messages in ([seen], [seen, *HELLO], [*HELLO, said, seen], [seen, said, seen]):
        with pytest.raises(ClientError) as refused:
            read(messages=messages)
        assert "unsupported_content" == refused.value.code


def test_unknown_parameters_are_ignored_and_named():
    """Unknown parameters change nothing; each answer names them, and the log names them once."""
    ignored = Ignored()
    body = json.dumps({"messages": HELLO, "user": "me", "best_of": 2}).encode()
    with structlog.testing.capture_logs() as logs:
        first = read_chat_request(body, {}, ignored, FACTS)
        again = read_chat_request(body, {}, ignored, FACTS)
    assert attrs.evolve(read(), ignored=("best_of", "user")) == first == again
    assert [("warning", "best_of"), ("warning", "user")] == [
        (entry["log_level"], entry["parameter"]) for entry in logs
    ]


def test_an_unknown_null_is_not_reported():
    """An unknown parameter is reported only if it has a value."""
    assert () == read(made_up=None).ignored
    assert ("made_up",) == read(made_up=False).ignored


@pytest.mark.parametrize(
    ("said", "settings"),
    [
        ({}, {"enable_thinking": False, "mood": "calm"}),
        ({"enable_thinking": True}, {"enable_thinking": True, "mood": "calm"}),
        (
            {"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}},
            {"enable_thinking": False, "mood": "calm"},
        ),
        ({"chat_template_kwargs": {"mood": "wild"}}, {"enable_thinking": False, "mood": "wild"}),
    ],
)
def test_template_settings_that_are_left_out(said: Any, settings: Any):
    """The model's settings apply unless the request has its own."""
    facts = attrs.evolve(FACTS, template={"enable_thinking": False, "mood": "calm"})
    body = json.dumps({"messages": HELLO, **said}).encode()
    asked = read_chat_request(body, {}, Ignored(), facts).command.conversation
    assert asked is not None
    assert settings == asked.template


def test_fields_that_are_left_out_have_the_servers_defaults():
    """The model's recommended values apply where a client leaves a field out, and only there."""
    defaults = Sampling(temperature=0.6, top_k=20, repetition_penalty=1.05)
    facts = attrs.evolve(FACTS, defaults=defaults)

    def sampling(**fields: Any) -> Sampling:
        body = json.dumps({"messages": HELLO, **fields}).encode()
        return read_chat_request(body, {}, Ignored(), facts).command.sampling

    assert defaults == sampling() == sampling(temperature=None)
    assert attrs.evolve(defaults, temperature=1.0) == sampling(temperature=1)
    assert attrs.evolve(defaults, top_k=0, top_p=0.5) == sampling(top_k=0, top_p=0.5)


@pytest.mark.parametrize(
    ("sent", "meant"),
    [
        ("max_token", "max_tokens"),
        ("maxTokens", "max_tokens"),
        ("temprature", "temperature"),
        ("tool", "tools"),
        ("toolls", "tools"),
        ("sede", "seed"),
        ("sed", "seed"),
        ("stopp", "stop"),
        ("modle", "model"),
        ("stteam", "stream"),
        ("stpo", "stop"),
        ("Stream", "stream"),
        ("cache-prompt", "cache_prompt"),
    ],
)
def test_a_misspelt_field_is_reported_with_the_one_that_is_meant(sent: str, meant: str):
    """It has no effect, and both the answer and the log suggest the right name."""
    with structlog.testing.capture_logs() as logs:
        assert (f"{sent} (did you mean {meant}?)",) == read({}, **{sent: 1}).ignored
    assert [(sent, meant)] == [(entry["parameter"], entry["did_you_mean"]) for entry in logs]


@pytest.mark.parametrize(
    "sent",
    [
        *("user", "min_tokens", "top_a", "top_n", "best_of", "stream.options", "sxxd"),
        *("speed", "mode", "models", "step", "need", "send"),
    ],
)
def test_a_field_that_resembles_no_other_has_no_hint(sent: str):
    """Fields of other servers, and paths into a known field, are not taken for misspellings."""
    with structlog.testing.capture_logs() as logs:
        assert (sent,) == read({}, **{sent: 1}).ignored
    assert ["did_you_mean" in entry for entry in logs] == [False]


@pytest.mark.parametrize(
    ("sent", "hint"),
    [
        ({"message": []}, ". Did you mean `messages` instead of `message`?"),
        ({"mesages": [], "model": "m"}, ". Did you mean `messages` instead of `mesages`?"),
        ({"message": None}, ""),
        ({"prompt": "Hi"}, ""),
        ({}, ""),
    ],
)
def test_a_field_that_is_missing_and_may_be_misspelt(sent: dict[str, Any], hint: str):
    """The refusal names the field that may have been sent instead."""
    with pytest.raises(ClientError) as failed:
        read_chat_request(json.dumps(sent).encode(), {}, Ignored(), FACTS)
    assert f"Missing required field `messages`{hint}" == failed.value.message
    assert "messages" == failed.value.param


def test_made_up_names_do_not_fill_the_answer():
    """An answer names a limited number of them, each cut to a length."""
    fields: dict[str, Any] = {f"name-{number:03}" + "x" * 1000: 1 for number in range(100)}
    asked = read(**fields)
    assert 64 == len(asked.ignored)
    assert "name-000" + "x" * 92 == asked.ignored[0]


def test_made_up_names_do_not_fill_the_log():
    """Beyond a number of names, further ones are not logged."""
    ignored = Ignored(names_max=3)
    with structlog.testing.capture_logs() as logs:
        for number in range(10):
            ignored.add(f"name-{number}")
    assert ["name-0", "name-1", "name-2"] == [entry["parameter"] for entry in logs]


@pytest.mark.parametrize(
    ("switches", "fields", "template", "ignored_names"),
    [
        ({"enable_thinking"}, {"reasoning_effort": "none"}, {"enable_thinking": False}, ()),
        ({"enable_thinking"}, {"reasoning_effort": "minimal"}, {"enable_thinking": True}, ()),
        ({"enable_thinking"}, {"reasoning_effort": None}, {}, ()),
        (
            {"enable_thinking"},
            {"reasoning_effort": "high", "enable_thinking": False},
            {"enable_thinking": False},
            (),
        ),
        ({"reasoning_effort"}, {"reasoning_effort": "low"}, {"reasoning_effort": "low"}, ()),
        ({"reasoning_effort"}, {"reasoning_effort": "max"}, {}, ("reasoning_effort",)),
        (set(), {"reasoning_effort": "high"}, {}, ("reasoning_effort",)),
    ],
)
def test_effort(switches: set[str], fields: Any, template: Any, ignored_names: tuple[str, ...]):
    """It sets what the model's template supports; otherwise it is reported as ignored."""
    facts = attrs.evolve(FACTS, switches=frozenset(switches))
    body = json.dumps({"messages": HELLO, **fields}).encode()
    found = read_chat_request(body, {}, Ignored(), facts)
    assert found.command.conversation is not None
    assert (template, ignored_names) == (dict(found.command.conversation.template), found.ignored)


def test_a_cache_key_is_a_group():
    """It is the group if no header names one and it is a valid name."""
    assert "talk-1" == command(prompt_cache_key="talk-1").group
    assert "one" == command(headers={"session-id": "one"}, prompt_cache_key="talk-1").group
    assert command(prompt_cache_key="x" * 201).group is None
    assert () == read(prompt_cache_key="talk-1").ignored


def test_a_call_of_the_older_form_is_refused():
    """
    It would be lost silently, so it is refused; an empty one, which some clients send, is accepted.
    """
    older = {"role": "assistant", "content": None, "function_call": {"name": "f"}}
    with pytest.raises(ClientError) as caught:
        read(messages=[*HELLO, older])
    assert ("messages[1].function_call", "unsupported_value") == (
        caught.value.param,
        caught.value.code,
    )
    assert "tool_calls" in caught.value.message
    assert "" == message(**{**older, "function_call": None}).content


def test_several_answers():
    """The command asks the service for this many answers."""
    assert 16 == command(n=16).choices
    assert 1 == command(n=None).choices


def test_all_that_the_official_client_has_names_for_is_taken():
    """Parameters without effect are reported as ignored; none is refused."""
    found = read(
        model="m",
        audio={"format": "wav", "voice": "alloy"},
        frequency_penalty=-2,
        function_call="none",
        functions=[{"name": "name", "parameters": {"foo": "bar"}}],
        logit_bias={"0": 0},
        logprobs=True,
        max_completion_tokens=1,
        max_tokens=1,
        metadata={"foo": "string"},
        modalities=["text"],
        moderation={"model": "model"},
        n=1,
        parallel_tool_calls=True,
        prediction={"content": "string", "type": "content"},
        presence_penalty=-2,
        prompt_cache_key="key",
        prompt_cache_options={"mode": "implicit", "ttl": "30m"},
        prompt_cache_retention="in_memory",
        reasoning_effort="none",
        response_format={"type": "text"},
        safety_identifier="someone",
        seed=-9007199254740991,
        service_tier="auto",
        stop="\n",
        store=True,
        stream=False,
        stream_options={"include_obfuscation": True, "include_usage": True},
        temperature=1,
        tool_choice="none",
        tools=[{"type": "function", "function": {"name": "name", "strict": True}}],
        top_logprobs=0,
        top_p=1,
        user="someone",
        verbosity="low",
        web_search_options={"search_context_size": "low"},
    )
    assert (
        "audio",
        "function_call",
        "functions",
        "metadata",
        "modalities",
        "moderation",
        "prediction",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
        "verbosity",
        "web_search_options",
    ) == found.ignored
