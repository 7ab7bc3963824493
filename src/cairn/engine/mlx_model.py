"""
Loading a model through mlx-lm, and finding out what Cairn must know of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import mlx.core as mx
import mlx_lm
from mlx_lm.models.cache import KVCache, make_prompt_cache

from cairn.engine import mlx_rows
from cairn.engine.mlx_cache import LayerShape
from cairn.engine.model_files import directory_fault, is_path
from cairn.engine.prompt import Conversation, Message, TemplateError, render


class ModelRefused(Exception):
    """
    The model cannot be served; the message says what, where and what to do. The operator's.
    """


@attrs.frozen(kw_only=True)
class LoadedModel:
    """
    A model in memory.

    Attributes:
        model: mlx-lm's module.
        tokenizer: mlx-lm's wrapper.
        directory: where it was loaded from.
        name: the name that clients see.
        shapes: what each layer keeps for a token; empty where the layers keep other things than the
            keys and values of all tokens, of which no sealed block can be made yet.
        vocabulary_tokens: the length of a row of logits.
    """

    model: Any
    tokenizer: Any
    directory: Path
    name: str
    config: Mapping[str, Any]
    shapes: tuple[LayerShape, ...]
    vocabulary_tokens: int
    context_tokens: int
    eos_ids: frozenset[int]


def load_model(where: str, *, name: str | None = None) -> LoadedModel:
    """
    Load a model directory, or a hub's model where the hub can be reached.

    Args:
        where: a directory, or a name that mlx-lm resolves.
        name: what clients see; by default the directory's name, or the hub's.

    Raises:
        ModelRefused: it is no model that can be served.
    """
    directory = _directory(where)
    try:
        model, tokenizer, config = mlx_lm.load(str(directory), return_config=True)
    except Exception as error:  # a model can be broken in any way, and mlx-lm says how
        fact = f"{error}".strip().rstrip(".") or type(error).__name__
        raise ModelRefused(
            f"{where} cannot be loaded as a model: {fact}. A model directory of mlx-lm holds "
            "config.json, *.safetensors and a tokenizer."
        ) from error
    try:
        render(tokenizer, Conversation(messages=(Message(role="user", content="Hello"),)))
    except TemplateError as error:
        raise ModelRefused(
            f"{where} cannot hold a conversation: {error}. It needs a tokenizer with a chat "
            "template, as instruction-tuned models have it."
        ) from error
    model.eval()
    mlx_rows.install()
    shapes, vocabulary_tokens = _measured(model)
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        directory=directory,
        name=name or (directory.resolve().name if is_path(where) else where),
        config=config,
        shapes=shapes,
        vocabulary_tokens=vocabulary_tokens,
        context_tokens=_context_tokens(config),
        eos_ids=frozenset(int(token) for token in tokenizer.eos_token_ids),
    )


def _directory(where: str) -> Path:
    if is_path(where):
        fault = directory_fault(where)
        if fault is not None:
            raise ModelRefused(fault)
        return Path(where).expanduser()
    try:
        from mlx_lm.utils import _download
    except ImportError as error:  # pragma: no cover - another mlx-lm than pyproject admits
        raise ModelRefused(f"{where} does not exist") from error
    try:
        return Path(_download(where))
    except Exception as error:  # the hub client has many ways to say that it cannot
        raise ModelRefused(
            f"{where} is no directory here, and no hub gave a model of that name: {error}"
        ) from error


def _measured(model: Any) -> tuple[tuple[LayerShape, ...], int]:
    """
    What each layer keeps and how many logits there are, found by running one token. The shapes are
    empty where a layer keeps something else than the keys and values of all tokens (a window, a
    recurrent state).
    """
    caches = make_prompt_cache(model)
    logits = model(mx.array([[0]]), cache=caches)
    mx.eval(logits)
    if any(type(cache) is not KVCache for cache in caches):
        return (), logits.shape[-1]
    shapes = tuple(
        LayerShape(
            kv_heads=cache.keys.shape[1],
            key_dim=cache.keys.shape[3],
            value_dim=cache.values.shape[3],
            dtype=cache.keys.dtype,
        )
        for cache in caches
    )
    return shapes, logits.shape[-1]


def _context_tokens(config: Mapping[str, Any]) -> int:
    text = config.get("text_config", config)
    found = text.get("max_position_embeddings", config.get("max_position_embeddings"))
    return int(found) if found else 32768
