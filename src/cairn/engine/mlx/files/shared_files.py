"""
Block files in a store that all nodes of a fleet see, through obstore.

Rules of this module:

1. A node creates, renames and removes files only below its own name, in folders that its user
   alone may enter. No file is ever written twice: a second write to a name is refused by the store.
2. Files of other nodes are only read. One that is damaged stays, and is not read again by this run.
   Its node sets it aside when it reads it itself.
3. A block is checked before it is returned, as in ``block_files``. The store does not sync a file
   to disk, so one may be damaged after a loss of power; that is found here, too. A file that cannot
   be read now (too many open files, a mount that is stale) is not damaged: it is as if it were not
   there.

A file is at ``<node>/<fingerprint>/<first two of the key>/<key>.safetensors``.
"""

from __future__ import annotations

import contextlib
import errno
import io
import shutil
import stat
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx

from cairn.engine.block_folder import (
    ENDING,
    Named,
    metadata_of,
    named,
    place_of,
    run_in,
)
from cairn.engine.json_text import parsed
from cairn.engine.mlx.blocks import SealedBlock, arrays_of, block_of, digest, metadata_for
from cairn.engine.mlx.files.counted import RESERVE_BYTES, CountedFiles, NoRoom, Rejected
from cairn.engine.reports import RejectReport, ScanReport
from cairn.journal.events import FileFault

HEAD_MOST = 1024 * 1024
"""The most bytes that a file has beside its arrays."""


