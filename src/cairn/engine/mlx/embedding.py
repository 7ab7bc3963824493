"""
Embedding models on MLX: decoder families of mlx-lm, without their head.

A text is computed alone: passes of ``pass_tokens`` tokens over mlx-lm's own caches, and a last one
of exactly the rest. So the shape of each pass, and with it every bit of the vector, follows from
the text's own tokens, whatever else is embedded; and a pass takes a bounded time.
"""

from __future__ import annotations

import collections
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.utils
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models.cache import KVCache, make_prompt_cache

from cairn.engine.contract import Embedder, EmbedderFacts, EmbedReport, Tokenizer
from cairn.engine.errors import EngineFault, ModelRefused
from cairn.engine.machine.blas import loaded_blas
from cairn.engine.mlx.cache import flat
from cairn.engine.mlx.dtype import CannotWiden, DtypeSetting, settle_dtype
from cairn.engine.mlx.passes import attention
from cairn.engine.mlx.start import default_block_tokens, device_facts
from cairn.engine.mlx.tokenizer import load_tokenizer
from cairn.engine.model import fingerprint
from cairn.engine.model.embedding_files import (
    TEXT_TOKENS_MAX,
    Matryoshka,
    embedding_fault,
    read_matryoshka,
)
from cairn.journal.keys import fingerprint_of

_LOADING = "loading the embedding model"


class MlxEmbedder(Embedder):
    """An embedding model in memory. Its methods must run on the engine's thread."""

    def __init__(self, model: Any, tokenizer: Tokenizer, facts: EmbedderFacts) -> None:
        """
        Args:
            model: mlx-lm's module without its head.
        """
        self.facts = facts
        self.tokenizer = tokenizer
        self._model = model
        self._caches: list[Any] | None = None
        self._done: tuple[int, ...] = ()

    def run_pass(self, ids: Sequence[int], start: int) -> EmbedReport:
        began = time.perf_counter_ns()
        if start == 0:
            self._caches, self._done = make_prompt_cache(self._model), ()
        end = min(len(ids), start + self.facts.pass_tokens)
        if self._caches is None or self._done != tuple(ids[:start]) or not start < end:
            raise EngineFault(f"no pass of {len(ids)} tokens begins at {start}")
        states = self._model.model(mx.array([list(ids[start:end])]), cache=self._caches)
        rows, vector = states.shape[1], None
        self._done = tuple(ids[:end])
        if end == len(ids):
            last = states[0, -1].astype(mx.float32)
            mx.eval(last)
            vector = np.array(last, dtype="<f4")
            self.drop()
            if not np.isfinite(vector).all() or not vector.any():
                raise EngineFault("the vector of a text is not finite, or is all zeros")
        else:
            mx.eval([one.state for one in self._caches])
        return EmbedReport(
            tokens=rows,
            vector=None if vector is None else vector.tobytes(),
            duration_us=(time.perf_counter_ns() - began) // 1000,
        )

    def drop(self) -> None:
        self._caches, self._done = None, ()


