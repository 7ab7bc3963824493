"""
Bodies that cannot be used, with the error for each; and unusual ones that can.

The tables are tested against the scripted service and against a server in its own process.
"""

from __future__ import annotations

import gzip
import json
from typing import Any

import attrs

HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


@attrs.frozen
class Bad:
    """
    A body that is refused with 400; the field that the error names, and a part of its message.
    """

    name: str
    body: bytes
    code: str
    param: str | None
    text: str

    def check(self, status: int, answer: Any) -> None:
        """Assert that the answer is the envelope of this refusal."""
        assert {"error"} == answer.keys(), answer
        error = answer["error"]
        assert {"message", "type", "param", "code"} == error.keys()
        assert (400, "invalid_request_error", self.code, self.param) == (
            status,
            error["type"],
            error["code"],
            error["param"],
        ), error
        assert self.text in error["message"]


def say(**fields: Any) -> bytes:
    """A body with one good message and these fields."""
    return json.dumps({"messages": HELLO, **fields}).encode()


def streamed(body: bytes) -> bytes:
    """The same body from a client that requests a stream, unless the body says otherwise."""
    if body.startswith(b'{"messages"') and body.endswith(b"}") and b'"stream"' not in body:
        return body[:-1] + b',"stream":true}'
    return body


def messages(*messages: Any) -> bytes:
    """A body of these messages."""
    return json.dumps({"messages": messages}).encode()


def user(content: Any) -> bytes:
    """A body with one user message."""
    return messages({"role": "user", "content": content})


def raw(field: bytes) -> bytes:
    """A body with one good message and a field as raw JSON."""
    return b'{"messages":[{"role":"user","content":"x"}],%s}' % field


def nested(depth: int) -> list[Any]:
    """A list in a list in a list."""
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


def deep(depth: int, opening: bytes = b"[", closing: bytes = b"]") -> bytes:
    """Brackets within brackets."""
    return opening * depth + b"1" + closing * depth


def tool(**fields: Any) -> bytes:
    """A body with one tool."""
    return say(tools=[{"type": "function", "function": {"name": "f"}, **fields}])


def choose(choice: Any) -> bytes:
    """A body with one tool, and a tool choice."""
    return say(tools=[{"type": "function", "function": {"name": "f"}}], tool_choice=choice)


def schema(schema: Any, **more: Any) -> bytes:
    """A body that asks for JSON of a schema."""
    wanted = {"name": "a", "schema": schema, **more}
    return say(response_format={"type": "json_schema", "json_schema": wanted})


def tool_call(function: Any) -> bytes:
    """A body with one tool call of an assistant."""
    return messages(*HELLO, {"role": "assistant", "tool_calls": [{"function": function}]})


