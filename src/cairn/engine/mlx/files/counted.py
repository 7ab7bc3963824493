"""The block files that a journal knows of, counted, wherever they are."""

from __future__ import annotations

import contextlib
import os
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from cairn.engine.block_folder import ASIDE, Named, is_file, place_of
from cairn.engine.reports import RejectReport, ScanReport
from cairn.journal.events import FileFault

ASIDE_MOST = 16
"""How many rejected files are kept for inspection; any more are removed."""

RESERVE_BYTES = 64 * 1024 * 1024
"""The free space that block files leave on their disk, which may hold the journal too."""


class Rejected(Exception):
    """A file is not as it was written. It was set aside, if it is of this server."""

    def __init__(self, report: RejectReport) -> None:
        super().__init__(f"block {report.key}: {report.reason}")
        self.report = report


class NoRoom(Exception):
    """The file would exceed the budget. No part of it was kept."""


class CountedFiles(ABC):
    """Block files with their sizes when they were found or written."""

    def __init__(
        self, folder: Path, fingerprint: str, run: str, earlier: Collection[str] = ()
    ) -> None:
        """
        Args:
            folder: of this server.
            fingerprint: the fingerprint that files are written and read under.
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
        removed, left, damaged = 0, 0, []
        for one, size in self._found():
            if one is None:
                left += 1
            elif one.kind == "block" and one.key in on_record and one.key not in self._files:
                self._count(one.key, one.path, on_record[one.key])
                if size != on_record[one.key]:
                    damaged.append(one.key)
            elif one.kind == "aside" and one.key in known and keep_aside:
                self._aside += 1
            elif self._is_ours(one, known) and self._removed(one.path):
                removed += 1
            else:
                left += 1
        missing = [key for key in on_record if key not in self._files]
        rejected = [RejectReport(key=key, reason="missing", moved_to=None) for key in missing]
        rejected += [self._set_aside(key, "unreadable") for key in damaged]
        blocks, total = self.measure()
        return ScanReport(
            rejected=tuple(rejected),
            removed_files=removed,
            left_files=left,
            disk_blocks=blocks,
            disk_bytes=total,
        )

    def drop(self, key: str) -> int:
        """
        Remove a block's file and return its size. It is not an error if the file is gone already.

        Raises:
            KeyError: the block has no file.
            OSError: the file cannot be removed. It still exists and counts.
        """
        path, size = self._files[key]
        self._remove(path)
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
                self._remove(aside)
                self._aside = max(0, self._aside - 1)

    @abstractmethod
    def _found(self) -> Iterator[tuple[Named | None, int | None]]:
        """
        The files of this server in the order of their names: what the name says, None if it has not
        the form of Cairn's; and the size, None if it cannot be determined.
        """

    @abstractmethod
    def _wrote(self, path: Path, fingerprint: str, key: str) -> bool:
        """Whether a run of this journal wrote a block's file, by the file's metadata."""

    @abstractmethod
    def _remove(self, path: Path) -> None:
        """
        Remove a file, if it is there.

        Raises:
            OSError: it cannot be removed.
        """

    @abstractmethod
    def _rename(self, path: Path, to: Path) -> str:
        """
        Rename a file, and return the new path in the folder.

        Raises:
            OSError: it cannot be renamed.
        """

    def _set_aside(self, key: str, reason: FileFault) -> RejectReport:
        """Stop counting a file, and rename it so that it is not taken for a block again."""
        path = self._forget(key)
        aside = path.with_name(path.name + ASIDE)
        where = None
        # If it cannot be renamed, or is not a regular file, it stays; it no longer counts anyway.
        with contextlib.suppress(OSError):
            if not is_file(path):
                pass
            elif self._aside < ASIDE_MOST and not os.path.lexists(aside):
                where = self._rename(path, aside)
                self._aside += 1
            else:
                self._remove(path)
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

    def _removed(self, path: Path) -> bool:
        try:
            self._remove(path)
        except OSError:
            return False
        return True

    def _count(self, key: str, path: Path, size: int) -> None:
        self._files[key] = (path, size)
        self._bytes += size

    def _forget(self, key: str) -> Path:
        """Stop counting a file, and return its path."""
        path, size = self._files.pop(key)
        self._bytes -= size
        return path
