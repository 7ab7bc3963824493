"""Where things are: the data directory, and the rows that a command was pointed at."""

from __future__ import annotations

import contextlib
import fcntl
import gzip
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar

import attrs
import click

from cairn.journal.base import Base
from cairn.journal.codec import Row
from cairn.journal.errors import StoreError
from cairn.journal.tenants import session_name
from cairn.ops.common.output import progress

if TYPE_CHECKING:
    from cairn.journal.export import Excerpt, First
    from cairn.journal.store_sql import SqlStore

Decorated = TypeVar("Decorated", bound=Callable[..., Any])

PREFIX_MIN = 6
"""The fewest characters by which an id is known."""

_STDIN = Path("-")
_GZIP = b"\x1f\x8b"
_SQLITE = b"SQLite format 3\0"


def default_data_dir() -> Path:
    """
    ``$CAIRN_DATA_DIR``, else ``$XDG_DATA_HOME/cairn``, else ``~/.local/share/cairn``, on macOS too.
    """
    if named := os.environ.get("CAIRN_DATA_DIR"):
        return Path(named)
    home = os.environ.get("XDG_DATA_HOME")
    return (Path(home) if home else Path.home() / ".local" / "share") / "cairn"


def log_path(data_dir: Path) -> Path:
    """Where the server writes its log."""
    return data_dir / "logs" / "cairn.jsonl"


def example(*lines: str) -> str:
    """The end of a command's help."""
    return "\n".join(("\b", "Example:", *(f"  {line}" for line in lines)))


def data_dir_option(command: Decorated) -> Decorated:
    """The option ``--data-dir``."""
    return click.option(
        "--data-dir",
        type=click.Path(file_okay=False, path_type=Path),
        default=default_data_dir,
        show_default="$CAIRN_DATA_DIR, else ~/.local/share/cairn",
        help="The server's data directory.",
    )(command)


def journal_options(command: Decorated) -> Decorated:
    """The options ``--data-dir`` and ``--journal``."""
    option = click.option(
        "--journal",
        metavar="URL",
        help="The journal, if it is not journal.db in the data directory: a database URL, or "
        "the path of an SQLite file.",
    )
    return data_dir_option(option(command))


def file_argument(command: Decorated) -> Decorated:
    """An export (or an SQLite file) in place of the server's journal; ``-`` is standard input."""
    path = click.Path(exists=True, dir_okay=False, allow_dash=True, path_type=Path)
    return click.argument("file", type=path, required=False)(command)


def url_of(data_dir: Path, journal: str | None) -> str:
    """The database URL of a journal."""
    from cairn.journal.store_sql import journal_url, sqlite_url

    if journal is None:
        return journal_url(data_dir)
    return journal if "://" in journal else sqlite_url(Path(journal))


def bytes_on_disk(url: str) -> tuple[int, ...]:
    """The bytes of the journal's file and of the log beside it; nothing for a database server's."""
    from cairn.journal.store_sql import sqlite_path

    if not url.startswith("sqlite"):
        return ()
    path = sqlite_path(url)
    log = path.with_name(f"{path.name}-wal")
    return tuple(file.stat().st_size if file.exists() else 0 for file in (path, log))


