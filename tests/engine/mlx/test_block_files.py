"""
Block files: what is written can be read, damaged files are rejected, and a scan reports the
contents of a folder.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from cairn.engine.mlx.blocks import SealedBlock, digest
from cairn.engine.mlx.files import block_files as mlx_files
from cairn.engine.mlx.files.block_files import BlockFiles
from cairn.engine.mlx.files.counted import ASIDE_MOST, NoRoom, Rejected

FINGERPRINT = "0123456789abcdef"
RUN = "5f0c0000-run"
MOST = 1 << 30
KEYS = tuple(f"{place:02x}{'ab' * 15}" for place in range(40))


def block_of(seed: int, dtype: mx.Dtype = mx.float32, value_dim: int = 8) -> SealedBlock:
    """A block of two layers."""

    def made(place: int, dim: int) -> mx.array:
        key = mx.random.key(100 * seed + place)
        return mx.random.normal((2, 16, dim), key=key).astype(dtype)

    return SealedBlock(
        keys=(made(0, 8), made(1, 8)), values=(made(2, value_dim), made(3, value_dim))
    )


def write(files: BlockFiles, seed: int, most: int = MOST, **of: Any) -> tuple[str, str, int]:
    """Write the block of a seed; returns its key, its digest and the file's size."""
    block = block_of(seed, **of)
    found = digest(block)
    return KEYS[seed], found, files.write(KEYS[seed], block, found, (0, 16), most)


def path_of(folder: Path, key: str) -> Path:
    """The path of a block's file."""
    return folder / FINGERPRINT / key[:2] / f"{key}.safetensors"


@pytest.fixture(name="folder")
def folder_(tmp_path: Path) -> Path:
    """A folder of blocks that does not exist yet."""
    return tmp_path / "blocks"


@pytest.fixture(name="files")
def files_(folder: Path) -> BlockFiles:
    """The files in it."""
    return BlockFiles(folder, FINGERPRINT, RUN)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("value_dim", [8, 0])
def test_what_is_written_comes_back(
    folder: Path, files: BlockFiles, dtype: mx.Dtype, value_dim: int
):
    """All arrays come back bit for bit, and the file is at the path that its key determines."""
    key, found, size = write(files, 1, dtype=dtype, value_dim=value_dim)
    block, again = files.read(key, found)
    assert found == again == digest(block)
    assert (1, size) == files.measure()
    assert size == path_of(folder, key).stat().st_size
    assert [path_of(folder, key)] == [path for path in folder.rglob("*") if path.is_file()]
    loaded: Any = mx.load(str(path_of(folder, key)), return_metadata=True)
    expected = {
        "key": key,
        "fingerprint": FINGERPRINT,
        "digest": found,
        "tokens": "0-16",
        "run": RUN,
    }
    assert expected == loaded[1]


def test_files_are_their_owners_alone(folder: Path, files: BlockFiles):
    """Other users cannot read block files, regardless of the umask."""
    before = os.umask(0)
    try:
        key, _, _ = write(files, 1)
    finally:
        os.umask(before)
    path = path_of(folder, key)
    assert 0o600 == path.stat().st_mode & 0o777
    for above in (folder, path.parents[1], path.parent):
        assert 0o700 == above.stat().st_mode & 0o777


def flip(offset: int) -> Callable[[Path, Path], None]:
    """Flip a bit of a file."""

    def damage(path: Path, other: Path) -> None:
        whole = bytearray(path.read_bytes())
        whole[offset] ^= 1
        path.write_bytes(whole)

    return damage


def cut(length: int) -> Callable[[Path, Path], None]:
    """Cut a file off after ``length`` bytes."""

    def damage(path: Path, other: Path) -> None:
        path.write_bytes(path.read_bytes()[:length])

    return damage


def swap(path: Path, other: Path) -> None:
    """Replace it by another block's file."""
    path.write_bytes(other.read_bytes())


def forge(path: Path, other: Path) -> None:
    """Replace it by another block's file whose metadata names this block."""
    path.write_bytes(other.read_bytes().replace(other.stem.encode(), path.stem.encode()))


