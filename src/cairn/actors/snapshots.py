"""
Stores snapshots of the fold in a file of the data directory, so that the next start reads only the
rows after it. See ``cairn.journal.rows.snapshots``.

1. A snapshot is used if the file is as it was written, its owner alone can write it, this code
   wrote it, the journal has the row after which it was made, unchanged, and its keys are no older
   copy. Otherwise the log says why not, and the whole journal is folded.
2. One is written when the server stops, and while it runs every so many rows: so few that a start
   after a crash is quick, and so many that snapshots take a small part of what is written.
3. Trio's thread takes what is to be written, which copies no more than the places of stored turns.
   A worker thread encodes and writes it; one snapshot at a time.
4. What cannot be written is logged, and changes nothing else.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

import attrs
import structlog
import trio

import cairn
import cairn.journal
from cairn.actors.models.self_tests import code_hash
from cairn.journal.events import JournalPruned, Recorded, SessionForgotten
from cairn.journal.rows.snapshots import Folds, Snapshot, pieces, snapshot_of, unusable
from cairn.journal.rows.store import Store
from cairn.journal.state import State

log = structlog.get_logger("cairn")

ROWS_MIN = 10_000
"""The fewest rows between two snapshots of a running server."""

BYTES_A_ROW = 1024
"""The most bytes of snapshots for each row, on average, while a server runs."""

_DRAFT = ".new"
_FORMAT = 1
_LENGTH_BYTES = 4
_COUNT_BYTES = 8
_DIGEST_BYTES = 32


class _Unusable(Exception):
    """A file is no snapshot of this journal. The message says why."""


@attrs.frozen
class SnapshotFile:
    """
    The file with the last snapshot. Its folder exists.

    Attributes:
        key_counts: how many of the journal's keys were ever stored, and removed; None if it has
            none.
    """

    path: Path
    key_counts: Callable[[], tuple[int, int]] | None = None

    def read(self, store: Store, check: Callable[[], None] = lambda: None) -> Snapshot | None:
        """
        The snapshot, if there is one that may be used for this journal. One that may not is
        removed, because it may have texts that were pruned, and so is what a writer that was
        killed has left.

        Args:
            check: called again and again; what it raises ends the reading.
        """
        _remove(self._drafts())
        try:
            content = _content(self.path, self._counts())
            found = snapshot_of(_pieces_in(content, check))
            place = found.place
            base = store.base()
            digest = base.digest if base is not None else None
            fault = unusable(place, digest, store.row(place.position))
            if fault is not None:
                raise _Unusable(fault)
        except FileNotFoundError:
            return None
        except OSError as error:
            fact = error.strerror or str(error)
        except (_Unusable, ValueError) as error:
            fact = str(error)
        else:
            return found
        log.warning(
            "the snapshot is not used, so the whole journal is read",
            file=str(self.path),
            fact=fact,
        )
        self.remove()
        return None

    def write(self, snapshot: Snapshot) -> int | None:
        """
        Replace the file. Other processes see all of the new one, or the old one.

        Returns:
            Its size in bytes; None if it could not be written, which is logged.
        """
        try:
            return _write(self.path, snapshot, self._counts())
        except OSError as error:
            log.warning(
                "no snapshot is stored, so the next start reads more of the journal",
                file=str(self.path),
                fact=error.strerror or str(error),
            )
            return None

    def _counts(self) -> tuple[int, int]:
        return self.key_counts() if self.key_counts is not None else (0, 0)

    def remove(self) -> str | None:
        """
        Remove it, and what was left when writing one was cut short. Why it is left, if it cannot be
        removed; None if nothing is.
        """
        return _remove([self.path, *self._drafts()])

    def _drafts(self) -> list[Path]:
        return list(self.path.parent.glob(f".{self.path.name}.*{_DRAFT}"))


class Snapshots:
    """
    Writes the snapshots of a running server. ``see`` gets each committed event after ``folds`` has
    seen it.
    """

    def __init__(
        self,
        file: SnapshotFile,
        folds: Folds,
        now: Callable[[], tuple[State, str]],
        last: int,
    ) -> None:
        """
        Args:
            now: the fold of all that was appended, committed or not, and the hash of its last row.
            last: the position of the snapshot from which the server started; 0 if there was none.
        """
        self._file = file
        self._folds = folds
        self._now = now
        self._last = last
        self._forgot_at = 0
        self._rows = ROWS_MIN
        self._awaited: tuple[State, str] | None = None
        self._wake = trio.Event()
        self._taken: Snapshot | None = None
        self._one = trio.Lock()
        self._running = trio.CancelScope()

    def see(self, recorded: Recorded) -> None:
        """
        Take a snapshot if one is due. Rows that are not committed yet are awaited. After a prune,
        or when a session was forgotten, one is due at once, and the one before, which has texts
        that are to go, goes.
        """
        if isinstance(recorded.event, SessionForgotten):
            self._forgot_at = recorded.position
        if isinstance(recorded.event, JournalPruned | SessionForgotten):
            self._file.remove()
            self._last = -self._rows
            self._awaited = None
        if self._taken is not None or self._one.locked():
            return
        if self._awaited is None and recorded.position - self._last >= self._rows:
            self._awaited = self._now()
        if self._awaited is not None and self._awaited[0].position == recorded.position:
            self._taken = self._folds.snapshot(*self._awaited)
            self._awaited = None
            self._wake.set()

    async def run(self) -> None:
        """Write what was taken, until ``close``."""
        with self._running:
            while True:
                await self._wake.wait()
                self._wake = trio.Event()
                assert self._taken is not None
                await self._write(self._taken)

    def close(self) -> None:
        """End ``run``, after what it writes now."""
        self._running.cancel()

    async def write_last(self) -> None:
        """Write a snapshot of the end. By then everything that was appended is committed."""
        await self._write(self._folds.snapshot(*self._now()))

    async def _write(self, snapshot: Snapshot) -> None:
        # A thread that writes is awaited, also by who is cancelled.
        async with self._one:
            size = await trio.to_thread.run_sync(partial(self._file.write, snapshot))
            self._taken = None
            self._last = snapshot.place.position
            pruned = self._folds.pruned
            is_old = pruned is not None and snapshot.place.base_digest != pruned[1].base_digest
            if is_old or snapshot.place.position < self._forgot_at:
                # Rows were pruned, or a session forgotten, while it was written: it has texts.
                self._file.remove()
                self._last = -self._rows
            if size is not None:
                self._rows = max(ROWS_MIN, size // BYTES_A_ROW)


# --- the file ------------------------------------------------------------------------------------
#
# A line of JSON with what wrote it, how many keys the journal had got and lost, the pieces, each
# with its length before it, and the SHA-256 of all that.


def _remove(paths: Iterable[Path]) -> str | None:
    """Remove files. Why one of them is left; None if none is."""
    left = None
    for path in paths:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            left = f"{path}: {error.strerror}"
    return left


def _header() -> bytes:
    code = code_hash(Path(cairn.journal.__path__[0]))
    written_by = {"format": _FORMAT, "cairn": cairn.__version__, "code": code}
    return f"cairn snapshot {json.dumps(written_by)}\n".encode()


def _content(path: Path, counts: tuple[int, int]) -> memoryview:
    """
    The pieces in a file.

    Args:
        counts: of the journal's keys now.

    Raises:
        OSError: it cannot be read.
        _Unusable: others may have written it, it is damaged, other code wrote it, or keys that it
            was written with are not here.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(handle, "rb") as file:
        of = os.fstat(handle)
        if not stat.S_ISREG(of.st_mode):
            raise _Unusable("it is not a file")
        if of.st_uid != os.geteuid() or of.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise _Unusable("other users can write it")
        content = memoryview(file.read())
    signed, digest = content[:-_DIGEST_BYTES], content[-_DIGEST_BYTES:]
    if hashlib.sha256(signed).digest() != digest:
        raise _Unusable("it is damaged")
    header = _header()
    if bytes(signed[: len(header)]) != header:
        raise _Unusable("another version of Cairn wrote it")
    begins = len(header) + 2 * _COUNT_BYTES
    before = (
        int.from_bytes(signed[at : at + _COUNT_BYTES], "big")
        for at in (len(header), len(header) + _COUNT_BYTES)
    )
    if any(now < then for now, then in zip(counts, before, strict=True)):
        raise _Unusable("the keys of the journal are older than it")
    return signed[begins:]


def _pieces_in(content: memoryview, check: Callable[[], None]) -> Iterator[bytes]:
    at = 0
    while at < len(content):
        check()
        begins = at + _LENGTH_BYTES
        at = begins + int.from_bytes(content[at:begins], "big")
        yield bytes(content[begins:at])


def _write(path: Path, snapshot: Snapshot, counts: tuple[int, int]) -> int:
    """Write a file that its owner alone can read, and put it in place."""
    digest = hashlib.sha256()
    handle, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=_DRAFT)
    try:
        with os.fdopen(handle, "wb") as file:

            def put(part: bytes) -> None:
                digest.update(part)
                file.write(part)

            put(_header() + b"".join(one.to_bytes(_COUNT_BYTES, "big") for one in counts))
            for piece in pieces(snapshot):
                put(len(piece).to_bytes(_LENGTH_BYTES, "big") + piece)
            file.write(digest.digest())
            size = file.tell()
        Path(draft).replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(draft).unlink()
        raise
    return size
