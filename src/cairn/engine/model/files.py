"""Checks of a model directory before anything heavy is imported."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from cairn.engine.json_text import parsed
from cairn.engine.model.file_names import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from cairn.engine.model.generation_config import (
    GenerationConfigFault,
    read_defaults,
    read_template_settings,
)

_CONVERT = (
    "mlx-lm reads directories of safetensors: convert the model it was made from with "
    "`mlx_lm.convert --hf-path OWNER/MODEL --mlx-path DIR`, and serve DIR."
)
_SHOWN_MAX = 80
_READ = frozenset({".json", ".jinja", ".safetensors", ".model", ".txt", ".tiktoken"})
_LAYERS = frozenset({"num_hidden_layers", "num_layers", "n_layers", "n_layer"})
_LAYERS_MAX = 10_000  # mlx-lm makes an object for each before it looks at the weights
_OFFSET_END = 1 << 63
_HEADER_BYTES_MAX = 100_000_000  # the limit of the safetensors library


def is_path(where: str) -> bool:
    """Whether ``--model`` is a path on this machine, and not the name of a model on a hub."""
    looks_so = where.startswith(("/", ".", "~")) or where.endswith(".gguf")
    return looks_so or not where or _so(Path(where).exists)


def directory_fault(where: str) -> str | None:
    """Why a path is not a model directory, in a sentence; None if nothing is wrong."""
    try:
        return _fault_in(where, Path(where).expanduser())
    except (OSError, RuntimeError) as error:
        return f"{where} cannot be read: {_fact(error)}."


def adapter_fault(where: str) -> str | None:
    """
    Why a path is not a directory of an mlx-lm adapter, in a sentence; None if nothing is wrong.
    """
    try:
        return _adapter_fault_in(where, Path(where).expanduser())
    except (OSError, RuntimeError) as error:
        return f"{where} cannot be read: {_fact(error)}."


def _fault_in(where: str, path: Path) -> str | None:
    if where.endswith(".gguf") and not path.is_dir():
        return f"{where} is a GGUF file, which cannot be served. {_CONVERT}"
    if not where or not path.exists():
        return f"There is no model directory at {where!r}."
    if path.is_file():
        return f"{where} is a file, not a directory in mlx-lm's format."
    files = sorted(path.iterdir())
    for file in files:
        # Reading a pipe or a device may never end.
        if file.suffix in _READ and file.exists() and not (file.is_file() or file.is_dir()):
            return f"{file} is not a regular file, so it is not read."
    endings = {file.suffix for file in files}
    has_weights = ".safetensors" in endings
    if not has_weights and ".gguf" in endings:
        return f"{where} contains GGUF files, which cannot be served. {_CONVERT}"
    config = path / "config.json"
    if not config.is_file():
        return f"{where} is not a model directory: it has no config.json."
    try:
        found = parsed(config.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return f"{config} cannot be read: {error}."
    if not isinstance(found, dict) or "model_type" not in found:
        return f"{config} has no model_type, so mlx-lm cannot load it."
    if found.get("model_file") is not None:
        # Older versions of mlx-lm would run it.
        return (
            f"{where} needs Python code of its own ({_short(str(found['model_file']))}), and no "
            "code of a model is run. Choose a model of a family that mlx-lm has."
        )
    if (layers := _most_layers(found)) > _LAYERS_MAX:
        return (
            f"{config} says that the model has {layers} layers; at most {_LAYERS_MAX} are loaded."
        )
    if not has_weights:
        return f"{where} has no weights (*.safetensors). Was its download complete?"
    try:
        read_defaults(path)
        read_template_settings(path)
    except GenerationConfigFault as fault:
        return str(fault)
    return _incomplete(path)


def _most_layers(config: Any) -> int:
    """The largest number of layers that a configuration says, in any of its parts; 0 if none."""
    if not isinstance(config, dict):
        return 0
    counts = (
        value if name in _LAYERS and type(value) is int else _most_layers(value)
        for name, value in config.items()
    )
    return max(counts, default=0)


def _adapter_fault_in(where: str, path: Path) -> str | None:
    if not where or not path.is_dir():
        return f"There is no adapter directory at {where!r}."
    if not (path / ADAPTER_WEIGHTS).is_file():
        hint = "convert PEFT adapters first" if any(path.glob("adapter_model.*")) else ""
        hint = hint or "mlx_lm.lora writes it"
        return f"{where} is not an mlx-lm adapter: it has no {ADAPTER_WEIGHTS} ({hint})."
    config = path / ADAPTER_CONFIG
    if not config.is_file():
        return f"{where} is not an mlx-lm adapter: it has no {ADAPTER_CONFIG}."
    try:
        found = parsed(config.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return f"{config} cannot be read: {error}."
    if not isinstance(found, dict):
        return f"{config} is not a JSON object, so {where} is not an mlx-lm adapter."
    needed = {"num_layers", "lora_parameters"} if found.get("fine_tune_type") != "full" else set()
    if missing := sorted(needed - found.keys()):
        return f"{config} lacks {' and '.join(missing)}, so {where} is not an mlx-lm adapter."
    return _cut_off(path / ADAPTER_WEIGHTS)


def weights_bytes(directory: Path, adapter: Path | None = None) -> int:
    """
    How much memory the weights take, from the headers of the files: mlx-lm keeps the dtype of each
    tensor, except for a few packed formats that it unpacks.
    """
    paths = list(directory.glob("model*.safetensors"))
    if adapter is not None:
        paths.append(adapter / ADAPTER_WEIGHTS)
    return sum(_data_bytes(path)[0] for path in paths)


def _incomplete(directory: Path) -> str | None:
    """Which weights file of a directory is missing or truncated."""
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        try:
            named = _named(parsed(index.read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            return f"{index} cannot be read: {error}. Was its download complete?"
        missing = sorted(name for name in named if not _so((directory / name).is_file))
        if missing:
            return (
                f"{directory} lacks {len(missing)} of the {len(named)} weights files in its index, "
                f"for example {_short(missing[0])}. Was its download complete?"
            )
    faults = map(_cut_off, sorted(directory.glob("model*.safetensors")))
    return next((fault for fault in faults if fault), None)


def _named(index: Any) -> set[str]:
    """
    The weights files that an index names.

    Raises:
        ValueError: it is not an index.
    """
    places = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(places, dict):
        raise ValueError("it has no weight_map")
    for tensor, name in places.items():
        if not isinstance(name, str):
            raise ValueError(f"the file of {_short(tensor)} is {_short(repr(name))}, not a name")
    return set(places.values())


def _cut_off(path: Path) -> str | None:
    try:
        data, header = _data_bytes(path)
    except (OSError, ValueError) as error:
        return f"{path} cannot be read as safetensors: {error}. Was its download complete?"
    size = path.stat().st_size
    if size < header + data:
        return (
            f"{path} is cut off: it has {size} of {header + data} bytes. Was its download complete?"
        )
    return None


def _data_bytes(path: Path) -> tuple[int, int]:
    """
    The size of a file's tensors, and of its header.

    Raises:
        ValueError: the header cannot be read.
    """
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", _exactly(file.read(8), 8))
        if length > _HEADER_BYTES_MAX:
            raise ValueError("it does not begin with a header")
        header = parsed(_exactly(file.read(length), length))
    return max(_ends(header), default=0), 8 + length


def _ends(header: Any) -> Iterator[int]:
    """
    Where the tensors of a header end, in bytes after it.

    Raises:
        ValueError: the header does not say that.
    """
    if not isinstance(header, dict):
        raise ValueError("its header is not a JSON object")
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        span = entry.get("data_offsets") if isinstance(entry, dict) else None
        places = span if isinstance(span, list) else []
        whole = [type(place) for place in places] == [int, int]
        if not whole or not 0 <= places[0] <= places[1] < _OFFSET_END:
            raise ValueError(f"its header does not say where {_short(name)} begins and ends")
        yield places[1]


def _exactly(found: bytes, length: int) -> bytes:
    if len(found) < length:
        raise ValueError("its header is cut off")
    return found


def _so(question: Callable[[], bool]) -> bool:
    """
    A property of a path; False if it cannot be determined, for instance because the name is too
    long.
    """
    try:
        return question()
    except OSError:
        return False


def _fact(error: OSError | RuntimeError) -> str:
    # Without the path: the sentence has it already, and it may be what is too long.
    return (isinstance(error, OSError) and error.strerror) or str(error).rstrip(".")


def _short(text: str) -> str:
    """A name from a file, cut to a length that can be shown."""
    return text if len(text) <= _SHOWN_MAX else f"{text[:_SHOWN_MAX]}..."
