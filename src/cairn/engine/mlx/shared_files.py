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

from cairn.engine.block_folder import ASIDE, ENDING, metadata_of, place_of
from cairn.engine.json_text import parsed
from cairn.engine.mlx.block_files import ASIDE_MOST, RESERVE_BYTES, NoRoom, Rejected
from cairn.engine.mlx.blocks import SealedBlock, arrays_of, block_of, digest, metadata_for
from cairn.engine.reports import RejectReport, ScanReport
from cairn.journal.events import FileFault

HEAD_MOST = 1024 * 1024
"""The most bytes that a file has beside its arrays."""


class SharedFiles:
    """
    The block files of one node, with their sizes when they were found or written, and those of
    other nodes when they are asked for. Has the methods of ``BlockFiles``.
    """

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

        self._obstore = obstore
        self._fleet = folder.parent
        self._store = LocalStore(self._fleet)
        self._node = folder.name
        self._fingerprint = fingerprint
        self._run = run
        self._runs = {run, *earlier}
        self._files: dict[str, tuple[str, int]] = {}
        self._bytes = 0
        self._damaged: dict[str, tuple[int, int]] = {}  # files of others: path to inode and time

    def __contains__(self, key: str) -> bool:
        return key in self._files

    def measure(self) -> tuple[int, int]:
        """(files, their bytes), by their sizes when they were found or written."""
        return len(self._files), self._bytes

    def scan(
        self, on_record: Mapping[str, int], known: Collection[str] = (), *, keep_aside: bool = True
    ) -> ScanReport:
        """See ``BlockFiles.scan``. Looks only at the files of this node."""
        with contextlib.suppress(OSError):  # there is none yet, or its file system has no modes
            (self._fleet / self._node).chmod(0o700)
        self._remove_drafts()
        aside = removed = left = 0
        damaged: list[str] = []
        for path, size in self._listed():
            *_, name = path.split("/")
            key = name.removesuffix(ASIDE).removesuffix(ENDING)
            is_block = name == f"{key}{ENDING}"
            if is_block and key in on_record and key not in self._files:
                self._count(key, path, on_record[key])
                if size != on_record[key]:
                    damaged.append(key)
            elif name.endswith(ASIDE) and key in known and keep_aside and aside < ASIDE_MOST:
                aside += 1
            elif (key in known if name.endswith(ASIDE) else self._wrote(path)) and self._removed(
                path
            ):
                removed += 1
            else:
                left += 1
        missing = [key for key in on_record if key not in self._files]
        rejected = [RejectReport(key=key, reason="missing", moved_to=None) for key in missing]
        rejected += [self._set_aside(*self._forget(key), "unreadable") for key in damaged]
        blocks, total = self.measure()
        return ScanReport(
            rejected=tuple(rejected),
            removed_files=removed,
            left_files=left,
            disk_blocks=blocks,
            disk_bytes=total,
        )

    def write(
        self, key: str, block: SealedBlock, digest: str, span: tuple[int, int], most_bytes: int
    ) -> int:
        """See ``BlockFiles.write``."""
        path = self._path(self._node, key)
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
            where = self._fleet / path
            for folder in (where.parents[2], where.parents[1], where.parent):
                folder.mkdir(mode=0o700, exist_ok=True)  # the store would make it by the umask
            self._obstore.put(self._store, path, sink, mode="create", use_multipart=False)
            with contextlib.suppress(OSError):
                where.chmod(0o600)
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
        path = self._path(node, key)
        try:
            return self._state_of(path) != self._damaged.get(path)
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
        path = self._path(node, key)
        try:
            return self._read(key, path, digest_due, (size, size + HEAD_MOST))
        except OSError:
            return None
        except Rejected as rejected:
            if rejected.report.reason == "missing":
                return None
            with contextlib.suppress(OSError):
                self._damaged[path] = self._state_of(path)
            raise

    def drop(self, key: str) -> int:
        """See ``BlockFiles.drop``."""
        path, size = self._files[key]
        self._delete(path)
        self._forget(key)
        return size

    def drop_aside(self, key: str) -> None:
        """See ``BlockFiles.drop_aside``. Removes those of this node."""
        home = self._fleet / self._node
        for above in home.iterdir() if home.is_dir() else ():
            path = place_of(home, above.name, key)
            self._delete(f"{path.relative_to(self._fleet).as_posix()}{ASIDE}")

    def _read(
        self, key: str, path: str, digest_due: str, sizes: tuple[int, int]
    ) -> tuple[SealedBlock, str]:
        """
        Raises:
            Rejected: the file is not as it was written.
            OSError: it cannot be read now.
        """
        where = self._fleet / path
        try:
            found = where.lstat()
        except (FileNotFoundError, NotADirectoryError) as error:
            raise Rejected(self._rejected(key, path, "missing")) from error
        # MLX would follow a link, and block on a pipe; another size could fill the memory.
        if not (stat.S_ISREG(found.st_mode) and sizes[0] <= found.st_size <= sizes[1]):
            raise Rejected(self._rejected(key, path, "unreadable"))
        try:
            # By MLX itself, which takes a fraction of the time that bytes from the store take.
            loaded: Any = mx.load(str(where), return_metadata=True)
            arrays, metadata = loaded
            block = block_of(arrays, metadata)
            described = metadata.get("key"), metadata.get("fingerprint")
            measured = digest(block)
        except Exception as error:
            # MLX raises the same errors if the file is damaged and if this process cannot read it.
            if _is_whole(where, found.st_size):
                raise OSError(errno.EIO, "it cannot be read now") from error
            raise Rejected(self._rejected(key, path, "unreadable")) from error
        if described != (key, self._fingerprint):
            raise Rejected(self._rejected(key, path, "foreign"))
        if measured != digest_due:
            raise Rejected(self._rejected(key, path, "digest"))
        return block, measured

    def _rejected(self, key: str, path: str, reason: FileFault) -> RejectReport:
        if path != self._files.get(key, ("",))[0]:
            return RejectReport(key=key, reason=reason, moved_to=None)
        return self._set_aside(*self._forget(key), reason)

    def _set_aside(self, path: str, key: str, reason: FileFault) -> RejectReport:
        """Rename a file so that it is not taken for a block again, if it is there."""
        aside = f"{path}{ASIDE}"
        try:
            self._obstore.rename(self._store, path, aside)
        except (OSError, self._obstore.exceptions.BaseError):
            return RejectReport(key=key, reason=reason, moved_to=None)
        return RejectReport(key=key, reason=reason, moved_to=aside)

    def _listed(self) -> Iterator[tuple[str, int]]:
        """The files of this node, in the order of their names."""
        pages = self._obstore.list(self._store, f"{self._node}/")
        found = [(one["path"], one["size"]) for page in pages for one in page]
        return iter(sorted(found))

    def _remove_drafts(self) -> None:
        """Remove what writes left that did not end: ``LocalStore`` writes to NAME#NUMBER first."""
        for draft in (self._fleet / self._node).rglob(f"*{ENDING}#*"):
            draft.unlink(missing_ok=True)

    def _wrote(self, path: str) -> bool:
        """Whether a run of this journal wrote a file, by its metadata."""
        try:
            head = self._obstore.get_range(self._store, path, start=0, length=HEAD_MOST)
        except (OSError, self._obstore.exceptions.BaseError):
            return False
        return metadata_of(bytes(head)).get("run") in self._runs

    def _removed(self, path: str) -> bool:
        try:
            self._delete(path)
        except OSError:
            return False
        return True

    def _delete(self, path: str) -> None:
        """
        Remove a file, if it is there.

        Raises:
            OSError: it cannot be removed.
        """
        try:
            self._obstore.delete(self._store, path)
        except FileNotFoundError:
            pass
        except self._obstore.exceptions.BaseError as error:
            raise OSError(errno.EIO, (str(error).splitlines() or [""])[0]) from error

    def _path(self, node: str, key: str) -> str:
        where = place_of(self._fleet / node, self._fingerprint, key)
        return where.relative_to(self._fleet).as_posix()

    def _state_of(self, path: str) -> tuple[int, int]:
        """What differs if a file is another one by now."""
        found = (self._fleet / path).lstat()
        return found.st_ino, found.st_mtime_ns

    def _count(self, key: str, path: str, size: int) -> None:
        self._files[key] = (path, size)
        self._bytes += size

    def _forget(self, key: str) -> tuple[str, str]:
        """Stop counting a file. Its path and its key."""
        path, size = self._files.pop(key)
        self._bytes -= size
        return path, key


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