def reprint(path: Path, other: Path) -> None:
    """Replace it by a file that was written under a different fingerprint."""
    path.write_bytes(path.read_bytes().replace(FINGERPRINT.encode(), b"f" * 16))


def noise(path: Path, other: Path) -> None:
    """Replace it by something that is not a block file."""
    path.write_bytes(bytes(range(256)) * 20)


def fewer(path: Path, other: Path) -> None:
    """Remove an array from the file."""
    loaded: Any = mx.load(str(path), return_metadata=True)
    arrays, metadata = loaded
    del arrays["keys.0"]
    mx.save_safetensors(str(path), arrays, metadata=metadata)


DAMAGES: dict[str, tuple[Callable[[Path, Path], None], str]] = {
    "a bit of the last array": (flip(-1), "digest"),
    "a bit of the length of the head": (flip(6), "unreadable"),
    "a bit of the head": (flip(8), "unreadable"),
    "the last byte is gone": (cut(-1), "unreadable"),
    "the arrays are gone": (cut(200), "unreadable"),
    "only the length is there": (cut(8), "unreadable"),
    "nothing is in it": (cut(0), "unreadable"),
    "noise": (noise, "unreadable"),
    "an array is missing": (fewer, "unreadable"),
    "another block's file": (swap, "foreign"),
    "another block's file under this one's name": (forge, "digest"),
    "another fingerprint's file": (reprint, "foreign"),
    "no file": (lambda path, other: path.unlink(), "missing"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_what_was_damaged_is_set_aside(folder: Path, files: BlockFiles, name: str):
    """A damaged file is not returned, is renamed and no longer counts. Others are not affected."""
    damage, reason = DAMAGES[name]
    key, found, _ = write(files, 1)
    other, other_found, other_size = write(files, 2)
    path = path_of(folder, key)
    damage(path, path_of(folder, other))
    with pytest.raises(Rejected) as caught:
        files.read(key, found)

    report = caught.value.report
    assert (key, reason) == (report.key, report.reason)
    assert not path.exists()
    assert key not in files
    assert (1, other_size) == files.measure()
    aside = folder / report.moved_to if report.moved_to is not None else None
    assert (reason == "missing") == (aside is None)
    assert aside is None or aside.name == f"{path.name}.rejected"
    assert other_found == files.read(other, other_found)[1]
    assert key == write(files, 1)[0]
    assert found == files.read(key, found)[1]


def put_a_folder(path: Path) -> None:
    """Put a folder at its path."""
    path.unlink()
    path.mkdir()


def put_a_link(path: Path) -> None:
    """Move it elsewhere, and put a link to it at its path."""
    elsewhere = path.with_name("elsewhere")
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


def put_a_pipe(path: Path) -> None:
    """Put a pipe without a writer at its path."""
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("change", [put_a_folder, put_a_link, put_a_pipe])
def test_what_is_no_file_is_not_read(
    folder: Path, files: BlockFiles, change: Callable[[Path], None]
):
    """Links are not followed and pipes do not block. They no longer count, and stay."""
    key, found, _ = write(files, 1)
    path = path_of(folder, key)
    change(path)
    before = path.lstat()
    with pytest.raises(Rejected) as caught:
        files.read(key, found)

    report = caught.value.report
    assert (key, "unreadable", None) == (report.key, report.reason, report.moved_to)
    assert key not in files
    assert before.st_ino == path.lstat().st_ino


def test_a_file_of_another_size_is_not_loaded(
    folder: Path, files: BlockFiles, monkeypatch: pytest.MonkeyPatch
):
    """A file that has grown is set aside unread, because it may be larger than memory."""
    key, found, _ = write(files, 1)
    with path_of(folder, key).open("r+b") as file:
        file.truncate(1 << 40)  # sparse: takes no space on the disk

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("it was loaded")

    monkeypatch.setattr(mx, "load", never)
    with pytest.raises(Rejected) as caught:
        files.read(key, found)
    assert "unreadable" == caught.value.report.reason
    assert "OSError" == type(caught.value.__cause__).__name__


def test_few_files_are_set_aside(folder: Path, files: BlockFiles):
    """The number of files that are set aside is limited; further ones are removed."""
    reports = []
    for seed in range(ASIDE_MOST + 2):
        key, found, _ = write(files, seed)
        flip(-1)(path_of(folder, key), folder)
        with pytest.raises(Rejected) as caught:
            files.read(key, found)
        reports.append(caught.value.report)
    assert [True] * ASIDE_MOST + [False] * 2 == [one.moved_to is not None for one in reports]
    assert ASIDE_MOST == len([path for path in folder.rglob("*") if path.is_file()])


class Full:
    """A disk that is full when files are synced."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __call__(self, descriptor: int) -> None:
        """Replaces ``os.fsync``."""
        raise OSError(self._number, os.strerror(self._number))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_file_that_cannot_be_written(
    folder: Path, files: BlockFiles, monkeypatch: pytest.MonkeyPatch, number: int
):
    """The error is raised, no part of the file remains, and the next file is written."""
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", Full(number))
        with pytest.raises(OSError, match=os.strerror(number)):
            write(files, 1)
    assert [] == [path for path in folder.rglob("*") if path.is_file()]
    assert (0, 0) == files.measure()
    assert KEYS[1] == write(files, 1)[0]


def test_the_disk_keeps_a_reserve(folder: Path, files: BlockFiles, monkeypatch: pytest.MonkeyPatch):
    """If too little space would be left for the journal, nothing is written."""
    monkeypatch.setattr(mlx_files, "RESERVE_BYTES", 1 << 60)
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        write(files, 1)
    assert [] == [path for path in folder.rglob("*") if path.is_file()]


def test_the_budget_is_looked_at_again(folder: Path, files: BlockFiles):
    """A file that turns out to exceed the budget is not kept."""
    key, _, size = write(files, 1)
    with pytest.raises(NoRoom):
        write(files, 2, most=2 * size - 1)
    assert (1, size) == files.measure()
    assert [path_of(folder, key)] == [path for path in folder.rglob("*") if path.is_file()]
    write(files, 2, most=2 * size)
    assert (2, 2 * size) == files.measure()


def test_a_file_is_removed(folder: Path, files: BlockFiles):
    """A dropped file is removed and no longer counts."""
    key, _, size = write(files, 1)
    assert size == files.drop(key)
    assert not path_of(folder, key).exists()
    assert (0, 0) == files.measure()
    with pytest.raises(KeyError):
        files.drop(key)


def test_a_scan_finds_what_is_there(folder: Path, files: BlockFiles):
    """
    Files on record are found by name and size, whatever their fingerprint. A missing file and one
    of a different size are rejected. Unfinished files and files without a record are removed if a
    run of this journal wrote them. Files that were set aside stay.
    """
    on_record = {key: size for key, _, size in (write(files, seed) for seed in range(4))}
    elsewhere = BlockFiles(folder, "f" * 16, RUN)
    key = KEYS[4]
    size = elsewhere.write(key, block_of(4), digest(block_of(4)), (0, 16), MOST)
    on_record[key] = size
    path_of(folder, KEYS[0]).unlink()
    cut(-1)(path_of(folder, KEYS[1]), folder)
    write(files, 5)  # not on record
    leftover = path_of(folder, KEYS[6])
    leftover.parent.mkdir()
    leftover.with_name(f"{KEYS[6]}.{RUN}.unfinished").write_bytes(b"half")
    aside = path_of(folder, KEYS[7]).with_name(f"{KEYS[7]}.safetensors.rejected")
    aside.parent.mkdir()
    aside.write_bytes(b"looked at")

    found = BlockFiles(folder, FINGERPRINT, "the next", {RUN})
    report = found.scan(on_record, KEYS)

    rejected = {(one.key, one.reason, one.moved_to is None) for one in report.rejected}
    assert {(KEYS[0], "missing", True), (KEYS[1], "unreadable", False)} == rejected
    assert (2, 0) == (report.removed_files, report.left_files)
    left = sum(on_record[key] for key in (KEYS[2], KEYS[3], KEYS[4]))
    assert (3, left) == (report.disk_blocks, report.disk_bytes) == found.measure()
    names = {path.name for path in folder.rglob("*") if path.is_file()}
    kept = {f"{key}.safetensors" for key in (KEYS[2], KEYS[3], KEYS[4])}
    assert kept | {aside.name, f"{KEYS[1]}.safetensors.rejected"} == names
    assert digest(block_of(2)) == found.read(KEYS[2], digest(block_of(2)))[1]


def _text(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("mine")


def _linked(path: Path) -> None:
    _text(path.parents[3] / "elsewhere" / path.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(path.parents[3] / "elsewhere" / path.name)


def _other_run(path: Path) -> None:
    files = BlockFiles(path.parents[2], path.parents[1].name, "another journal's")
    block = block_of(1)
    files.write(path.stem, block, digest(block), (0, 16), MOST)


def _other_draft(path: Path) -> None:
    _text(path.with_name(f"{path.stem}.another.unfinished"))


def _other_aside(path: Path) -> None:
    _text(path.with_name(f"{path.name}.rejected"))


def _linked_folder(path: Path) -> None:
    out = path.parents[3] / "elsewhere" / path.parent.name
    _text(out / f"{path.stem}.{RUN}.unfinished")  # would be ours if the link were followed
    path.parents[2].mkdir(parents=True, exist_ok=True)
    path.parents[1].symlink_to(out.parent)


FOREIGN: dict[str, Callable[[Path], None]] = {
    "a text where a block would be": _text,
    "weights in a folder": lambda path: _text(path.parents[2] / "m" / "x" / "w-1.safetensors"),
    "a text at the top": lambda path: _text(path.parents[2] / "README"),
    "a name with more to it": lambda path: _text(path.with_name(f"{path.name}.index.json")),
    "a link where a block would be": _linked,
    "a folder that is a link": _linked_folder,
    "another journal's block": _other_run,
    "another journal's draft": _other_draft,
    "what another journal set aside": _other_aside,
    "a folder where a block would be": lambda path: path.mkdir(parents=True),
    "a key of another place": lambda path: _text(path.with_name(f"{KEYS[9]}.safetensors")),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_what_others_left_stays(folder: Path, tmp_path: Path, name: str):
    """
    Files that no run of this journal wrote are never changed, whatever is on record and whatever is
    called later. They are counted, and writing a block to such a path fails like a full disk.
    """
    path = path_of(folder, KEYS[1])
    FOREIGN[name](path)

    def there() -> dict[str, bytes | None]:
        return {
            str(one): one.read_bytes() if one.is_file() else None for one in tmp_path.rglob("*")
        }

    before = there()
    files = BlockFiles(folder, FINGERPRINT, RUN, {"earlier"})
    report = files.scan({}, {KEYS[2]}, keep_aside=False)
    assert (0, 1) == (report.removed_files, report.left_files)
    taken = path.is_symlink() or path.exists() or path.parents[1].is_symlink()
    block = block_of(1)
    if taken:
        with pytest.raises(OSError, match=r"journal did not write|is a link"):
            files.write(KEYS[1], block, digest(block), (0, 16), MOST)
    else:
        files.write(KEYS[1], block, digest(block), (0, 16), MOST)
        assert files.measure()[1] == files.drop(KEYS[1])
    after = there()
    assert before == {one: after[one] for one in before}


def test_what_is_on_record_and_no_file_is_missing(folder: Path, files: BlockFiles):
    """A link at the path of a file on record stays, and the block is reported as missing."""
    key, _, size = write(files, 1)
    path = path_of(folder, key)
    path.rename(folder.parent / "moved")
    path.symlink_to(folder.parent / "moved")
    report = BlockFiles(folder, FINGERPRINT, RUN).scan({key: size}, {key})
    assert [(key, "missing", None)] == [(r.key, r.reason, r.moved_to) for r in report.rejected]
    assert path.is_symlink()
    assert 1 == report.left_files


def test_nothing_set_aside_is_kept_where_nothing_is_to_be_kept(folder: Path, files: BlockFiles):
    """On request, the scan also removes files that were set aside."""
    key, found, _ = write(files, 1)
    flip(-1)(path_of(folder, key), folder)
    with pytest.raises(Rejected):
        files.read(key, found)
    report = BlockFiles(folder, FINGERPRINT, RUN).scan({}, {key}, keep_aside=False)
    assert 1 == report.removed_files
    assert [] == [path for path in folder.rglob("*") if path.is_file()]


def test_a_scan_counts_what_was_set_aside(folder: Path, files: BlockFiles):
    """The limit on files that are set aside holds across runs, without a scan each time."""
    for seed in range(ASIDE_MOST):
        key, found, _ = write(files, seed)
        flip(-1)(path_of(folder, key), folder)
        with pytest.raises(Rejected):
            files.read(key, found)
    later = BlockFiles(folder, FINGERPRINT, RUN)
    later.scan({}, KEYS)
    key, found, _ = write(later, ASIDE_MOST)
    flip(-1)(path_of(folder, key), folder)
    with pytest.raises(Rejected) as caught:
        later.read(key, found)
    assert None is caught.value.report.moved_to


def test_setting_aside_looks_at_one_file(
    folder: Path, files: BlockFiles, monkeypatch: pytest.MonkeyPatch
):
    """It does not walk the folder, which may be large, because requests wait meanwhile."""
    key, found, _ = write(files, 1)
    flip(-1)(path_of(folder, key), folder)
    walked: list[Any] = []
    monkeypatch.setattr(os, "scandir", lambda *of: walked.append(of))
    with pytest.raises(Rejected):
        files.read(key, found)
    assert [] == walked


def test_what_is_no_error_of_the_systems(
    folder: Path, files: BlockFiles, monkeypatch: pytest.MonkeyPatch
):
    """An error of MLX's own while a file is written is reported like a disk error."""

    def failing(*of: Any, **named: Any) -> None:
        raise RuntimeError("[save_safetensors] failed")

    with monkeypatch.context() as patch:
        patch.setattr(mx, "save_safetensors", failing)
        with pytest.raises(OSError, match="save_safetensors"):
            write(files, 1)
    assert [] == [path for path in folder.rglob("*") if path.is_file()]
    assert KEYS[1] == write(files, 1)[0]


def test_a_file_that_no_block_can_be_in(folder: Path, files: BlockFiles):
    """Arrays that cannot be hashed, because they have no shape, count as a damaged file."""
    key, found, _ = write(files, 1)
    metadata = {"key": key, "fingerprint": FINGERPRINT, "digest": found, "tokens": "0-16"}
    scalars = {"keys.0": mx.array(1.0), "values.0": mx.array(1.0)}
    mx.save_safetensors(str(path_of(folder, key)), scalars, metadata=metadata)
    with pytest.raises(Rejected) as caught:
        files.read(key, found)
    assert caught.value.report.reason in ("unreadable", "digest")


def test_a_disk_that_fails_at_a_look(
    folder: Path, files: BlockFiles, monkeypatch: pytest.MonkeyPatch
):
    """A file whose size cannot be read does not stop a scan: it is rejected, others are found."""
    on_record = {key: size for key, _, size in (write(files, seed) for seed in range(2))}
    plain = Path.stat

    def failing(self: Path, **named: Any) -> os.stat_result:
        if self.stem == KEYS[0]:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return plain(self, **named)

    monkeypatch.setattr(Path, "stat", failing)
    report = BlockFiles(folder, FINGERPRINT, RUN).scan(on_record, on_record)
    assert ([KEYS[0]], 1) == ([one.key for one in report.rejected], report.disk_blocks)


def test_what_cannot_be_removed_counts(
    folder: Path, files: BlockFiles, monkeypatch: pytest.MonkeyPatch
):
    """A file that cannot be removed is reported and still counts; a missing one is no error."""
    key, _, size = write(files, 1)

    def failing(self: Path, missing_ok: bool = False) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", failing)
        with pytest.raises(PermissionError):
            files.drop(key)
    assert (1, size) == files.measure()
    path_of(folder, key).unlink()
    assert size == files.drop(key)
    assert (0, 0) == files.measure()


def test_a_folder_that_is_not_there(folder: Path, files: BlockFiles):
    """The first start finds nothing and creates nothing."""
    report = files.scan({KEYS[1]: 10})
    assert ["missing"] == [one.reason for one in report.rejected]
    assert (0, 0, 0) == (report.removed_files, report.disk_blocks, report.disk_bytes)
    assert not folder.exists()
