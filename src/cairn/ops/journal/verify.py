"""
``ops verify``: the chain and all invariants of a journal or an export, by the server's own code.

From an export something may have been left out, and what is not there cannot be checked:

1. Without private contents, the chain still can: it goes over their digests. The invariants
   cannot, since the fold needs token ids.
2. Of an excerpt (one session's rows), each row's own hash can be checked, its link to the row
   before where that is there, and that no row of the session is missing before it. How many were
   pruned, the excerpt's first line says; that it says so rightly, only the journal could tell.

Neither may look like a pass, so both have an exit code of their own.

Where the first rows were pruned, the base in their place is checked against the row that names it,
and everything else goes on from there. What was in those rows cannot be seen any more; whether the
base says what they did rests on who pruned.

A chain holds without its last rows, and so does one that was made anew from its beginning. Only who
kept a head of earlier can tell, hence ``--head``. Such a head vouches for what is below it, and so
for no base that was made after it.
"""

from __future__ import annotations

import contextlib
import re
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path

import click

from cairn.journal import events as ev
from cairn.journal.base import Base, base_fault, state_of
from cairn.journal.codec import GENESIS, Row, chain_fault, decode
from cairn.journal.errors import DamagedRow, UnknownEvent
from cairn.journal.export import Excerpt
from cairn.journal.invariants import SENTENCES
from cairn.journal.replay import Finding, Replay
from cairn.ops.common.locations import Source, example, file_argument, journal_options
from cairn.ops.common.output import counted

_HASH = re.compile(r"[0-9a-f]{64}")
_COMPARE = "compare head with one that you kept (--head)"
_UNSEEN = f"not seen: rows cut off at the end, or a whole chain written anew; {_COMPARE}"
_UNSEEN_BELOW = (
    "not seen: rows cut off at the end, a whole chain written anew, or what stood in the rows that "
    f"were pruned; {_COMPARE}"
)
_NAMESPACE = uuid.UUID("0d6cf0d6-54b3-5d0c-8a7b-6f4f5b3c9a27")


class Verification:
    """
    All that can be checked of rows. ``feed`` it rows, then read what it came to.

    Attributes:
        left_out: rows whose private contents are not there.
        excerpt: whether it is one session's rows only.
        kept_at: the row whose hash is ``kept``, a head of earlier; None while there was none.
        pruned: the last row that says that the journal was pruned, and its position.
    """

    def __init__(
        self,
        *,
        may_be_excerpt: bool,
        kept: str | None = None,
        base: Base | None = None,
        begins: Excerpt | None = None,
    ) -> None:
        self.rows = 0
        self.base = base
        self.head = GENESIS if base is None else base.head
        self.kept_at = 0 if kept == GENESIS else None
        if base is not None and kept == base.head:
            self.kept_at = base.position
        self.left_out = 0
        self.begins = begins
        self.excerpt = begins is not None
        self.pruned: tuple[int, ev.JournalPruned] | None = None
        self._kept = kept
        # The rows of one session go without a base.
        self._may_be_excerpt = may_be_excerpt and base is None
        self._without_state = base is not None and base.state is None
        self._replay = Replay(base)
        self._before: Row | None = None
        self._chain: list[Finding] = []

    @property
    def whole(self) -> bool:
        """Whether everything could be checked."""
        return not self.left_out and not self.excerpt and not self._without_state

    def feed(self, row: Row) -> None:
        """
        Take in the next row.

        Raises:
            DamagedRow: a row of an unbroken chain cannot be decoded.
            UnknownEvent: the journal was written by a newer Cairn.
        """
        self.rows += 1
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
        if row.kind == ev.JournalPruned.kind:
            self._keep_pruned(row)
        self._before = row
        self.head = row.hash
        if row.hash == self._kept:
            self.kept_at = row.position

    @property
    def vouched(self) -> bool:
        """
        Whether the kept head is in the chain, and the base, if there is one, was made before it.
        """
        if self.kept_at is None:
            return False
        return self.base is None or (self.pruned is not None and self.pruned[0] <= self.kept_at)

    def findings(self) -> tuple[Finding, ...]:
        """What is broken, in the order of rows."""
        if not self.whole and not self.excerpt:
            self._check_base()
        found = (*self._replay.report(whole=self.whole).findings, *self._chain)
        return tuple(sorted(found, key=lambda finding: finding.position))

    def _keep_pruned(self, row: Row) -> None:
        # A changed row may be no event any more; that is found by its hash.
        with contextlib.suppress(DamagedRow, UnknownEvent):
            event = decode(row).event
            if isinstance(event, ev.JournalPruned):
                self.pruned = row.position, event

    def _check_base(self) -> None:
        """Whether the base is the one that the journal names, where no fold was made of it."""
        fault = base_fault(self.base, self.pruned[1] if self.pruned else None)
        if fault is not None:
            at = self.base.position if self.base is not None else 0
            self._chain.append(_news(f"{self.head}/{at}/{fault[0]}", at, *fault))

    def _feed_chain(self, row: Row) -> None:
        fault = chain_fault(row, self.head)
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
            due = f"one above {position}"
            self._broken(row, "rows are not in order", due, str(row.position))
        elif row.seq != seq + 1:
            words = f"rows of {row.stream} are missing before it"
            self._broken(row, words, str(seq + 1), str(row.seq))

    def _reached(self, row: Row) -> tuple[str, int, int, str]:
        """Where an excerpt was before a row: (stream, seq in it, position, hash there)."""
        if (before := self._before) is not None:
            return before.stream, before.seq, before.position, before.hash
        if (begins := self.begins) is not None:
            return begins.stream, begins.seq, begins.base.position, begins.base.head
        return row.stream, 0, 0, GENESIS

    def _broken(self, row: Row, message: str, expected: str, actual: str) -> None:
        name = f"{row.hash}/{row.position}/{message}"
        self._chain.append(_news(name, row.position, message, expected, actual))


