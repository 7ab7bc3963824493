"""The served models, as lists show them and as requests name them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from cairn.actors.requests.messages import ListedModel
from cairn.http.wire.checks import ClientError
from cairn.http.wire.sent import Sent


class ModelState(Sent):
    """Whether a model is loaded, and what is known of it."""

    kind: Literal["chat", "embedding"]
    state: Literal["loaded", "loading", "not_loaded"]
    waiting: int
    aliases: list[str]
    fingerprint: str | None
    context_tokens: int | None
    dimensions: int | UnsetType = UNSET


class ModelObject(Sent, kw_only=True):
    """A served model, with the fields of OpenAI's model and of Anthropic's."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["cairn"] = "cairn"
    type: Literal["model"] = "model"
    display_name: str
    created_at: str
    cairn: ModelState


class ModelList(Sent, kw_only=True):
    """All served models: OpenAI's list, and the only page of Anthropic's."""

    object: Literal["list"] = "list"
    data: list[ModelObject]
    has_more: Literal[False] = False
    first_id: str | None
    last_id: str | None


def model_list(models: Sequence[ListedModel]) -> ModelList:
    """The list of all served models."""
    data = [model_object(model) for model in models]
    return ModelList(
        data=data,
        first_id=data[0].id if data else None,
        last_id=data[-1].id if data else None,
    )


def model_object(model: ListedModel) -> ModelObject:
    """One of the served models."""
    facts = model.facts
    return ModelObject(
        id=facts.model,
        created=facts.started_s,
        display_name=facts.model,
        created_at=f"{datetime.fromtimestamp(facts.started_s, UTC):%Y-%m-%dT%H:%M:%SZ}",
        cairn=ModelState(
            kind="chat" if model.embeds is None else "embedding",
            state=model.state,
            waiting=model.waiting,
            aliases=list(model.aliases),
            fingerprint=facts.fingerprint or None,
            context_tokens=facts.context_tokens or None,
            dimensions=UNSET if model.embeds is None else model.embeds.dimensions,
        ),
    )


def listed(name: str, models: Sequence[ListedModel]) -> ListedModel:
    """
    Find a served model by its name or an alias.

    Raises:
        ClientError: no served model has this name.
    """
    for model in models:
        if name in (model.facts.model, *model.aliases):
            return model
    names = [repr(model.facts.model) for model in models]
    served = names[0]
    if len(names) > 1:
        served = f"one of {', '.join(names)}"
    raise ClientError(
        f"the model {name[:200]!r} is not served here; send {served}, or no model",
        param="model",
        code="model_not_found",
        status=404,
    )


def answering(models: Sequence[ListedModel]) -> Sequence[ListedModel]:
    """The models that answer: all but the embedding models."""
    return [one for one in models if one.embeds is None]


def check_answers(name: str, models: Sequence[ListedModel]) -> None:
    """
    Refuse the name of an embedding model for an answer.

    Raises:
        ClientError: it is one.
    """
    for model in models:
        if model.embeds is not None and name in (model.facts.model, *model.aliases):
            instead = ", ".join(repr(one.facts.model) for one in answering(models))
            raise ClientError(
                f"the model {name[:200]!r} embeds texts and answers nothing; send it to "
                f"/v1/embeddings, or use {instead} here",
                param="model",
                code="wrong_kind_of_model",
            )


def embedding_model(name: str, models: Sequence[ListedModel]) -> ListedModel:
    """
    The embedding model that a request names; the first one if it names none.

    Raises:
        ClientError: there is none of this name.
    """
    found = [one for one in models if one.embeds is not None]
    if not found:
        raise ClientError(
            "this server has no embedding model; its operator adds one to the file of --models, "
            "with embeddings = true",
            param="model",
            code="model_not_found",
            status=404,
        )
    for one in found:
        if name in ("", one.facts.model, *one.aliases):
            return one
    instead = ", ".join(repr(one.facts.model) for one in found)
    if any(name in (one.facts.model, *one.aliases) for one in models):
        raise ClientError(
            f"the model {name[:200]!r} answers and embeds nothing; use {instead} here",
            param="model",
            code="wrong_kind_of_model",
        )
    # Any name is good enough for a chat, but vectors of another model cannot be compared.
    raise ClientError(
        f"there is no embedding model {name[:200]!r} here; send {instead}, or ask the operator to "
        "make the name an alias of it",
        param="model",
        code="model_not_found",
        status=404,
    )


class _Named(msgspec.Struct):
    """The field of a body that says which model's defaults apply to the others."""

    model: str | None = None


def named_model(body: bytes, models: Sequence[ListedModel]) -> str:
    """The model that a body names; empty if it cannot be read, which the adapter then reports."""
    if len(models) == 1:
        return ""
    try:
        return msgspec.json.decode(body, type=_Named).model or ""
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return ""
