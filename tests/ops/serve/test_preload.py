"""The first start on a Linux CPU prepares OpenBLAS; no other start and no other machine does."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from cairn.engine.machine.blas import BlasError
from cairn.ops.serve import preload

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="a BLAS is preloaded on Linux only")


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Path]:
    """The copies that were built. None exists at first, and none is preloaded."""
    made: list[Path] = []

    def build(target: Path) -> Path:
        made.append(target)
        target.touch()
        return target

    monkeypatch.delenv("LD_PRELOAD", raising=False)
    monkeypatch.setattr(preload, "copy_path", lambda: tmp_path / "libopenblas.so")
    monkeypatch.setattr(preload, "has_cuda", lambda: False)
    monkeypatch.setattr(preload, "build_blas", build)
    return made


def test_the_first_start_prepares_it(
    built: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """With a line on stderr; the second start finds it."""
    preload.prepare_blas()
    preload.prepare_blas()
    assert [tmp_path / "libopenblas.so"] == built
    assert ("", "Preparing OpenBLAS for this environment, once ...\n") == capsys.readouterr()


def test_where_another_blas_is_used_nothing_is_prepared(
    built: list[Path], monkeypatch: pytest.MonkeyPatch
):
    """Nor on a GPU, nor without the wheel."""
    with monkeypatch.context() as patched:
        patched.setenv("LD_PRELOAD", "")
        preload.prepare_blas()
    with monkeypatch.context() as patched:
        patched.setattr(preload, "has_cuda", lambda: True)
        preload.prepare_blas()
    monkeypatch.setattr(preload, "copy_path", lambda: None)
    preload.prepare_blas()
    assert [] == built


@pytest.mark.parametrize("error", [BlasError("patchelf failed: no"), PermissionError(13, "denied")])
def test_a_start_does_without_if_it_cannot_be_prepared(
    built: list[Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: Exception,
):
    """With a warning that says why."""

    def fails(_: Path) -> Path:
        raise error

    monkeypatch.setattr(preload, "build_blas", fails)
    preload.prepare_blas()
    _, _, warning = capsys.readouterr().err.partition("\n")
    assert warning.startswith(f"Warning: OpenBLAS cannot be prepared: {error}.")