@attrs.frozen
class Source:
    """Rows to read: an export, or a journal that is opened read-only."""

    name: str
    _file: Path | None
    _url: str | None
    _lock: Path | None = None

    @classmethod
    def of(cls, data_dir: Path, journal: str | None, file: Path | None = None) -> Source:
        """
        What the options of a command point at.

        Raises:
            click.UsageError: at two things.
            StoreError: the file cannot be read.
        """
        if file is not None and journal is not None:
            raise click.UsageError("Name a file or --journal, not both.")
        if file is not None:
            name = "standard input" if file == _STDIN else str(file)
            plain = _plain(file, name)
            if _begins(plain, name) != _SQLITE:
                return cls(name, plain, None)
            if plain != file:
                raise StoreError(
                    f"{name} is a database, and its last rows may lie in a file beside it. Name it "
                    "by its path, or pass on what `ops export` writes."
                )
            journal = str(file)
        url = url_of(data_dir, journal)
        return cls(journal or str(data_dir), None, url, _lock_of(data_dir, journal, url))

    @property
    def is_export(self) -> bool:
        """Whether the rows come from an export, from which something may have been left out."""
        return self._file is not None

    @property
    def is_held(self) -> bool | None:
        """Whether a server holds the journal; None where that cannot be told."""
        if self._lock is None:
            return None
        try:
            with self._lock.open("rb") as lock:
                # A shared lock, so that two who look do not see each other. It is given back at
                # once; a server that starts in that moment asks again (``home.hold``).
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        except OSError:
            return None
        return False

    def base(self) -> Base | None:
        """
        What stands in the place of the first rows, where they were pruned.

        Raises:
            StoreError: it cannot be read.
        """
        if self._file is not None:
            from cairn.journal.export import read_base

            return self._first(read_base, self._file)
        store = self.open()
        try:
            return store.base()
        finally:
            store.close()

    def excerpt(self) -> Excerpt | None:
        """
        What one session's rows begin with, where rows of their journal were pruned.

        Raises:
            StoreError: it cannot be read.
        """
        from cairn.journal.export import read_excerpt

        return self._first(read_excerpt, self._file) if self._file is not None else None

    def _first(self, read: Callable[[Path], First | None], file: Path) -> First | None:
        try:
            return read(file)
        except StoreError as error:
            # What was unpacked has a name that nobody gave it.
            raise StoreError(str(error).replace(str(file), self.name)) from error

    def rows(
        self, label: str, *, stream: str | None = None, base: Base | None = None
    ) -> Iterator[Row]:
        """
        The rows in order, of one stream if one is named, with a progress bar named ``label``.

        Args:
            base: what ``base`` gave; whoever reads on from there has to hear if it moved.

        Raises:
            StoreError: they cannot be read, or were pruned meanwhile, or an export has none.
        """
        if self._file is not None:
            from cairn.journal.export import read_export

            row = None
            try:
                for row in progress(read_export(self._file), label):
                    if stream in (None, row.stream):
                        yield row
            except StoreError as error:
                raise StoreError(str(error).replace(str(self._file), self.name)) from error
            if row is None and base is None:
                # Of nothing everything holds; most likely what was to write it failed.
                raise StoreError(
                    f"There are no rows in {self.name}. `ops export` writes them; see whether it "
                    "said that it could not, and export once more."
                )
            return
        store = self.open()
        try:
            total = None
            if stream is None:
                total = store.head()[0] - (base.position if base is not None else 0)
            yield from progress(store.read(stream=stream), label, total)
            if stream is None and store.base() != base:
                raise StoreError(f"{self.name} was pruned while it was read. Run this again.")
        finally:
            store.close()

    def sessions(self, base: Base | None) -> set[str]:
        """
        The ids of all sessions of a journal that is no export, those that were pruned too.

        Raises:
            StoreError: it cannot be read.
        """
        from cairn.journal.base import state_of

        store = self.open()
        try:
            streams = store.streams()
        finally:
            store.close()
        with contextlib.suppress(ValueError):  # of a damaged base nobody knows what went
            streams |= set(state_of(base).streams) if base is not None else set()
        return {one.removeprefix("session/") for one in streams if one.startswith("session/")}

    def open(self) -> SqlStore:
        """The store, read-only."""
        from cairn.journal.store_sql import SqlStore

        assert self._url is not None
        return SqlStore.open(self._url, read_only=True)


def named(target: str, known: Iterable[str]) -> str | None:
    """
    Which of the ids is meant by an id or by the beginning of one; None where none is.

    Raises:
        StoreError: several are.
    """
    known = set(known)
    if target in known:
        return target
    if len(target) < PREFIX_MIN:
        return None
    # Its client knows a session by a name without the tenant.
    names = sorted(
        name for name in known if name.startswith(target) or session_name(name).startswith(target)
    )
    if len(names) > 1:
        raise StoreError(f"{target} is the beginning of several: {', '.join(names[:5])}.")
    return names[0] if names else None


def too_short_words(target: str) -> str:
    """A remark on the beginning of an id that says too little; else none."""
    return f" (name at least {PREFIX_MIN} characters)" if len(target) < PREFIX_MIN else ""


def pruned_words(base: Base | None, stream: str) -> str:
    """A sentence where a stream had rows that were pruned; else none."""
    if base is None:
        return ""
    from cairn.journal.base import state_of

    try:
        known = stream in state_of(base).streams
    except ValueError:
        return ""
    return f" It was pruned with the rows up to {base.position}." if known else ""


def _lock_of(data_dir: Path, journal: str | None, url: str) -> Path | None:
    """
    The file that a server locks which writes a journal: the data directory's for the journal there,
    one beside the journal elsewhere.
    """
    from cairn.journal.store_sql import sqlite_path

    if journal is None:
        return data_dir / "lock"
    if not url.startswith("sqlite"):
        return None
    path = Path(os.path.realpath(sqlite_path(url)))
    beside = path.with_name(f"{path.name}.lock")
    return beside if beside.exists() else path.with_name("lock")


def _plain(file: Path, name: str) -> Path:
    """
    A file that can be read again from its beginning. What comes through a pipe or is packed is
    written to one that goes when the command ends: a story is told in several passes.
    """
    if file != _STDIN and file.is_file() and _begins(file, name)[:2] != _GZIP:
        return file
    kept = _open_copy()
    try:
        with click.open_file(str(file), "rb") as stream:
            shutil.copyfileobj(stream, kept)
        kept.flush()
        if _begins(Path(kept.name), name)[:2] == _GZIP:
            with gzip.open(kept.name) as unpacked:
                kept = _open_copy()
                shutil.copyfileobj(unpacked, kept)
            kept.flush()
    except (OSError, EOFError, zlib.error) as error:
        raise StoreError(f"{name} cannot be read: {error}.") from error
    return Path(kept.name)


def _open_copy() -> IO[bytes]:
    """A file that its owner alone can read, for as long as the command runs."""
    file = tempfile.NamedTemporaryFile(prefix="cairn-")  # noqa: SIM115  # outlives this call
    click.get_current_context().call_on_close(file.close)
    return file


def _begins(path: Path, name: str) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(len(_SQLITE))
    except OSError as error:
        raise StoreError(f"{name} cannot be read: {error.strerror}.") from error
