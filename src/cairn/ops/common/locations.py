"""Where things are: the data directory, and the rows that a command reads."""

from __future__ import annotations

import contextlib
import fcntl
import gzip
import os
import shlex
import shutil
import tarfile
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar

import attrs
import click

from cairn.engine.machine.cache import cache_folder
from cairn.journal.errors import StoreError, StoreLost
from cairn.journal.nodes import NODE_MAX, is_node_name
from cairn.journal.tenants import session_name
from cairn.ops.common.config_file import read_config
from cairn.ops.common.output import progress

if TYPE_CHECKING:
    from cairn.actors.journal_keys import JournalKeys
    from cairn.journal.rows.base import Base
    from cairn.journal.rows.codec import Row
    from cairn.journal.rows.export import Excerpt, First, SignedEnd
    from cairn.journal.rows.sealing import Key, Keys
    from cairn.journal.rows.store_sql import SqlStore

Decorated = TypeVar("Decorated", bound=Callable[..., Any])

PREFIX_MIN = 6
"""The least number of characters of an abbreviated id."""

EXPORT_NAME = "journal.jsonl"
"""The name of the export in a bundle."""

KEYS_NAME = "keys.json"
"""The name of the keys of that export in a bundle."""

_STDIN = Path("-")
_KEYS = "cairn.keys"
_NODE = "cairn.node"
_GZIP = b"\x1f\x8b"
_SQLITE = b"SQLite format 3\0"


def default_data_dir() -> Path:
    """
    ``$CAIRN_DATA_DIR``, else what the configuration file says, else ``usual_data_dir``.

    Raises:
        Unreadable: the configuration file cannot be used.
    """
    if named := os.environ.get("CAIRN_DATA_DIR"):
        return Path(named)
    file = read_config()
    written = file.values.get("data_dir") if file is not None else None
    if file is None or not isinstance(written, str):
        return usual_data_dir()
    try:
        return file.path.absolute().parent / Path(written).expanduser()
    except RuntimeError as error:  # a user that there is not
        from cairn.ops.cli import Unreadable

        raise Unreadable(f"{file.place('data_dir')}: data_dir is {written!r}: {error}") from error


def usual_data_dir() -> Path:
    """``$XDG_DATA_HOME/cairn``, else ``~/.local/share/cairn``, on macOS too."""
    home = os.environ.get("XDG_DATA_HOME")
    return (Path(home) if home else Path.home() / ".local" / "share") / "cairn"


def self_tests_folder() -> Path | None:
    """
    The folder of the results of self-tests, which all data directories share: ``self-tests`` in
    ``cache_folder``. None if this user has no home directory.
    """
    cache = cache_folder()
    return cache / "self-tests" if cache is not None else None


def log_path(data_dir: Path) -> Path:
    """Where the server writes its log."""
    return data_dir / "logs" / "cairn.jsonl"


def snapshot_path(data_dir: Path) -> Path:
    """Where the server stores the snapshot of what its journal implies."""
    return data_dir / "snapshot"


def example(*lines: str) -> str:
    """The examples at the end of a command's help."""
    return "\n".join(("\b", "Example:", *(f"  {line}" for line in lines)))


def data_dir_option(command: Decorated) -> Decorated:
    """The option ``--data-dir``."""
    return click.option(
        "--data-dir",
        type=click.Path(file_okay=False, path_type=Path),
        default=default_data_dir,
        show_default="$CAIRN_DATA_DIR, else the configuration file, else ~/.local/share/cairn",
        help="The server's data directory.",
    )(command)


def journal_options(command: Decorated) -> Decorated:
    """
    The options ``--data-dir``, ``--journal`` and ``--node``. The command gets the first two: the
    URL of a journal has the schema of its node.
    """
    journal = click.option(
        "--journal",
        metavar="URL",
        callback=_with_node,
        help="The journal, if it is not journal.db in the data directory: a database URL, or "
        "the path of an SQLite file.",
    )
    return data_dir_option(journal(node_option(command)))


def node_option(command: Decorated) -> Decorated:
    """The option ``--node``. The command gets it by ``of_the_node``."""
    return click.option(
        "--node",
        metavar="NAME",
        is_eager=True,  # the journal depends on it
        expose_value=False,
        callback=_keep_node,
        help="The node of a fleet whose journal it is, in the database that --journal names.",
    )(command)


def of_the_node(journal: str | None) -> str | None:
    """
    The journal that a command's ``--node`` has in a database; the journal itself without one.

    Raises:
        click.UsageError: there is no database of a fleet.
    """
    return journal_of(journal, click.get_current_context().meta.get(_NODE))


