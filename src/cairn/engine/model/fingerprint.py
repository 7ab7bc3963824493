"""
The fingerprint: everything that may change a bit of an answer, and the hash that names it.

A block, a session's cache and a bug record belong to one fingerprint. This module does not import
MLX; the properties of the device are arguments.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from blake3 import blake3

from cairn.engine.machine.blas import loaded_blas
from cairn.engine.model.file_names import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from cairn.journal.cache.windows import SinkWindow
from cairn.journal.keys import fingerprint_of, tested_fields

ENGINE_VERSION = 1
"""Incremented with every change of Cairn's engine that may change a bit."""

TAIL_RULE = "exact"

STEERING = (
    "OPENBLAS_CORETYPE",
    "OPENBLAS_NUM_THREADS",
    "OMP_NUM_THREADS",
    "MLX_DISABLE_COMPILE",
    "MLX_SDPA_BLOCKS",
    "MLX_ENABLE_TF32",
    "NVIDIA_TF32_OVERRIDE",
    "MLX_CUDA_USE_CUDNN_SDPA",
    "MLX_METAL_FAST_SYNCH",
)
"""Environment variables that affect kernels."""

_WEIGHTS = ("*.safetensors", "config.json", "generation_config.json")
_ADAPTER = (ADAPTER_WEIGHTS, ADAPTER_CONFIG)
_TEXT = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
    "*.model",
    "*.tiktoken",
    "*.py",
)
_LIBRARIES = ("core*.so", "lib/*.so*", "lib/*.dylib", "lib/*.metallib")

Seen = frozenset[tuple[str, tuple[int, ...]]]
"""See ``seen``."""


def collect(
    *,
    directory: Path,
    device: Mapping[str, str],
    dtypes: Mapping[str, int],
    block_tokens: int,
    decode_rows: int,
    kv_cache: str,
    context_tokens: int,
    windows: Sequence[int | None] = (),
    policy: SinkWindow | None = None,
    states: Mapping[str, Any] | None = None,
    adapter: Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """
    The fields of a fingerprint. Reads the model's files.

    Args:
        directory: the model's.
        device: MLX's description of the device.
        dtypes: how many parameters have which dtype.
        context_tokens: the longest sequence that is served.
        windows: the window of each layer in Cairn's cache; None for a layer without one.
        policy: what a token attends to; None for what the model's layers define.
        states: what layers keep apart from keys and values, and where; None if they keep nothing
            else, or nothing is reused.
        adapter: the directory of an adapter over the weights.
        progress: called with (bytes hashed, bytes in all).
    """
    blas = loaded_blas()
    over: dict[str, Any] = {"adapter": hash_files(adapter, _ADAPTER)} if adapter is not None else {}
    if any(windows):
        over["kv_windows"] = list(windows)
    if states is not None:
        over["kv_states"] = dict(states)
    return over | {
        "weights": hash_files(directory, _WEIGHTS, progress),
        "tokenizer": hash_files(directory, _TEXT),
        "dtypes": dict(sorted(dtypes.items())),
        "mlx": importlib.metadata.version("mlx"),
        "mlx_libraries": hash_libraries(mlx_folders()),
        "mlx_lm": importlib.metadata.version("mlx-lm"),
        # It decides which tokens may come next in a constrained answer.
        "llguidance": importlib.metadata.version("llguidance"),
        "cairn_engine": ENGINE_VERSION,
        "device": dict(sorted(device.items())),
        "system": f"{platform.system()} {platform.machine()}",
        "system_build": platform.release() if platform.system() == "Darwin" else "",
        "processor": _processor(),
        "blas": dataclasses.asdict(blas) if blas is not None else None,
        "environment": {name: os.environ[name] for name in STEERING if name in os.environ},
        "block_tokens": block_tokens,
        "tail_rule": TAIL_RULE,
        "decode_rows": decode_rows,
        "kv_policy": "full" if policy is None else f"sink_window {policy.sinks}+{policy.window}",
        "kv_cache": kv_cache,
        "shards": 1,
        # An answer must end there, on a small machine earlier than the model's own context.
        "context_tokens": context_tokens,
    }


def base_of(fields: Mapping[str, Any]) -> str:
    """
    The hash of a fingerprint without ``row_class``, which the self-test finds: the name under which
    an earlier self-test is looked up.
    """
    return fingerprint_of(tested_fields(fields))


def hash_files(
    directory: Path,
    patterns: tuple[str, ...],
    progress: Callable[[int, int], None] | None = None,
) -> str:
    """One hash over the names and contents of a directory's files."""
    paths = _files(directory, patterns)
    total = sum(path.stat().st_size for path in paths)
    found = blake3(max_threads=blake3.AUTO)
    done = 0
    for path in paths:
        found.update(f"{path.name}/{path.stat().st_size}/".encode())
        with path.open("rb") as file:
            while block := file.read(1 << 24):
                found.update(block)
                done += len(block)
                if progress is not None:
                    progress(done, total)
    return found.hexdigest()


def mlx_folders() -> tuple[Path, ...]:
    """
    The folders in which MLX is installed. Several packages share one folder. Imports none of them.
    """
    spec = importlib.util.find_spec("mlx")
    return tuple(Path(one) for one in (spec and spec.submodule_search_locations) or ())


def hash_libraries(folders: Sequence[Path]) -> str:
    """
    One hash over the names and contents of MLX's own libraries, because a custom build, or a
    backend from a different build, has the same version and may give different bits. The files are
    read again only if their metadata changes.
    """
    found = [(one, path) for one in folders for path in _files(one, _LIBRARIES)]
    return _hash_libraries(
        tuple((str(path.relative_to(one)), path, _known_by(path)) for one, path in found)
    )


@functools.lru_cache(maxsize=4)
def _hash_libraries(found: tuple[tuple[str, Path, tuple[int, ...]], ...]) -> str:
    hashed = blake3(max_threads=blake3.AUTO)
    for name, path, _ in found:
        hashed.update(f"{name}/{path.stat().st_size}/".encode())
        hashed.update_mmap(path)
    return hashed.hexdigest()


def seen(directory: Path, adapter: Path | None = None) -> Seen:
    """
    The files that a fingerprint reads, with their metadata. Does not read their contents. If two
    calls return the same, the files did not change in between. The time of the last status change
    is included because tools can reset the modification time.
    """
    paths = _files(directory, _WEIGHTS + _TEXT)
    if adapter is not None:
        paths += _files(adapter, _ADAPTER)
    return frozenset((str(path), _known_by(path)) for path in paths)


def _files(directory: Path, patterns: tuple[str, ...]) -> list[Path]:
    return sorted({path for pattern in patterns for path in directory.glob(pattern)})


def _known_by(path: Path) -> tuple[int, ...]:
    """The metadata that identifies a file's state; empty if the file no longer exists."""
    try:
        of = path.stat()
    except OSError:
        return ()
    return of.st_dev, of.st_ino, of.st_size, of.st_mtime_ns, of.st_ctime_ns


def _processor() -> str:
    """The processor's model, which decides the CPU kernels."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        names = ("model name", "CPU implementer", "CPU part")
        lines = info.read_text(encoding="utf-8", errors="replace").splitlines()
        found = dict.fromkeys(line for line in lines if line.split("\t")[0].strip() in names)
        flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
        features = hashlib.sha256(flags.encode()).hexdigest()[:12]
        return " / ".join(" ".join(line.split()) for line in found) + f" / features {features}"
    return platform.processor()