BAD = [
    Bad("nothing", b"", "invalid_json", None, "not valid JSON"),
    Bad("no json", b"hello", "invalid_json", None, "not valid JSON"),
    Bad("cut off", b'{"messages": [', "invalid_json", None, "not valid JSON"),
    Bad("two values", b'{"messages": []} {}', "invalid_json", None, "not valid JSON"),
    Bad("a form", b"messages=x&model=y", "invalid_json", None, "not valid JSON"),
    Bad(
        "not utf-8",
        b'{"messages": [{"role": "user", "content": "\xff"}]}',
        "invalid_json",
        None,
        "UTF-8",
    ),
    Bad("utf-16", '{"messages": []}'.encode("utf-16"), "invalid_json", None, "not valid JSON"),
    Bad("half a surrogate", raw(b'"stop":"\\ud800 "'), "invalid_json", None, "not valid JSON"),
    Bad("surrogate in utf-8", raw(b'"stop":"\xed\xa0\x80"'), "invalid_json", None, "UTF-8"),
    Bad("a list", b"[]", "invalid_type", None, "must be an object, not a list"),
    Bad("a string", b'"x"', "invalid_type", None, "must be an object, not a string"),
    Bad("null", b"null", "invalid_type", None, "must be an object, not null"),
    Bad("too deep", b'{"a":' * 100_000, "invalid_json", None, "nested too deep"),
    Bad("too deep within", raw(b'"x":' + b"[" * 100_000), "invalid_json", None, "nested too deep"),
    Bad(
        "no messages",
        b"{}",
        "missing_required_parameter",
        "messages",
        "Missing required field",
    ),
    Bad(
        "messages null",
        b'{"messages": null}',
        "invalid_type",
        "messages",
        "must be a list, not null",
    ),
    Bad(
        "messages text",
        b'{"messages": "x"}',
        "invalid_type",
        "messages",
        "must be a list, not a string",
    ),
    Bad("messages empty", messages(), "invalid_value", "messages", "messages is empty"),
    Bad("message text", messages("x"), "invalid_type", "messages[0]", "must be an object"),
    Bad(
        "no role",
        messages({"content": "x"}),
        "missing_required_parameter",
        "messages[0].role",
        "Missing required field",
    ),
    Bad(
        "role number",
        messages({"role": 1, "content": "x"}),
        "invalid_type",
        "messages[0].role",
        "a string",
    ),
    Bad(
        "role unknown",
        messages({"role": "bard", "content": "x"}),
        "invalid_value",
        "messages[0].role",
        "'bard'",
    ),
    Bad(
        "no content",
        messages(*HELLO, {"role": "user"}),
        "missing_required_parameter",
        "messages[1].content",
        "Missing required field",
    ),
    Bad(
        "content null",
        user(None),
        "missing_required_parameter",
        "messages[0].content",
        "Missing required field",
    ),
    Bad(
        "content number",
        user(5),
        "invalid_type",
        "messages[0].content",
        "a string or a list, not an integer",
    ),
    Bad("part text", user(["x"]), "invalid_type", "messages[0].content[0]", "must be an object"),
    Bad(
        "part no type",
        user([{"text": "x"}]),
        "missing_required_parameter",
        "messages[0].content[0].type",
        "Missing required field",
    ),
    Bad(
        "part no text",
        user([{"type": "text"}]),
        "missing_required_parameter",
        "messages[0].content[0].text",
        "Missing required field",
    ),
    Bad(
        "image",
        user([{"type": "text", "text": "x"}, IMAGE]),
        "unsupported_content",
        "messages[0].content[1].type",
        "image_url",
    ),
    Bad(
        "audio",
        user([{"type": "input_audio"}]),
        "unsupported_content",
        "messages[0].content[0].type",
        "input_audio",
    ),
    Bad(
        "call no name",
        tool_call({}),
        "missing_required_parameter",
        "messages[1].tool_calls[0].function.name",
        "Missing required field",
    ),
    Bad(
        "call arguments",
        tool_call({"name": "f", "arguments": 3}),
        "invalid_type",
        "messages[1].tool_calls[0].function.arguments",
        "a string or an object",
    ),
    Bad(
        "call arguments deep",
        tool_call({"name": "f", "arguments": {"a": nested(70)}}),
        "invalid_value",
        "messages[1].tool_calls[0].function.arguments",
        "64 levels",
    ),
    Bad(
        "temperature text",
        say(temperature="1"),
        "invalid_type",
        "temperature",
        "a number, not a string",
    ),
    Bad(
        "temperature negative",
        say(temperature=-0.1),
        "invalid_value",
        "temperature",
        "between 0 and 100",
    ),
    Bad("temperature nan", raw(b'"temperature":NaN'), "invalid_json", None, "not valid JSON"),
    Bad(
        "temperature infinite",
        raw(b'"temperature":Infinity'),
        "invalid_json",
        None,
        "not valid JSON",
    ),
    Bad("temperature 1e999", raw(b'"temperature":1e999'), "invalid_value", None, "out of range"),
    Bad(
        "temperature huge",
        raw(b'"temperature":1' + b"0" * 400),
        "invalid_value",
        "temperature",
        "out of range",
    ),
    Bad(
        "temperature longer",
        raw(b'"temperature":1' + b"0" * 5000),
        "invalid_value",
        None,
        "out of range",
    ),
    Bad(
        "temperature true",
        say(temperature=True),
        "invalid_type",
        "temperature",
        "a number, not true or false",
    ),
    Bad("top_p above", say(top_p=1.1), "invalid_value", "top_p", "at most 1"),
    Bad("top_k negative", say(top_k=-2), "invalid_value", "top_k", "top_k must be at least 0"),
    Bad("top_k fraction", say(top_k=1.5), "invalid_type", "top_k", "an integer, not a number"),
    Bad("top_k huge", say(top_k=2**63), "invalid_value", "top_k", "at most"),
    Bad("min_p negative", say(min_p=-1), "invalid_value", "min_p", "between 0 and 1"),
    Bad(
        "repetition zero",
        say(repetition_penalty=0),
        "invalid_value",
        "repetition_penalty",
        "between 0.01 and 100",
    ),
    Bad(
        "repetition text",
        say(repetition_penalty="1"),
        "invalid_type",
        "repetition_penalty",
        "a number",
    ),
    Bad(
        "presence",
        say(presence_penalty=2.1),
        "invalid_value",
        "presence_penalty",
        "between -2 and 2",
    ),
    Bad(
        "frequency",
        say(frequency_penalty=-3),
        "invalid_value",
        "frequency_penalty",
        "between -2 and 2",
    ),
    Bad("frequency nan", raw(b'"frequency_penalty":NaN'), "invalid_json", None, "not valid JSON"),
    Bad("bias list", say(logit_bias=[1]), "invalid_type", "logit_bias", "an object, not a list"),
    Bad(
        "bias text",
        say(logit_bias={"1": "2"}),
        "invalid_type",
        "logit_bias",
        "a number, not a string",
    ),
    Bad(
        "bias null", say(logit_bias={"1": None}), "invalid_type", "logit_bias", "a number, not null"
    ),
    Bad(
        "bias above",
        say(logit_bias={"1": 101}),
        "invalid_value",
        "logit_bias",
        "between -100 and 100",
    ),
    Bad("bias of no token", say(logit_bias={"999999": 1}), "invalid_value", "logit_bias", "0 to "),
    Bad("bias of a word", say(logit_bias={"hello": 1}), "invalid_value", "logit_bias", "'hello'"),
    Bad("bias negative", say(logit_bias={"-1": 1}), "invalid_value", "logit_bias", "'-1'"),
    Bad("bias twice", say(logit_bias={"01": 1, "1": 2}), "invalid_value", "logit_bias", "'01'"),
    Bad(
        "bias digits",
        say(logit_bias={"9" * 5000: 1}),
        "invalid_value",
        "logit_bias",
        "not a token",
    ),
    Bad(
        "bias many",
        say(logit_bias={str(token): 1 for token in range(1025)}),
        "invalid_value",
        "logit_bias",
        "at most 1024",
    ),
    Bad("seed fraction", say(seed=1.5), "invalid_type", "seed", "an integer"),
    Bad("seed huge", say(seed=2**64), "invalid_value", "seed", "between"),
    Bad("seed below", say(seed=-(2**63) - 1), "invalid_value", "seed", "between"),
    Bad(
        "max_tokens zero",
        say(max_tokens=0),
        "invalid_value",
        "max_tokens",
        "max_tokens must be at least 1",
    ),
    Bad("max_tokens negative", say(max_tokens=-2), "invalid_value", "max_tokens", "at least 1"),
    Bad(
        "completion tokens",
        say(max_completion_tokens=0),
        "invalid_value",
        "max_completion_tokens",
        "at least 1",
    ),
    Bad("stop number", say(stop=1), "invalid_type", "stop", "a string or a list"),
    Bad("stop of numbers", say(stop=[1]), "invalid_type", "stop[0]", "a string"),
    Bad("stop five", say(stop=list("abcde")), "invalid_value", "stop", "at most 4"),
    Bad("logprobs number", say(logprobs=5), "invalid_type", "logprobs", "true or false"),
    Bad(
        "top_logprobs 21",
        say(logprobs=True, top_logprobs=21),
        "invalid_value",
        "top_logprobs",
        "between 0 and 20",
    ),
    Bad(
        "top_logprobs -1",
        say(logprobs=True, top_logprobs=-1),
        "invalid_value",
        "top_logprobs",
        "between 0",
    ),
    Bad(
        "top_logprobs alone",
        say(top_logprobs=2),
        "invalid_value",
        "top_logprobs",
        "logprobs: true",
    ),
    Bad(
        "a question to be continued",
        say(continue_final_message=True),
        "invalid_value",
        "continue_final_message",
        "continues an assistant message, but the last one has the role 'user'",
    ),
    Bad(
        "a question as a prefix",
        messages({"role": "user", "content": "x", "prefix": True}),
        "invalid_value",
        "messages[0].prefix",
        "end with the beginning of the answer",
    ),
    Bad(
        "a call to be continued",
        messages(
            *HELLO,
            {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}], "prefix": True},
        ),
        "unsupported_value",
        "messages[1].tool_calls",
        "no text continues",
    ),
    Bad("n many", say(n=17), "invalid_value", "n", "between 1 and 16"),
    Bad("n zero", say(n=0), "invalid_value", "n", "between 1 and 16"),
    Bad(
        "format of another type",
        say(response_format={"type": "regex"}),
        "unsupported_value",
        "response_format.type",
        "text, json_object, json_schema",
    ),
    Bad(
        "json mode with a list for a schema",
        say(response_format={"type": "json_object", "schema": []}),
        "invalid_type",
        "response_format.schema",
        "must be an object",
    ),
    Bad(
        "schema missing",
        say(response_format={"type": "json_schema"}),
        "missing_required_parameter",
        "response_format.json_schema",
        "Missing required field",
    ),
    Bad(
        "schema empty",
        schema(None),
        "missing_required_parameter",
        "response_format.json_schema.schema",
        "Missing required field",
    ),
    Bad(
        "schema text",
        schema("{}"),
        "invalid_type",
        "response_format.json_schema.schema",
        "an object",
    ),
    Bad(
        "schema deep",
        schema({"enum": nested(70)}),
        "invalid_value",
        "response_format.json_schema.schema",
        "64 levels",
    ),
    Bad(
        "schema strict text",
        schema({}, strict="yes"),
        "invalid_type",
        "response_format.json_schema.strict",
        "true or false",
    ),
    Bad("stream text", say(stream="yes"), "invalid_type", "stream", "true or false, not a string"),
    Bad("stream options", say(stream_options=True), "invalid_type", "stream_options", "an object"),
    Bad(
        "usage text",
        say(stream_options={"include_usage": 1}),
        "invalid_type",
        "stream_options.include_usage",
        "true",
    ),
    Bad("tools object", say(tools={}), "invalid_type", "tools", "a list, not an object"),
    Bad("tool text", say(tools=["f"]), "invalid_type", "tools[0]", "an object"),
    Bad(
        "tool of other type",
        tool(type="web_search"),
        "unsupported_value",
        "tools[0]",
        "is not a function",
    ),
    Bad(
        "tool no function",
        say(tools=[{"type": "function"}]),
        "unsupported_value",
        "tools[0]",
        "is not a function",
    ),
    Bad("tool no name", tool(function={}), "invalid_type", "tools[0].function.name", "a string"),
    Bad(
        "tool empty name",
        tool(function={"name": ""}),
        "invalid_value",
        "tools[0].function.name",
        "must not be empty",
    ),
    Bad("tool deep", tool(x=nested(70)), "invalid_value", "tools[0]", "64 levels"),
    Bad("tool huge integer", tool(x=2**64), "invalid_value", "tools[0]", "64 bits"),
    Bad(
        "parallel text",
        say(parallel_tool_calls="no"),
        "invalid_type",
        "parallel_tool_calls",
        "true or false",
    ),
    Bad("tool_choice", say(tool_choice="maybe"), "invalid_value", "tool_choice", "'maybe'"),
    Bad(
        "tool_choice required without tools",
        say(tool_choice="required"),
        "invalid_value",
        "tool_choice",
        "has no tools",
    ),
    Bad(
        "tool_choice of another kind",
        choose({"type": "custom", "custom": {"name": "f"}}),
        "unsupported_value",
        "tool_choice",
        "does not name a function",
    ),
    Bad(
        "tool_choice named unknown",
        choose({"type": "function", "function": {"name": "g"}}),
        "invalid_value",
        "tool_choice.function.name",
        "'g'",
    ),
    Bad(
        "tool_choice number",
        say(tool_choice=1),
        "invalid_type",
        "tool_choice",
        "a string or an object",
    ),
    Bad(
        "template list",
        say(chat_template_kwargs=[]),
        "invalid_type",
        "chat_template_kwargs",
        "an object",
    ),
    Bad(
        "template of the client's",
        say(chat_template_kwargs={"chat_template": "{{ x }}"}),
        "invalid_value",
        "chat_template_kwargs.chat_template",
        "is set by the server",
    ),
    Bad(
        "template deep",
        say(chat_template_kwargs={"x": nested(70)}),
        "invalid_value",
        "chat_template_kwargs",
        "64",
    ),
    Bad(
        "thinking text",
        say(enable_thinking="no"),
        "invalid_type",
        "enable_thinking",
        "true or false",
    ),
    Bad(
        "cache_prompt number", say(cache_prompt=0), "invalid_type", "cache_prompt", "true or false"
    ),
    Bad("cache_mode number", say(cache_mode=1), "invalid_type", "cache_mode", "a string"),
    Bad(
        "cache_mode unknown",
        say(cache_mode="Full"),
        "invalid_value",
        "cache_mode",
        "cache_mode is 'Full'; it must be one of full, prefix",
    ),
    Bad(
        "messages many",
        messages(*[{"role": "user", "content": "x"}] * 10_001),
        "invalid_value",
        "messages",
        "10001 entries; send at most 10000",
    ),
    Bad(
        "tools many",
        say(tools=[{"type": "function", "function": {"name": "look"}}] * 1025),
        "invalid_value",
        "tools",
        "1025 entries; send at most 1024",
    ),
    Bad(
        "calls many",
        messages(
            *HELLO,
            {"role": "assistant", "tool_calls": [{"function": {"name": "look"}}] * 1025},
        ),
        "invalid_value",
        "messages[1].tool_calls",
        "1025 entries; send at most 1024",
    ),
    Bad("session empty", say(session_id=""), "invalid_value", "session_id", "1 to 200"),
    Bad("session long", say(session_id="x" * 201), "invalid_value", "session_id", "1 to 200"),
    Bad("session unprintable", say(session_id="a\nb"), "invalid_value", "session_id", "printable"),
    Bad("model long", say(model="m" * 300), "invalid_value", "model", "longer"),
    Bad("model number", say(model=3), "invalid_type", "model", "a string"),
    Bad("byte order mark", b"\xef\xbb\xbf" + say(), "invalid_json", None, "not valid JSON"),
    Bad("packed", gzip.compress(say()), "invalid_json", None, "not valid JSON"),
    Bad("a control character", raw(b'"stop":"a\x00b"'), "invalid_json", None, "not valid JSON"),
    Bad(
        "half a surrogate as a name",
        raw(b'"\\udc00\\ud800":1'),
        "invalid_json",
        None,
        "not valid JSON",
    ),
    Bad("lists 20,000 deep", raw(b'"x":' + deep(20_000)), "invalid_json", None, "nested too deep"),
    Bad(
        "objects 20,000 deep",
        raw(b'"x":' + deep(20_000, b'{"a":', b"}")),
        "invalid_json",
        None,
        "nested too deep",
    ),
    Bad(
        "messages 20,000 deep",
        b'{"messages":%s}' % deep(20_000),
        "invalid_json",
        None,
        "nested too deep",
    ),
    Bad(
        "content 20,000 deep",
        b'{"messages":[{"role":"user","content":%s}]}' % deep(20_000),
        "invalid_json",
        None,
        "nested too deep",
    ),
    Bad(
        "tools 20,000 deep",
        raw(b'"tools":%s' % deep(20_000)),
        "invalid_json",
        None,
        "nested too deep",
    ),
    Bad(
        "template 20,000 deep",
        raw(b'"chat_template_kwargs":%s' % deep(20_000, b'{"a":', b"}")),
        "invalid_json",
        None,
        "nested too deep",
    ),
    Bad(
        "content 900 deep",
        user(nested(900)),
        "invalid_type",
        "messages[0].content[0]",
        "an object, not a list",
    ),
    Bad(
        "twice the same field",
        raw(b'"messages":[]'),
        "invalid_value",
        "messages",
        "messages is empty",
    ),
    Bad(
        "a role of spaces",
        messages({"role": " ", "content": "x"}),
        "invalid_value",
        "messages[0].role",
        "' '",
    ),
    Bad(
        "content an object",
        user({"type": "text", "text": "x"}),
        "invalid_type",
        "messages[0].content",
        "a string or a list, not an object",
    ),
    Bad("content true", user(True), "invalid_type", "messages[0].content", "not true or false"),
    Bad(
        "part null",
        user([None]),
        "invalid_type",
        "messages[0].content[0]",
        "must be an object, not null",
    ),
    Bad(
        "part of a list",
        user([[]]),
        "invalid_type",
        "messages[0].content[0]",
        "must be an object, not a list",
    ),
    Bad(
        "part text number",
        user([{"type": "text", "text": 1}]),
        "invalid_type",
        "messages[0].content[0].text",
        "a string",
    ),
    Bad(
        "file",
        user([{"type": "file", "file": {}}]),
        "unsupported_content",
        "messages[0].content[0].type",
        "'file'",
    ),
    Bad(
        "image of a system",
        messages({"role": "system", "content": [IMAGE]}, *HELLO),
        "unsupported_content",
        "messages[0].content[0].type",
        "only text parts",
    ),
    Bad(
        "tool without content",
        messages(*HELLO, {"role": "tool"}),
        "missing_required_parameter",
        "messages[1].content",
        "Missing required field",
    ),
    Bad(
        "call id number",
        messages({"role": "tool", "content": "x", "tool_call_id": 1}),
        "invalid_type",
        "messages[0].tool_call_id",
        "a string",
    ),
    Bad("temperature -1e999", raw(b'"temperature":-1e999'), "invalid_value", None, "out of range"),
    Bad("temperature -nan", raw(b'"temperature":-NaN'), "invalid_json", None, "not valid JSON"),
    Bad("top_p nan", raw(b'"top_p":NaN'), "invalid_json", None, "not valid JSON"),
    Bad("top_p negative", say(top_p=-0.5), "invalid_value", "top_p", "above 0"),
    Bad("min_p infinite", raw(b'"min_p":Infinity'), "invalid_json", None, "not valid JSON"),
    Bad("seed of 4,000 digits", raw(b'"seed":1' + b"0" * 4000), "invalid_value", "seed", "between"),
    Bad("seed true", say(seed=True), "invalid_type", "seed", "an integer"),
    Bad(
        "max_tokens fraction",
        say(max_tokens=3.0),
        "invalid_type",
        "max_tokens",
        "an integer, not a number",
    ),
    Bad("max_tokens huge", say(max_tokens=2**63), "invalid_value", "max_tokens", "at most"),
    Bad("n fraction", say(n=1.0), "invalid_type", "n", "an integer"),
    Bad(
        "template nan",
        raw(b'"chat_template_kwargs":{"x":NaN}'),
        "invalid_json",
        None,
        "not valid JSON",
    ),
    Bad(
        "template huge integer",
        say(chat_template_kwargs={"x": 2**64}),
        "invalid_value",
        "chat_template_kwargs",
        "64 bits",
    ),
    Bad(
        "template's own renderer",
        say(chat_template_kwargs={"self": 1}),
        "invalid_value",
        "chat_template_kwargs.self",
        "is set by the server",
    ),
    Bad("session with a zero", say(session_id="a\0b"), "invalid_value", "session_id", "printable"),
]