def blocks_option(command: Decorated) -> Decorated:
    """The option ``--blocks``. The command gets the folder of the node's own blocks."""
    return click.option(
        "--blocks",
        metavar="DIR",
        type=click.Path(exists=True, file_okay=False, path_type=Path),
        callback=_blocks_of_node,
        help="With --node: the folder of blocks that the node was started with.",
    )(command)


def _blocks_of_node(context: click.Context, _: click.Parameter, value: Path | None) -> Path | None:
    if value is None:
        return None
    node: str | None = context.meta.get(_NODE)
    if node is None:
        raise click.UsageError("--blocks is a folder of the nodes of a fleet: add --node.", context)
    return value.absolute() / node


def check_node(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """Refuse a name that no node may have."""
    if value is not None and not is_node_name(value):
        raise click.BadParameter(
            f"{value!r} is not the name of a node; write 1 to {NODE_MAX} lower-case letters and "
            "digits, beginning with a letter: n1.",
            context,
            parameter,
        )
    return value


def _keep_node(context: click.Context, parameter: click.Parameter, value: str | None) -> None:
    context.meta[_NODE] = check_node(context, parameter, value)


def _with_node(_: click.Context, __: click.Parameter, value: str | None) -> str | None:
    return of_the_node(value)


def journal_of(journal: str | None, node: str | None) -> str | None:
    """
    The option ``--journal`` with the schema of a node.

    Raises:
        click.UsageError: there is no database of a fleet.
    """
    if node is None:
        return journal
    if journal is None or "://" not in journal:
        raise click.UsageError(
            f"--node {node} needs the PostgreSQL database of the fleet: add --journal "
            "postgresql://user@host/name."
        )
    from cairn.journal.rows.database.urls import node_url

    return node_url(journal, node)


def file_argument(command: Decorated) -> Decorated:
    """An export (or an SQLite file) in place of the server's journal; ``-`` is standard input."""
    path = click.Path(exists=True, dir_okay=False, allow_dash=True, path_type=Path)
    return click.argument("file", type=path, required=False)(command)


def url_of(data_dir: Path, journal: str | None) -> str:
    """The database URL of a journal."""
    from cairn.journal.rows.database.urls import journal_url, sqlite_url

    if journal is None:
        return journal_url(data_dir)
    return journal if "://" in journal else sqlite_url(Path(journal))


def options_of(data_dir: Path, journal: str | None = None) -> str:
    """The options with which another command finds the same journal, beginning with a space."""
    words = ["", *(["--data-dir", str(data_dir)] if data_dir != default_data_dir() else [])]
    words += ["--journal", journal] if journal is not None else []
    return " ".join([words[0], *map(shlex.quote, words[1:])])


def bytes_on_disk(url: str) -> tuple[int, ...]:
    """The sizes of the journal's file and of its write-ahead log; empty for a database server."""
    from cairn.journal.rows.database.urls import sqlite_path

    if not url.startswith("sqlite"):
        return ()
    path = sqlite_path(url)
    log = path.with_name(f"{path.name}-wal")
    return tuple(file.stat().st_size if file.exists() else 0 for file in (path, log))


@attrs.frozen
class _Held:
    """
    The keys to read an export with.

    Attributes:
        handed: that are beside it.
        own: of the journal in the data directory, which may be the one that was exported.
    """

    handed: Keys | None
    own: Keys | None

    def get(self, key_id: str) -> Key | None:
        """See ``sealing.Keys``."""
        found = self.handed.get(key_id) if self.handed is not None else None
        return self.own.get(key_id) if found is None and self.own is not None else found


@attrs.frozen
class Source:
    """Rows to read: an export, or a journal opened read-only."""

    name: str
    _file: Path | None
    _url: str | None
    _lock: Path | None = None
    _keys: Path | None = None
    _sealed: Keys | None = None

    @classmethod
    def of(
        cls,
        data_dir: Path,
        journal: str | None,
        file: Path | None = None,
    ) -> Source:
        """
        The rows that the options of a command name.

        Raises:
            click.UsageError: they name two journals.
            StoreError: the file cannot be read.
        """
        from cairn.ops.common.heads import HeadFiles

        if file is not None and journal is not None:
            raise click.UsageError("Give a FILE or --journal, not both.")
        if file is not None:
            name = "standard input" if file == _STDIN else str(file)
            plain = _plain(file, name)
            if _begins(plain, name) != _SQLITE:
                own = keys_in(HeadFiles.of(data_dir, None).keys, url_of(data_dir, None))
                return cls(name, plain, None, sealed=_Held(_handed_over(file), own))
            if plain != file:
                raise StoreError(
                    f"{name} is a database, and its last rows may be in a file beside it. Give its "
                    "path, or the output of `ops export`."
                )
            journal = str(file)
        url = url_of(data_dir, journal)
        lock, sealed = _lock_of(data_dir, journal, url), HeadFiles.of(data_dir, journal).keys
        return cls(journal or str(data_dir), None, url, lock, sealed)

    @property
    def is_export(self) -> bool:
        """Whether the rows come from an export, which may be incomplete."""
        return self._file is not None

    @property
    def is_held(self) -> bool | None:
        """Whether a server uses the journal; None if that cannot be determined."""
        if self._lock is None:
            return None
        try:
            with self._lock.open("rb") as lock:
                # A shared lock, so that two checks do not see each other. It is released at once; a
                # server that starts in that moment tries again (``data_dir.hold``).
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
        The base that replaces pruned rows; None if none were pruned.

        Raises:
            StoreError: it cannot be read.
        """
        if self._file is not None:
            from cairn.journal.rows.export import read_base

            return self._first(read_base, self._file)
        with contextlib.closing(self.open()) as store:
            return store.base()

    def schema_faults(self) -> list[tuple[str, str]]:
        """
        What another program changed in the database of a journal; nothing of an export.

        Raises:
            StoreError: it cannot be read.
        """
        if self._file is not None:
            return []
        with contextlib.closing(self.open()) as store:
            return store.schema_faults()

    def excerpt(self) -> Excerpt | None:
        """
        The first line of one session's export, if rows of its journal were pruned.

        Raises:
            StoreError: it cannot be read.
        """
        from cairn.journal.rows.export import read_excerpt

        return self._first(read_excerpt, self._file) if self._file is not None else None

    def signed_end(self) -> SignedEnd | None:
        """
        What the last line of an export says about checkpoints; None if there is no such line.

        Raises:
            StoreError: it cannot be read.
        """
        from cairn.journal.rows.export import read_checkpoint

        return self._first(read_checkpoint, self._file) if self._file is not None else None

    def _first(self, read: Callable[[Path], First | None], file: Path) -> First | None:
        try:
            return read(file)
        except StoreError as error:
            # An unpacked file has a temporary name.
            raise StoreError(str(error).replace(str(file), self.name)) from error

    def rows(
        self, label: str, *, stream: str | None = None, base: Base | None = None
    ) -> Iterator[Row]:
        """
        The rows in order, with a progress bar.

        Args:
            label: of the progress bar.
            stream: only the rows of this stream.
            base: the result of ``base``, which the caller continues from.

        Raises:
            StoreError: they cannot be read, the base has changed since, or an export has no rows.
        """
        if self._file is not None:
            from cairn.journal.rows.codec import opened
            from cairn.journal.rows.export import read_export

            row = None
            try:
                for row in progress(read_export(self._file), label):
                    if stream in (None, row.stream):
                        yield row if self._sealed is None else opened(row, self._sealed)
            except StoreError as error:
                raise StoreError(str(error).replace(str(self._file), self.name)) from error
            if row is None and base is None:
                # No rows would pass every check; most likely the export failed.
                raise StoreError(
                    f"There are no rows in {self.name}. Check whether `ops export` reported an "
                    "error, and export again."
                )
            return
        with contextlib.closing(self.open()) as store:
            total = None
            if stream is None:
                total = store.head()[0] - (base.position if base is not None else 0)
            yield from progress(store.read(stream=stream), label, total)
            if stream is None and store.base() != base:
                raise StoreError(
                    f"{self.name} was pruned while it was read. Run the command again."
                )

    def sessions(self, base: Base | None) -> set[str]:
        """
        The ids of all sessions of a journal that is not an export, including pruned ones.

        Raises:
            StoreError: it cannot be read.
        """
        from cairn.journal.rows.base import state_of

        with contextlib.closing(self.open()) as store:
            streams = store.streams()
        with contextlib.suppress(ValueError):  # a damaged base does not say what was pruned
            streams |= set(state_of(base).streams) if base is not None else set()
        return {one.removeprefix("session/") for one in streams if one.startswith("session/")}

    def keys_of(self, rows: Iterable[Row]) -> list[Key]:
        """The keys that are here of those that the rows are sealed with, in order of their ids."""
        from cairn.journal.rows.sealing import key_id

        keys = self._sealed if self._file is not None else keys_in(self._keys, self._url)
        wanted = {found for row in rows if (found := key_id(row.private)) is not None}
        held = [keys.get(found) for found in sorted(wanted)] if keys is not None else []
        return [key for key in held if key is not None]

    def opened(self, row: Row) -> Row:
        """A row that a base keeps, opened with the keys that are here."""
        from cairn.journal.rows.codec import opened

        keys = self._sealed if self._file is not None else keys_in(self._keys, self._url)
        return row if keys is None else opened(row, keys)

    def open(self) -> SqlStore:
        """The store, read-only."""
        from cairn.journal.rows.store_sql import SqlStore

        assert self._url is not None
        return SqlStore.open(self._url, read_only=True, keys=keys_in(self._keys, self._url))


def _handed_over(file: Path) -> Keys | None:
    """The keys beside an export, or in a bundle; None if there are none."""
    from cairn.journal.rows.sealing import keys_from_text

    if not file.is_file():
        return None  # standard input, by any name
    beside = keys_beside(file)
    try:
        if beside.exists():
            return keys_from_text(beside.read_bytes())
        if not tarfile.is_tarfile(file):
            return None
        with tarfile.open(file) as bundle:
            member = bundle.extractfile(KEYS_NAME)
            return keys_from_text(member.read()) if member is not None else None
    except KeyError:
        return None
    except (OSError, ValueError, tarfile.TarError) as error:
        raise StoreError(f"The keys of {file} cannot be read: {error}.") from error


def keys_beside(file: Path) -> Path:
    """Where the keys of an export are, if they were handed over with it."""
    return file.with_name(f"{file.name}.keys")


def keys_in(path: Path | None, url: str | None) -> JournalKeys | None:
    """
    The keys of a journal, for a command that changes nothing. None if there are none, or if they
    cannot be used, which is printed once: texts then cannot be read.
    """
    if path is None or url is None:
        return None
    from cairn.actors.journal_keys import read_keys

    context = click.get_current_context(silent=True)
    known: dict[str, JournalKeys | None] = context.meta.setdefault(_KEYS, {}) if context else {}
    if url not in known:
        try:
            known[url] = found = read_keys(path, url)
        except StoreLost:
            raise  # the journal itself cannot be read
        except StoreError as error:
            known[url] = None
            click.echo(f"Texts cannot be read. {error}", err=True)
        else:
            if context is not None and found is not None:
                context.call_on_close(found.close)
    return known[url]


def named(target: str, known: Iterable[str]) -> str | None:
    """
    The id that a target is, or begins; None if there is none.

    Raises:
        StoreError: it begins several ids.
    """
    known = set(known)
    if target in known:
        return target
    if len(target) < PREFIX_MIN:
        return None
    # Clients know a session by its name without the tenant.
    names = sorted(
        name for name in known if name.startswith(target) or session_name(name).startswith(target)
    )
    if len(names) > 1:
        raise StoreError(f"Several ids begin with {target}: {', '.join(names[:5])}.")
    return names[0] if names else None


def too_short_words(target: str) -> str:
    """A hint if an abbreviated id is too short; else an empty text."""
    return f" (give at least {PREFIX_MIN} characters)" if len(target) < PREFIX_MIN else ""


def pruned_words(base: Base | None, stream: str) -> str:
    """A sentence if a stream had pruned rows; else an empty text."""
    if base is None:
        return ""
    from cairn.journal.rows.base import state_of

    try:
        known = stream in state_of(base).streams
    except ValueError:
        return ""
    return f" It was pruned with the rows up to {base.position}." if known else ""


def _lock_of(data_dir: Path, journal: str | None, url: str) -> Path | None:
    """
    The file that the server of a journal locks: in the data directory if the journal is there, else
    beside the journal.
    """
    from cairn.journal.rows.database.urls import sqlite_path

    if journal is None:
        return data_dir / "lock"
    if not url.startswith("sqlite"):
        return None
    path = Path(os.path.realpath(sqlite_path(url)))
    beside = path.with_name(f"{path.name}.lock")
    return beside if beside.exists() else path.with_name("lock")


def _plain(file: Path, name: str) -> Path:
    """
    A file that can be read several times. Standard input, compressed files and the export in a
    bundle are copied to a temporary file, which is deleted when the command ends.
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
        if tarfile.is_tarfile(kept.name):
            with tarfile.open(kept.name) as bundle:
                export = bundle.extractfile(EXPORT_NAME)
                assert export is not None, "a folder has this name"
                kept = _open_copy()
                shutil.copyfileobj(export, kept)
            kept.flush()
    except (KeyError, AssertionError) as error:
        raise StoreError(f"{name} is not a bundle: it has no {EXPORT_NAME}.") from error
    except (OSError, EOFError, zlib.error, tarfile.TarError) as error:
        raise StoreError(f"{name} cannot be read: {error}.") from error
    return Path(kept.name)


def _open_copy() -> IO[bytes]:
    """A temporary file that its owner alone can read, deleted when the command ends."""
    file = tempfile.NamedTemporaryFile(prefix="cairn-")  # noqa: SIM115  # outlives this call
    click.get_current_context().call_on_close(file.close)
    return file


def _begins(path: Path, name: str) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(len(_SQLITE))
    except OSError as error:
        raise StoreError(f"{name} cannot be read: {error.strerror}.") from error
