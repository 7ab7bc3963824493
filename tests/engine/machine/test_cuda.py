"""The versions of NVIDIA's libraries and of the driver, which decide kernels."""

from __future__ import annotations

import ctypes
import importlib.metadata
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from cairn.engine.machine import blas
from cairn.engine.machine.cuda import cuda_versions, has_cuda
from cairn.engine.mlx import start

MAPS = """\
7f0000000000-7f0000001000 r--p 00000000 08:01 11 /site/nvidia/cu13/lib/libcublasLt.so.13
7f0000001000-7f0000002000 r-xp 00001000 08:01 11 /site/nvidia/cu13/lib/libcublasLt.so.13
7f0000002000-7f0000003000 r-xp 00000000 08:01 12 /site/nvidia/cudnn/lib/libcudnn.so.9
7f0000003000-7f0000004000 r-xp 00000000 08:01 13 /site/nvidia/cudnn/lib/libcudnn_ops.so.9
7f0000004000-7f0000005000 r-xp 00000000 08:01 14 /site/nvidia/cu13/lib/libnvrtc.so.13
7f0000005000-7f0000006000 rw-p 00000000 00:00 0
7f0000006000-7f0000007000 r-xp 00000000 08:01 15 /lib/libc.so.6
"""
DRIVER = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (one)\n"
)


def asked(name: str, path: Path) -> str:
    """In place of a library."""
    return f"{name} of {path.name}"


def root_with(root: Path, maps: str, driver: str | None) -> Path:
    """A folder with the files that are read."""
    for name, text in (("proc/self/maps", maps), ("proc/driver/nvidia/version", driver)):
        if text is not None:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text, "utf-8")
    return root


def test_each_library_is_asked_and_the_driver_is_read(tmp_path: Path) -> None:
    """The parts of cuDNN belong to it, and other libraries have no kernels."""
    found = {
        "cublas": "cublas of libcublasLt.so.13",
        "cudnn": "cudnn of libcudnn.so.9",
        "nvrtc": "nvrtc of libnvrtc.so.13",
    }
    assert found == cuda_versions(root_with(tmp_path / "hidden", MAPS, None), asked)
    shown = root_with(tmp_path / "shown", MAPS, DRIVER)
    assert {**found, "driver": "580.159.04"} == cuda_versions(shown, asked)
    strange = root_with(tmp_path / "strange", MAPS, "no number\n")
    assert found == cuda_versions(strange, asked)


def test_without_the_libraries_there_is_nothing(tmp_path: Path) -> None:
    """A machine may have a driver that MLX does not use; other systems have no such file."""
    others = "\n".join(line for line in MAPS.splitlines() if "nvidia" not in line)
    assert {} == cuda_versions(root_with(tmp_path / "others", others, DRIVER), asked)
    assert {} == cuda_versions(tmp_path / "nothing", asked)


def library(path: str) -> object:
    """A library of NVIDIA's, as ctypes gives it: its functions have attributes."""

    def compiler(major: Any, minor: Any) -> int:
        for place, value in ((major, 13), (minor, 2)):
            ctypes.cast(place, ctypes.POINTER(ctypes.c_int))[0] = value
        return 0

    return SimpleNamespace(
        cublasLtGetVersion=lambda: 130100, cudnnGetVersion=lambda: 91900, nvrtcVersion=compiler
    )


def test_how_a_library_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each by its own function."""
    monkeypatch.setattr(ctypes, "CDLL", library)
    found = cuda_versions(root_with(tmp_path, MAPS, None))
    assert {"cublas": "130100", "cudnn": "91900", "nvrtc": "13.2"} == found


@pytest.mark.parametrize("installed", ["mlx-cuda-12", "mlx-cuda-13", None])
@pytest.mark.parametrize("driver", [True, False])
def test_a_gpu_needs_the_backend_and_a_driver(
    monkeypatch: pytest.MonkeyPatch, installed: str | None, driver: bool
) -> None:
    """Then no BLAS is missed."""

    def version(name: str) -> str:
        if name != installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return "0.32.4"

    def loaded(name: str) -> object:
        if not driver:
            raise OSError(name)
        return object()

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(ctypes, "CDLL", loaded)
    assert (installed is not None and driver) == has_cuda()


@pytest.mark.skipif(sys.platform != "linux", reason="no BLAS is preloaded on other systems")
def test_on_a_gpu_no_blas_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if none can be found."""
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    monkeypatch.setattr(blas, "find_blas", lambda: None)
    monkeypatch.setattr(blas, "has_cuda", lambda: False)
    assert "not needed" not in blas.describe()[1]
    monkeypatch.setattr(blas, "has_cuda", lambda: True)
    assert (True, "not needed here: MLX computes on the GPU") == blas.describe()


@pytest.mark.parametrize("kind", [mx.DeviceType.cpu, mx.DeviceType.gpu])
def test_the_versions_belong_to_the_device(
    monkeypatch: pytest.MonkeyPatch, kind: mx.DeviceType
) -> None:
    """The fingerprint of a CPU does not have them, even if the libraries are loaded."""
    device = SimpleNamespace(
        DeviceType=mx.DeviceType,
        default_device=lambda: mx.Device(kind),
        device_info=lambda: {"device_name": "NVIDIA H200", "free_memory": 1},
    )
    monkeypatch.setattr(start, "mx", device)
    monkeypatch.setattr(start, "cuda_versions", lambda: {"cublas": "130100"})
    due = {"device": f"Device({kind.name}, 0)"}
    if kind == mx.DeviceType.gpu:
        due |= {"device_name": "NVIDIA H200", "cublas": "130100"}
    assert due == start.device_facts()
