"""The JSON objects of OpenAI's responses, as they are sent."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from cairn.http.wire.checks import JsonObject
from cairn.http.wire.sent import CairnObject, Sent

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(Sent, kw_only=True, tag_field="type", tag="output_text"):
    """Text of the answer."""

    text: str
    annotations: list[Any] = msgspec.field(default_factory=list)
    logprobs: list[Any] = msgspec.field(default_factory=list)


class ReasoningText(Sent, tag_field="type", tag="reasoning_text"):
    """Reasoning."""

    text: str


class SummaryText(Sent, tag_field="type", tag="summary_text"):
    """Reasoning, in the field where clients look for its summary."""

    text: str


Part = OutputText | ReasoningText | SummaryText


class OutputItem(Sent, kw_only=True):
    """An item of the output. A message, reasoning and a function call have different fields."""

    id: str
    status: ItemStatus
    type: Literal["message", "reasoning", "function_call"]
    role: Literal["assistant"] | UnsetType = UNSET
    summary: list[SummaryText] | UnsetType = UNSET
    content: list[OutputText | ReasoningText] | UnsetType = UNSET
    encrypted_content: str | UnsetType = UNSET
    call_id: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class ResponseError(Sent):
    """Why a response failed."""

    code: str
    message: str


class IncompleteDetails(Sent):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens"]


class InputDetails(Sent):
    """The part of a prompt that was served from the cache."""

    cached_tokens: int


class OutputDetails(Sent):
    """How many tokens were reasoning. They are not counted, but clients require the field."""

    reasoning_tokens: int = 0


class ResponsesUsage(Sent, kw_only=True):
    """Token counts of the prompt and the answer."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class Echo(Sent, kw_only=True):
    """The parameters of a request that its response repeats."""

    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, str] = msgspec.field(default_factory=dict)
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    prompt_cache_key: str | None = None
    reasoning: JsonObject = msgspec.field(default_factory=dict)
    store: bool = True
    temperature: float | None = None
    text: JsonObject = msgspec.field(default_factory=dict)
    tool_choice: str | JsonObject = "auto"
    tools: list[JsonObject] = msgspec.field(default_factory=list)
    top_p: float | None = None


class Response(Sent, kw_only=True):
    """OpenAI's response. The fields from ``instructions`` to ``top_p`` are those of ``Echo``."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"] = "in_progress"
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    model: str
    background: Literal[False] = False
    truncation: Literal["disabled"] = "disabled"
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: JsonObject
    store: bool
    temperature: float | None
    text: JsonObject
    tool_choice: str | JsonObject
    tools: list[JsonObject]
    top_p: float | None
    usage: ResponsesUsage | None = None
    output: list[OutputItem]
    cairn: CairnObject | UnsetType = UNSET


class CompactedResponse(Sent, kw_only=True):
    """The items that replace a conversation: what the user said, and a summary."""

    id: str
    object: Literal["response.compaction"] = "response.compaction"
    created_at: int
    output: list[JsonObject]
    usage: ResponsesUsage
    cairn: CairnObject


class InputTokens(Sent, kw_only=True):
    """How many tokens the prompt of a request has."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


class ItemPage(Sent, kw_only=True):
    """A page of the items that a request brought."""

    object: Literal["list"] = "list"
    data: list[JsonObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedResponse(Sent, kw_only=True):
    """The name of a response that was deleted."""

    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class Event(Sent, kw_only=True):
    """An event of a streamed response."""

    type: str
    sequence_number: int
    item_id: str | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    summary_index: int | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    item: OutputItem | UnsetType = UNSET
    part: Part | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    logprobs: list[Any] | UnsetType = UNSET
    response: Response | UnsetType = UNSET
    code: str | UnsetType = UNSET
    message: str | UnsetType = UNSET
    param: str | UnsetType | None = UNSET
