"""
Block files: the sealed blocks on disk, one file each.

Rules of this module:

1. A file gets its final name only after it was written completely and synced to disk.
2. A block is checked before it is returned: the file must name the block's key and fingerprint, and
   its KV must have the digest that the journal recorded. A file that fails is set aside and no
   longer counts.
3. Nothing here decides. The caller says what to write, read and remove.
4. Files that the journal has no record of and that none of its runs wrote are not removed, renamed
   or replaced. Each file says which run wrote it. ``block_folder`` defines paths and names.

A key never occurs under two fingerprints, because the fingerprint is part of the key.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx

from cairn.engine.block_folder import (
    ASIDE,
    NO_LINK,
    UNFINISHED,
    Named,
    files_in,
    is_file,
    place_of,
    run_of,
)
from cairn.engine.mlx.blocks import SealedBlock, arrays_of, block_of, digest, metadata_for
from cairn.engine.reports import RejectReport, ScanReport
from cairn.journal.events import FileFault

ASIDE_MOST = 16
"""How many rejected files are kept for inspection; any more are removed."""

RESERVE_BYTES = 64 * 1024 * 1024
"""The free space that block files leave on their disk, which may hold the journal too."""


class Rejected(Exception):
    """A file is not as it was written. It was set aside."""

    def __init__(self, report: RejectReport) -> None:
        super().__init__(f"block {report.key}: {report.reason}")
        self.report = report


class NoRoom(Exception):
    """The file would exceed the budget. No part of it was kept."""


class BlockFiles:
    """The block files in a folder, with their sizes when they were found or written."""

    def __init__(
        self, folder: Path, fingerprint: str, run: str, earlier: Collection[str] = ()
    ) -> None:
        """
        Args:
            fingerprint: the fingerprint that files are written under.
            run: the id of this run of the server.
            earlier: the ids of earlier runs on this journal.
        """
        self._folder = folder
        self._fingerprint = fingerprint
        self._run = run
        self._runs = {run, *earlier}
        self._files: dict[str, tuple[Path, int]] = {}
        self._bytes = 0
        self._aside = 0

    def __contains__(self, key: str) -> bool:
        return key in self._files

    def measure(self) -> tuple[int, int]:
        """(files, their bytes), by their sizes when they were found or written."""
        return len(self._files), self._bytes

    def scan(
        self, on_record: Mapping[str, int], known: Collection[str] = (), *, keep_aside: bool = True
    ) -> ScanReport:
        """
        Find the files that the journal knows of, by name and size, and remove other files that runs
        of this journal left. All other files stay, and are counted.

        Args:
            on_record: the size of each file that the journal knows of, by key.
            known: the keys of all blocks that the journal knows of, with or without a file.
            keep_aside: whether files that were set aside stay.
        """
        named, others = files_in(self._folder)
        removed, left, damaged = 0, len(others), []
        for one in named:
            if one.kind == "block" and one.key in on_record and one.key not in self._files:
                size = _size_of(one.path)
                self._count(one.key, one.path, on_record[one.key])
                if size != on_record[one.key]:
                    damaged.append(one.key)
            elif one.kind == "aside" and one.key in known and keep_aside:
                self._aside += 1
            elif self._is_ours(one, known) and _removed(one.path):
                removed += 1
            else:
                left += 1
        missing = [key for key in on_record if key not in self._files]
        rejected = [RejectReport(key=key, reason="missing", moved_to=None) for key in missing]
        rejected += [self._set_aside(key, "unreadable") for key in damaged]
        blocks, size = self.measure()
        return ScanReport(
            rejected=tuple(rejected),
            removed_files=removed,
            left_files=left,
            disk_blocks=blocks,
            disk_bytes=size,
        )

    def write(
        self, key: str, block: SealedBlock, digest: str, span: tuple[int, int], most_bytes: int
    ) -> int:
        """
        Write a block's file and return its size.

        Args:
            digest: the block's digest.
            span: the range of tokens that it covers.
            most_bytes: the most that all files may take afterwards.

        Raises:
            NoRoom: they would take more.
            OSError: the file cannot be written, would leave less free space than the reserve, or
                its path is taken by a file that this journal did not write. No part of it remains.
        """
        path = place_of(self._folder, self._fingerprint, key)
        try:
            self._make_way(path, key, block.nbytes)
            size = self._written(path, key, block, digest, span, most_bytes)
        except (NoRoom, OSError):
            raise
        except Exception as error:
            # MLX raises its own errors for arrays and files that it cannot write.
            raise OSError(errno.EIO, f"{type(error).__name__}: {error}") from error
        self._count(key, path, size)
        return size

    def _make_way(self, path: Path, key: str, size: int) -> None:
        """Make a file's folders; check that its path is free and that the disk has room."""
        for folder in (self._folder, path.parents[1], path.parent):
            folder.mkdir(exist_ok=True, mode=0o700)
            if folder != self._folder and folder.is_symlink():
                raise OSError(
                    errno.ENOTDIR, f"{folder.name} is a link, which Cairn does not follow"
                )
        if os.path.lexists(path) and not self._wrote(path, self._fingerprint, key):
            raise OSError(
                errno.EEXIST, "its path is taken by a file that this journal did not write"
            )
        if shutil.disk_usage(path.parent).free < RESERVE_BYTES + size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _written(
        self,
        path: Path,
        key: str,
        block: SealedBlock,
        digest: str,
        span: tuple[int, int],
        most_bytes: int,
    ) -> int:
        draft = path.with_name(f"{key}.{self._run}{UNFINISHED}")
        metadata = metadata_for(block, key, self._fingerprint, digest, span, self._run)
        # O_EXCL: never overwrite an existing file.
        opened = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | NO_LINK, 0o600)
        try:
            with os.fdopen(opened, "wb") as file:
                sink: Any = file
                mx.save_safetensors(sink, arrays_of(block), metadata=metadata)
                file.flush()
                os.fsync(file.fileno())
                size = file.tell()
            if self._bytes + size > most_bytes:
                raise NoRoom
            draft.rename(path)
        except BaseException:
            with contextlib.suppress(OSError):
                draft.unlink()
            raise
        return size

    def read(self, key: str, digest_due: str) -> tuple[SealedBlock, str]:
        """
        Read a block, and hash what was read.

        Args:
            digest_due: the digest that its KV must have.

        Raises:
            Rejected: the file is not as it was written. It was set aside.
            KeyError: the block has no file.
        """
        path, size = self._files[key]
        try:
            if not is_file(path):  # MLX would follow a link, and block on a pipe
                raise OSError(errno.EINVAL, "no file")
            if path.lstat().st_size != size:  # checked first: reading it could fill the memory
                raise OSError(errno.EFBIG, "its size is not the size that was written")
            # MLX reads lazily, so damaged bytes may raise only in mx.eval.
            loaded: Any = mx.load(str(path), return_metadata=True)
            arrays, metadata = loaded
            block = block_of(arrays, metadata)
            described = metadata.get("key"), metadata.get("fingerprint")
            found = digest(block)
        except Exception as error:
            fault: FileFault = "unreadable" if os.path.lexists(path) else "missing"
            raise Rejected(self._set_aside(key, fault)) from error
        if described != (key, self._fingerprint):
            raise Rejected(self._set_aside(key, "foreign"))
        if found != digest_due:
            raise Rejected(self._set_aside(key, "digest"))
        return block, found

    def drop(self, key: str) -> int:
        """
        Remove a block's file and return its size. It is not an error if the file is gone already.

        Raises:
            KeyError: the block has no file.
            OSError: the file cannot be removed. It still exists and counts.
        """
        path, size = self._files[key]
        path.unlink(missing_ok=True)
        self._forget(key)
        return size

    def drop_aside(self, key: str) -> None:
        """
        Remove what was set aside of a block's files, under any fingerprint.

        Raises:
            OSError: one cannot be removed.
        """
        for above in self._folder.iterdir() if self._folder.is_dir() else ():
            path = place_of(self._folder, above.name, key)
            aside = path.with_name(path.name + ASIDE)
            if is_file(aside):
                aside.unlink()
                self._aside = max(0, self._aside - 1)

    def _set_aside(self, key: str, reason: FileFault) -> RejectReport:
        """Stop counting a file, and rename it so that it is not taken for a block again."""
        path, _ = self._forget(key)
        aside = path.with_name(path.name + ASIDE)
        where = None
        # If it cannot be renamed, or is not a regular file, it stays; it no longer counts anyway.
        with contextlib.suppress(OSError):
            if not is_file(path):
                pass
            elif self._aside < ASIDE_MOST and not os.path.lexists(aside):
                path.rename(aside)
                self._aside += 1
                where = aside.relative_to(self._folder).as_posix()
            else:
                path.unlink()
        return RejectReport(key=key, reason=reason, moved_to=where)

    def _is_ours(self, one: Named, known: Collection[str]) -> bool:
        """
        Whether a file that is not on record belongs to this journal. For a file that was set aside
        its key decides, because its metadata may be damaged.
        """
        match one.kind:
            case "draft":
                return one.run in self._runs
            case "aside":
                return one.key in known
            case "block":
                return self._wrote(one.path, one.fingerprint, one.key)

    def _wrote(self, path: Path, fingerprint: str, key: str) -> bool:
        """Whether a run of this journal wrote a block's file, by the file's metadata."""
        return is_file(path) and run_of(path, fingerprint, key) in self._runs

    def _count(self, key: str, path: Path, size: int) -> None:
        self._files[key] = (path, size)
        self._bytes += size

    def _forget(self, key: str) -> tuple[Path, int]:
        path, size = self._files.pop(key)
        self._bytes -= size
        return path, size


def _size_of(path: Path) -> int | None:
    """The size of a file; None if it cannot be determined."""
    try:
        return path.stat().st_size
    except OSError:
        return None


def _removed(path: Path) -> bool:
    try:
        path.unlink()
    except OSError:
        return False
    return True
