"""``ops bundle``: packs what another machine needs to replay a bug."""

from __future__ import annotations

import io
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import click

from cairn import __version__
from cairn.journal.errors import StoreError
from cairn.journal.replay import Finding
from cairn.journal.rows.export import to_line
from cairn.journal.rows.sealing import keys_to_text
from cairn.journal.stories import BugStory, bug_story
from cairn.ops.common.heads import HeadFiles
from cairn.ops.common.locations import (
    EXPORT_NAME,
    KEYS_NAME,
    Source,
    example,
    file_argument,
    journal_options,
    options_of,
    url_of,
)
from cairn.ops.common.program import as_called
from cairn.ops.journal.export import write_rows, written
from cairn.ops.journal.replay import folded, meant

# They concern a server that is to be started, not the journal.
_NOT_PACKED = ("port",)
_PORT = 8000


@click.command(
    epilog=example("ops bundle 6acffc27", "ops bundle 6acffc27 journal.jsonl -o bug.tgz")
)
@click.argument("bug_id")
@file_argument
@journal_options
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="The file to write. Only you can read it. Default: cairn-bug-ID.tar.gz here.",
)
def bundle(
    data_dir: Path, journal: str | None, bug_id: str, file: Path | None, output: Path | None
) -> None:
    """
    Pack what another machine needs to replay a bug.

    Writes a compressed archive with the export of the journal, the rows that led to the bug, what
    `ops doctor` says of this machine, and a README with the commands. `ops replay` and `ops verify`
    read the archive itself. It has the texts of all conversations of the journal, and the keys to
    read them.

    \b
    Exit code
      0  written
      2  there is no such bug, or the journal cannot be read
    """
    source = Source.of(data_dir, journal, file)
    base = source.base()
    finding, _ = meant(folded(source), bug_id, base)
    if finding is None:
        raise StoreError(f"{bug_id} is a session, not a bug; `ops verify` lists the bug ids.")
    story = bug_story(source.rows("story", base=base), finding, base)
    path = output or Path(f"cairn-bug-{finding.bug_id[:8]}.tar.gz")
    with tempfile.TemporaryFile() as exported:
        files = HeadFiles.of(data_dir, journal) if file is None else None
        count, head = write_rows(exported, source, base, files)
        with written(path) as made, tarfile.open(fileobj=made, mode="w:gz") as packed:
            _pack(packed, "README.md", _readme(finding, story, path.name, f"{count} rows, {head}"))
            _pack(packed, EXPORT_NAME, exported)
            keys = source.keys_of(source.rows("keys", base=base))
            if keys:
                _pack(packed, KEYS_NAME, keys_to_text(keys))
            _pack(packed, "bug.jsonl", b"".join(map(to_line, story.rows)))
            lines = _doctor(data_dir, journal) if file is None else iter(())
            _pack(packed, "doctor.txt", "".join(f"{line}\n" for line in lines).encode())
    click.echo(as_called(f"{path}: replay it with `ops replay {finding.bug_id[:8]} {path}`"))
    click.echo("It has the texts of all conversations of the journal.", err=True)


def _pack(packed: tarfile.TarFile, name: str, content: bytes | BinaryIO) -> None:
    file = io.BytesIO(content) if isinstance(content, bytes) else content
    member = tarfile.TarInfo(name)
    member.mode = 0o600
    member.size = file.seek(0, io.SEEK_END)
    file.seek(0)
    packed.addfile(member, file)


def _readme(finding: Finding, story: BugStory, name: str, journal: str) -> bytes:
    session = finding.concerns
    version = story.violated.cairn_version if story.violated is not None else __version__
    engine = (
        f"    ops replay {session} {name} --engine   # with the model, on the same fingerprint\n"
        if session is not None
        else ""
    )
    return (
        f"# Bug {finding.bug_id}\n\n"
        f"{finding.invariant} at {finding.where}: {finding.message}.\n\n"
        f"    ops replay {finding.bug_id} {name}\n{engine}"
        f"    ops verify {name}\n\n"
        f"Cairn {version}, fingerprint {story.fingerprint or 'none'}. "
        f"{EXPORT_NAME} is the export of the journal ({journal}), bug.jsonl has the rows that led "
        "to the bug, and doctor.txt says what the machine was.\n"
    ).encode()


def _doctor(data_dir: Path, journal: str | None) -> Iterator[str]:
    from cairn.ops.doctor import checks

    url, options = url_of(data_dir, journal), options_of(data_dir, journal)
    for name, check in checks(data_dir, url, _PORT, None, options, journal):
        if name not in _NOT_PACKED:
            found = check()
            yield f"{found.status:<4}  {name:<8}  {found.fact}"
