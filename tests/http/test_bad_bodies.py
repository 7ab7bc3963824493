"""What cannot be used is a 400 in the envelope that says where, and reaches no session."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cairn.http.app import create_app
from tests.http.fake_service import FakeService

pytestmark = pytest.mark.trio

HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


def say(**fields: Any) -> bytes:
    """A body with one good message and these fields."""
    return json.dumps({"messages": HELLO, **fields}).encode()


def messages(*messages: Any) -> bytes:
    """A body of these messages."""
    return json.dumps({"messages": messages}).encode()


def user(content: Any) -> bytes:
    """A body with one message of a user."""
    return messages({"role": "user", "content": content})


def raw(field: bytes) -> bytes:
    """A body with one good message and a field as it is written."""
    return b'{"messages":[{"role":"user","content":"x"}],%s}' % field


def nested(depth: int) -> list[Any]:
    """A list in a list in a list."""
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


def tool(**fields: Any) -> bytes:
    """A body with one tool."""
    return say(tools=[{"type": "function", "function": {"name": "f"}, **fields}])


def tool_call(function: Any) -> bytes:
    """A body with one call of an assistant."""
    return messages(*HELLO, {"role": "assistant", "tool_calls": [{"function": function}]})


# What is sent, the parameter that the answer names, and what its message has.
BAD: list[tuple[str, bytes, str | None, str]] = [
    ("nothing", b"", None, "not valid JSON"),
    ("no json", b"hello", None, "not valid JSON"),
    ("cut off", b'{"messages": [', None, "not valid JSON"),
    ("two values", b'{"messages": []} {}', None, "not valid JSON"),
    ("a form", b"messages=x&model=y", None, "not valid JSON"),
    ("not utf-8", b'{"messages": [{"role": "user", "content": "\xff"}]}', None, "UTF-8"),
    ("utf-16", '{"messages": []}'.encode("utf-16"), None, "not valid JSON"),
    ("half a surrogate", raw(b'"stop":"\\ud800 "'), None, "not valid JSON"),
    ("surrogate in utf-8", raw(b'"stop":"\xed\xa0\x80"'), None, "UTF-8"),
    ("a list", b"[]", None, "must be an object, not a list"),
    ("a string", b'"x"', None, "must be an object, not a string"),
    ("null", b"null", None, "must be an object, not null"),
    ("too deep", b'{"a":' * 100_000, None, "nested too deep"),
    ("too deep within", raw(b'"x":' + b"[" * 100_000), None, "nested too deep"),
    ("no messages", b"{}", "messages", "messages is missing"),
    ("messages null", b'{"messages": null}', "messages", "must be a list, not null"),
    ("messages text", b'{"messages": "x"}', "messages", "must be a list, not a string"),
    ("messages empty", messages(), "messages", "messages is empty"),
    ("message text", messages("x"), "messages[0]", "must be an object"),
    ("no role", messages({"content": "x"}), "messages[0].role", "is missing"),
    ("role number", messages({"role": 1, "content": "x"}), "messages[0].role", "a string"),
    ("role unknown", messages({"role": "bard", "content": "x"}), "messages[0].role", "'bard'"),
    ("no content", messages(*HELLO, {"role": "user"}), "messages[1].content", "is missing"),
    ("content null", user(None), "messages[0].content", "is missing"),
    ("content number", user(5), "messages[0].content", "a string or a list, not an integer"),
    ("part text", user(["x"]), "messages[0].content[0]", "must be an object"),
    ("part no type", user([{"text": "x"}]), "messages[0].content[0].type", "is missing"),
    ("part no text", user([{"type": "text"}]), "messages[0].content[0].text", "is missing"),
    (
        "image",
        user([{"type": "text", "text": "x"}, IMAGE]),
        "messages[0].content[1].type",
        "image_url",
    ),
    ("audio", user([{"type": "input_audio"}]), "messages[0].content[0].type", "input_audio"),
    ("call no name", tool_call({}), "messages[1].tool_calls[0].function.name", "is missing"),
    (
        "call arguments",
        tool_call({"name": "f", "arguments": 3}),
        "messages[1].tool_calls[0].function.arguments",
        "a string or an object",
    ),
    (
        "call arguments deep",
        tool_call({"name": "f", "arguments": {"a": nested(70)}}),
        "messages[1].tool_calls[0].function.arguments",
        "64 levels",
    ),
    ("temperature text", say(temperature="1"), "temperature", "a number, not a string"),
    ("temperature negative", say(temperature=-0.1), "temperature", "between 0 and 100"),
    ("temperature nan", raw(b'"temperature":NaN'), None, "not valid JSON"),
    ("temperature infinite", raw(b'"temperature":Infinity'), None, "not valid JSON"),
    ("temperature 1e999", raw(b'"temperature":1e999'), None, "out of range"),
    ("temperature huge", raw(b'"temperature":1' + b"0" * 400), "temperature", "out of range"),
    ("temperature longer", raw(b'"temperature":1' + b"0" * 5000), None, "out of range"),
    ("temperature true", say(temperature=True), "temperature", "a number, not true or false"),
    ("top_p zero", say(top_p=0), "top_p", "above 0"),
    ("top_p above", say(top_p=1.1), "top_p", "at most 1"),
    ("top_k negative", say(top_k=-1), "top_k", "top_k must be at least 0"),
    ("top_k fraction", say(top_k=1.5), "top_k", "an integer, not a number"),
    ("top_k huge", say(top_k=2**63), "top_k", "at most"),
    ("min_p negative", say(min_p=-1), "min_p", "between 0 and 1"),
    ("repetition zero", say(repetition_penalty=0), "repetition_penalty", "between 0.01 and 100"),
    ("repetition text", say(repetition_penalty="1"), "repetition_penalty", "a number"),
    ("presence", say(presence_penalty=2.1), "presence_penalty", "between -2 and 2"),
    ("frequency", say(frequency_penalty=-3), "frequency_penalty", "between -2 and 2"),
    ("bias list", say(logit_bias=[1]), "logit_bias", "an object, not a list"),
    ("bias text", say(logit_bias={"1": "2"}), "logit_bias", "a number, not a string"),
    ("bias null", say(logit_bias={"1": None}), "logit_bias", "a number, not null"),
    ("bias above", say(logit_bias={"1": 101}), "logit_bias", "between -100 and 100"),
    ("bias of no token", say(logit_bias={"2000": 1}), "logit_bias", "0 to 1999"),
    ("bias of a word", say(logit_bias={"hello": 1}), "logit_bias", "'hello'"),
    ("bias negative", say(logit_bias={"-1": 1}), "logit_bias", "'-1'"),
    ("bias twice", say(logit_bias={"01": 1, "1": 2}), "logit_bias", "'01'"),
    ("bias digits", say(logit_bias={"9" * 5000: 1}), "logit_bias", "no token"),
    (
        "bias many",
        say(logit_bias={str(token): 1 for token in range(1025)}),
        "logit_bias",
        "at most 1024",
    ),
    ("seed fraction", say(seed=1.5), "seed", "an integer"),
    ("seed huge", say(seed=2**64), "seed", "between"),
    ("seed below", say(seed=-(2**63) - 1), "seed", "between"),
    ("max_tokens zero", say(max_tokens=0), "max_tokens", "max_tokens must be at least 1"),
    ("max_tokens negative", say(max_tokens=-1), "max_tokens", "at least 1"),
    ("completion tokens", say(max_completion_tokens=0), "max_completion_tokens", "at least 1"),
    ("stop number", say(stop=1), "stop", "a string or a list"),
    ("stop of numbers", say(stop=[1]), "stop[0]", "a string"),
    ("stop five", say(stop=list("abcde")), "stop", "at most 4"),
    ("stop empty", say(stop=["a", ""]), "stop", "empty"),
    ("stop empty text", say(stop=""), "stop", "empty"),
    ("logprobs number", say(logprobs=5), "logprobs", "true or false"),
    ("top_logprobs 21", say(logprobs=True, top_logprobs=21), "top_logprobs", "between 0 and 20"),
    ("top_logprobs -1", say(logprobs=True, top_logprobs=-1), "top_logprobs", "between 0"),
    ("top_logprobs alone", say(top_logprobs=2), "top_logprobs", "needs logprobs"),
    ("n two", say(n=2), "n", "one choice"),
    ("n zero", say(n=0), "n", "one choice"),
    ("json mode", say(response_format={"type": "json_object"}), "response_format", "yet"),
    ("stream text", say(stream="yes"), "stream", "true or false, not a string"),
    ("stream options", say(stream_options=True), "stream_options", "an object"),
    (
        "usage text",
        say(stream_options={"include_usage": 1}),
        "stream_options.include_usage",
        "true",
    ),
    ("tools object", say(tools={}), "tools", "a list, not an object"),
    ("tool text", say(tools=["f"]), "tools[0]", "an object"),
    ("tool of other type", tool(type="web_search"), "tools[0]", "no function"),
    ("tool no function", say(tools=[{"type": "function"}]), "tools[0]", "no function"),
    ("tool no name", tool(function={}), "tools[0].function.name", "a string"),
    ("tool deep", tool(x=nested(70)), "tools[0]", "64 levels"),
    ("tool huge integer", tool(x=2**64), "tools[0]", "64 bits"),
    ("tool_choice", say(tool_choice="maybe"), "tool_choice", "'maybe'"),
    ("tool_choice required", say(tool_choice="required"), "tool_choice", "not enforce tool calls"),
    (
        "tool_choice named",
        say(tool_choice={"type": "function", "function": {"name": "f"}}),
        "tool_choice",
        "not enforce tool calls",
    ),
    ("tool_choice number", say(tool_choice=1), "tool_choice", "a string or an object"),
    ("template list", say(chat_template_kwargs=[]), "chat_template_kwargs", "an object"),
    (
        "template of the client's",
        say(chat_template_kwargs={"chat_template": "{{ x }}"}),
        "chat_template_kwargs.chat_template",
        "belongs to the server",
    ),
    ("template deep", say(chat_template_kwargs={"x": nested(70)}), "chat_template_kwargs", "64"),
    ("thinking text", say(enable_thinking="no"), "enable_thinking", "true or false"),
    ("cache_prompt number", say(cache_prompt=0), "cache_prompt", "true or false"),
    ("session empty", say(session_id=""), "session_id", "1 to 200"),
    ("session long", say(session_id="x" * 201), "session_id", "1 to 200"),
    ("session unprintable", say(session_id="a\nb"), "session_id", "printable"),
    ("model long", say(model="m" * 300), "model", "longer"),
    ("model number", say(model=3), "model", "a string"),
]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("body", "param", "text"), [row[1:] for row in BAD], ids=[row[0] for row in BAD]
)
async def test_bad_body(body: bytes, param: str | None, text: str, stream: bool):
    """Each is refused with 400, its parameter and a message, before the service hears of it."""
    if stream and body.startswith(b'{"messages"') and body.endswith(b"}"):
        body = body[:-1] + b',"stream":true}' if b'"stream"' not in body else body
    service = FakeService()
    client = create_app(service).test_client()
    response = await client.post("/v1/chat/completions", data=body)
    answer = json.loads(await response.get_data(as_text=True))
    assert {"error"} == answer.keys()
    error = answer["error"]
    assert (400, "invalid_request_error", param) == (
        response.status_code,
        error["type"],
        error["param"],
    ), error
    assert text in error["message"]
    assert error["code"]
    assert "application/json" == response.content_type
    assert [] == service.commands


async def test_good_body_is_served():
    """The control: what the table varies is served as it is."""
    service = FakeService()
    client = create_app(service).test_client()
    for body in (say(), raw(b'"x":1'), tool(x=nested(5)), tool_call({"name": "f"})):
        response = await client.post("/v1/chat/completions", data=body)
        assert 200 == response.status_code
    assert 4 == len(service.commands)
