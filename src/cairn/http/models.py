"""The models that may be asked for: as a list has them, and which one a request means."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from cairn.actors.requests.messages import ListedModel
from cairn.http.wire.errors import ClientError


def model_list(models: Sequence[ListedModel]) -> dict[str, Any]:
    """All models: OpenAI's list and Anthropic's page, which is the only one."""
    data = [model_object(model) for model in models]
    return {
        "object": "list",
        "data": data,
        "has_more": False,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
    }


def model_object(model: ListedModel) -> dict[str, Any]:
    """
    A model, as the list of models has it: with what OpenAI's clients look for, and Anthropic's.
    """
    facts = model.facts
    return {
        "id": facts.model,
        "object": "model",
        "created": facts.started_s,
        "owned_by": "cairn",
        "type": "model",
        "display_name": facts.model,
        "created_at": f"{datetime.fromtimestamp(facts.started_s, UTC):%Y-%m-%dT%H:%M:%SZ}",
        "cairn": {
            "state": model.state,
            "waiting": model.waiting,
            "aliases": model.aliases,
            "fingerprint": facts.fingerprint or None,
            "context_tokens": facts.context_tokens or None,
        },
    }


def listed(name: str, models: Sequence[ListedModel]) -> ListedModel:
    """
    The model of a name or an alias.

    Raises:
        ClientError: there is none.
    """
    for model in models:
        if name in (model.facts.model, *model.aliases):
            return model
    names = [repr(model.facts.model) for model in models]
    served = f"{names[0]} is: send that name, or none"
    if len(names) > 1:
        served = f"{', '.join(names)} are: send one of these names, or none"
    raise ClientError(
        f"the model {name[:200]!r} is not served here; {served}",
        param="model",
        code="model_not_found",
        status=404,
    )


class _Named(msgspec.Struct):
    """Of a body, what says which model's defaults hold for the rest."""

    model: str | None = None


def named_model(body: bytes, models: Sequence[ListedModel]) -> str:
    """
    The model that a body asks for; none where it cannot be read, which the adapter says better.
    """
    if len(models) == 1:
        return ""
    try:
        return msgspec.json.decode(body, type=_Named).model or ""
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return ""
