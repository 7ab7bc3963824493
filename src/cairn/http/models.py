"""The served models, as lists show them and as requests name them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Literal

import msgspec

from cairn.actors.requests.messages import ListedModel
from cairn.http.wire.checks import ClientError
from cairn.http.wire.sent import Sent


class ModelState(Sent):
    """Whether a model is loaded, and what is known of it."""

    state: Literal["loaded", "loading", "not_loaded"]
    waiting: int
    aliases: list[str]
    fingerprint: str | None
    context_tokens: int | None


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
            state=model.state,
            waiting=model.waiting,
            aliases=list(model.aliases),
            fingerprint=facts.fingerprint or None,
            context_tokens=facts.context_tokens or None,
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
