"""
The models that this machine already holds: in the cache of the Hugging Face Hub, in the folders of
LM Studio, and what Ollama holds, which cannot be read. Reads files, and changes nothing.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs

from cairn.engine.json_text import parsed
from cairn.engine.model.builtin import builtin_directory, builtin_fault
from cairn.engine.model.files import directory_fault, weights_bytes
from cairn.ops.models.short_names import PEBBLE

BUILT_IN, HUB, LM_STUDIO = "built in", "hub cache", "LM Studio"
"""Where a model is held."""

PART = ".part"
"""The end of the name of a file that is not downloaded completely."""

_HALF_BITS = 16
_FLOAT32_BITS = 32


@attrs.frozen(kw_only=True)
class HeldModel:
    """
    A model on this machine.

    Attributes:
        name: by which it can be served: a name on the hub, or a path.
        held_by: ``BUILT_IN``, ``HUB`` or ``LM_STUDIO``.
        files_bytes: what its files take on disk.
        weights_bytes: of its weights; 0 if they cannot be read.
        float32_bytes: of its weights in float32; 0 likewise.
        context_tokens: the longest sequence that it takes; 0 if unknown.
        fault: why it cannot be served, in a sentence; None if nothing is wrong.
        is_incomplete: whether its download is not complete.
    """

    name: str
    held_by: str
    directory: Path
    files_bytes: int
    weights_bytes: int
    float32_bytes: int
    context_tokens: int
    fault: str | None
    is_incomplete: bool = False


@attrs.frozen(kw_only=True)
class Found:
    """
    What is on this machine.

    Attributes:
        models: that can be served, or whose download can continue.
        unreadable: names of models in other formats, by the program that holds them.
    """

    models: tuple[HeldModel, ...]
    unreadable: dict[str, list[str]]


def all_found() -> Found:
    """All models on this machine that are found."""
    models = [held_in(PEBBLE, BUILT_IN, builtin_directory(), fault=builtin_fault())]
    unreadable: dict[str, list[str]] = {}
    for one in (*_in_hub_cache(), *_in_lm_studio()):
        if one.fault is None or one.is_incomplete:
            models.append(one)
        else:
            unreadable.setdefault(one.held_by, []).append(one.name)
    if in_ollama := ollama_names():
        unreadable["Ollama"] = in_ollama
    return Found(models=tuple(models), unreadable=unreadable)


def held_in(
    name: str,
    held_by: str,
    directory: Path,
    *,
    fault: str | None,
    files_bytes: int | None = None,
    is_incomplete: bool = False,
) -> HeldModel:
    """
    A model in a directory.

    Args:
        files_bytes: None to count its files.
    """
    config: Any = {}
    weights = 0
    if fault is None:
        try:
            config = parsed((directory / "config.json").read_text(encoding="utf-8"))
            weights = weights_bytes(directory)
        except (OSError, ValueError) as error:  # it changed meanwhile
            fault = f"{directory} cannot be read: {error}."
    bits = bits_of(config)
    return HeldModel(
        name=name,
        held_by=held_by,
        directory=directory,
        files_bytes=_size_of(directory) if files_bytes is None else files_bytes,
        weights_bytes=weights,
        float32_bytes=round(weights * _FLOAT32_BITS / bits),
        context_tokens=_context_of(config),
        fault=fault,
        is_incomplete=is_incomplete,
    )


def model_fault(directory: Path) -> str | None:
    """Why a directory is not a model for MLX, in a sentence; None if nothing is wrong."""
    fault = directory_fault(str(directory))
    if fault is not None:
        return fault
    config = parsed((directory / "config.json").read_text(encoding="utf-8"))
    return family_fault(str(directory), config)


def family_fault(name: str, config: Any) -> str | None:
    """
    Why mlx-lm cannot compute a model, by its configuration; None if nothing is known. Does not
    import MLX if mlx-lm has a module of the family's name.
    """
    family = config.get("model_type") if isinstance(config, dict) else None
    if not isinstance(family, str):
        return f"{name} is not a model for MLX: its config.json has no model_type."
    found = importlib.util.find_spec("mlx_lm")
    places = found.submodule_search_locations if found is not None else None
    if not places:
        return None
    if family.isidentifier() and any(
        Path(place, "models", f"{family}.py").exists() for place in places
    ):
        return None
    try:
        from mlx_lm.utils import MODEL_REMAPPING
    except ImportError:
        return None
    if family in MODEL_REMAPPING:
        return None
    return (
        f"{name} is not a model for MLX: mlx-lm has no model_type {family[:80]!r}. Choose a model "
        "of a family in docs/models.md."
    )


def hub_cache() -> Path:
    """The cache of the Hugging Face Hub, which all programs of this user share."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def hub_folder(name: str) -> Path:
    """The folder of a model in the hub's cache, which may not exist."""
    from huggingface_hub.file_download import repo_folder_name

    return hub_cache() / repo_folder_name(repo_id=name, repo_type="model")


