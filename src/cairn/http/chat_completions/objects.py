"""
The JSON objects of OpenAI's chat completions, as they are sent.

To add a field: declare it here (in ``ChatChunk`` too if it is streamed), set it in ``answers.py``
(``id`` to ``system_fingerprint``, ``usage`` and ``timings`` are set in ``choices.py``, ``cairn`` in
``wire/answers.py``), and describe it in docs/reference/chat-completions.md. A new value comes from
``actors/requests/messages.py``. The OpenAPI document follows from ``ChatCompletion``. Agents send
these objects too, and ``choices.py`` shares ``Usage`` and ``Timings`` with ``/v1/completions``.
"""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, UnsetType

from cairn.http.wire.sent import CairnObject, Sent


class CachedTokens(Sent):
    """The part of a prompt that was served from the cache."""

    cached_tokens: int


class Usage(Sent):
    """Token counts of the prompt and of all answers together."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class Timings(Sent, kw_only=True):
    """
    How long the answer took, under llama.cpp's names; with several answers, the first one.
    ``cache_n`` and ``prompt_n`` are the tokens of the prompt that were served from the cache, and
    the others. Times are in milliseconds: of the prompt up to the first token, without the time in
    the queue, and of the tokens after it. A rate is 0 if there is none.
    """

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float


class Alternative(Sent):
    """A candidate for a token's place."""

    token: str
    bytes: list[int] | None
    logprob: float


class TokenLogprob(Sent):
    """A token of the answer and the likeliest candidates for its place."""

    token: str
    bytes: list[int] | None
    logprob: float
    top_logprobs: list[Alternative]


class ChatLogprobs(Sent):
    """The log-probabilities of an answer's tokens."""

    content: list[TokenLogprob]
    refusal: None = None


class FunctionCall(Sent):
    """The function that a call names, and its arguments as JSON text."""

    name: str
    arguments: str


class ToolCall(Sent, kw_only=True):
    """A tool call that the model made."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class AssistantMessage(Sent, kw_only=True):
    """The model's message. Reasoning is sent under both names that clients use."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


ChatFinishReason = Literal["stop", "length", "tool_calls"]


class ChatChoice(Sent):
    """One of the answers to a request."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason


class ChatCompletion(Sent, kw_only=True):
    """The answer to a conversation."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    timings: Timings | UnsetType = UNSET
    cairn: CairnObject


class FunctionDelta(Sent):
    """More of a call: first its name, then its arguments piece by piece."""

    name: str | UnsetType = UNSET
    arguments: str = ""


class ToolCallDelta(Sent, kw_only=True):
    """More of a tool call. Only its first piece has the id and the type."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionDelta


class ChatDelta(Sent):
    """More of a message."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(Sent):
    """More of one of the answers."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason | None


class ChatChunk(Sent, kw_only=True):
    """An event of a streamed answer."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    timings: Timings | UnsetType = UNSET
    cairn: CairnObject | UnsetType = UNSET