def _news(name: str, position: int, message: str, expected: str, actual: str) -> Finding:
    """A break of the chain that nobody recorded. Its bug id follows from ``name``."""
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


def follow_ons(findings: Sequence[Finding]) -> set[str]:
    """
    The bug ids that may come of what was broken before, not of a bug of their own.

    The fold goes on behind the first row that it could not take in, without what that row should
    have brought, so whatever is decided on it afterwards looks wrong as well. The chain does not
    go over what was folded: each break of it stands for itself. What is on record was found by the
    server, whose fold stops at a violation.
    """
    news = [finding for finding in findings if not finding.recorded]
    return {finding.bug_id for finding in news[1:] if finding.invariant != "INV-8"}


def line_of(finding: Finding, *, follows: bool = False) -> str:
    """
    A finding in one line: bug id, invariant, row, session, message, whether it is on record, and
    whether it may follow from what was broken first.
    """
    fields = (
        finding.bug_id,
        finding.invariant,
        f"row {finding.position}",
        f"session {finding.session}" if finding.session else "server",
        " ".join(finding.message.split()),
        "on record" if finding.recorded else "not on record",
    )
    return "\t".join((*fields, "may follow from it") if follows else fields)


def _kept_head(_: click.Context, __: click.Parameter, value: str | None) -> str | None:
    if value is not None and not _HASH.fullmatch(value.lower()):
        raise click.BadParameter("a head is 64 hexadecimal digits, as printed after `head:`")
    return value.lower() if value is not None else None


