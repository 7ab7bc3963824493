"""Loads a model through mlx-lm, and measures what Cairn needs to know about it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import mlx.core as mx
import mlx_lm
import mlx_lm.utils
from mlx.utils import tree_flatten
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    KVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from cairn.engine.contract import ModelTokenizer
from cairn.engine.errors import ModelRefused
from cairn.engine.mlx.cache import AnyShape, LayerShape, flat
from cairn.engine.mlx.dtype import CannotWiden, own_dtypes
from cairn.engine.mlx.passes import attention
from cairn.engine.mlx.state import StateShape
from cairn.engine.model import fingerprint
from cairn.engine.model.file_names import ADAPTER_WEIGHTS
from cairn.engine.model.files import (
    adapter_fault,
    directory_fault,
    is_path,
    weights_bytes,
)
from cairn.engine.model.generation_config import read_defaults, read_template_settings
from cairn.engine.model.hub import Progress, download, download_fault
from cairn.engine.prompt.template import Conversation, Message, TemplateError, render
from cairn.engine.sampling import Sampling

_LOADING = "loading the model"
_AT_ONCE_BYTES = 64 * 1024 * 1024


@attrs.frozen(kw_only=True)
class LoadedModel:
    """
    A model in memory.

    Attributes:
        model: mlx-lm's module.
        tokenizer: mlx-lm's wrapper.
        directory: where it was loaded from.
        adapter: the directory of the adapter over its weights, if there is one.
        files: the state of its files before the first of them was read.
        name: the name that clients see.
        shapes: what each layer keeps; empty if a layer keeps something that no sealed block can
            hold.
        together: how many of the shapes each layer of the model keeps in one list, 0 for a layer
            that keeps one without a list; empty if all do.
        vocabulary_tokens: the length of a row of logits.
        defaults: the sampling parameters that the model's makers recommend.
        template: the settings of the chat template that they recommend.
        dtype: the dtype that it computes in, and why, for people.
    """

    model: Any
    tokenizer: ModelTokenizer
    directory: Path
    adapter: Path | None
    files: fingerprint.Seen
    name: str
    config: Mapping[str, Any]
    shapes: tuple[AnyShape, ...]
    together: tuple[int, ...]
    vocabulary_tokens: int
    context_tokens: int
    eos_ids: frozenset[int]
    defaults: Sampling
    template: Mapping[str, Any]
    dtype: str

    @property
    def state_bytes(self) -> int:
        """The recurrent states of all layers, in bytes."""
        return sum(shape.state_bytes for shape in self.shapes)

    @property
    def is_simple(self) -> bool:
        """Whether every layer keeps keys and values and nothing else."""
        return not self.together and all(isinstance(one, LayerShape) for one in self.shapes)

    def cannot_run(self, error: Exception) -> ModelRefused:
        """The refusal of a model whose code failed on a canonical pass."""
        family = self.config.get("model_type", "unknown")
        return ModelRefused(
            f"{self.name} (model_type {family}) cannot be served: its code in mlx-lm failed on a "
            f"canonical pass ({_fact(error)}). docs/models.md lists the families that are served; "
            "choose a model of one of them."
        )

    def served_cold(self) -> LoadedModel:
        """The same model, served on mlx-lm's own caches without reuse."""
        return attrs.evolve(self, shapes=(), together=())

    def refuse_changed(self) -> None:
        """
        Check that no file has changed. To be called after everything was read: weights, tokenizer
        and what is hashed of them belong together only if no file changed in the meantime.

        Raises:
            ModelRefused: a file has changed.
        """
        _refuse_changed(self.directory, self.adapter, self.files)


def _no_progress(what: str, done: int, total: int) -> None:
    """Ignore progress."""


def _accept_any_size(size: int) -> None:
    """Accept any size."""


def _keep_dtype(model: Any) -> str:
    """The dtype of the weights, unchanged."""
    return " and ".join(own_dtypes(model))


