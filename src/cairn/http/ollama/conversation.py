"""
Reads Ollama's messages into the form of chat completions, which makes them canonical: a
conversation may switch between the two.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from cairn.engine.prompt.template import Message
from cairn.http.chat_completions import conversation as chat
from cairn.http.chat_completions.conversation import WirePart, WireToolCall
from cairn.http.wire.checks import ClientError
from cairn.http.wire.placeholders import answered


class WireMessage(msgspec.Struct):
    """A message as it is sent. Of images only the number is read."""

    role: str
    content: str | None = None
    thinking: str | None = None
    images: list[str] | None = None
    tool_calls: list[WireToolCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


def read_messages(wire: Sequence[WireMessage]) -> tuple[tuple[Message, ...], bool, set[str]]:
    """
    The messages in canonical form; whether the answer is the rest of the last one, which is so if
    that is the assistant's; and what is replaced by a placeholder.

    Raises:
        ClientError: one of them cannot be used.
    """
    messages = [_as_chat(message) for message in wire]
    _name_calls(messages)
    first = answered([message.role for message in messages])
    for index, message in enumerate(wire):
        if index >= first and messages[index].role != "tool":
            check_images(message.images, f"messages[{index}].images")
    messages[-1].prefix = messages[-1].role == "assistant"
    continued = chat.continues_last(messages, None)
    read, replaced = chat.read_messages(messages)
    return read, continued, {"messages.images"} if replaced else set()


def check_images(images: Sequence[str] | None, where: str) -> None:
    """
    Refuse images.

    Raises:
        ClientError: there is one.
    """
    if images:
        raise ClientError(
            f"{where}: this model accepts only text; leave the images out",
            param=where,
            code="unsupported_content",
        )


def _as_chat(wire: WireMessage) -> chat.WireMessage:
    role = wire.role.lower()
    content: str | list[WirePart] = wire.content or ""
    if wire.images:
        images = [WirePart(type="image") for _ in wire.images]
        content = [WirePart(type="text", text=wire.content or ""), *images]
    return chat.WireMessage(
        role=role,
        content=content,
        name=wire.tool_name if role == "tool" else None,
        reasoning_content=wire.thinking,
        tool_calls=wire.tool_calls,
        tool_call_id=wire.tool_call_id,
    )


def _name_calls(messages: Sequence[chat.WireMessage]) -> None:
    """
    Give ids to calls without one, and to results: a result is of the first call without one to the
    function that it names, else of the first. Some clients drop the ids that they were sent, and
    some templates need them. Changes the messages.
    """
    count, unanswered = 0, dict[str, str]()
    for message in messages:
        for call in message.tool_calls or ():
            call.id = call.id or f"call{count:05}"
            count += 1
            unanswered[call.id] = call.function.name
        if message.role == "tool" and not message.tool_call_id and unanswered:
            named = (one for one, name in unanswered.items() if name == message.name)
            message.tool_call_id = next(named, next(iter(unanswered)))
        if message.tool_call_id is not None:
            unanswered.pop(message.tool_call_id, None)
