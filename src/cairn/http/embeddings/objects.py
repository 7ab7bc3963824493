"""The JSON objects of embeddings, as they are sent."""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, UnsetType

from cairn.http.wire.sent import Sent


class EmbeddingObject(Sent, kw_only=True):
    """The vector of a text: numbers, or base64 of little-endian float32."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingUsage(Sent):
    """The tokens that were computed, twice, as OpenAI has it."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingCairn(Sent, kw_only=True):
    """How Cairn served the request."""

    request: str
    fingerprint: str
    ignored: list[str] | UnsetType = UNSET


class EmbeddingList(Sent, kw_only=True):
    """The vectors of all texts, in their order."""

    object: Literal["list"] = "list"
    data: list[EmbeddingObject]
    model: str
    usage: EmbeddingUsage
    cairn: EmbeddingCairn