# Bodies that look like mistakes but are valid, or that the server does not check.
ODD: dict[str, bytes] = {
    "unknown field": raw(b'"x":1'),
    "unknown field, 500 deep": raw(b'"x":' + deep(500)),
    "unknown name with a zero": raw(b'"a\\u0000b":1'),
    "the last of two fields counts": raw(b'"messages":[{"role":"user","content":"y"}]'),
    "no text at all": user(""),
    "no parts": user([]),
    "a zero within the text": user("a\0b"),
    "text at the ends of Unicode": user("\ufeff\ufffe\u2028\U0010ffff"),
    "a tool's result for no call": messages({"role": "tool", "content": "x"}),
    "an assistant first": messages({"role": "assistant"}),
    "deep text for arguments": tool_call({"name": "f", "arguments": deep(20).decode()}),
    "arguments that are no JSON": tool_call({"name": "f", "arguments": "{"}),
    "tools five deep": tool(x=nested(5)),
    "temperature too small for a number": raw(b'"temperature":1e-999'),
    "temperature below nothing": raw(b'"temperature":-0.0'),
    "everything at its end": say(temperature=100, top_p=5e-324, min_p=1, top_k=2**63 - 1),
    "a seed of 64 bits": say(seed=2**64 - 1),
    "values of other servers": say(max_tokens=-1, top_k=-1, top_p=0, stop=["", ""]),
}
