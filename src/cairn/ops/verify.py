"""
``ops verify``: the chain and all invariants of a journal or an export, by the server's own code.

From an export something may have been left out, and what is not there cannot be checked:

1. Without private contents, the chain still can: it goes over their digests. The invariants
   cannot, since the fold needs token ids.
2. Of an excerpt (one session's rows), each row's own hash can be checked, its link to the row
   before where that is there, and that no row of the session is missing in between.

Neither may look like a pass, so both have an exit code of their own.

A chain holds without its last rows, and so does one that was made anew from its beginning. Only who
kept a head of earlier can tell, hence ``--head``.
"""

from __future__ import annotations

import re
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path

import click

from cairn.journal.codec import GENESIS, Row, chain_fault
from cairn.journal.errors import DamagedRow
from cairn.journal.invariants import SENTENCES
from cairn.journal.replay import Finding, Replay
from cairn.ops.where import Source, example, file_argument, journal_options

_HASH = re.compile(r"[0-9a-f]{64}")
_UNSEEN = (
    "not seen: rows cut off at the end, or a whole chain written anew; compare head with one that "
    "you kept (--head)"
)
_NAMESPACE = uuid.UUID("0d6cf0d6-54b3-5d0c-8a7b-6f4f5b3c9a27")


class Verification:
    """
    All that can be checked of rows. ``feed`` it rows, then read what it came to.

    Attributes:
        left_out: rows whose private contents are not there.
        excerpt: whether it is one session's rows only.
        kept_at: the row whose hash is ``kept``, a head of earlier; None while there was none.
    """

    def __init__(self, *, may_be_excerpt: bool, kept: str | None = None) -> None:
        self.rows = 0
        self.head = GENESIS
        self.kept_at = 0 if kept == GENESIS else None
        self.left_out = 0
        self.excerpt = False
        self._kept = kept
        self._may_be_excerpt = may_be_excerpt
        self._replay = Replay()
        self._before: Row | None = None
        self._chain: list[Finding] = []

    @property
    def whole(self) -> bool:
        """
        Whether everything could be checked.
        """
        return not self.left_out and not self.excerpt

    def feed(self, row: Row) -> None:
        """
        Take in the next row.

        Raises:
            DamagedRow: a row of an unbroken chain cannot be decoded.
            UnknownEvent: the journal was written by a newer Cairn.
        """
        self.rows += 1
        if self._before is None and row.position > 1 and row.stream.startswith("session/"):
            self.excerpt = self._may_be_excerpt
        if row.private is None and row.private_digest:
            self.left_out += 1
        if self.excerpt:
            self._feed_excerpt(row)
        elif self.left_out:
            self._feed_chain(row)
        else:
            self._replay.feed(row)
        self._before = row
        self.head = row.hash
        if row.hash == self._kept:
            self.kept_at = row.position

    def findings(self) -> tuple[Finding, ...]:
        """
        What is broken, in the order of rows.
        """
        found = (*self._replay.report().findings, *self._chain)
        return tuple(sorted(found, key=lambda finding: finding.position))

    def _feed_chain(self, row: Row) -> None:
        fault = chain_fault(row, self.head)
        if fault is not None:
            self._broken(row, *fault)

    def _feed_excerpt(self, row: Row) -> None:
        before = self._before
        follows = before is not None and row.position == before.position + 1
        fault = chain_fault(row, before.hash if before and follows else row.previous_hash)
        if fault is not None:
            self._broken(row, *fault)
        if before is not None and row.stream != before.stream:
            self._broken(row, "rows are missing before it", f"more of {before.stream}", row.stream)
        elif row.seq != (before.seq if before else 0) + 1:
            due = str((before.seq if before else 0) + 1)
            self._broken(row, f"rows of {row.stream} are missing before it", due, str(row.seq))

    def _broken(self, row: Row, message: str, expected: str, actual: str) -> None:
        name = f"{row.hash}/{row.position}/{message}"
        self._chain.append(
            Finding(
                bug_id=str(uuid.uuid5(_NAMESPACE, name)),
                invariant="INV-8",
                position=row.position,
                session=None,
                message=message,
                expected=expected,
                actual=actual,
                recorded=False,
                reproduced=True,
            )
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
    that you kept, or pass that with --head.

    \b
    Exit code
      0  all holds
      1  something is broken, or the head that you kept is not in the chain
      2  it cannot be read
      3  what is there holds, but contents or rows were left out of the export
    """
    source = Source.of(data_dir, journal, file)
    checked = Verification(may_be_excerpt=source.is_export, kept=kept)
    for row in source.rows("verify"):
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
    click.echo(f"head: {checked.head}")
    lost = False
    if kept is not None:
        # An excerpt lacks the rows of others, so it may lack this one without any harm.
        lost = checked.kept_at is None and not checked.excerpt
        click.echo(f"kept head: {_kept_words(checked)}")
    click.echo(_UNSEEN)
    click.echo(f"checked: {' '.join(SENTENCES) if checked.whole else 'INV-8'}")
    if not checked.whole:
        click.echo(_not_checked(checked))
    behind = f", and {len(following)} that may follow" if following else ""
    click.echo(f"broken: {len(findings) - len(following)}{behind}")
    sys.exit(1 if findings or lost else 0 if checked.whole else 3)


def _kept_words(checked: Verification) -> str:
    if checked.kept_at is not None:
        return f"in the chain, at row {checked.kept_at}"
    if checked.excerpt:
        return "not in this excerpt, which lacks the rows of others"
    return "not in the chain: rows were cut off, or the chain was written anew"


def _not_checked(checked: Verification) -> str:
    words = ["not checked:", *(name for name in SENTENCES if name != "INV-8")]
    if checked.excerpt:
        words.append("and the links to rows of others (these are one session's)")
    if checked.left_out:
        words.append(f"(the contents of {checked.left_out} rows were left out)")
    return " ".join(words)
