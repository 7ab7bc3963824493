"""A model that the server may load, and what is known of it before."""

from __future__ import annotations

import math

import attrs

from cairn.actors.errors import ModelNotLoaded
from cairn.actors.requests.messages import ServerFacts
from cairn.actors.settings import Settings
from cairn.engine.model.models_file import ModelEntry, ModelMetadata

_ANY_TOKEN = 1 << 31


@attrs.frozen(kw_only=True)
class Choice:
    """
    A model that the server may load.

    Attributes:
        settings: the server's, with those that are set for this model.
        metadata: what its directory says about it, read at the start.
    """

    entry: ModelEntry
    settings: Settings
    metadata: ModelMetadata

    @property
    def name(self) -> str:
        """What clients see."""
        return self.entry.name


def not_loaded(choice: Choice, pause_s: float) -> ModelNotLoaded:
    return ModelNotLoaded(
        f"the model {choice.name!r} could not be loaded; the server's log says why. Use another "
        "one, or try again later",
        retry_after_s=math.ceil(pause_s),
    )


def first_facts(choice: Choice, started_s: int) -> ServerFacts:
    """Facts about a model that was never loaded, from its files."""
    settings, metadata = choice.settings, choice.metadata
    return ServerFacts(
        model=choice.name,
        fingerprint="",
        context_tokens=metadata.context_tokens,
        block_tokens=settings.block_tokens or 0,
        decode_rows=settings.decode_rows or 0,
        kv_cache=settings.kv_cache,
        started_s=started_s,
        default_max_tokens=settings.limits.max_tokens,
        vocabulary_tokens=metadata.vocabulary_tokens or _ANY_TOKEN,
        defaults=metadata.defaults,
        template=metadata.template,
        switches=metadata.switches,
        infill=metadata.infill,
        min_cache_tokens=settings.min_cache_tokens,
        node=settings.node,
    )
