"""``/api/embed`` and the older ``/api/embeddings``: what is asked, and what is answered."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from cairn.actors.requests.messages import Embedded, ListedModel
from cairn.http.embeddings.objects import EmbeddingCairn
from cairn.http.embeddings.request import EmbeddingsRequest, embeddings_request, vector_texts
from cairn.http.ollama.objects import OllamaEmbedding, OllamaEmbeddings
from cairn.http.wire.checks import JsonObject, missing
from cairn.http.wire.json import to_struct
from cairn.http.wire.parameters import Ignored


class EmbedBody(msgspec.Struct):
    """Texts."""

    model: str | None = None
    input: str | list[str] | None = None
    dimensions: int | None = None


class EmbeddingsBody(msgspec.Struct):
    """A text."""

    model: str | None = None
    prompt: str | None = None


def read_embed_request(
    fields: JsonObject, ignored: Ignored, models: Sequence[ListedModel]
) -> EmbeddingsRequest:
    """As ``embeddings.request.embeddings_request``."""
    to_struct(fields, EmbedBody)
    return embeddings_request(fields, ignored, models)


def read_prompt_request(
    fields: JsonObject, ignored: Ignored, models: Sequence[ListedModel]
) -> EmbeddingsRequest:
    """As ``embeddings.request.embeddings_request``, for a single text."""
    prompt = to_struct(fields, EmbeddingsBody).prompt
    if not prompt:
        raise missing("prompt")
    others = {name: value for name, value in fields.items() if name != "prompt"}
    return embeddings_request({**others, "input": prompt}, ignored, models)


async def vectors(found: Embedded, read: EmbeddingsRequest) -> OllamaEmbeddings:
    """The vectors of all texts, in their order."""
    return OllamaEmbeddings(
        model=found.model,
        embeddings=await vector_texts(found),
        prompt_eval_count=found.tokens,
        cairn=EmbeddingCairn(
            request=found.request,
            fingerprint=found.fingerprint,
            ignored=list(read.ignored) or msgspec.UNSET,
        ),
    )


async def vector(found: Embedded, read: EmbeddingsRequest) -> OllamaEmbedding:
    """The vector of a single text."""
    all_of_it = await vectors(found, read)
    return OllamaEmbedding(embedding=all_of_it.embeddings[0], cairn=all_of_it.cairn)
