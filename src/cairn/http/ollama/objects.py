"""
The JSON objects of Ollama's API, as they are sent.

To add a field: declare it here, set it in ``answers.py`` or ``models.py``, and describe it in
docs/reference/ollama.md. The OpenAPI document follows.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from cairn.http.embeddings.objects import EmbeddingCairn
from cairn.http.wire.checks import JsonObject
from cairn.http.wire.sent import CairnObject, Sent

DoneReason = Literal["stop", "length", "load", "unload"]


class OllamaErrorEnvelope(Sent):
    """The body of an error answer, and the last line of a stream that broke off."""

    error: str
    code: str
    param: str | None


class OllamaFunction(Sent):
    """The function that a call names, with its arguments."""

    index: int
    name: str
    arguments: JsonObject | msgspec.Raw


class OllamaCall(Sent):
    """A tool call that the model made."""

    id: str
    function: OllamaFunction


class OllamaMessage(Sent, kw_only=True):
    """The model's message, or more of it."""

    role: Literal["assistant"] = "assistant"
    content: str = ""
    thinking: str | UnsetType = UNSET
    tool_calls: list[OllamaCall] | UnsetType = UNSET


class Piece(Sent, kw_only=True):
    """
    An answer, or a line of a streamed one; only the last line has what follows ``done``. Durations
    are in nanoseconds; they are absent if the journal no longer has them.
    """

    model: str
    created_at: str
    done: bool
    done_reason: DoneReason | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET
    cairn: CairnObject | UnsetType = UNSET


class OllamaChat(Piece, kw_only=True):
    """The answer to a conversation."""

    message: OllamaMessage


class OllamaText(Piece, kw_only=True):
    """The answer to a prompt."""

    response: str
    thinking: str | UnsetType = UNSET


class OllamaVersion(Sent):
    """The version of Ollama whose API this is, and Cairn's own."""

    version: str
    cairn: str


class OllamaDetails(Sent, kw_only=True):
    """What is known of a model's files."""

    parent_model: str = ""
    format: str
    family: str
    families: list[str]
    parameter_size: str = ""
    quantization_level: str = ""


class OllamaModel(Sent, kw_only=True):
    """A served model."""

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: OllamaDetails
    capabilities: list[str]


class OllamaModels(Sent):
    """All served models."""

    models: list[OllamaModel]


class OllamaLoadedModel(Sent, kw_only=True):
    """A model in memory."""

    name: str
    model: str
    size: int
    digest: str
    details: OllamaDetails
    expires_at: str
    size_vram: int
    context_length: int


class OllamaLoadedModels(Sent):
    """The models in memory."""

    models: list[OllamaLoadedModel]


class OllamaModelFacts(Sent, kw_only=True):
    """What is known of a model."""

    modelfile: str
    parameters: str
    template: str
    details: OllamaDetails
    model_info: dict[str, str | int]
    capabilities: list[str]
    modified_at: str


class OllamaEmbeddings(Sent, kw_only=True):
    """The vectors of texts."""

    model: str
    embeddings: list[list[float]]
    prompt_eval_count: int
    cairn: EmbeddingCairn


class OllamaEmbedding(Sent, kw_only=True):
    """The vector of a text."""

    embedding: list[float]
    cairn: EmbeddingCairn
