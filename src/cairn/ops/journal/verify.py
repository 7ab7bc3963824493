"""``ops verify``: verifies a journal or an export with ``cairn.journal.rows.verification``."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import click

from cairn.journal.errors import DamagedRow
from cairn.journal.invariants import SENTENCES
from cairn.journal.replay import Finding
from cairn.journal.rows.base import Base, state_of
from cairn.journal.rows.verification import Verification, consequences
from cairn.ops.common.locations import Source, example, file_argument, journal_options
from cairn.ops.common.output import counted

_HASH = re.compile(r"[0-9a-f]{64}")
_SAVE = " To check for that, pass a head you saved earlier: --head HASH"
_UNSEEN_AFTER = (
    "This cannot detect rows removed from the end, or rewritten, after the saved head{pruned}."
)
_UNSEEN = "This cannot detect rows removed from the end, or a completely rewritten chain{pruned}."


def line_of(finding: Finding, *, follows: bool = False) -> str:
    """
    A violation in one line: bug id, invariant, row, session, message, whether it is on record, and
    whether it may be a consequence of an earlier one.
    """
    fields = (
        finding.bug_id,
        finding.invariant,
        finding.where,
        f"session {finding.session}" if finding.session else "server",
        " ".join(finding.message.split()),
        "on record" if finding.recorded else "not on record",
    )
    return "\t".join((*fields, "may be a consequence") if follows else fields)


def _head(_: click.Context, __: click.Parameter, value: str | None) -> str | None:
    if value is not None and not _HASH.fullmatch(value.lower()):
        raise click.BadParameter(
            "expected 64 hexadecimal digits, as `ops verify` prints them after `head:`"
        )
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
    "saved",
    metavar="HASH",
    callback=_head,
    help="A head that you saved earlier. The chain must still contain it.",
)
def verify(data_dir: Path, journal: str | None, file: Path | None, saved: str | None) -> None:
    """
    Check a journal: its hash chain and all invariants.

    Reads the server's journal (the server may be running), or FILE: an export, which may be
    compressed with gzip; - is standard input. Prints a line for each violation, with the bug id
    that `ops replay` takes, and a summary of what was checked. Violations after the first one that
    is not on record may be its consequences; they are marked and counted separately.

    It cannot detect rows removed from the end, or a completely rewritten chain. Save the `head`
    that it prints, and pass it later with --head. If the journal was pruned, the base that replaces
    the pruned rows is checked against the row that names it. What those rows contained cannot be
    checked.

    \b
    Exit code
      0  all checks pass
      1  something is broken, or the head that you saved is not in the chain
      2  the journal cannot be read, or the export has no rows
      3  all that can be checked passes, but contents or rows were left out of the export, or the
         head that you saved is older than the last prune, and may be of a pruned row
    """
    source = Source.of(data_dir, journal, file)
    base = source.base()
    faults = source.schema_faults()
    begins = source.excerpt()
    checked = Verification(
        may_be_excerpt=source.is_export, saved_head=saved, base=base, begins=begins
    )
    for row in source.rows("verify", base=base):
        try:
            checked.feed(row)
        except DamagedRow as error:
            raise DamagedRow(
                error.position,
                f"{error.fact}. Its hash is correct, so it was written like this: "
                "verify it with the version of Cairn that wrote it.",
            ) from error
    for part, fact in faults:
        checked.note_place(part, fact)
    findings = checked.findings()
    follow = consequences(findings)
    first = next((finding for finding in findings if not finding.recorded), None)
    for finding in findings:
        click.echo(line_of(finding, follows=finding.bug_id in follow))
        if finding is first:
            click.echo(f"first broken: {finding.where}")
    click.echo(f"rows: {checked.rows}")
    if base is not None:
        click.echo(f"begins: {_begins_words(base, checked)}")
        if gone := _violations(base):
            click.echo(f"pruned: {counted(gone, 'violation')} on record")
    if begins is not None:
        click.echo(
            f"begins: after row {begins.base.position}; {begins.seq} rows of {begins.stream} were "
            f"pruned, with base {begins.base.digest}"
        )
    click.echo(f"head: {checked.head}")
    lost = False
    if saved is not None:
        # An excerpt lacks the rows of other sessions, and a pruned journal its first rows: the head
        # may be of one of these.
        lost = checked.saved_at is None and not checked.excerpt and base is None
        click.echo(f"saved head: {_saved_words(checked)}")
    pruned = "" if base is None and begins is None else ", or changes to rows that were pruned"
    if checked.saved_at is None:
        click.echo(_UNSEEN.format(pruned=pruned) + (_SAVE if saved is None else ""))
    else:
        click.echo(_UNSEEN_AFTER.format(pruned=pruned))
    click.echo(f"checked: {' '.join(SENTENCES) if checked.whole else 'INV-8'}")
    if not checked.whole:
        click.echo(_not_checked(checked))
    more = f", and {len(follow)} that may be consequences" if follow else ""
    click.echo(f"broken: {len(findings) - len(follow)}{more}")
    unsure = saved is not None and not checked.vouched_for
    sys.exit(1 if findings or lost else 0 if checked.whole and not unsure else 3)


def _begins_words(base: Base, checked: Verification) -> str:
    words = f"at row {base.position + 1}, with a base that replaces the rows before it"
    if checked.pruned is None:
        return words
    return f"{words} (journal_pruned at row {checked.pruned[0]})"


def _violations(base: Base) -> int:
    """How many violations were on record in the rows that a base replaces."""
    try:
        return len(state_of(base).faults)
    except ValueError:
        return 0  # left out, or damaged, which is a violation of its own


def _saved_words(checked: Verification) -> str:
    if checked.saved_at is not None:
        words = f"in the chain, at row {checked.saved_at}"
        if checked.base is None or checked.vouched_for:
            return words
        return (
            f"{words}; the base was made after that head, which does not vouch for the rows before "
            f"row {checked.base.position + 1}"
        )
    if checked.excerpt:
        return "not in this excerpt, which lacks the rows of other sessions"
    if checked.base is not None:
        return f"not in the chain; it may be of a row up to {checked.base.position}, now pruned"
    return "not in the chain: rows were removed from the end, or the chain was rewritten"


def _not_checked(checked: Verification) -> str:
    words = ["not checked:", *(name for name in SENTENCES if name != "INV-8")]
    if checked.excerpt:
        words.append("and the links to rows of other sessions (this is an excerpt)")
    if checked.left_out:
        words.append(f"(the contents of {checked.left_out} rows were left out)")
    return " ".join(words)