def snapshot_of(name: str) -> Path | None:
    """The directory of a model in the hub's cache; None if there is none. It may be incomplete."""
    folder = hub_folder(name)
    try:
        revision = (folder / "refs" / "main").read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return None
    snapshot = folder / "snapshots" / revision
    return snapshot if revision and snapshot.is_dir() else None


def at_hand(name: str) -> Path | None:
    """
    The directory of a complete model on this machine.

    Args:
        name: on the hub.
    """
    for directory in (snapshot_of(name), *(root / name for root in lm_studio_folders())):
        if directory is not None and directory.is_dir() and directory_fault(str(directory)) is None:
            return directory
    return None


def parts_bytes(name: str) -> int:
    """What of a model was downloaded into files that are not complete."""
    return sum(part.stat().st_size for part in (hub_folder(name) / "blobs").glob(f"*{PART}"))


def _in_hub_cache() -> Iterator[HeldModel]:
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        cache = scan_cache_dir(hub_cache())
    except (CacheNotFound, OSError, ValueError):
        return
    for repo in sorted(cache.repos, key=lambda one: one.repo_id):
        if repo.repo_type != "model" or not repo.revisions:
            continue
        newest = max(repo.revisions, key=lambda one: ("main" in one.refs, one.last_modified))
        parts = parts_bytes(repo.repo_id)
        fault = model_fault(newest.snapshot_path)
        yield held_in(
            repo.repo_id,
            HUB,
            newest.snapshot_path,
            fault=fault,
            files_bytes=repo.size_on_disk + parts,
            is_incomplete=fault is not None and parts > 0,
        )


def lm_studio_folders() -> tuple[Path, ...]:
    """Where LM Studio keeps models, now and in earlier versions."""
    try:
        home = Path.home()
    except RuntimeError:
        return ()
    return home / ".lmstudio" / "models", home / ".cache" / "lm-studio" / "models"


def _in_lm_studio() -> Iterator[HeldModel]:
    """Models lie two folders deep: that of the publisher, and their own."""
    for root in lm_studio_folders():
        for directory in sorted(one for one in root.glob("*/*") if one.is_dir()):
            endings = {file.suffix for file in directory.iterdir()}
            if endings & {".safetensors", ".gguf"}:
                fault = model_fault(directory)
                yield held_in(str(directory), LM_STUDIO, directory, fault=fault)


def ollama_names() -> list[str]:
    """The models that Ollama holds, as ``NAME:TAG``. Their format is GGUF."""
    try:
        own = Path.home() / ".ollama" / "models"
    except RuntimeError:
        return []
    root = Path(os.environ.get("OLLAMA_MODELS") or own) / "manifests"
    # REGISTRY/PUBLISHER/MODEL/TAG; the publisher "library" is Ollama itself.
    found = sorted(path for path in root.glob("*/*/*/*") if path.is_file())
    return [
        f"{model}:{tag}" if publisher == "library" else f"{publisher}/{model}:{tag}"
        for publisher, model, tag in (path.parts[-3:] for path in found)
    ]


def bits_of(config: Any) -> float:
    """The bits of a weight: by the quantisation, else by the dtype."""
    quantised = config.get("quantization") if isinstance(config, dict) else None
    if isinstance(quantised, dict):
        bits, group = quantised.get("bits"), quantised.get("group_size")
        if type(bits) is int and bits > 0:
            return bits + (_FLOAT32_BITS / group if type(group) is int and group > 0 else 0)
    dtype = config.get("dtype", config.get("torch_dtype")) if isinstance(config, dict) else None
    return _FLOAT32_BITS if dtype == "float32" else _HALF_BITS


def _context_of(config: Any) -> int:
    for holder in (config, config.get("text_config") if isinstance(config, dict) else None):
        value = holder.get("max_position_embeddings") if isinstance(holder, dict) else None
        if type(value) is int and value > 0:
            return value
    return 0


def _size_of(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())
