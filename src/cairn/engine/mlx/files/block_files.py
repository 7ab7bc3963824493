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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx

from cairn.engine.block_folder import (
    NO_LINK,
    UNFINISHED,
    Named,
    files_in,
    is_file,
    place_of,
    run_of,
)
from cairn.engine.mlx.blocks import SealedBlock, arrays_of, block_of, digest, metadata_for
from cairn.engine.mlx.files.counted import RESERVE_BYTES, CountedFiles, NoRoom, Rejected
from cairn.journal.events import FileFault


class BlockFiles(CountedFiles):
    """The block files in a folder."""

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

    def _found(self) -> Iterator[tuple[Named | None, int | None]]:
        named, others = files_in(self._folder)
        for one in named:
            yield one, _size_of(one.path)
        for _ in others:
            yield None, None

    def _wrote(self, path: Path, fingerprint: str, key: str) -> bool:
        return is_file(path) and run_of(path, fingerprint, key) in self._runs

    def _remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def _rename(self, path: Path, to: Path) -> str:
        path.rename(to)
        return to.relative_to(self._folder).as_posix()


def _size_of(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None
