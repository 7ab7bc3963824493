"""``ops verify``: verifies a journal or an export with ``cairn.journal.rows.verification``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import click

from cairn.journal.errors import DamagedRow
from cairn.journal.invariants import SENTENCES
from cairn.journal.replay import Finding
from cairn.journal.rows.base import Base, state_of
from cairn.journal.rows.codec import Row
from cairn.journal.rows.export import Excerpt
from cairn.journal.rows.heads import Head
from cairn.journal.rows.signed_notes import PublicKey
from cairn.journal.rows.verification import Verification, consequences
from cairn.journal.unread import NotChecked
from cairn.ops.common.heads import HeadFiles
from cairn.ops.common.locations import Source, example, file_argument, journal_options
from cairn.ops.common.output import counted
from cairn.ops.journal.known_heads import known_heads

_SAVE = (
    " To check for that, pass a checkpoint that was kept elsewhere, --checkpoint FILE, or a head, "
    "--head POSITION:HASH"
)
_UNSEEN_AFTER = (
    "This cannot detect rows removed from the end, or rewritten, after row {row}{pruned}."
)
_UNSEEN = "This cannot detect rows removed from the end, or a completely rewritten chain{pruned}."
_BESIDE = (
    " Rows up to {row} are compared with the head record and the checkpoints beside the journal, "
    "which may have been changed with it."
)


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


def _head(_: click.Context, __: click.Parameter, value: str | None) -> Head | None:
    try:
        return Head.parse(value) if value is not None else None
    except ValueError as error:
        raise click.BadParameter(
            "expected POSITION:HASH, as `ops verify` prints it after `head:`"
        ) from error


def _key(_: click.Context, __: click.Parameter, value: str | None) -> PublicKey | None:
    try:
        return PublicKey.parse(value) if value is not None else None
    except ValueError as error:
        raise click.BadParameter(
            "expected NAME+ID+KEY, as `ops verify` prints it after `public key:`"
        ) from error


@click.command(
    epilog=example(
        "ops verify",
        "ops verify --data-dir /srv/cairn",
        "ops verify journal.jsonl",
        "gzip -c journal.jsonl | ops verify -",
        "ops verify --fleet postgresql://cairn@db/cairn",
    )
)
@file_argument
@journal_options
@click.option(
    "--head",
    "saved",
    metavar="POSITION:HASH",
    callback=_head,
    help="A head that you saved earlier. The chain must still contain it.",
)
@click.option(
    "--checkpoint",
    metavar="FILE",
    help="Signed checkpoints that were kept elsewhere: a file, or the text of one. The chain must "
    "still contain them all.",
)
@click.option(
    "--fleet",
    metavar="URL",
    help="Check the journals of all nodes in a PostgreSQL database, and what they say of each "
    "other.",
)
@click.option(
    "--public-key",
    metavar="KEY",
    callback=_key,
    help="The public half of the key that signed them. Default: the one in the data directory or "
    "in the export.",
)
def verify(
    data_dir: Path,
    journal: str | None,
    file: Path | None,
    saved: Head | None,
    checkpoint: str | None,
    public_key: PublicKey | None,
    fleet: str | None,
) -> None:
    """
    Check a journal: its hash chain and all invariants.

    Reads the server's journal (the server may be running), or FILE: an export, which may be
    compressed with gzip; - is standard input. Prints a line for each violation, with the bug id
    that `ops replay` takes, and a summary of what was checked. Violations after the first one that
    is not on record may be its consequences; they are marked and counted separately.

    The rows alone cannot show that rows were removed from the end, or that the chain was completely
    rewritten. The head record and the signed checkpoints that a server keeps in its data directory
    do, unless they were changed with the journal. Those that an operator accepted as lost (`ops
    serve --accept-lost-rows`, journaled as `loss_accepted`) are named, and are no violations. Keep
    checkpoints elsewhere (`ops serve --checkpoints FILE`), and pass them with --checkpoint; or save
    the `head` that is printed, and pass it later with --head.

    Rows whose texts cannot be read are counted: those of sessions that were forgotten (`ops
    forget`), those whose key is not here, and decisions that were compared with such texts. Of
    these only the hashes, numbers and order are checked.

    If the journal was pruned, the base that replaces the pruned rows is checked against the row
    that names it. What those rows contained cannot be checked.

    With --fleet, each node's journal is checked like this, then that a block has one digest on all
    nodes, that each row which a node names of another one (a head that it saw, a block that it
    adopted) is there, and that leases do not overlap. The verdict is a line for each node; if it is
    piped, an object of JSON.

    \b
    Exit code
      0  all checks pass
      1  something is broken, a head or a checkpoint is not in the chain, or a signature is wrong
      2  the journal or the checkpoints cannot be read, or the export has no rows
      3  all that can be checked passes, but contents or rows were left out of the export, or what
         you saved is older than the last prune, and may be of a pruned row, or is all of rows
         whose loss an operator accepted
      4  all that can be checked passes, but the texts of some rows cannot be read, because their
         sessions were forgotten or their keys are not here
    """
    if fleet is not None:
        if any((journal, file, saved, checkpoint, public_key)):
            raise click.UsageError(
                "--fleet checks whole journals. Omit the options of a single one."
            )
        from cairn.ops.fleet.verify import verify_fleet

        sys.exit(verify_fleet(fleet, data_dir))
    source = Source.of(data_dir, journal, file)
    files = HeadFiles.of(data_dir, journal) if file is None else None
    # Read before the rows, which a server may be adding to.
    known = known_heads(source, files, saved, checkpoint, public_key)
    base = source.base()
    begins = source.excerpt()
    checked = verification_of(source, base, known.heads, begins=begins)
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
    wrong = known.report(checked)
    pruned = "" if base is None and begins is None else ", or changes to rows that were pruned"
    reached, is_elsewhere = known.last_present(checked)
    if reached is None:
        click.echo(_UNSEEN.format(pruned=pruned) + (_SAVE if known.is_little else ""))
    elif is_elsewhere:
        click.echo(_UNSEEN_AFTER.format(row=reached, pruned=pruned))
    else:
        click.echo((_UNSEEN_AFTER + _BESIDE).format(row=reached, pruned=pruned) + _SAVE)
    click.echo(f"checked: {' '.join(SENTENCES) if checked.whole else 'INV-8'}")
    if not checked.whole:
        click.echo(_not_checked(checked))
    not_checked = checked.not_checked
    if not_checked:
        click.echo(_unread_words(not_checked))
    more = f", and {len(follow)} that may be consequences" if follow else ""
    click.echo(f"broken: {len(findings) - len(follow)}{more}")
    if wrong:
        what = counted(wrong, "head or checkpoint does", "heads or checkpoints do")
        click.echo(f"not vouched for: {what} not fit (named above)")
    unsure = known.is_unsure(checked)
    if findings or wrong:
        sys.exit(1)
    sys.exit(3 if unsure or not checked.whole else 4 if not_checked else 0)


def verification_of(
    source: Source,
    base: Base | None,
    saved: Iterable[Head],
    *,
    begins: Excerpt | None = None,
    label: str = "verify",
    watched: Callable[[Row], object] = lambda _: None,
) -> Verification:
    """
    Verify all rows of a source, with a progress bar.

    Args:
        base: of the source.
        saved: heads to look for.
        begins: the first line of an excerpt.
        label: of the progress bar.
        watched: called with each row.

    Raises:
        JournalError: they cannot be read.
    """
    faults = source.schema_faults()
    checked = Verification(may_be_excerpt=source.is_export, saved=saved, base=base, begins=begins)
    for row in source.rows(label, base=base):
        try:
            checked.feed(row)
        except DamagedRow as error:
            raise DamagedRow(
                error.position,
                f"{error.fact}. Its hash is correct, so it was written like this: "
                "verify it with the version of Cairn that wrote it.",
            ) from error
        watched(row)
    for part, fact in faults:
        checked.note_place(part, fact)
    return checked


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


def _unread_words(rows: NotChecked) -> str:
    words = f"not checked: {rows.forgotten} rows (forgotten), {rows.no_key} rows (no key)"
    return f"{words}, {rows.named} rows (compared with these)" if rows.named else words


def _not_checked(checked: Verification) -> str:
    words = ["not checked:", *(name for name in SENTENCES if name != "INV-8")]
    if checked.excerpt:
        words.append("and the links to rows of other sessions (this is an excerpt)")
    if checked.left_out:
        words.append(f"(the contents of {checked.left_out} rows were left out)")
    return " ".join(words)
