"""``ops export``: writes a journal as lines of JSON, to archive, search or verify elsewhere."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import attrs
import click

from cairn.journal.errors import StoreError
from cairn.journal.rows.base import Base, state_of
from cairn.journal.rows.codec import shown
from cairn.journal.rows.export import (
    Excerpt,
    SignedEnd,
    base_to_line,
    checkpoint_to_line,
    excerpt_to_line,
    to_line,
)
from cairn.journal.rows.heads import BEGINNING, Head
from cairn.journal.rows.sealing import Key, keys_to_text
from cairn.ops.common.heads import HeadFiles, last_note
from cairn.ops.common.locations import (
    Source,
    example,
    journal_options,
    keys_beside,
    named,
    pruned_words,
    too_short_words,
)
from cairn.ops.parquet import manifest_of, manifest_path, write_parquet


@click.command(
    epilog=example("ops export -o journal.jsonl", "ops export --no-private | gzip > journal.gz")
)
@journal_options
@click.option(
    "--format",
    type=click.Choice(["jsonl", "parquet"]),
    default="jsonl",
    show_default=True,
    help="Lines of JSON, or a Parquet file for analysis, with a manifest beside it.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="The file to write. Only you can read it. An existing file is replaced when all rows are "
    "written. Default: stdout.",
)
@click.option(
    "--session",
    metavar="ID",
    help="Only the rows of this session; the beginning of its id is enough.",
)
@click.option("--no-private", is_flag=True, help="Leave out texts and token ids.")
@click.option(
    "--with-keys",
    is_flag=True,
    help="Also write FILE.keys, with which the texts in FILE can be read, also after their "
    "sessions were forgotten here. Only you can read it.",
)
def export(
    data_dir: Path,
    journal: str | None,
    format: str,  # noqa: A002  # click passes an option by its name
    output: Path | None,
    session: str | None,
    no_private: bool,
    with_keys: bool,
) -> None:
    """
    Write a journal as lines of JSON, one event on each line.

    `ops verify` and `ops replay` read the file, also when it is compressed with gzip. Without texts
    and token ids, or with one session only, `ops verify` can check only the hashes, and says so;
    the other commands refuse such a file.

    Texts and token ids are sealed, as in the journal: with the file alone the hashes can be checked
    and what is public can be read. Commands read the rest with the keys of the data directory, or
    with FILE.keys beside it.

    If the journal was pruned, the first line is the base that replaces the pruned rows. In the
    export of one session, the first line says which base that is and how many of the session's rows
    were pruned.

    The last line has the public half of the key that signs the journal's checkpoints, and the last
    checkpoint, unless no server has written the journal from this data directory.

    A Parquet file has the same columns, with `payload` and `private` as texts of JSON, or of base64
    if they are sealed. Its
    manifest, FILE.manifest.json, has its SHA-256, the head and the last checkpoint. Other commands
    do not read it.
    """
    if with_keys and (output is None or no_private or format == "parquet"):
        raise click.UsageError("--with-keys needs -o FILE, lines of JSON and private contents.")
    if format == "parquet" and output is None:
        raise click.UsageError("A Parquet file needs a name: -o FILE.")
    source = Source.of(data_dir, journal)
    base = source.base()
    if session is not None:
        session = _meant(source, base, session)
    files = HeadFiles.of(data_dir, journal)
    if format == "parquet":
        assert output is not None
        count, head = _parquet(output, source, base, files, session, no_private=no_private)
        click.echo(f"{count} rows, head {head}", err=True)
        return
    with written(output) as file:
        count, head = write_rows(file, source, base, files, session, no_private=no_private)
        if session is not None and count == 0:
            raise _not_found(source, base, session)
    if with_keys:
        assert output is not None
        with written(keys_beside(output)) as file:
            file.write(keys_to_text(_keys_of(source, base, session)))
    click.echo(f"{count} rows, head {head}", err=True)


def _keys_of(source: Source, base: Base | None, session: str | None) -> list[Key]:
    stream = f"session/{session}" if session is not None else None
    return source.keys_of(source.rows("keys", stream=stream, base=base))


def write_rows(
    file: BinaryIO,
    source: Source,
    base: Base | None,
    files: HeadFiles | None,
    session: str | None = None,
    *,
    no_private: bool = False,
) -> tuple[int, Head]:
    """
    Write the lines of an export.

    Args:
        files: beside the journal; None if the source is an export.
        session: only the rows of this one.
        no_private: whether to leave out private contents.

    Returns:
        How many rows were written, and the head of the last one.
    """
    count, head = 0, Head(base.position, base.head) if base is not None else BEGINNING
    stream = f"session/{session}" if session is not None else None
    if base is not None and session is None:
        file.write(base_to_line(attrs.evolve(base, state=None) if no_private else base))
    for row in source.rows("export", stream=stream, base=base):
        if base is not None and stream is not None and count == 0:
            file.write(excerpt_to_line(_excerpt(stream, base)))
        file.write(to_line(attrs.evolve(row, private=None) if no_private else row))
        count, head = count + 1, Head(row.position, shown(row.hash))
    if (end := source.signed_end() if files is None else _signed_end(files, head)) is not None:
        file.write(checkpoint_to_line(end))
    return count, head


def _parquet(
    path: Path,
    source: Source,
    base: Base | None,
    files: HeadFiles,
    session: str | None,
    *,
    no_private: bool,
) -> tuple[int, Head]:
    """Write a Parquet file and its manifest; see ``write_rows``."""
    stream = f"session/{session}" if session is not None else None
    begin = Head(base.position, base.head) if base is not None else BEGINNING
    rows = source.rows("export", stream=stream, base=base)
    with written(path) as file:
        left = (attrs.evolve(row, private=None) for row in rows) if no_private else rows
        count, head = write_parquet(file, left, begin)
        if session is not None and count == 0:
            raise _not_found(source, base, session)
    end = _signed_end(files, head)
    facts = {
        "rows": count,
        "begins_after": str(begin),
        "head": str(head),
        "session": session,
        "private": not no_private,
        "base_digest": base.digest if base is not None else None,
        "public_key": end.public_key if end is not None else None,
        "checkpoint": end.note if end is not None else None,
    }
    with written(manifest_path(path)) as file:
        file.write(manifest_of(path, facts))
    return count, head


def _signed_end(files: HeadFiles, head: Head) -> SignedEnd | None:
    """The last line; None if no key is known. Checkpoints that cannot be read do not stop it."""
    public = files.public_key()
    if public is None:
        return None
    try:
        note = last_note(files.notes(), head.position)
    except StoreError as error:
        click.echo(f"Warning: the export has no checkpoint. {error}", err=True)
        note = None
    return SignedEnd(public_key=str(public), note=note.whole if note is not None else "")


def _meant(source: Source, base: Base | None, session: str) -> str:
    """
    The id of the session with this id, or whose id begins like this.

    Raises:
        StoreError: there is none, or there are several.
    """
    found = named(session, source.sessions(base))
    if found is None:
        raise _not_found(source, base, session)
    return found


def _not_found(source: Source, base: Base | None, session: str) -> StoreError:
    """The error for a session without rows."""
    return StoreError(
        f"No session {session} is in {source.name}{too_short_words(session)}; `ops sessions` lists "
        f"them.{pruned_words(base, f'session/{session}')}"
    )


def _excerpt(stream: str, base: Base) -> Excerpt:
    """The first line for the rows of one stream; of a damaged base it counts no pruned rows."""
    try:
        seq = state_of(base).streams.get(stream, 0)
    except ValueError:
        seq = 0
    return Excerpt(stream=stream, seq=seq, base=base)


@contextmanager
def written(path: Path | None) -> Iterator[BinaryIO]:
    """A file for its owner alone that gets its name when all is written; stdout for None."""
    if path is None:
        yield sys.stdout.buffer
        return
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        # It contains all conversations, so only its owner may read it, whatever the umask.
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as error:
        raise StoreError(f"{path} cannot be written: {error.strerror}.") from error
    finally:
        part.unlink(missing_ok=True)
