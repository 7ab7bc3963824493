"""
Which of NVIDIA's libraries MLX's CUDA backend computes with.

They come in packages of their own and from the driver. If one of them is updated, the same MLX
computes with other kernels, so their versions are part of the fingerprint.

Nothing here imports MLX.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import re
from collections.abc import Callable
from pathlib import Path

_WHEELS = ("mlx-cuda-13", "mlx-cuda-12")
_DRIVER = "libcuda.so.1"

# Each has kernels, or compiles them.
_LIBRARIES = {
    "cublas": re.compile(r"libcublasLt\.so"),
    "cudnn": re.compile(r"libcudnn\.so"),
    "nvrtc": re.compile(r"libnvrtc\.so"),
}


def cuda_versions(
    root: Path = Path("/"), asked: Callable[[str, Path], str] | None = None
) -> dict[str, str]:
    """
    The versions of the driver and of the libraries that this process has loaded; empty without any.

    Args:
        root: where ``proc`` is.
        asked: returns the version of a library, by its name here and its path; by default the
            library itself is asked.
    """
    found = {}
    for path in _mapped(root):
        for name, pattern in _LIBRARIES.items():
            if pattern.match(path.name):
                found[name] = (asked or _asked)(name, path)
    if not found:
        return {}
    try:
        driver = (root / "proc/driver/nvidia/version").read_text("utf-8", errors="replace")
    except OSError:  # not every container shows it
        return found
    if number := re.search(r"\s(\d+(?:\.\d+)+)\s", driver):
        found["driver"] = number[1]
    return found


def has_cuda() -> bool:
    """Whether MLX's CUDA backend is installed and there is a driver: then it computes on a GPU."""
    if not any(map(_is_installed, _WHEELS)):
        return False
    try:
        ctypes.CDLL(_DRIVER)
    except OSError:
        return False
    return True


def _is_installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _mapped(root: Path) -> list[Path]:
    """The files that are mapped into this process."""
    try:
        lines = (root / "proc/self/maps").read_text("utf-8", errors="surrogateescape").splitlines()
    except OSError:  # not Linux
        return []
    places = (line.split(maxsplit=5) for line in lines)
    return sorted({Path(fields[5]) for fields in places if len(fields) == 6})


def _asked(name: str, path: Path) -> str:
    """What a library says of itself."""
    library = ctypes.CDLL(str(path))
    if name == "nvrtc":
        major, minor = ctypes.c_int(), ctypes.c_int()
        library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
        return f"{major.value}.{minor.value}"
    function = {"cublas": "cublasLtGetVersion", "cudnn": "cudnnGetVersion"}[name]
    version = getattr(library, function)
    version.restype = ctypes.c_size_t
    return str(version())
