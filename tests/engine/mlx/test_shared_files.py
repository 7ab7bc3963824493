"""
Block files in a folder that several nodes see: a node reads those of another one and changes none,
and only a file that is damaged is rejected.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from cairn.engine.mlx.blocks import SealedBlock, digest
from cairn.engine.mlx.files.counted import Rejected
from cairn.engine.mlx.files.shared_files import SharedFiles
from tests.engine.mlx.test_block_files import FINGERPRINT, KEYS, MOST, block_of

KEY = KEYS[1]


@pytest.fixture
def one(tmp_path: Path) -> SharedFiles:
    """The files of the node that writes."""
    return SharedFiles(tmp_path / "n1", FINGERPRINT, "run-1")


@pytest.fixture
def two(tmp_path: Path) -> SharedFiles:
    """The files of another node."""
    return SharedFiles(tmp_path / "n2", FINGERPRINT, "run-2")


@pytest.fixture
def block() -> SealedBlock:
    """A block of two layers."""
    return block_of(1)


@pytest.fixture
def path(tmp_path: Path, one: SharedFiles, block: SealedBlock) -> Path:
    """The file of the block, which the first node has written."""
    one.write(KEY, block, digest(block), (0, 16), MOST)
    return tmp_path / "n1" / FINGERPRINT / KEY[:2] / f"{KEY}.safetensors"


def test_files_are_their_owners_alone(tmp_path: Path, one: SharedFiles, block: SealedBlock):
    """
    Other users can read no block, whatever the umask. Folders that an earlier version made are
    closed by a scan.
    """
    before = os.umask(0)
    try:
        one.write(KEY, block, digest(block), (0, 16), MOST)
    finally:
        os.umask(before)
    (path,) = (path for path in (tmp_path / "n1").rglob("*") if path.is_file())
    assert 0o600 == path.stat().st_mode & 0o777
    for above in path.parents[:3]:
        assert 0o700 == above.stat().st_mode & 0o777
    (tmp_path / "n1").chmod(0o755)
    one.scan({KEY: path.stat().st_size}, [KEY])
    assert 0o700 == (tmp_path / "n1").stat().st_mode & 0o777


def too_many_files(*_: Any, **__: Any) -> Any:
    """What MLX raises if the process has too many files open."""
    raise RuntimeError("[load] Failed to open file")


def no_memory(*_: Any, **__: Any) -> Any:
    """What Python raises without memory."""
    raise MemoryError


@pytest.mark.parametrize("error", [too_many_files, no_memory])
def test_a_file_that_cannot_be_read_now(
    one: SharedFiles,
    two: SharedFiles,
    block: SealedBlock,
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: Any,
):
    """It is a miss for its own node and for another one, stays, and is read later."""
    due, size = digest(block), block.nbytes
    with monkeypatch.context() as patch:
        patch.setattr(mx, "load", error)
        assert two.read_of("n1", KEY, due, size) is None
        assert one.read(KEY, due) is None
    assert path.exists()
    for read in (two.read_of("n1", KEY, due, size), one.read(KEY, due)):
        assert read is not None
        assert due == read[1]


def test_a_mount_that_is_stale(
    two: SharedFiles, block: SealedBlock, path: Path, monkeypatch: pytest.MonkeyPatch
):
    """It is a miss, and the file stays."""
    plain = Path.lstat

    def stale(self: Path) -> os.stat_result:
        if self == path:
            raise OSError(errno.ESTALE, "Stale file handle")
        return plain(self)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "lstat", stale)
        assert two.read_of("n1", KEY, digest(block), block.nbytes) is None
    assert path.exists()
    assert two.read_of("n1", KEY, digest(block), block.nbytes) is not None


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda whole: whole[:-1] + bytes([whole[-1] ^ 1]), "digest"),
        (lambda whole: whole[:-1], "unreadable"),
        (lambda whole: b"\xff" * 8 + whole[8:], "unreadable"),
        (lambda whole: whole.replace(FINGERPRINT.encode(), b"f" * 16), "foreign"),
    ],
)
def test_a_file_of_another_node_that_is_damaged(
    one: SharedFiles, two: SharedFiles, block: SealedBlock, path: Path, damage: Any, reason: str
):
    """
    It is rejected once, and not looked at again until it is another file. Only its own node sets it
    aside.
    """
    due, whole = digest(block), path.read_bytes()
    path.write_bytes(damage(whole))
    with pytest.raises(Rejected) as rejected:
        two.read_of("n1", KEY, due, block.nbytes)
    assert (reason, None) == (rejected.value.report.reason, rejected.value.report.moved_to)
    assert path.exists()
    assert not two.has_of("n1", KEY)
    assert two.read_of("n1", KEY, due, block.nbytes) is None
    with pytest.raises(Rejected) as rejected:
        one.read(KEY, due)
    assert f"n1/{FINGERPRINT}/{KEY[:2]}/{path.name}.rejected" == rejected.value.report.moved_to
    assert not path.exists()
    one.write(KEY, block, due, (0, 16), MOST)
    assert two.has_of("n1", KEY)
    assert two.read_of("n1", KEY, due, block.nbytes) is not None