class SharedFiles(CountedFiles):
    """The block files of one node, and those of other nodes when they are asked for."""

    def __init__(
        self, folder: Path, fingerprint: str, run: str, earlier: Collection[str] = ()
    ) -> None:
        """
        Args:
            folder: of the node, in the folder of the fleet. Its name is that of the node.
            fingerprint: the fingerprint that files are written and read under.
            run: the id of this run of the server.
            earlier: the ids of earlier runs on this journal.
        """
        import obstore  # only fleets with --blocks need the package
        from obstore.store import LocalStore

        super().__init__(folder, fingerprint, run, earlier)
        self._obstore = obstore
        self._fleet = folder.parent
        self._store = LocalStore(self._fleet)
        self._damaged: dict[Path, tuple[int, int]] = {}  # files of others, by inode and time

    def scan(
        self, on_record: Mapping[str, int], known: Collection[str] = (), *, keep_aside: bool = True
    ) -> ScanReport:
        """See ``CountedFiles.scan``. Looks only at the files of this node."""
        with contextlib.suppress(OSError):  # there is none yet, or its file system has no modes
            self._folder.chmod(0o700)
        # What writes left that did not end: ``LocalStore`` writes to NAME#NUMBER first.
        for draft in self._folder.rglob(f"*{ENDING}#*"):
            draft.unlink(missing_ok=True)
        return super().scan(on_record, known, keep_aside=keep_aside)

    def write(
        self, key: str, block: SealedBlock, digest: str, span: tuple[int, int], most_bytes: int
    ) -> int:
        """See ``BlockFiles.write``."""
        path = place_of(self._folder, self._fingerprint, key)
        sink: Any = io.BytesIO()
        metadata = metadata_for(block, key, self._fingerprint, digest, span, self._run)
        try:
            mx.save_safetensors(sink, arrays_of(block), metadata=metadata)
            size: int = sink.tell()
            if self._bytes + size > most_bytes:
                raise NoRoom
            if shutil.disk_usage(self._fleet).free < RESERVE_BYTES + size:
                raise OSError(errno.ENOSPC, "No space left on device")
            sink.seek(0)
            for folder in (self._folder, path.parents[1], path.parent):
                folder.mkdir(mode=0o700, exist_ok=True)  # the store would make it by the umask
            place = self._place(path)
            self._obstore.put(self._store, place, sink, mode="create", use_multipart=False)
            with contextlib.suppress(OSError):
                path.chmod(0o600)
        except (NoRoom, OSError):
            raise
        except self._obstore.exceptions.AlreadyExistsError as error:
            fact = "its path is taken by a file that this journal did not write"
            raise OSError(errno.EEXIST, fact) from error
        except Exception as error:
            # obstore and MLX raise errors of their own.
            first = (str(error).splitlines() or [""])[0]
            raise OSError(errno.EIO, f"{type(error).__name__}: {first}") from error
        self._count(key, path, size)
        return size

    def read(self, key: str, digest_due: str) -> tuple[SealedBlock, str] | None:
        """See ``BlockFiles.read``. None if it cannot be read now."""
        path, size = self._files[key]
        try:
            return self._read(key, path, digest_due, (size, size))
        except OSError:
            return None

    def has_of(self, node: str, key: str) -> bool:
        """Whether a node has a file of a block that this run has not found damaged."""
        path = place_of(self._fleet / node, self._fingerprint, key)
        try:
            return _state_of(path) != self._damaged.get(path)
        except OSError:
            return False

    def read_of(
        self, node: str, key: str, digest_due: str, size: int
    ) -> tuple[SealedBlock, str] | None:
        """
        Read a block of another node, and hash what was read. None if it has no file, or if that
        cannot be read now or was found damaged before.

        Args:
            digest_due: the digest that its KV must have by that node's journal.
            size: of its KV by that journal.

        Raises:
            Rejected: the file is not as it was written. It stays as it is.
        """
        if not self.has_of(node, key):
            return None
        path = place_of(self._fleet / node, self._fingerprint, key)
        try:
            return self._read(key, path, digest_due, (size, size + HEAD_MOST))
        except OSError:
            return None
        except Rejected as rejected:
            if rejected.report.reason == "missing":
                return None
            with contextlib.suppress(OSError):
                self._damaged[path] = _state_of(path)
            raise

    def _read(
        self, key: str, path: Path, digest_due: str, sizes: tuple[int, int]
    ) -> tuple[SealedBlock, str]:
        """
        Raises:
            Rejected: the file is not as it was written.
            OSError: it cannot be read now.
        """
        try:
            found = path.lstat()
        except (FileNotFoundError, NotADirectoryError) as error:
            raise Rejected(self._rejected(key, path, "missing")) from error
        # MLX would follow a link, and block on a pipe; another size could fill the memory.
        if not (stat.S_ISREG(found.st_mode) and sizes[0] <= found.st_size <= sizes[1]):
            raise Rejected(self._rejected(key, path, "unreadable"))
        try:
            # By MLX itself, which takes a fraction of the time that bytes from the store take.
            loaded: Any = mx.load(str(path), return_metadata=True)
            arrays, metadata = loaded
            block = block_of(arrays, metadata)
            described = metadata.get("key"), metadata.get("fingerprint")
            measured = digest(block)
        except Exception as error:
            # MLX raises the same errors if the file is damaged and if this process cannot read it.
            if _is_whole(path, found.st_size):
                raise OSError(errno.EIO, "it cannot be read now") from error
            raise Rejected(self._rejected(key, path, "unreadable")) from error
        if described != (key, self._fingerprint):
            raise Rejected(self._rejected(key, path, "foreign"))
        if measured != digest_due:
            raise Rejected(self._rejected(key, path, "digest"))
        return block, measured

    def _rejected(self, key: str, path: Path, reason: FileFault) -> RejectReport:
        if key in self._files and path == self._files[key][0]:
            return self._set_aside(key, reason)
        return RejectReport(key=key, reason=reason, moved_to=None)

    def _found(self) -> Iterator[tuple[Named | None, int | None]]:
        pages = self._obstore.list(self._store, self._place(self._folder) + "/")
        for place, size in sorted((one["path"], one["size"]) for page in pages for one in page):
            yield named(self._fleet / place), size

    def _wrote(self, path: Path, fingerprint: str, key: str) -> bool:
        with self._as_os_errors():
            head = self._obstore.get_range(
                self._store, self._place(path), start=0, length=HEAD_MOST
            )
        return run_in(metadata_of(bytes(head)), fingerprint, key) in self._runs

    def _remove(self, path: Path) -> None:
        with contextlib.suppress(FileNotFoundError), self._as_os_errors():
            self._obstore.delete(self._store, self._place(path))

    def _rename(self, path: Path, to: Path) -> str:
        with self._as_os_errors():
            self._obstore.rename(self._store, self._place(path), self._place(to))
        return self._place(to)

    def _place(self, path: Path) -> str:
        """A path as the store names it."""
        return path.relative_to(self._fleet).as_posix()

    @contextlib.contextmanager
    def _as_os_errors(self) -> Iterator[None]:
        try:
            yield
        except self._obstore.exceptions.BaseError as error:
            raise OSError(errno.EIO, (str(error).splitlines() or [""])[0]) from error


def _state_of(path: Path) -> tuple[int, int]:
    """What differs if a file is another one by now."""
    found = path.lstat()
    return found.st_ino, found.st_mtime_ns


def _is_whole(path: Path, size: int) -> bool:
    """
    Whether a file is a safetensors file of which nothing is missing, by its head.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        head = file.read(min(length, HEAD_MOST))
    try:
        arrays = parsed(head)
        arrays.pop("__metadata__")
        ends = [int(one["data_offsets"][1]) for one in arrays.values()]
        return size == 8 + length + max(ends)
    except (ValueError, LookupError, TypeError, AttributeError):
        return False
