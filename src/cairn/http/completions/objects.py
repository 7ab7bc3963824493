"""The JSON objects of OpenAI's older completions, as they are sent."""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, UnsetType

from cairn.http.chat_completions.objects import Timings, Usage
from cairn.http.wire.sent import CairnObject, Sent

TextFinishReason = Literal["stop", "length"]


class TextLogprobs(Sent):
    """The tokens of a text, and where in the text each begins."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class TextChoice(Sent):
    """One of the texts."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: TextFinishReason


class TextCompletion(Sent, kw_only=True):
    """The continuation of a text."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[TextChoice]
    usage: Usage
    timings: Timings | UnsetType = UNSET
    cairn: CairnObject


class TextChunkChoice(Sent):
    """More of one of the texts."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: TextFinishReason | None


class TextChunk(Sent, kw_only=True):
    """An event of a streamed text."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[TextChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    timings: Timings | UnsetType = UNSET
    cairn: CairnObject | UnsetType = UNSET
