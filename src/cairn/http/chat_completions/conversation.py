"""
Reads OpenAI's messages, tools and template settings into canonical form.

Conversations are compared by hashes of this form, so differences without meaning are removed:
content as a string or as a list of parts, cache hints, arguments as text or as an object, empty or
absent fields.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from cairn.engine.prompt.template import Message, call_arguments
from cairn.engine.prompt.template_settings import RENDERED
from cairn.http.wire.checks import (
    CALLS_MAX,
    MESSAGES_MAX,
    TOOLS_MAX,
    ClientError,
    JsonObject,
    check_count,
    check_json,
    check_known,
    check_name,
    missing,
)
from cairn.http.wire.placeholders import OF_PARTS, answered

_ROLES = ("system", "developer", "user", "assistant", "tool")


class WirePart(msgspec.Struct):
    """A part of a content list. Only the type of an image part is read."""

    type: str
    text: str | None = None
    refusal: str | None = None


class WireFunction(msgspec.Struct):
    """The function of a tool call."""

    name: str
    arguments: str | JsonObject | None = None


class WireToolCall(msgspec.Struct):
    """A tool call in an assistant message."""

    function: WireFunction
    id: str | None = None


class WireMessage(msgspec.Struct):
    """A message as it is sent."""

    role: str
    content: str | list[WirePart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[WireToolCall] | None = None
    function_call: Any = None
    tool_call_id: str | None = None
    prefix: bool | None = None


def continues_last(wire: Sequence[WireMessage], field: bool | None) -> bool:
    """
    Whether the answer is the rest of the last message. Clients of vLLM say so in a field, those of
    Mistral and DeepSeek by ``prefix`` in the message.

    Args:
        field: the value of ``continue_final_message``.

    Raises:
        ClientError: the last message cannot be continued.
    """
    last, where = wire[-1], f"messages[{len(wire) - 1}]"
    if not (field or last.prefix):
        return False
    param = "continue_final_message" if field else f"{where}.prefix"
    if last.role != "assistant":
        raise ClientError(
            f"{param} continues an assistant message, but the last one has the role "
            f"{last.role[:40]!r}; end with the beginning of the answer",
            param=param,
        )
    if last.tool_calls:
        raise ClientError(
            f"{where} has tool_calls, which no text continues; send their results, or leave them "
            "out",
            param=f"{where}.tool_calls",
            code="unsupported_value",
        )
    return True


def read_messages(wire: Sequence[WireMessage]) -> tuple[tuple[Message, ...], set[str]]:
    """
    The messages in canonical form, and the types of the parts that were replaced by placeholders.

    Raises:
        ClientError: one of them cannot be used.
    """
    if not wire:
        raise ClientError("messages is empty; send at least one message", param="messages")
    check_count(wire, "messages", MESSAGES_MAX)
    messages, ignored = [], set()
    for index, (message, placeholders) in enumerate(_with_placeholders(wire)):
        messages.append(_message(message, f"messages[{index}]", placeholders))
        if isinstance(message.content, list):
            replaced = (part.type for part in message.content if part.type in placeholders)
            ignored |= {f"messages.{kind}" for kind in replaced}
    return tuple(messages), ignored


def read_tools(wire: Sequence[JsonObject]) -> tuple[JsonObject, ...]:
    """
    The tools as the template takes them. ``tool_choice`` does not change them, so that the prompt
    keeps its beginning.

    Raises:
        ClientError: one of them is not a function.
    """
    check_count(wire, "tools", TOOLS_MAX)
    return tuple(_tool(tool, f"tools[{index}]") for index, tool in enumerate(wire))


def read_template(
    given: JsonObject,
    enable_thinking: bool | None,
    effort: JsonObject,
    defaults: JsonObject,
) -> JsonObject:
    """
    The template settings. Those in ``given`` take precedence over ``enable_thinking``, then those
    that an ``effort`` of thinking sets, then the model's ``defaults``.

    Raises:
        ClientError: a setting is not the client's to make.
    """
    template = dict(given)
    taken = sorted(RENDERED & template.keys())
    if taken:
        where = f"chat_template_kwargs.{taken[0]}"
        raise ClientError(f"{where} is set by the server; leave it out", param=where)
    check_json(template, "chat_template_kwargs")
    if enable_thinking is not None:
        template.setdefault("enable_thinking", enable_thinking)
    return {**defaults, **effort, **template}


def _with_placeholders(
    wire: Sequence[WireMessage],
) -> Iterator[tuple[WireMessage, Mapping[str, str]]]:
    """Each message with the placeholders for its parts, by part type."""
    first = answered([message.role for message in wire])
    for index, message in enumerate(wire):
        is_past = message.role == "user" and index < first
        yield message, OF_PARTS if is_past or message.role == "tool" else {}


def _message(wire: WireMessage, where: str, placeholders: Mapping[str, str]) -> Message:
    check_known(wire.role, _ROLES, f"{where}.role")
    is_assistant = wire.role == "assistant"
    if is_assistant and wire.function_call is not None:
        # Its result would have the role `function`, which does not say which call it answers.
        raise ClientError(
            f"{where}.function_call is not supported; send the call in tool_calls, and its result "
            "as a message with the role tool",
            param=f"{where}.function_call",
            code="unsupported_value",
        )
    if wire.content is None and not is_assistant:
        raise ClientError(
            f"Missing required field `{where}.content`; only assistant messages may omit it",
            param=f"{where}.content",
            code="missing_required_parameter",
        )
    calls = wire.tool_calls or () if is_assistant else ()
    check_count(calls, f"{where}.tool_calls", CALLS_MAX)
    return Message(
        role="system" if wire.role == "developer" else wire.role,
        content=_text(wire.content, f"{where}.content", placeholders),
        reasoning=(wire.reasoning_content or wire.reasoning or None) if is_assistant else None,
        tool_calls=tuple(
            _tool_call(call, f"{where}.tool_calls[{index}]") for index, call in enumerate(calls)
        ),
        tool_call_id=(wire.tool_call_id or None) if wire.role == "tool" else None,
        name=wire.name or None,
    )


def _text(content: str | list[WirePart] | None, where: str, placeholders: Mapping[str, str]) -> str:
    if not isinstance(content, list):
        return content or ""
    return "".join(
        placeholders.get(part.type) or _part(part, f"{where}[{index}]")
        for index, part in enumerate(content)
    )


def _part(part: WirePart, where: str) -> str:
    if part.type not in ("text", "refusal"):
        raise ClientError(
            f"{where} has the type {part.type[:40]!r}; this model accepts only text parts",
            param=f"{where}.type",
            code="unsupported_content",
        )
    text = part.refusal if part.type == "refusal" else part.text
    if text is None:
        raise missing(f"{where}.{part.type}")
    return text


def _tool_call(wire: WireToolCall, where: str) -> JsonObject:
    arguments: str | JsonObject = wire.function.arguments or ""
    if isinstance(arguments, str):
        arguments = call_arguments(arguments)
    else:
        check_json(arguments, f"{where}.function.arguments")
    function = {"name": wire.function.name, "arguments": arguments}
    return {"id": wire.id or "", "type": "function", "function": function}


def _tool(tool: JsonObject, where: str) -> JsonObject:
    function = tool.get("function")
    if tool.get("type", "function") != "function" or not isinstance(function, dict):
        raise ClientError(
            f'{where} is not a function; send {{"type": "function", "function": {{"name": ...}}}}',
            param=where,
            code="unsupported_value",
        )
    param = f"{where}.function.name"
    if not isinstance(function.get("name"), str):
        raise ClientError(f"{param} must be a string", param=param, code="invalid_type")
    check_name(function["name"], param)
    check_json(tool, where)
    return {
        **{key: value for key, value in tool.items() if key != "cache_control"},
        "type": "function",
        "function": {key: value for key, value in function.items() if key != "cache_control"},
    }
