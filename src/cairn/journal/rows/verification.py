"""
Verifies the rows of a journal or of an export: the hash chain and all invariants.

What was left out of an export cannot be checked:

1. Without private contents the chain can be checked, because it covers their digests. The
   invariants cannot, because the fold needs token ids.
2. In an excerpt (the rows of one session), each row's own hash can be checked, its link to the row
   before if that is present, and that no row of the session is missing before it. The first line of
   an excerpt says how many rows were pruned; only the journal can confirm the number.

If the first rows were pruned, the base that replaces them is checked against the row that names it.
What the pruned rows contained cannot be checked; whether the base describes them correctly depends
on who pruned the journal.

A chain without its last rows is valid, and so is one that was rewritten from its beginning. Only a
head that was saved earlier can show the difference. It vouches for the rows before it, and not for
a base that was made after it.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

import attrs

from cairn.journal import events as ev
from cairn.journal.errors import DamagedRow, UnknownEvent
from cairn.journal.replay import Finding, Replay
from cairn.journal.rows.base import Base, base_fault, state_of
from cairn.journal.rows.codec import (
    GENESIS,
    Row,
    chain_fault,
    decode,
    misplaced,
    shown,
    type_fault,
)
from cairn.journal.rows.export import Excerpt, read_base, read_excerpt, read_export
from cairn.journal.rows.heads import BEGINNING, Head
from cairn.journal.unread import NotChecked

Standing = Literal["present", "replaced", "missing", "accepted", "pruned", "unseen"]
"""
What became of the row of a saved head: it is in the chain, another row is in its place, the chain
ends before it, an operator accepted one of these two, it may have been pruned, or it may be a row
of another session than the excerpt's.
"""

_NAMESPACE = uuid.UUID("0d6cf0d6-54b3-5d0c-8a7b-6f4f5b3c9a27")


def verify_export(path: Path, *, saved: Iterable[Head] = ()) -> Verification:
    """
    Verify an export.

    Args:
        path: the file, not compressed.
        saved: heads of this journal that were saved earlier, to look for.

    Raises:
        StoreError: the file cannot be read, or a line of it is not a row.
        DamagedRow: a row of an unbroken chain cannot be decoded.
        UnknownEvent: the journal was written by a newer Cairn.
    """
    verification = Verification(
        may_be_excerpt=True,
        saved=saved,
        base=read_base(path),
        begins=read_excerpt(path),
    )
    for row in read_export(path):
        verification.feed(row)
    return verification


class Verification:
    """
    What can be checked of a journal's rows. ``feed`` it all rows in order, then read the result.

    Args:
        may_be_excerpt: whether the rows may be those of one session only, as in an export.
        saved: heads of this journal that were saved earlier, to look for.
        base: replaces the first rows of a pruned journal.
        begins: the first line of an excerpt from a pruned journal.

    Attributes:
        rows: how many were fed.
        head: of the last one.
        left_out: how many rows lack their private contents.
        excerpt: whether these are the rows of one session only.
        pruned: the last ``journal_pruned`` event and its position.
        lost: heads (POSITION:HASH) whose loss an operator accepted, each with the row of that.
    """

    def __init__(
        self,
        *,
        may_be_excerpt: bool,
        saved: Iterable[Head] = (),
        base: Base | None = None,
        begins: Excerpt | None = None,
    ) -> None:
        self.rows = 0
        self.base = base
        self.head = BEGINNING if base is None else Head(base.position, base.head)
        self._saved_positions = {head.position for head in saved}
        self._seen = {self.head.position: self.head.hash}
        self.left_out = 0
        self.begins = begins
        self.excerpt = begins is not None
        self.pruned: tuple[int, ev.JournalPruned] | None = None
        self.lost: dict[str, int] = {}
        if base is not None and base.state is not None:
            with contextlib.suppress(ValueError):  # a damaged one is a violation of its own
                self.lost.update(state_of(base).lost)
        # The rows of one session have no base.
        self._may_be_excerpt = may_be_excerpt and base is None
        self._without_state = base is not None and base.state is None
        self._after = base.position if base is not None else 0
        self._replay = Replay(base)
        self._before: Row | None = None
        self._chain: list[Finding] = []

    @property
    def whole(self) -> bool:
        """Whether everything could be checked."""
        return not self.left_out and not self.excerpt and not self._without_state

    @property
    def not_checked(self) -> NotChecked:
        """The rows that could not be checked, because their texts cannot be read here."""
        return self._replay.report(whole=False).not_checked

    def feed(self, row: Row) -> None:
        """
        Check the next row.

        Raises:
            DamagedRow: a row of an unbroken chain cannot be decoded.
            UnknownEvent: the journal was written by a newer Cairn.
        """
        self.rows += 1
        odd = type_fault(row) or (None if self.excerpt else misplaced(row, self._after))
        if odd is not None:
            if self.whole:
                self._replay.feed(row)
            else:
                self._broken(row, *odd)
            return
        if self._before is None and row.position > 1 and row.stream.startswith("session/"):
            self.excerpt = self.excerpt or self._may_be_excerpt
        if row.private is None and row.private_digest:
            self.left_out += 1
        if self.excerpt:
            self._feed_excerpt(row)
        elif self.left_out or self._without_state:
            self._feed_chain(row)
        else:
            self._replay.feed(row)
        if row.kind in (ev.JournalPruned.kind, ev.LossAccepted.kind):
            self._note(row)
        self._before = row
        self.head = Head(row.position, row.hash)
        if row.position in self._saved_positions:
            self._seen[row.position] = row.hash

    def standing(self, saved: Head) -> Standing:
        """What became of the row of a saved head."""
        found = self._seen.get(saved.position)
        if found == saved.hash:
            return "present"
        if str(saved) in self.lost:
            return "accepted"
        if found is not None:
            return "replaced"
        if self.excerpt:
            return "unseen"
        pruned = self.base is not None and saved.position < self.base.position
        return "pruned" if pruned else "missing"

    def vouched_for(self, saved: Head) -> bool:
        """Whether a saved head is in the chain, and no base was made after it."""
        if self.standing(saved) != "present":
            return False
        return self.base is None or (self.pruned is not None and self.pruned[0] <= saved.position)

    def findings(self) -> tuple[Finding, ...]:
        """All violations, in the order of rows."""
        if not self.whole and not self.excerpt:
            self._check_base()
        found = (*self._replay.report(whole=self.whole).findings, *self._chain)
        return tuple(sorted(found, key=lambda finding: finding.position))

    def note_place(self, place: str, message: str) -> None:
        """Add a violation in a part of the database that is not a row."""
        found = _unrecorded(f"{place}/{message}", 0, message, "what Cairn makes", place)
        self._chain.append(attrs.evolve(found, place=place))

    def _note(self, row: Row) -> None:
        # A changed row may not decode to an event; its hash shows that it was changed.
        with contextlib.suppress(DamagedRow, UnknownEvent):
            event = decode(row).event
            if isinstance(event, ev.JournalPruned):
                self.pruned = row.position, event
            else:
                assert isinstance(event, ev.LossAccepted)
                self.lost.update(dict.fromkeys(event.heads, row.position))

    def _check_base(self) -> None:
        """Check that the base is the one that the journal names, without folding it."""
        fault = base_fault(self.base, self.pruned[1] if self.pruned else None)
        if fault is not None:
            at = self.base.position if self.base is not None else 0
            self._chain.append(_unrecorded(f"{self.head.hash}/{at}/{fault[0]}", at, *fault))

    def _feed_chain(self, row: Row) -> None:
        before = self._before.position if self._before is not None else None
        fault = chain_fault(row, self.head.hash, before)
        if fault is not None:
            self._broken(row, *fault)

    def _feed_excerpt(self, row: Row) -> None:
        stream, seq, position, head = self._reached(row)
        fault = chain_fault(row, head if row.position == position + 1 else row.previous_hash)
        if fault is not None:
            self._broken(row, *fault)
        if row.stream != stream:
            self._broken(row, "rows are missing before it", f"more of {stream}", row.stream)
        elif row.position <= position:
            expected = f"one above {position}"
            self._broken(row, "rows are not in order", expected, str(row.position))
        elif row.seq != seq + 1:
            words = f"rows of {row.stream} are missing before it"
            self._broken(row, words, str(seq + 1), str(row.seq))

    def _reached(self, row: Row) -> tuple[str, int, int, str]:
        """The place of an excerpt before a row: (stream, seq, position, hash)."""
        if (before := self._before) is not None:
            return before.stream, before.seq, before.position, before.hash
        if (begins := self.begins) is not None:
            return begins.stream, begins.seq, begins.base.position, begins.base.head
        return row.stream, 0, 0, GENESIS

    def _broken(self, row: Row, message: str, expected: str, actual: str) -> None:
        at = row.position if type(row.position) is int else 0
        name = f"{shown(row.hash)}/{at}/{message}"
        self._chain.append(_unrecorded(name, at, message, expected, actual))


def _unrecorded(name: str, position: int, message: str, expected: str, actual: str) -> Finding:
    """A break of the chain that is not on record. Its bug id is derived from ``name``."""
    return Finding(
        bug_id=str(uuid.uuid5(_NAMESPACE, name)),
        invariant="INV-8",
        position=position,
        session=None,
        message=message,
        expected=expected,
        actual=actual,
        recorded=False,
        reproduced=True,
    )


def consequences(findings: Sequence[Finding]) -> set[str]:
    """
    The bug ids of violations that may be consequences of an earlier one.

    The fold skips the first row that it cannot apply and goes on without that row's effects, so
    later decisions may look wrong too. Breaks of the chain are independent of the fold. Violations
    on record were found by the server, whose fold stops at the first one.
    """
    unrecorded = [finding for finding in findings if not finding.recorded]
    return {finding.bug_id for finding in unrecorded[1:] if finding.invariant != "INV-8"}
