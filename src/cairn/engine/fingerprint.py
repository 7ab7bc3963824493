"""
The fingerprint: everything that may change a bit of an answer, and the hash that names it.

A block, a session's cache and a bug record belong to one fingerprint. Nothing here imports MLX:
what only the device can tell comes in as an argument.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import os
import platform
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
from blake3 import blake3

from cairn.engine.blas import loaded_blas
from cairn.engine.model_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS

ENGINE_VERSION = 1
"""
Raised with every change of Cairn's engine that may change a bit.
"""

TAIL_RULE = "exact"

STEERING = (
    "OPENBLAS_CORETYPE",
    "OPENBLAS_NUM_THREADS",
    "OMP_NUM_THREADS",
    "MLX_DISABLE_COMPILE",
    "MLX_SDPA_BLOCKS",
    "MLX_ENABLE_TF32",
    "MLX_CUDA_USE_CUDNN_SDPA",
    "MLX_METAL_FAST_SYNCH",
)
"""
Environment variables that steer kernels.
"""

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
    "*.py",
)
_encoder = msgspec.json.Encoder(order="deterministic")


def collect(
    *,
    directory: Path,
    device: Mapping[str, str],
    dtypes: Mapping[str, int],
    chunk_tokens: int,
    decode_rows: int,
    kv_cache: str,
    context_tokens: int,
    adapter: Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """
    The fields of a fingerprint. Reads the model's files.

    Args:
        directory: of the model.
        device: what MLX says of the device.
        dtypes: how many parameters have which dtype.
        context_tokens: the longest sequence that is served.
        adapter: the directory of an adapter over the weights.
        progress: called with (bytes hashed, bytes in all).
    """
    blas = loaded_blas()
    over = {"adapter": hash_files(adapter, _ADAPTER)} if adapter is not None else {}
    return over | {
        "weights": hash_files(directory, _WEIGHTS, progress),
        "tokenizer": hash_files(directory, _TEXT),
        "dtypes": dict(sorted(dtypes.items())),
        "mlx": importlib.metadata.version("mlx"),
        "mlx_lm": importlib.metadata.version("mlx-lm"),
        "cairn_engine": ENGINE_VERSION,
        "device": dict(sorted(device.items())),
        "system": f"{platform.system()} {platform.machine()}",
        "system_build": platform.release() if platform.system() == "Darwin" else "",
        "processor": _processor(),
        "blas": dataclasses.asdict(blas) if blas is not None else None,
        "environment": {name: os.environ[name] for name in STEERING if name in os.environ},
        "chunk_tokens": chunk_tokens,
        "tail_rule": TAIL_RULE,
        "decode_rows": decode_rows,
        "kv_policy": "full",
        "kv_cache": kv_cache,
        "shards": 1,
        # Where an answer must end; on a small machine sooner than the model would have it.
        "context_tokens": context_tokens,
    }


def name_of(fields: Mapping[str, Any]) -> str:
    """
    The hash that names a fingerprint.
    """
    return hashlib.sha256(_encoder.encode(fields)).hexdigest()[:16]


def hash_files(
    directory: Path,
    patterns: tuple[str, ...],
    progress: Callable[[int, int], None] | None = None,
) -> str:
    """
    One hash over the names and contents of a directory's files.
    """
    paths = sorted({path for pattern in patterns for path in directory.glob(pattern)})
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


def _processor() -> str:
    """
    The processor's model, which decides the CPU kernels.
    """
    info = Path("/proc/cpuinfo")
    if info.is_file():
        names = ("model name", "CPU implementer", "CPU part")
        lines = info.read_text(encoding="utf-8", errors="replace").splitlines()
        found = dict.fromkeys(line for line in lines if line.split("\t")[0].strip() in names)
        flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
        features = hashlib.sha256(flags.encode()).hexdigest()[:12]
        return " / ".join(" ".join(line.split()) for line in found) + f" / features {features}"
    return platform.processor()
