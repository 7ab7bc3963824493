"""``/v1/embeddings``: what is asked, and what is answered."""

from __future__ import annotations

import base64
from array import array
from collections.abc import Sequence
from typing import Any

import attrs
import msgspec
import trio

from cairn.actors.requests.messages import Embed, Embedded, ListedModel
from cairn.http.completions.request import read_token_ids
from cairn.http.embeddings.objects import (
    EmbeddingCairn,
    EmbeddingList,
    EmbeddingObject,
    EmbeddingUsage,
)
from cairn.http.models import embedding_model
from cairn.http.wire import parameters
from cairn.http.wire.checks import ClientError, JsonObject, check_count, check_known, missing
from cairn.http.wire.json import decode_object, to_struct
from cairn.http.wire.parameters import Ignored, model_name
from cairn.http.wire.suggestions import slip_for

INPUTS_MAX = 2048
"""The most texts of a request, as with OpenAI."""

_FORMATS = ("float", "base64")


class EmbeddingsBody(msgspec.Struct):
    """Texts, or lists of token ids; ``user`` is taken and means nothing."""

    input: str | list[str | int | list[int]] | None = None
    model: str | None = None
    encoding_format: str | None = None
    dimensions: int | None = None
    user: str | None = None


@attrs.frozen(kw_only=True)
class EmbeddingsRequest:
    """
    A request that was read.

    Attributes:
        as_base64: whether vectors are sent as base64.
        ignored: parameters that have no effect.
    """

    command: Embed
    as_base64: bool
    ignored: tuple[str, ...]


def read_embeddings_request(
    body: bytes, ignored: Ignored, models: Sequence[ListedModel]
) -> EmbeddingsRequest:
    """
    Read a body.

    Args:
        models: those that the server has.

    Raises:
        ClientError: it cannot be used.
    """
    return embeddings_request(decode_object(body), ignored, models)


def embeddings_request(
    fields: JsonObject, ignored: Ignored, models: Sequence[ListedModel]
) -> EmbeddingsRequest:
    """As ``read_embeddings_request``, for the fields of a body."""
    wire = to_struct(fields, EmbeddingsBody)
    known = EmbeddingsBody.__struct_fields__
    if wire.input is None:
        raise missing("input", slip_for("input", fields, known))
    encoding = wire.encoding_format or "float"
    check_known(encoding, _FORMATS, "encoding_format")
    model = embedding_model(model_name(wire.model), models)
    return EmbeddingsRequest(
        command=Embed(
            model=model.facts.model,
            inputs=_inputs(wire.input, model.facts.vocabulary_tokens),
            dimensions=_dimensions(wire.dimensions, model),
        ),
        as_base64=encoding == "base64",
        ignored=ignored.report(parameters.unknown(fields, known), known),
    )


async def vector_texts(found: Embedded, *, as_base64: bool = False) -> list[Any]:
    """
    The JSON of each vector, which takes a second for a large request. Other tasks run in between.
    """
    texts = []
    for vector in found.vectors:
        await trio.lowlevel.checkpoint()
        sent = base64.b64encode(vector).decode() if as_base64 else array("f", vector).tolist()
        texts.append(msgspec.Raw(msgspec.json.encode(sent)))
    return texts


async def embedding_list(found: Embedded, read: EmbeddingsRequest) -> EmbeddingList:
    """The vectors, as they are sent."""
    texts = await vector_texts(found, as_base64=read.as_base64)
    return EmbeddingList(
        data=[EmbeddingObject(index=index, embedding=text) for index, text in enumerate(texts)],
        model=found.model,
        usage=EmbeddingUsage(found.tokens, found.tokens),
        cairn=EmbeddingCairn(
            request=found.request,
            fingerprint=found.fingerprint,
            ignored=list(read.ignored) or msgspec.UNSET,
        ),
    )


def _inputs(
    wire: str | Sequence[str | int | list[int]], vocabulary_tokens: int
) -> tuple[str | tuple[int, ...], ...]:
    if not wire:
        raise ClientError("input is empty; send a text, or a list of texts", param="input")
    if isinstance(wire, str):
        return (wire,)
    if all(isinstance(one, int) for one in wire):
        return (read_token_ids(wire, vocabulary_tokens, "input"),)
    check_count(wire, "input", INPUTS_MAX)
    found: list[str | tuple[int, ...]] = []
    for place, one in enumerate(wire):
        where = f"input[{place}]"
        if isinstance(one, int):
            raise ClientError(
                f"{where} is a token id beside other inputs; send texts, or lists of token ids",
                param="input",
                code="invalid_type",
            )
        if not one:
            raise ClientError(f"{where} is empty; leave it out", param=where)
        found.append(one if isinstance(one, str) else read_token_ids(one, vocabulary_tokens, where))
    return tuple(found)


def _dimensions(wanted: int | None, model: ListedModel) -> int | None:
    facts = model.embeds
    assert facts is not None
    if wanted is None or wanted == facts.dimensions:
        return None
    if 1 <= wanted < facts.dimensions and facts.matryoshka.allows(wanted):
        return wanted
    cut = "cannot be cut; leave dimensions out"
    if facts.matryoshka.any_length:
        cut = f"can be cut to any number from 1 to {facts.dimensions}"
    elif facts.matryoshka.lengths:
        cut = f"can be cut to {', '.join(map(str, facts.matryoshka.lengths))}"
    raise ClientError(
        f"dimensions is {wanted}; the vectors of {facts.name} have {facts.dimensions} numbers and "
        f"{cut}",
        param="dimensions",
        code="unsupported_value",
    )
