"""
What can be said of a model's directory before anything heavy is imported.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cairn.engine.generation_config import GenerationConfigFault, read_defaults

ADAPTER_WEIGHTS = "adapters.safetensors"
ADAPTER_CONFIG = "adapter_config.json"

_CONVERT = (
    "mlx-lm reads directories of safetensors: convert the model it was made from with "
    "`mlx_lm.convert --hf-path OWNER/MODEL --mlx-path DIR`, and serve DIR."
)
_HEADER_BYTES_MAX = 100_000_000  # as the safetensors library has it


def is_path(where: str) -> bool:
    """
    Whether ``--model`` names a place on this machine, and not a hub's model.
    """
    path = Path(where).expanduser()
    looks_so = where.startswith(("/", ".", "~")) or where.endswith(".gguf")
    return looks_so or not where or path.exists()


def directory_fault(where: str) -> str | None:
    """
    Why a place on this machine is no model directory, in a sentence; None where it may be one.
    """
    path = Path(where).expanduser()
    if where.endswith(".gguf") and not path.is_dir():
        return f"{where} is a GGUF file, which cannot be served. {_CONVERT}"
    if not where or not path.exists():
        return f"There is no model directory at {where!r}."
    if path.is_file():
        return f"{where} is a file; --model takes a directory in mlx-lm's format."
    has_weights = any(path.glob("*.safetensors"))
    if not has_weights and any(path.glob("*.gguf")):
        return f"{where} holds GGUF files, which cannot be served. {_CONVERT}"
    config = path / "config.json"
    if not config.is_file():
        return f"{where} is no model directory: there is no config.json in it."
    try:
        found = json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return f"{config} cannot be read: {error}."
    if not isinstance(found, dict) or "model_type" not in found:
        return f"{config} names no model_type, so it is no model of mlx-lm's."
    if not has_weights:
        return f"{where} holds no weights (*.safetensors). Was its download complete?"
    try:
        read_defaults(path)
    except GenerationConfigFault as fault:
        return str(fault)
    return _incomplete(path)


def adapter_fault(where: str) -> str | None:
    """
    Why a place on this machine is no adapter of mlx-lm's, in a sentence; None where it may be one.
    """
    path = Path(where).expanduser()
    if not where or not path.is_dir():
        return f"There is no adapter directory at {where!r}."
    if not (path / ADAPTER_WEIGHTS).is_file():
        hint = "PEFT's adapters have to be converted" if any(path.glob("adapter_model.*")) else ""
        hint = hint or "mlx_lm.lora writes it"
        return f"{where} is no adapter of mlx-lm's: there is no {ADAPTER_WEIGHTS} in it ({hint})."
    config = path / ADAPTER_CONFIG
    if not config.is_file():
        return f"{where} is no adapter of mlx-lm's: there is no {ADAPTER_CONFIG} in it."
    try:
        found = json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return f"{config} cannot be read: {error}."
    if not isinstance(found, dict):
        return f"{config} is no JSON object, so {where} is no adapter of mlx-lm's."
    needed = {"num_layers", "lora_parameters"} if found.get("fine_tune_type") != "full" else set()
    if missing := sorted(needed - found.keys()):
        return f"{config} lacks {' and '.join(missing)}, so {where} is no adapter of mlx-lm's."
    return _cut_off(path / ADAPTER_WEIGHTS)


def weights_bytes(directory: Path, adapter: Path | None = None) -> int:
    """
    What the weights take in memory. Read from the files' headers: mlx-lm holds each tensor in the
    type that its file has, but for a few packed formats that it unpacks.
    """
    paths = list(directory.glob("model*.safetensors"))
    if adapter is not None:
        paths.append(adapter / ADAPTER_WEIGHTS)
    return sum(_data_bytes(path)[0] for path in paths)


def _incomplete(directory: Path) -> str | None:
    """
    Which file of a directory of weights is missing or cut off.
    """
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        try:
            named = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            return f"{index} cannot be read: {error!r}."
        missing = sorted(name for name in named if not (directory / str(name)).is_file())
        if missing:
            return (
                f"{directory} lacks {len(missing)} of the {len(named)} files of weights that its "
                f"index names, {missing[0]} for one. Was its download complete?"
            )
    faults = map(_cut_off, sorted(directory.glob("model*.safetensors")))
    return next((fault for fault in faults if fault), None)


def _cut_off(path: Path) -> str | None:
    try:
        data, header = _data_bytes(path)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        return f"{path} cannot be read as safetensors: {error}. Was its download complete?"
    size = path.stat().st_size
    if size < header + data:
        return (
            f"{path} is cut off: it has {size} bytes, and its header speaks of {header + data}. "
            "Was its download complete?"
        )
    return None


def _data_bytes(path: Path) -> tuple[int, int]:
    """
    The bytes of a file's tensors, and those before them.

    Raises:
        ValueError: the file has no header that can be read.
    """
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", _exactly(file.read(8), 8))
        if length > _HEADER_BYTES_MAX:
            raise ValueError("it does not begin with a header")
        header: Mapping[str, Any] = json.loads(_exactly(file.read(length), length))
    ends = (told["data_offsets"][1] for name, told in header.items() if name != "__metadata__")
    return max(ends, default=0), 8 + length


def _exactly(found: bytes, length: int) -> bytes:
    if len(found) < length:
        raise ValueError("its header is cut off")
    return found
