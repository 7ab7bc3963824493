"""
Where things are: the data directory, and the rows that a command was pointed at.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import attrs
import click

from cairn.journal.codec import Row
from cairn.journal.errors import StoreError
from cairn.ops.output import progress

if TYPE_CHECKING:
    from cairn.journal.store_sql import SqlStore

Decorated = TypeVar("Decorated", bound=Callable[..., Any])


def default_data_dir() -> Path:
    """
    ``$CAIRN_DATA_DIR``, else ``$XDG_DATA_HOME/cairn``, else ``~/.local/share/cairn``, on macOS too.
    """
    if named := os.environ.get("CAIRN_DATA_DIR"):
        return Path(named)
    home = os.environ.get("XDG_DATA_HOME")
    return (Path(home) if home else Path.home() / ".local" / "share") / "cairn"


def log_path(data_dir: Path) -> Path:
    """
    Where the server writes its log.
    """
    return data_dir / "logs" / "cairn.jsonl"


def example(*lines: str) -> str:
    """
    The end of a command's help.
    """
    return "\n".join(("\b", "Example:", *(f"  {line}" for line in lines)))


def data_dir_option(command: Decorated) -> Decorated:
    """
    The option ``--data-dir``.
    """
    return click.option(
        "--data-dir",
        type=click.Path(file_okay=False, path_type=Path),
        default=default_data_dir,
        show_default="$CAIRN_DATA_DIR, else ~/.local/share/cairn",
        help="The server's data directory.",
    )(command)


def journal_options(command: Decorated) -> Decorated:
    """
    The options ``--data-dir`` and ``--journal``.
    """
    option = click.option(
        "--journal",
        metavar="URL",
        help="The journal, where it is not journal.db in the data directory: a database URL, or "
        "the path of an SQLite file.",
    )
    return data_dir_option(option(command))


def file_argument(command: Decorated) -> Decorated:
    """
    An export (or an SQLite file) in place of the server's journal.
    """
    path = click.Path(exists=True, dir_okay=False, path_type=Path)
    return click.argument("file", type=path, required=False)(command)


def url_of(data_dir: Path, journal: str | None) -> str:
    """
    The database URL of a journal.
    """
    from cairn.journal.store_sql import journal_url, sqlite_url

    if journal is None:
        return journal_url(data_dir)
    return journal if "://" in journal else sqlite_url(Path(journal))


@attrs.frozen
class Source:
    """
    Rows to read: an export, or a journal that is opened read-only.
    """

    name: str
    _file: Path | None
    _url: str | None

    @classmethod
    def of(cls, data_dir: Path, journal: str | None, file: Path | None = None) -> Source:
        """
        What the options of a command point at.

        Raises:
            click.UsageError: at two things.
        """
        if file is not None and journal is not None:
            raise click.UsageError("Name a file or --journal, not both.")
        if file is not None and _is_sqlite(file):
            file, journal = None, str(file)
        if file is not None:
            return cls(str(file), file, None)
        url = url_of(data_dir, journal)
        return cls(journal or str(data_dir), None, url)

    @property
    def is_export(self) -> bool:
        """
        Whether the rows come from an export, from which something may have been left out.
        """
        return self._file is not None

    def rows(self, label: str, *, stream: str | None = None) -> Iterator[Row]:
        """
        The rows in order, of one stream if one is named, with a progress bar named ``label``.
        """
        if self._file is not None:
            from cairn.journal.export import read_export

            for row in progress(read_export(self._file), label):
                if stream in (None, row.stream):
                    yield row
            return
        store = self.open()
        try:
            total = store.head()[0] if stream is None else None
            yield from progress(store.read(stream=stream), label, total)
        finally:
            store.close()

    def open(self) -> SqlStore:
        """
        The store, read-only.
        """
        from cairn.journal.store_sql import SqlStore

        assert self._url is not None
        return SqlStore.open(self._url, read_only=True)


def _is_sqlite(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(16) == b"SQLite format 3\0"
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror}.") from error
