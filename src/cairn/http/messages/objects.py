"""The JSON objects of Anthropic's messages, as they are sent."""

from __future__ import annotations

from typing import Literal

import msgspec

from cairn.http.wire.checks import JsonObject
from cairn.http.wire.sent import CairnObject, Sent


class TextBlock(Sent, tag_field="type", tag="text"):
    """Text of the answer."""

    text: str


class ThinkingBlock(Sent, tag_field="type", tag="thinking"):
    """Reasoning. Clients send it back only if it has a signature; this one signs nothing."""

    thinking: str
    signature: str


class ToolUseBlock(Sent, tag_field="type", tag="tool_use"):
    """A tool call."""

    id: str
    name: str
    input: JsonObject | msgspec.Raw


Block = TextBlock | ThinkingBlock | ToolUseBlock

StopReason = Literal[
    "end_turn", "max_tokens", "model_context_window_exceeded", "stop_sequence", "tool_use"
]


class MessagesUsage(Sent):
    """Token counts. The three of the prompt add up to it."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class MessageObject(Sent, kw_only=True):
    """Anthropic's message. At the start of a stream, what is not known yet is null or empty."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[Block]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessagesUsage
    cairn: CairnObject


class TokenCount(Sent):
    """The length of a prompt."""

    input_tokens: int


class Ping(Sent, tag_field="type", tag="ping"):
    """Keeps a stream alive while there is nothing to send."""


class MessageStart(Sent, tag_field="type", tag="message_start"):
    """The request was accepted."""

    message: MessageObject


class BlockStart(Sent, tag_field="type", tag="content_block_start"):
    """A block begins, empty."""

    index: int
    content_block: Block


class TextDelta(Sent, tag_field="type", tag="text_delta"):
    """More of a text block."""

    text: str


class ThinkingDelta(Sent, tag_field="type", tag="thinking_delta"):
    """More of a thinking block."""

    thinking: str


class InputDelta(Sent, tag_field="type", tag="input_json_delta"):
    """More of a call's input, as JSON text."""

    partial_json: str


class SignatureDelta(Sent, tag_field="type", tag="signature_delta"):
    """The signature at the end of a thinking block."""

    signature: str


class BlockDelta(Sent, tag_field="type", tag="content_block_delta"):
    """More of a block."""

    index: int
    delta: TextDelta | ThinkingDelta | InputDelta | SignatureDelta


class BlockStop(Sent, tag_field="type", tag="content_block_stop"):
    """A block is complete."""

    index: int


class Stop(Sent):
    """Why an answer ended; None while it goes on."""

    stop_reason: StopReason | None
    stop_sequence: str | None


class MessageDelta(Sent, tag_field="type", tag="message_delta"):
    """Why the answer ended, and its token counts."""

    delta: Stop
    usage: MessagesUsage


class MessageStop(Sent, tag_field="type", tag="message_stop"):
    """The stream is complete."""


class MessagesErrorObject(Sent):
    """What is wrong. ``param`` and ``code`` are Cairn's own, as in the other envelope."""

    type: str
    message: str
    param: str | None
    code: str


class MessagesErrorEnvelope(Sent, tag_field="type", tag="error"):
    """The body of an error answer, and the event that ends a stream that broke off."""

    error: MessagesErrorObject
    request_id: str


Event = (
    Ping
    | MessageStart
    | BlockStart
    | BlockDelta
    | BlockStop
    | MessageDelta
    | MessageStop
    | MessagesErrorEnvelope
)
