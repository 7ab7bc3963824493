"""
Keeps the head of a journal outside of it, while the journal is written.

The head record is overwritten after each commit, so a start that finds less than it says knows that
rows were lost. Checkpoints are signed at the start, at the stop and every so many rows. All methods
but the constructor are for the thread that writes.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import structlog

from cairn.journal.events import LossAccepted
from cairn.journal.rows.heads import Head
from cairn.journal.rows.signed_notes import Signer

log = structlog.get_logger("cairn")

CHECKPOINT_ROWS = 10_000
"""How many rows may follow a checkpoint before the next one."""

_TAIL_BYTES = 64 * 1024  # more than a note has, with the signatures of witnesses
_SIGNATURE = "\n\N{EM DASH} ".encode()

Written = TypeVar("Written")

_LINE = "cairn head 1 {position:>19} {hash}\n"


def record_of(text: str) -> Head:
    """
    The head of a head record.

    Raises:
        ValueError: it is damaged.
    """
    words = text.split()
    head = Head.parse(":".join(words[3:]))
    if text != _LINE.format(position=head.position, hash=head.hash):
        raise ValueError("the head record is damaged")
    return head


class HeadKeeper:
    """
    The head record and the checkpoints of one journal.

    Args:
        record: the file of the head record.
        checkpoints: the files that checkpoints are appended to.
        accepted: the loss of rows that the operator has accepted; None if there is none.

    Raises:
        OSError: a file cannot be written.
    """

    def __init__(
        self,
        record: Path,
        checkpoints: Sequence[Path],
        signer: Signer,
        accepted: LossAccepted | None = None,
    ) -> None:
        self.accepted = accepted
        self.signed: Head | None = None
        self._signer = signer
        self._last: Head | None = None
        self._tried = 0
        self._failing: set[object] = set()
        with contextlib.ExitStack() as opened:
            self._record = _opened(record, os.O_RDWR)
            opened.callback(os.close, self._record)
            self._files = []
            for path in checkpoints:
                file = _opened(path, os.O_RDWR | os.O_APPEND)
                opened.callback(os.close, file)
                _cut_torn(file, path)
                self._files.append(file)
            self._opened = opened.pop_all()

    def committed(self, head: Head) -> None:
        """Record the head of the journal after a commit. The first one of a run is signed."""
        last, self._last = self._last, head
        self._try("record", self._write_record, head)
        if last is None:
            self._sign(head, "start")
        elif head.position - self._tried >= CHECKPOINT_ROWS:
            self._sign(head, "rows")

    def end(self) -> None:
        """Sign the last head of a run."""
        if self._last is not None:
            self._sign(self._last, "stop")

    def close(self) -> None:
        """Close the files."""
        self._opened.close()

    def _sign(self, head: Head, when: str) -> None:
        log.info("journal head", at=when, position=head.position, head=str(head))
        self._tried = head.position
        if head == self.signed:
            return
        note = self._signer.note(head)
        written = [self._try(file, partial(_append_note, file), note) for file in self._files]
        if any(written):
            self.signed = head

    def _write_record(self, head: Head) -> None:
        # Not synced: it survives the process, and after a loss of power it is older than the
        # journal, which says nothing false.
        line = _LINE.format(position=head.position, hash=head.hash)
        os.pwrite(self._record, line.encode(), 0)

    def _try(self, where: object, write: Callable[[Written], None], what: Written) -> bool:
        """
        Write; report a failure once for each place. The journal itself is written, so the server
        goes on.
        """
        try:
            write(what)
        except OSError as error:
            if where not in self._failing:
                log.error("the journal's head cannot be recorded", fact=error.strerror)
            self._failing.add(where)
            return False
        if where in self._failing:
            log.warning("the journal's head can be recorded again")
            self._failing.remove(where)
        return True


def _append_note(file: int, note: str) -> None:
    size = os.fstat(file).st_size
    try:
        if os.write(file, note.encode()) < len(note.encode()):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.fsync(file)
    except OSError:
        # Half a note would make those after it unreadable.
        with contextlib.suppress(OSError):
            os.ftruncate(file, size)
        raise


def _opened(path: Path, how: int) -> int:
    return os.open(path, how | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _cut_torn(file: int, path: Path) -> None:
    """
    Remove a last note that was not written to its end, as a loss of power leaves it: it would make
    the file unreadable.
    """
    size = os.fstat(file).st_size
    begin = max(0, size - _TAIL_BYTES)
    tail = os.pread(file, _TAIL_BYTES, begin)
    lines = tail[: tail.rfind(b"\n") + 1]
    signature = lines.rfind(_SIGNATURE)
    end = lines.find(b"\n", signature + 1) + 1 if signature >= 0 else 0
    if begin + end < size and (end or begin == 0):
        log.warning("the last checkpoint was not written to its end", file=path.name)
        os.ftruncate(file, begin + end)
