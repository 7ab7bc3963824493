"""The BLAS is found, built, preloaded without side effects, and identified correctly."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cairn.engine.machine import blas

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="a BLAS is preloaded on Linux only")

# Two ways to the same 600 rows; prints whether they agree bit for bit.
# Which splittings differ depends on the kernels that OpenBLAS chose for the processor.
SPLIT_PRODUCTS = """
import mlx.core as mx
equal = []
for width in (256, 1024):
    x = mx.random.normal((600, width), key=mx.random.key(1))
    w = mx.random.normal((1024, width), key=mx.random.key(2))
    whole = x @ w.T
    for cut in (37, 64, 300, 568, 599):
        parts = mx.concatenate([x[:cut] @ w.T, x[cut:] @ w.T])
        equal.append(mx.array_equal(whole, parts).item())
print(all(equal))
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy built for this run of the tests."""
    if blas.copy_path() is None:
        pytest.skip(f"{blas.WHEEL} is not installed")
    return blas.build_blas(tmp_path_factory.mktemp("blas") / "libopenblas-test.so")


def python(code: str, *, preload: Path | None) -> str:
    """Run code in a fresh interpreter and return what it prints."""
    environment = {key: value for key, value in os.environ.items() if key != "LD_PRELOAD"}
    if preload is not None:
        environment["LD_PRELOAD"] = str(preload)
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (0, "") == (done.returncode, done.stderr)
    return done.stdout.strip()


def test_copy_has_plain_names_only(built: Path):
    """The copy exports what MLX asks for, and nothing under the wheel's prefix."""
    names = blas.exported_symbols(built)
    wanted = {"cblas_sgemm", "cblas_dgemm", "cblas_cgemm", "sgesdd_", "spotrf_", "ssyevd_"}
    assert wanted <= set(names)
    assert [] == [name for name in names if name.startswith(blas.PREFIX)]


def test_same_wheels_give_same_bytes(built: Path, tmp_path: Path):
    """
    Two builds are equal, so that two machines can share a fingerprint. Other users can read them:
    root may install what another user runs.
    """
    again = blas.build_blas(tmp_path / "lib" / built.name)
    assert built.read_bytes() == again.read_bytes()
    umask = os.umask(0)
    os.umask(umask)
    assert 0o005 & ~umask == 0o005 & again.parent.stat().st_mode == 0o005 & again.stat().st_mode


def test_build_leaves_no_scraps(built: Path):
    """A build leaves the copy and no other file."""
    assert [built] == list(built.parent.iterdir())


def test_copy_is_found_before_the_system(built: Path, monkeypatch: pytest.MonkeyPatch):
    """The environment's copy goes first, then the system's, then none."""
    system = built.with_name("libopenblas.so.0")
    monkeypatch.setattr(blas, "SYSTEM_PATHS", (str(system),))
    monkeypatch.setattr(blas, "copy_path", lambda: built)
    assert built == blas.find_blas()

    monkeypatch.setattr(blas, "copy_path", lambda: None)
    assert blas.find_blas() is None
    system.touch()
    try:
        assert system == blas.find_blas()
    finally:
        system.unlink()


def test_the_copy_is_in_the_cache_if_the_environment_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """An environment of root's, for example. A copy that is in the environment is used."""
    prefix, cache = tmp_path / "env", tmp_path / "cache"
    (prefix / "lib").mkdir(parents=True)
    monkeypatch.setattr(sys, "prefix", str(prefix))
    monkeypatch.setattr("importlib.metadata.version", lambda _: "1.2")
    monkeypatch.setenv("CAIRN_CACHE_DIR", str(cache))
    name = "libopenblas-cairn-1.2.so"
    assert prefix / "lib" / "cairn" / name == blas.copy_path()

    # root may write everywhere
    monkeypatch.setattr(os, "access", lambda path, mode: mode == os.R_OK and path.exists())
    assert cache / "lib" / name == blas.copy_path()

    (prefix / "lib" / "cairn").mkdir()
    (prefix / "lib" / "cairn" / name).touch()
    assert prefix / "lib" / "cairn" / name == blas.copy_path()


def test_preloaded_blas_is_named(built: Path, monkeypatch: pytest.MonkeyPatch):
    """The preloaded library is the one that is named, with its file's hash, kernels and threads."""
    code = """
import numpy, mlx.core
from cairn.engine.machine import blas
found = blas.loaded_blas()
print(found.name, found.sha256, bool(found.core), found.threads)
"""
    digest = hashlib.sha256(built.read_bytes()).hexdigest()
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "2")
    assert f"{built.name} {digest} True 2" == python(code, preload=built)
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")
    assert f"{built.name} {digest} True 1" == python(code, preload=built)


def test_bundled_blas_is_named():
    """Without a preload, MLX's own library is named, not numpy's OpenBLAS."""
    code = """
from cairn.engine.machine import blas
before = blas.loaded_blas()
import numpy, mlx.core
found = blas.loaded_blas()
print(before, found.name.startswith("libblas"), found.core, found.threads)
"""
    assert "None True None None" == python(code, preload=None)


def test_asking_loads_no_mlx():
    """The module can be asked before MLX is loaded."""
    code = """
import sys
from cairn.engine.machine import blas
blas.find_blas(), blas.loaded_blas(), blas.describe()
print("mlx" in sys.modules)
"""
    assert "False" == python(code, preload=None)


def test_preload_does_not_affect_other_libraries(built: Path):
    """numpy, TLS and child processes work as they do without it."""
    code = """
import ssl, subprocess
import numpy
a = numpy.arange(9.0).reshape(3, 3) + 5 * numpy.eye(3)
assert numpy.allclose(numpy.linalg.inv(a) @ a, numpy.eye(3))
ssl.create_default_context()
print(subprocess.check_output(["sh", "-c", "echo child | cat"], text=True))
"""
    assert "child" == python(code, preload=built)


@pytest.mark.parametrize("preloaded", [True, False])
def test_check_sees_a_preload_that_is_no_blas(preloaded: bool, built: Path):
    """`--check` fails if LD_PRELOAD names a library that MLX cannot use."""
    code = "from cairn.engine.machine import blas; print(blas.main(['--check']))"
    other = "libm.so.6"
    words, code_line = python(code, preload=built if preloaded else Path(other)).splitlines()
    assert preloaded == words.startswith("preloaded: ")
    assert str(int(not preloaded)) == code_line


def test_a_file_that_is_no_library_is_refused(tmp_path: Path):
    """Reading the symbols of any other file raises an error."""
    path = tmp_path / "text.so"
    path.write_text("not a library")
    with pytest.raises(blas.BlasError, match="ELF"):
        blas.exported_symbols(path)


@pytest.mark.gate
def test_bits_depend_on_shape(built: Path):
    """With the copy, rows computed in two parts have different bits, so tests can detect them."""
    assert "False" == python(SPLIT_PRODUCTS, preload=built)


def test_bundled_blas_hides_the_shape():
    """The control: without the copy they are equal, which is why the tests need it."""
    assert "True" == python(SPLIT_PRODUCTS, preload=None)
