"""
What ``ops verify`` compares a chain with: a head and checkpoints that the operator saved, and what
the data directory or the export has beside the rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import attrs
import click

from cairn.journal.errors import StoreError
from cairn.journal.rows.heads import Head
from cairn.journal.rows.signed_notes import Note, PublicKey, read_notes
from cairn.journal.rows.verification import Verification
from cairn.ops.common.heads import HeadFiles, notes_of
from cairn.ops.common.locations import Source
from cairn.ops.common.output import counted


@attrs.frozen
class KnownHead:
    """
    A head with where it was found.

    Attributes:
        is_saved: whether the operator saved it elsewhere, so that it did not change with the
            journal.
        is_signed: whether it is one of several checkpoints, which are counted.
    """

    head: Head
    name: str
    is_saved: bool
    is_signed: bool = False


@attrs.define
class KnownHeads:
    """
    All heads to look for.

    Attributes:
        faults: what is wrong with them, in sentences.
        notices: what else is to be said about them.
        public_key: the key that the checkpoints were compared with.
        tag: of the journal among those of its data directory; None if that is not known.
    """

    found: list[KnownHead] = attrs.field(factory=list)
    faults: list[str] = attrs.field(factory=list)
    public_key: PublicKey | None = None
    tag: str | None = None
    notices: list[str] = attrs.field(factory=list)

    @property
    def heads(self) -> list[Head]:
        """Without where they were found."""
        return [one.head for one in self.found]

    @property
    def is_little(self) -> bool:
        """Whether the operator saved none of them."""
        return not any(one.is_saved for one in self.found)

    def add_notes(self, notes: Iterable[Note], name: str, *, is_saved: bool) -> None:
        """
        Add what the key has signed. A note of another key is a fault: what the operator names has
        to be signed by the key that it is compared with. One of another journal is left out.
        """
        assert self.public_key is not None
        of_others = 0
        for note in notes:
            signed = note.signed_by(self.public_key)
            where = f"{name}, line {note.line}"
            if signed is None:
                self.faults.append(f"{where}: not signed by {self.public_key.name}")
            elif not signed:
                self.faults.append(f"{where}: the signature does not fit")
            elif self.tag is not None and note.origin != self.public_key.origin_of(self.tag):
                of_others += 1
            else:
                self.found.append(KnownHead(note.head, name, is_saved, is_signed=True))
        if of_others:
            count = counted(of_others, "checkpoint")
            self.notices.append(f"{name}: {count} of other journals left out")

    def report(self, checked: Verification) -> int:
        """Print what became of each. Returns how many are faulty, or not in the chain."""
        wrong = len(self.faults)
        for notice in self.notices:
            click.echo(notice)
        for fault in self.faults:
            click.echo(f"checkpoint: {fault}")
        if self.public_key is not None:
            click.echo(f"public key: {self.public_key}")
        for name in dict.fromkeys(one.name for one in self.found if one.is_signed):
            of_name = [one.head for one in self.found if one.name == name]
            bad = [head for head in of_name if checked.standing(head) in ("replaced", "missing")]
            given_up = [head for head in of_name if checked.standing(head) == "accepted"]
            for head in (*bad, *given_up):
                click.echo(f"{name}: row {head.position}: {_words(checked, head)}")
            wrong += len(bad)
            there = [head for head in of_name if head not in given_up]
            if there and not bad:
                last = max(there, key=lambda head: head.position)
                count = counted(len(there), "checkpoint")
                click.echo(
                    f"{name}: {count}, the last of row {last.position}: {_words(checked, last)}"
                )
        for one in self.found:
            if not one.is_signed:
                click.echo(f"{one.name}: {_words(checked, one.head)}")
                wrong += checked.standing(one.head) in ("replaced", "missing")
        return wrong

    def last_present(self, checked: Verification) -> tuple[int | None, bool]:
        """
        The last row that is in the chain and was known, and whether the operator saved its head.
        """
        present = [one for one in self.found if checked.standing(one.head) == "present"]
        saved = [one for one in present if one.is_saved]
        rows = [one.head.position for one in saved or present]
        return max(rows, default=None), bool(saved)

    def is_unsure(self, checked: Verification) -> bool:
        """
        Whether the operator saved something, and the last of it does not vouch for the rows before.
        What was accepted as lost counts only if there is nothing else.
        """
        saved = [one.head for one in self.found if one.is_saved]
        there = [head for head in saved if checked.standing(head) != "accepted"]
        last = max(there or saved, key=lambda head: head.position, default=None)
        return last is not None and not checked.vouched_for(last)


def known_heads(
    source: Source,
    files: HeadFiles | None,
    saved: Head | None,
    checkpoint: str | None,
    public_key: PublicKey | None,
) -> KnownHeads:
    """
    Collect the heads.

    Args:
        files: of the journal; None for an export.
        saved: the head that the operator saved.
        checkpoint: the path of checkpoints that the operator saved, or the text of one.
        public_key: of the key that signed them.

    Raises:
        StoreError: they cannot be read.
        click.UsageError: no key is known.
    """
    known = KnownHeads(tag=files.tag if files is not None else None)
    if saved is not None:
        known.found.append(KnownHead(saved, "saved head", is_saved=True))
    end = source.signed_end()
    if files is not None:
        known.public_key = public_key or files.public_key()
    elif end is not None:
        known.public_key = public_key or _key_of(end.public_key, source)
    else:
        known.public_key = public_key
    if checkpoint is not None:
        if known.public_key is None:
            raise click.UsageError(
                "No key is known to compare the checkpoints with. Name the public half of the "
                "journal's with --public-key."
            )
        known.add_notes(_given(checkpoint), "saved checkpoints", is_saved=True)
        if not known.faults and not any(one.is_signed for one in known.found):
            known.faults.append("saved checkpoints: none is of this journal")
    if files is not None:
        try:
            recorded = files.recorded_head()
        except StoreError as error:
            known.faults.append(str(error))
        else:
            if recorded is not None:
                known.found.append(KnownHead(recorded, "head record", is_saved=False))
        if known.public_key is not None and public_key is None:
            try:
                known.add_notes(files.notes(), "checkpoints beside the journal", is_saved=False)
            except StoreError as error:
                known.faults.append(str(error))
    if end is not None and end.note:
        try:
            notes = list(read_notes(end.note))
        except ValueError as error:
            raise StoreError(f"{source.name}: its last line is damaged: {error}.") from error
        known.add_notes(notes, "checkpoint of the export", is_saved=False)
    return known


def _key_of(text: str, source: Source) -> PublicKey:
    try:
        return PublicKey.parse(text)
    except ValueError as error:
        raise StoreError(f"{source.name}: its last line is damaged: {error}.") from error


def _given(checkpoint: str) -> list[Note]:
    if "\n" not in checkpoint:
        return notes_of(Path(checkpoint))
    try:
        return list(read_notes(checkpoint.strip("\n") + "\n"))
    except ValueError as error:
        raise StoreError(f"The checkpoint cannot be read: {error}.") from error


def _words(checked: Verification, head: Head) -> str:
    match checked.standing(head):
        case "present":
            words = f"in the chain, at row {head.position}"
            if checked.base is None or checked.vouched_for(head):
                return words
            return (
                f"{words}; the base was made after that head, which does not vouch for the rows "
                f"before row {checked.base.position + 1}"
            )
        case "unseen":
            return "not in this excerpt, which lacks the rows of other sessions"
        case "pruned":
            return f"not in the chain: row {head.position} was pruned"
        case "missing":
            return f"not in the chain: rows were removed from the end, row {head.position} too"
        case "accepted":
            return (
                f"lost; the operator accepted that (loss_accepted, row {checked.lost[str(head)]})"
            )
        case "replaced":
            return f"not in the chain: row {head.position} has another hash, so it was rewritten"