def start_embedder(
    where: str,
    *,
    name: str,
    dtype: DtypeSetting = "auto",
    matryoshka: bool = False,
    progress: Callable[[str, int, int], None],
) -> MlxEmbedder:
    """
    Load an embedding model and compute its fingerprint. Must run on the engine's thread.

    Args:
        where: its directory.
        name: what clients see.
        dtype: whether to convert the weights to float32.
        matryoshka: whether its vectors may be cut to any length, whatever config.json says.
        progress: called with (what, done, total).

    Raises:
        ModelRefused: it cannot be served.
    """
    if (fault := embedding_fault(where)) is not None:
        raise ModelRefused(fault)
    directory = Path(where).expanduser()
    files = fingerprint.seen(directory)
    progress(_LOADING, 0, 1)
    try:
        loaded: Any = mlx_lm.utils.load_model(
            directory, lazy=True, get_model_classes=_classes_without_head
        )
        model, config = loaded
        settled = settle_dtype(
            model,
            dtype,
            on_cpu=mx.default_device().type == mx.DeviceType.cpu,
            real_blas=sys.platform != "linux" or loaded_blas() is not None,
            fault=lambda size: None,
        )
        mx.eval(model.parameters())
        model.eval()
        attention.install()
        tokenizer = load_tokenizer(where)
        dimensions, token_bytes = _measured(model)
        cuts = Matryoshka(any_length=True) if matryoshka else read_matryoshka(where)
    except CannotWiden as error:
        raise ModelRefused(f"{where} cannot be converted to float32: {error}.") from error
    except (Exception, SystemExit) as error:  # a broken model may raise anything in mlx-lm
        fact = " ".join(str(error).split())[:300].rstrip(".") or type(error).__name__
        raise ModelRefused(
            f"{where} cannot be served as an embedding model: {fact}. It must be a decoder family "
            "of mlx-lm, such as Qwen3-Embedding."
        ) from error
    progress(_LOADING, 1, 1)
    context = min(TEXT_TOKENS_MAX, _context_tokens(config))
    pass_tokens = default_block_tokens()
    dtypes = collections.Counter(str(one.dtype).removeprefix("mlx.core.") for one in _arrays(model))
    fields = fingerprint.collect(
        directory=directory,
        device=device_facts(),
        dtypes=dtypes,
        block_tokens=pass_tokens,
        decode_rows=1,
        kv_cache="mlx-lm",
        context_tokens=context,
    )
    if files != fingerprint.seen(directory):
        raise ModelRefused(
            f"{where} changed while the model was being read. Start again when nothing writes to "
            "it any more."
        )
    facts = EmbedderFacts(
        name=name,
        fingerprint=fingerprint_of({**fields, "embeds": "last token"}),
        dimensions=dimensions,
        matryoshka=cuts,
        context_tokens=context,
        vocabulary_tokens=_vocabulary(model, config),
        pass_tokens=pass_tokens,
        dtype=settled,
        memory_bytes=sum(one.nbytes for one in _arrays(model)) + context * token_bytes,
    )
    return MlxEmbedder(model, tokenizer, facts)


def _classes_without_head(config: Mapping[str, Any]) -> tuple[type, type]:
    """
    The classes of a family for hidden states: checkpoints of embedding models have no head, and
    most name their weights without the ``model.`` of the whole model.
    """
    kind: Any
    kind, arguments = mlx_lm.utils._get_classes(dict(config))

    class WithoutHead(kind):  # type: ignore[misc]  # the class is known only when it runs
        def __init__(self, given: Any) -> None:
            super().__init__(given)
            self.pop("lm_head", None)

        def sanitize(self, weights: dict[str, Any]) -> dict[str, Any]:
            if not any(one.startswith("model.") for one in weights):
                weights = {f"model.{one}": array for one, array in weights.items()}
            own = getattr(super(), "sanitize", None)
            weights = weights if own is None else own(weights)
            return {one: array for one, array in weights.items() if not one.startswith("lm_head.")}

    return WithoutHead, arguments


def _arrays(model: Any) -> list[Any]:
    found: Any = tree_flatten(model.parameters())
    return [array for _, array in found]


def _measured(model: Any) -> tuple[int, int]:
    """
    The length of a hidden state, and the bytes that caches keep of a token. Runs a token.

    Raises:
        ValueError: the family gives no hidden states.
    """
    inner = getattr(model, "model", None)
    if inner is None:
        raise ValueError("its module in mlx-lm has no inner model that gives hidden states")
    caches = make_prompt_cache(model)
    states = inner(mx.array([[0]]), cache=caches)
    mx.eval(states)
    if states.ndim != 3 or states.shape[:2] != (1, 1):
        raise ValueError("its module in mlx-lm gives something else than hidden states")
    return states.shape[2], sum(_token_bytes(one) for one in flat(caches))


def _token_bytes(cache: Any) -> int:
    """What a cache keeps of a token; 0 for one that does not grow."""
    if not isinstance(cache, KVCache) or cache.keys is None:
        return 0
    return sum(int(one.nbytes) // int(one.shape[2]) for one in (cache.keys, cache.values))


def _context_tokens(config: Mapping[str, Any]) -> int:
    found = config.get("max_position_embeddings")
    return found if type(found) is int and found > 0 else TEXT_TOKENS_MAX


def _vocabulary(model: Any, config: Mapping[str, Any]) -> int:
    """How many rows its embeddings have: the device does not check ids."""
    found = config.get("vocab_size")
    if type(found) is int and found > 0:
        return found
    return int(model.model.embed_tokens.weight.shape[0])