@click.command(
    epilog=example(
        "ops verify",
        "ops verify --data-dir /srv/cairn",
        "ops verify journal.jsonl",
        "gzip -c journal.jsonl | ops verify -",
    )
)
@file_argument
@journal_options
@click.option(
    "--head",
    "kept",
    metavar="HASH",
    callback=_kept_head,
    help="A head that you kept: it has to be in the chain still.",
)
def verify(data_dir: Path, journal: str | None, file: Path | None, kept: str | None) -> None:
    """
    Check a journal: its hash chain and all invariants.

    Reads the server's journal (also while the server runs), or FILE, an export, which may be
    packed with gzip; - is standard input. Prints a line for each violation, with the bug id that
    `ops replay` takes, and what was checked. Behind the first one that is not on record, others
    may follow from it; they are marked, and counted apart.

    It cannot see rows cut off at the end, nor a whole chain written anew: compare `head` with one
    that you kept, or pass that with --head. Of a journal that was pruned it says so, and checks
    that the base in the place of the rows that are gone is the one that the journal names. Whether
    it says what these rows did, it cannot see: that rests on who pruned.

    \b
    Exit code
      0  all holds
      1  something is broken, or the head that you kept is not in the chain
      2  it cannot be read, or is an export without a row
      3  what is there holds, but contents or rows were left out of the export, or the head
         that you kept is older than the last prune, and may be of a row that was pruned
    """
    source = Source.of(data_dir, journal, file)
    base = source.base()
    begins = source.excerpt()
    checked = Verification(may_be_excerpt=source.is_export, kept=kept, base=base, begins=begins)
    for row in source.rows("verify", base=base):
        try:
            checked.feed(row)
        except DamagedRow as error:
            raise DamagedRow(
                error.position,
                f"{error.fact}. Its hash is right, so it was written so: verify it with the "
                "version of Cairn that wrote it.",
            ) from error
    findings = checked.findings()
    following = follow_ons(findings)
    first = next((finding for finding in findings if not finding.recorded), None)
    for finding in findings:
        click.echo(line_of(finding, follows=finding.bug_id in following))
        if finding is first:
            click.echo(f"first broken: row {finding.position}")
    click.echo(f"rows: {checked.rows}")
    if base is not None:
        click.echo(f"begins: {_begins_words(base, checked)}")
        if gone := _violations(base):
            were = counted(gone, "violation on record was", "violations on record were")
            click.echo(f"{were} pruned")
    if begins is not None:
        click.echo(
            f"begins: behind row {begins.base.position}; {begins.seq} rows of {begins.stream} were "
            f"pruned, with base {begins.base.digest}"
        )
    click.echo(f"head: {checked.head}")
    lost = False
    if kept is not None:
        # An excerpt lacks the rows of others, so it may lack this one without any harm.
        # Where the first rows were pruned, it may be that of one of them.
        lost = checked.kept_at is None and not checked.excerpt and base is None
        click.echo(f"kept head: {_kept_words(checked)}")
    click.echo(_UNSEEN if base is None and begins is None else _UNSEEN_BELOW)
    click.echo(f"checked: {' '.join(SENTENCES) if checked.whole else 'INV-8'}")
    if not checked.whole:
        click.echo(_not_checked(checked))
    behind = f", and {len(following)} that may follow" if following else ""
    click.echo(f"broken: {len(findings) - len(following)}{behind}")
    unsure = kept is not None and not checked.vouched
    sys.exit(1 if findings or lost else 0 if checked.whole and not unsure else 3)


def _begins_words(base: Base, checked: Verification) -> str:
    words = f"at row {base.position + 1}, on a base in the place of the rows before it"
    if checked.pruned is None:
        return words
    return f"{words} (journal_pruned at row {checked.pruned[0]})"


def _violations(base: Base) -> int:
    """How many violations were on record in the rows that a base stands for."""
    try:
        return len(state_of(base).faults)
    except ValueError:
        return 0  # left out, or a finding of its own


def _kept_words(checked: Verification) -> str:
    if checked.kept_at is not None:
        words = f"in the chain, at row {checked.kept_at}"
        if checked.base is None or checked.vouched:
            return words
        return (
            f"{words}; the base was made after that head: what stood below row "
            f"{checked.base.position + 1} rests on who pruned"
        )
    if checked.excerpt:
        return "not in this excerpt, which lacks the rows of others"
    if checked.base is not None:
        return f"not in the chain; it may be of a row up to {checked.base.position}, now pruned"
    return "not in the chain: rows were cut off, or the chain was written anew"


def _not_checked(checked: Verification) -> str:
    words = ["not checked:", *(name for name in SENTENCES if name != "INV-8")]
    if checked.excerpt:
        words.append("and the links to rows of others (these are one session's)")
    if checked.left_out:
        words.append(f"(the contents of {checked.left_out} rows were left out)")
    return " ".join(words)
