"""The served models, as ``/api/tags``, ``/api/ps`` and ``/api/show`` have them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from cairn.actors.models.size import ModelSize
from cairn.actors.requests.messages import ListedModel
from cairn.http.models import listed
from cairn.http.ollama.objects import (
    OllamaDetails,
    OllamaLoadedModel,
    OllamaLoadedModels,
    OllamaModel,
    OllamaModelFacts,
    OllamaModels,
)
from cairn.http.wire.checks import ClientError, missing

API_VERSION: Final = "0.24.0"
"""
The version of Ollama whose API this follows. Clients ask for it, and refuse a server that is older
than what they need.
"""

#: The tag that Ollama's clients add to a name without one.
_TAG: Final = ":latest"

#: Ollama has GGUF's names for families here. All that clients do with them is to show them, and to
#: find the length of the context under ``FAMILY.context_length``.
_FORMAT: Final = "mlx"

#: A loaded model stays until the operator has it unloaded. Clients show times this far away as
#: "forever".
_NEVER: Final = "9999-12-31T23:59:59Z"


def served_name(name: str, models: Sequence[ListedModel]) -> str:
    """The name of a model without the tag that clients add, unless it is a part of its name."""
    is_served = any(name in (one.facts.model, *one.aliases) for one in models)
    return name if is_served else name.removesuffix(_TAG)


def named(body: Mapping[str, Any], models: Sequence[ListedModel]) -> ListedModel:
    """
    The served model that a body names, as ``model`` or, as older clients do, as ``name``.

    Raises:
        ClientError: it names none, or one that is not served.
    """
    name = body.get("model") or body.get("name")
    if name is None:
        raise missing("model")
    if not isinstance(name, str):
        raise ClientError("model must be a string", param="model", code="invalid_type")
    return listed(served_name(name, models), models)


def at(seconds: int) -> str:
    """
    A time as Ollama's clients read it.

    Args:
        seconds: since 1970.
    """
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%SZ}"


def all_models(models: Sequence[ListedModel], sizes: Mapping[str, ModelSize]) -> OllamaModels:
    """All served models."""
    return OllamaModels(
        [
            OllamaModel(
                name=facts.model,
                model=facts.model,
                modified_at=at(facts.started_s),
                size=_bytes_of(facts.model, sizes),
                digest=_digest(facts.model),
                details=_details(),
                capabilities=_capabilities(model),
            )
            for model, facts in ((one, one.facts) for one in models)
        ]
    )


def loaded_models(
    models: Sequence[ListedModel], sizes: Mapping[str, ModelSize]
) -> OllamaLoadedModels:
    """The models in memory."""
    return OllamaLoadedModels(
        [
            OllamaLoadedModel(
                name=facts.model,
                model=facts.model,
                size=_bytes_of(facts.model, sizes),
                digest=_digest(facts.model),
                details=_details(),
                expires_at=_NEVER,
                size_vram=_bytes_of(facts.model, sizes),
                context_length=_context_tokens(model),
            )
            for model, facts in ((one, one.facts) for one in models if one.state == "loaded")
        ]
    )


def model_facts(model: ListedModel) -> OllamaModelFacts:
    """What is known of a model."""
    facts = model.facts
    defaults = {
        "num_ctx": _context_tokens(model),
        "num_predict": facts.default_max_tokens,
        "temperature": facts.defaults.temperature,
        "top_p": facts.defaults.top_p,
        "top_k": facts.defaults.top_k,
        "min_p": facts.defaults.min_p,
        "repeat_penalty": facts.defaults.repetition_penalty,
    }
    info: dict[str, str | int] = {
        "general.architecture": _FORMAT,
        "general.basename": facts.model,
        f"{_FORMAT}.context_length": _context_tokens(model),
    }
    if model.embeds is not None:
        info[f"{_FORMAT}.embedding_length"] = model.embeds.dimensions
    return OllamaModelFacts(
        modelfile=f"FROM {facts.model}\n",
        parameters="\n".join(f"{name} {value}" for name, value in defaults.items()),
        template="",
        details=_details(),
        model_info=info,
        capabilities=_capabilities(model),
        modified_at=at(facts.started_s),
    )


def _bytes_of(name: str, sizes: Mapping[str, ModelSize]) -> int:
    """The bytes of a model's weights; 0 if its files cannot be read."""
    size = sizes.get(name)
    return (size.weights_bytes if size is not None else None) or 0


def _digest(name: str) -> str:
    # Clients show the first twelve digits and compare the rest. The files are not hashed for it.
    return hashlib.sha256(name.encode()).hexdigest()


def _details() -> OllamaDetails:
    return OllamaDetails(format=_FORMAT, family=_FORMAT, families=[_FORMAT])


def _context_tokens(model: ListedModel) -> int:
    return model.facts.context_tokens if model.embeds is None else model.embeds.context_tokens


def _capabilities(model: ListedModel) -> list[str]:
    if model.embeds is not None:
        return ["embedding"]
    facts = model.facts
    found = {"thinking": bool(facts.switches), "insert": facts.infill is not None}
    return ["completion", "tools", *(name for name, has in found.items() if has)]