def load_model(
    where: str,
    *,
    name: str | None = None,
    adapter: str | None = None,
    progress: Progress = _no_progress,
    fits: Callable[[int], None] = _accept_any_size,
    settle_dtype: Callable[[Any], str] = _keep_dtype,
) -> LoadedModel:
    """
    Load a model directory, or a model of a hub that can be reached.

    Args:
        where: a directory, or the name of a model on a hub.
        name: the name that clients see; by default the directory's, or the hub's.
        adapter: the directory of an mlx-lm adapter that goes over the weights.
        progress: called with (what, done, total).
        fits: called with the bytes of the weights before they are loaded; raises if there is no
            room.
        settle_dtype: called with the model before its weights are read. May change their dtype;
            returns which it is and why.

    Raises:
        ModelRefused: it cannot be served.
    """
    over = _adapter_directory(adapter)
    directory = _directory(where, progress)
    files = fingerprint.seen(directory, over)
    try:
        return _loaded(where, directory, over, files, name, progress, fits, settle_dtype)
    except Exception:
        # Loading may have failed only because the files were changing.
        _refuse_changed(directory, over, files)
        raise


def _loaded(
    where: str,
    directory: Path,
    over: Path | None,
    files: fingerprint.Seen,
    name: str | None,
    progress: Progress,
    fits: Callable[[int], None],
    settle_dtype: Callable[[Any], str],
) -> LoadedModel:
    """As ``load_model``."""
    fits(weights_bytes(directory, over))
    progress(_LOADING, 0, 1)
    try:
        model, tokenizer, config = mlx_lm.load(str(directory), lazy=True, return_config=True)
    except (Exception, SystemExit) as error:  # a broken model may raise anything in mlx-lm
        raise ModelRefused(
            f"{where} cannot be loaded as a model: {_fact(error)}. An mlx-lm model directory "
            "has config.json, *.safetensors and a tokenizer."
        ) from error
    if over is not None:
        _adapt(model, over, where)
    try:
        dtype = settle_dtype(model)
    except CannotWiden as error:
        raise ModelRefused(
            f"{where} cannot be converted to float32: {error}. Use --dtype model to serve it "
            "without conversion."
        ) from error
    fits(sum(array.nbytes for _, array in _parameters(model)))
    try:
        _read_weights(model, progress)
    except Exception as error:
        raise ModelRefused(
            f"The weights of {where} cannot be read: {_fact(error)}. Check the disk, or "
            "download them again."
        ) from error
    try:
        hello = (Message(role="user", content="Hello"),)
        settings = read_template_settings(directory)
        render(tokenizer, Conversation(messages=hello, template=settings))
    except TemplateError as error:
        raise ModelRefused(
            f"{where} cannot be used for chat: {error}. Choose a model with a chat template; "
            "instruction-tuned models have one."
        ) from error
    model.eval()
    attention.install()
    try:
        shapes, together, vocabulary_tokens = _measured(model)
    except Exception as error:
        with_adapter = f" with the adapter {over}" if over is not None else ""
        raise ModelRefused(
            f"{where}{with_adapter} cannot run a token: {_fact(error)}. Check that its config.json "
            "and its weights belong together."
        ) from error
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        directory=directory,
        adapter=over,
        files=files,
        name=name or (directory.resolve().name if is_path(where) else where),
        config=config,
        shapes=shapes,
        together=together,
        vocabulary_tokens=vocabulary_tokens,
        context_tokens=_context_tokens(config),
        eos_ids=frozenset(int(token) for token in tokenizer.eos_token_ids),
        defaults=read_defaults(directory),
        template=settings,
        dtype=dtype,
    )


def _refuse_changed(directory: Path, adapter: Path | None, before: fingerprint.Seen) -> None:
    changed = sorted(path for path, _ in before ^ fingerprint.seen(directory, adapter))
    if changed:
        raise ModelRefused(
            f"{changed[0]} changed while the model was being read. Start again when nothing "
            "writes to its directory any more."
        )


def _directory(where: str, progress: Progress) -> Path:
    place = where
    if not is_path(where):
        try:
            place = str(download(where, progress, mlx_lm.utils.snapshot_download))
        except Exception as error:  # the hub client raises many kinds of errors
            raise ModelRefused(download_fault(where, error)) from error
    fault = directory_fault(place)
    if fault is not None:
        raise ModelRefused(fault)
    return Path(place).expanduser()


