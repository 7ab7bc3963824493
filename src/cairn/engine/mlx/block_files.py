"""
Block files: the sealed blocks that are on disk, one file each.

Rules of this module:

1. A file has its name only when all of it is written and on the disk. Before, it has another one.
2. What is read is checked before anybody gets it: the file says which block it is, and its KV has
   the digest that the journal has of that block. A file that fails is set aside and counts no more.
3. Nothing here decides: what is written, read and removed comes from outside.
4. What is not on record and was not written by this journal's runs is not touched: not removed, not
   renamed, not replaced. A file says which run wrote it. ``block_folder`` says where files lie and
   how they are called.

No key is in the folders of two fingerprints, since a key covers its fingerprint.
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
from cairn.engine.mlx.blocks import SealedBlock, digest
from cairn.engine.reports import RejectReport, ScanReport
from cairn.journal.events import FileFault

ASIDE_MOST = 16
"""How many files that were set aside are kept for people to look at; a further one is removed."""

RESERVE_BYTES = 64 * 1024 * 1024
"""What block files leave free on their disk, where the journal may lie too."""


class Rejected(Exception):
    """A file is not what was written. It was set aside."""

    def __init__(self, report: RejectReport) -> None:
        super().__init__(f"block {report.key}: {report.reason}")
        self.report = report


class NoRoom(Exception):
    """The file would be over the budget. Nothing of it was kept."""


class BlockFiles:
    """The files of one folder, and their sizes as they were found or written."""

    def __init__(
        self, folder: Path, fingerprint: str, run: str, earlier: Collection[str] = ()
    ) -> None:
        """
        Args:
            fingerprint: under which files are written.
            run: which run of the server writes them.
            earlier: the runs of this journal before.
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
        """(files, their bytes), as they were found or written."""
        return len(self._files), self._bytes

    def scan(
        self, on_record: Mapping[str, int], known: Collection[str] = (), *, keep_aside: bool = True
    ) -> ScanReport:
        """
        Look for the files that are on record, by name and size, and remove what runs of this
        journal left besides. Everything else stays, and is counted.

        Args:
            on_record: key to the size of its file.
            known: the keys of all blocks on record, with a file or without.
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
        Write a block's file, and give its size.

        Args:
            digest: of the block.
            span: the tokens that it covers.
            most_bytes: what all files may take after it.

        Raises:
            NoRoom: they would take more.
            OSError: the file cannot be written, or would not leave the disk its reserve, or a file
                that is not this journal's has its place. Nothing of it is left.
        """
        path = place_of(self._folder, self._fingerprint, key)
        try:
            self._make_way(path, key, block.nbytes)
            size = self._written(path, key, block, digest, span, most_bytes)
        except (NoRoom, OSError):
            raise
        except Exception as error:
            # What MLX says of an array or of a file that it cannot write is an error of its own.
            raise OSError(errno.EIO, f"{type(error).__name__}: {error}") from error
        self._count(key, path, size)
        return size

    def _make_way(self, path: Path, key: str, size: int) -> None:
        """
        Make the folders of a file, and see that nothing is in its place and the disk has room.
        """
        for folder in (self._folder, path.parents[1], path.parent):
            folder.mkdir(exist_ok=True, mode=0o700)
            if folder != self._folder and folder.is_symlink():
                raise OSError(errno.ENOTDIR, f"{folder.name} is a link, and none of Cairn's")
        if os.path.lexists(path) and not self._wrote(path, self._fingerprint, key):
            raise OSError(errno.EEXIST, "a file that this journal did not write has its place")
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
        arrays = {f"keys.{place}": array for place, array in enumerate(block.keys)}
        arrays |= {f"values.{place}": array for place, array in enumerate(block.values)}
        arrays |= {f"states.{place}": array for place, array in enumerate(block.states)}
        metadata = {
            "key": key,
            "fingerprint": self._fingerprint,
            "digest": digest,
            "tokens": f"{span[0]}-{span[1]}",
            "run": self._run,
        }
        if block.state_tokens:
            metadata["state_tokens"] = str(block.state_tokens)
        # Whoever has put something in its place keeps it.
        opened = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | NO_LINK, 0o600)
        try:
            with os.fdopen(opened, "wb") as file:
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
        path, size = self._files[key]
        try:
            if not is_file(path):  # MLX would follow a link, and wait for who writes into a pipe
                raise OSError(errno.EINVAL, "no file")
            if path.lstat().st_size != size:  # else all of it is in memory before it is hashed
                raise OSError(errno.EFBIG, "it has another size than was written")
            # MLX reads when it evaluates: what is wrong with the bytes may show only then.
            loaded: Any = mx.load(str(path), return_metadata=True)
            arrays, metadata = loaded
            states = range(sum(name.startswith("states.") for name in arrays))
            layers = range((len(arrays) - len(states)) // 2)
            block = SealedBlock(
                keys=tuple(arrays[f"keys.{layer}"] for layer in layers),
                values=tuple(arrays[f"values.{layer}"] for layer in layers),
                states=tuple(arrays[f"states.{place}"] for place in states),
                state_tokens=int(metadata.get("state_tokens", 0)),
            )
            mx.eval(block.keys, block.values, block.states)
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
        Remove a block's file, and give its size. One that is gone already is removed too.

        Raises:
            KeyError: there is none.
            OSError: it cannot be removed; it is there still, and counts.
        """
        path, size = self._files[key]
        path.unlink(missing_ok=True)
        self._forget(key)
        return size

    def _set_aside(self, key: str, reason: FileFault) -> RejectReport:
        """Count a file no more, and give it a name under which nobody takes it for a block."""
        path, _ = self._forget(key)
        aside = path.with_name(path.name + ASIDE)
        where = None
        # What cannot be touched, or is no file, stays as it is; it counts no more either way.
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
        Whether a file without a record is this journal's. One that was set aside may be damaged
        where it says whose it is, so that its key has to do.
        """
        match one.kind:
            case "draft":
                return one.run in self._runs
            case "aside":
                return one.key in known
            case "block":
                return self._wrote(one.path, one.fingerprint, one.key)

    def _wrote(self, path: Path, fingerprint: str, key: str) -> bool:
        """Whether a run of this journal wrote a block's file, by what the file says."""
        return is_file(path) and run_of(path, fingerprint, key) in self._runs

    def _count(self, key: str, path: Path, size: int) -> None:
        self._files[key] = (path, size)
        self._bytes += size

    def _forget(self, key: str) -> tuple[Path, int]:
        path, size = self._files.pop(key)
        self._bytes -= size
        return path, size


def _size_of(path: Path) -> int | None:
    """The size of a file; None where the disk does not tell."""
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
