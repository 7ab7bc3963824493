"""
``ops verify``: the chain and all invariants of a journal or an export, by the server's own code.

From an export something may have been left out, and what is not there cannot be checked:

1. Without private contents, the chain still can: it goes over their digests. The invariants
   cannot, since the fold needs token ids.
2. Of an excerpt (one session's rows), each row's own hash can be checked, its link to the row
   before where that is there, and that no row of the session is missing in between.

Neither may look like a pass, so both have an exit code of their own.
"""

from __future__ import annotations

import sys
import uuid
from pathlib import Path

import click

from cairn.journal.codec import GENESIS, Row, chain_fault
from cairn.journal.errors import DamagedRow
from cairn.journal.invariants import SENTENCES
from cairn.journal.replay import Finding, Replay
from cairn.ops.where import Source, example, file_argument, journal_options

_NAMESPACE = uuid.UUID("0d6cf0d6-54b3-5d0c-8a7b-6f4f5b3c9a27")


class Verification:
    """
    All that can be checked of rows. ``feed`` it rows, then read what it came to.

    Attributes:
        left_out: rows whose private contents are not there.
        excerpt: whether it is one session's rows only.
    """

    def __init__(self, *, may_be_excerpt: bool) -> None:
        self.rows = 0
        self.head = GENESIS
        self.left_out = 0
        self.excerpt = False
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

    def findings(self) -> tuple[Finding, ...]:
        """
        What is broken, in the order of rows.
        """
        return (*self._replay.report().findings, *self._chain)

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


def line_of(finding: Finding) -> str:
    """
    A finding in one line: bug id, invariant, row, session, message, whether it is on record.
    """
    return "\t".join(
        (
            finding.bug_id,
            finding.invariant,
            f"row {finding.position}",
            f"session {finding.session}" if finding.session else "server",
            " ".join(finding.message.split()),
            "on record" if finding.recorded else "not on record",
        )
    )


@click.command(
    epilog=example("ops verify", "ops verify --data-dir /srv/cairn", "ops verify journal.jsonl")
)
@file_argument
@journal_options
def verify(data_dir: Path, journal: str | None, file: Path | None) -> None:
    """
    Check a journal: its hash chain and all invariants.

    Reads the server's journal (also while the server runs), or FILE, an export. Prints a line for
    each violation, with the bug id that `ops replay` takes, and what was checked.

    \b
    Exit code
      0  all holds
      1  something is broken
      2  it cannot be read
      3  what is there holds, but contents or rows were left out of the export
    """
    source = Source.of(data_dir, journal, file)
    checked = Verification(may_be_excerpt=source.is_export)
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
    for finding in findings:
        click.echo(line_of(finding))
    click.echo(f"rows: {checked.rows}")
    click.echo(f"head: {checked.head}")
    click.echo(f"checked: {' '.join(SENTENCES) if checked.whole else 'INV-8'}")
    if not checked.whole:
        click.echo(_not_checked(checked))
    click.echo(f"broken: {len(findings)}")
    sys.exit(1 if findings else 0 if checked.whole else 3)


def _not_checked(checked: Verification) -> str:
    words = ["not checked:", *(name for name in SENTENCES if name != "INV-8")]
    if checked.excerpt:
        words.append("and the links to rows of others (these are one session's)")
    if checked.left_out:
        words.append(f"(the contents of {checked.left_out} rows were left out)")
    return " ".join(words)