def _adapter_directory(adapter: str | None) -> Path | None:
    if adapter is None:
        return None
    fault = adapter_fault(adapter)
    if fault is not None:
        raise ModelRefused(fault)
    return Path(adapter).expanduser()


def _adapt(model: Any, adapter: Path, where: str) -> None:
    """Put an adapter over a model. Modifies the model."""
    try:
        mlx_lm.utils.load_adapters(model, str(adapter))
        there: dict[str, Any] = dict(tree_flatten(model.parameters()))
        # Older versions of mlx-lm ignore weights that the model has no parameter for.
        given: Any = mx.load(str(adapter / ADAPTER_WEIGHTS))
        strange = [name for name in given if name not in there]
        if not given:
            raise ValueError("it has no tensors")
        if strange:
            raise ValueError(f"the model has no parameter {strange[0]}")
    except Exception as error:  # as with models
        raise ModelRefused(
            f"The adapter {adapter} does not fit the model {where}: {_fact(error)}. Was it trained "
            "with mlx_lm.lora on this model?"
        ) from error


def _parameters(model: Any) -> list[tuple[str, Any]]:
    found: Any = tree_flatten(model.parameters())
    return list(found)


def _read_weights(model: Any, progress: Progress) -> None:
    """Read the weights into memory in parts, because it can take long."""
    arrays = [array for _, array in _parameters(model)]
    total, done = sum(array.nbytes for array in arrays), 0
    batch: list[Any] = []
    for place, array in enumerate(arrays, start=1):
        batch.append(array)
        if place == len(arrays) or sum(one.nbytes for one in batch) >= _AT_ONCE_BYTES:
            mx.eval(batch)
            done += sum(one.nbytes for one in batch)
            batch = []
            progress(_LOADING, done, total)


def _fact(error: BaseException) -> str:
    """The text of an error, on one line."""
    if isinstance(error, SystemExit):  # a family in mlx-lm exits if a package is missing
        return "its module in mlx-lm needs a package that is not installed; see the lines above"
    said = " ".join(str(error).split()).rstrip(".")
    return said[:300] or type(error).__name__


def _measured(model: Any) -> tuple[tuple[AnyShape, ...], tuple[int, ...], int]:
    """
    What each layer keeps, how many caches each keeps in a list, and the length of a row of logits,
    measured by running one token. The first two are empty if a layer keeps something that no block
    can hold.
    """
    caches = make_prompt_cache(model)
    logits = model(mx.array([[0]]), cache=caches)
    mx.eval(logits)
    shapes = [_shape(layer) for layer in flat(caches)]
    if not all(shapes):
        return (), (), logits.shape[-1]
    lists = tuple(len(one.caches) if type(one) is CacheList else 0 for one in caches)
    together = lists if any(lists) else ()
    return tuple(one for one in shapes if one is not None), together, logits.shape[-1]


def _shape(cache: Any) -> AnyShape | None:
    """What a cache keeps, measured after one token; None if no block can hold it."""
    if type(cache) is KVCache or _is_window(cache):
        if cache.keys is None:
            return None
        return LayerShape(
            kv_heads=cache.keys.shape[1],
            key_dim=cache.keys.shape[3],
            value_dim=cache.values.shape[3],
            dtype=cache.keys.dtype,
            window=cache.max_size if _is_window(cache) else None,
        )
    if (
        type(cache) is ArraysCache
        and cache.cache
        and all(isinstance(one, mx.array) for one in cache.cache)
    ):
        return StateShape(arrays=tuple((array.shape, array.dtype) for array in cache.cache))
    return None


def _is_window(cache: Any) -> bool:
    """Whether a layer attends to the last tokens only, without keeping any at the front."""
    return type(cache) is RotatingKVCache and cache.keep == 0


def _context_tokens(config: Mapping[str, Any]) -> int:
    text = config.get("text_config", config)
    names = ("max_position_embeddings", "n_positions", "n_ctx")
    sizes = (one.get(name) for one in (text, config) for name in names)
    return next((int(size) for size in sizes if size), 32768)
