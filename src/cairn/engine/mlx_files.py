"""
Block files: the sealed blocks that are on disk, one file each.

Rules of this module:

1. A file has its name only when all of it is written and on the disk. Before, it has another one.
2. What is read is checked before anybody gets it: the file says which block it is, and its KV has
   the digest that the journal has of that block. A file that fails is set aside and counts no more.
3. Nothing here decides: what is written, read and removed comes from outside.

A file lies at ``<fingerprint>/<two of the key>/<key>.safetensors`` in the folder of blocks. No
key is in the folders of two fingerprints, since a key covers its fingerprint.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx

from cairn.engine.mlx_blocks import SealedBlock, digest
from cairn.engine.reports import RejectReport, ScanReport
from cairn.journal.events import FileFault

ASIDE_MOST = 16
"""
How many files that were set aside are kept for people to look at; a further one is removed.
"""

RESERVE_BYTES = 64 * 1024 * 1024
"""
What block files leave free on their disk, where the journal may lie too.
"""

_NAME = re.compile(r"([0-9a-f]+)\.safetensors")
_UNFINISHED = ".unfinished"
_ASIDE = ".rejected"


class Rejected(Exception):
    """
    A file is not what was written. It was set aside.
    """

    def __init__(self, report: RejectReport) -> None:
        super().__init__(f"block {report.key}: {report.reason}")
        self.report = report


class NoRoom(Exception):
    """
    The file would be over the budget. Nothing of it was kept.
    """


class BlockFiles:
    """
    The files of one folder, and their sizes as they were found or written.
    """

    def __init__(self, folder: Path, fingerprint: str) -> None:
        """
        Args:
            fingerprint: under which files are written.
        """
        self._folder = folder
        self._fingerprint = fingerprint
        self._files: dict[str, tuple[Path, int]] = {}
        self._bytes = 0

    def __contains__(self, key: str) -> bool:
        return key in self._files

    def measure(self) -> tuple[int, int]:
        """
        (files, their bytes), as they were found or written.
        """
        return len(self._files), self._bytes

    def scan(self, on_record: Mapping[str, int]) -> ScanReport:
        """
        Look for the files that are on record, by name and size, and remove what no record has.

        Args:
            on_record: key to the size of its file.
        """
        removed, damaged = 0, []
        for path in list(self._walk()):
            if path.name.endswith(_ASIDE):
                continue
            named = _NAME.fullmatch(path.name)
            key = named[1] if named else None
            if key is None or key not in on_record or key in self._files:
                removed += _removed(path)
                continue
            size = path.stat().st_size
            self._count(key, path, size)
            if size != on_record[key]:
                damaged.append(key)
        missing = [key for key in on_record if key not in self._files]
        rejected = [RejectReport(key=key, reason="missing", aside=None) for key in missing]
        rejected += [self._set_aside(key, "unreadable") for key in damaged]
        blocks, size = self.measure()
        return ScanReport(
            rejected=tuple(rejected), removed_files=removed, disk_blocks=blocks, disk_bytes=size
        )

    def write(
        self, key: str, block: SealedBlock, digest: str, span: tuple[int, int], most_bytes: int
    ) -> int:
        """
        Write a block's file, and give its size.

        Args:
            digest: of the block.
            span: the tokens that it covers.
            most_bytes: what all files may take after it.

        Raises:
            NoRoom: they would take more.
            OSError: the file cannot be written, or would not leave the disk its reserve. Nothing of
                it is left.
        """
        path = self._folder / self._fingerprint / key[:2] / f"{key}.safetensors"
        for folder in (self._folder, path.parents[1], path.parent):
            folder.mkdir(exist_ok=True, mode=0o700)
        if shutil.disk_usage(path.parent).free < RESERVE_BYTES + block.nbytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        draft = path.with_name(f"{key}{_UNFINISHED}")
        arrays = {f"keys.{place}": array for place, array in enumerate(block.keys)}
        arrays |= {f"values.{place}": array for place, array in enumerate(block.values)}
        metadata = {
            "key": key,
            "fingerprint": self._fingerprint,
            "digest": digest,
            "tokens": f"{span[0]}-{span[1]}",
        }
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
            with os.fdopen(os.open(draft, flags, 0o600), "wb") as file:
                sink: Any = file
                mx.save_safetensors(sink, arrays, metadata=metadata)
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
        self._count(key, path, size)
        return size

    def read(self, key: str, digest_due: str) -> tuple[SealedBlock, str]:
        """
        Read a block, and hash what was read.

        Args:
            digest_due: the digest that its KV must have.

        Raises:
            Rejected: the file is not what was written. It is set aside.
            KeyError: there is none.
        """
        path, _ = self._files[key]
        try:
            # MLX reads when it evaluates: what is wrong with the bytes may show only then.
            loaded: Any = mx.load(str(path), return_metadata=True)
            arrays, metadata = loaded
            layers = range(len(arrays) // 2)
            block = SealedBlock(
                keys=tuple(arrays[f"keys.{layer}"] for layer in layers),
                values=tuple(arrays[f"values.{layer}"] for layer in layers),
            )
            mx.eval(block.keys, block.values)
        except Exception as error:
            fault: FileFault = "unreadable" if path.exists() else "missing"
            raise Rejected(self._set_aside(key, fault)) from error
        if (metadata.get("key"), metadata.get("fingerprint")) != (key, self._fingerprint):
            raise Rejected(self._set_aside(key, "foreign"))
        found = digest(block)
        if found != digest_due:
            raise Rejected(self._set_aside(key, "digest"))
        return block, found

    def drop(self, key: str) -> int:
        """
        Remove a block's file, and give its size.

        Raises:
            KeyError: there is none.
        """
        path, size = self._forget(key)
        with contextlib.suppress(OSError):
            path.unlink()
        return size

    def _set_aside(self, key: str, reason: FileFault) -> RejectReport:
        """
        Count a file no more, and give it a name under which nobody takes it for a block.
        """
        path, _ = self._forget(key)
        aside = path.with_name(path.name + _ASIDE)
        kept = sum(other.name.endswith(_ASIDE) for other in self._walk())
        try:
            if kept < ASIDE_MOST:
                path.replace(aside)
                where = aside.relative_to(self._folder).as_posix()
                return RejectReport(key=key, reason=reason, aside=where)
            path.unlink()
        except OSError:
            pass  # it is gone, or cannot be touched; it counts no more either way
        return RejectReport(key=key, reason=reason, aside=None)

    def _walk(self) -> Iterator[Path]:
        """
        Every file that lies where a block's file, or what became of one, may lie.
        """
        for path in self._folder.glob("*/*/*"):
            ours = ".safetensors" in path.name or path.name.endswith(_UNFINISHED)
            if ours and path.is_file():
                yield path

    def _count(self, key: str, path: Path, size: int) -> None:
        self._files[key] = (path, size)
        self._bytes += size

    def _forget(self, key: str) -> tuple[Path, int]:
        path, size = self._files.pop(key)
        self._bytes -= size
        return path, size


def _removed(path: Path) -> bool:
    with contextlib.suppress(OSError):
        path.unlink()
    return not path.exists()
