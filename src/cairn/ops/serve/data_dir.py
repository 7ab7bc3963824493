"""A server's data directory: private, and locked by one server at a time, like its journal."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import attrs

from cairn.ops.cli import Unreadable

_SECRET_BYTES = 32
_ATTEMPTS = 10
_BETWEEN_S = 0.02
_SERVER = "serve"


def make_home(data_dir: Path) -> None:
    """
    Create the data directory, readable by its owner alone.

    Raises:
        Unreadable: it cannot be created, or its mode cannot be set.
    """
    try:
        data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        data_dir.chmod(0o700)
    except OSError as error:
        raise Unreadable(
            f"The data directory {data_dir} cannot be used: {error.strerror}. "
            "Choose another with --data-dir."
        ) from error


class Held:
    """A lock that this process has. Its file tells other processes who has it."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file

    def record_address(self, address: str) -> None:
        """Add the server's address to the file. Does nothing if the disk is full."""
        with contextlib.suppress(OSError):
            self._file.write(f" {address}")
            self._file.flush()


@attrs.frozen
class Holder:
    """
    The process that has a lock, as its file says.

    Attributes:
        process: its id, as text; ``unknown`` if the file does not say.
        who: the command.
        address: a server's address; None if the file does not say.
    """

    process: str
    who: str
    address: str | None

    @classmethod
    def of(cls, text: str) -> Holder:
        """Parse the text of a lock file."""
        process, _, who = text.strip().partition(" ")
        name, _, address = who.partition(" ")
        if name in ("", _SERVER):
            return cls(process or "unknown", _SERVER, address or None)
        return cls(process, who, None)


def server_at(data_dir: Path) -> Holder | None:
    """
    The server that uses a data directory; None if there is none.

    Raises:
        Unreadable: the lock cannot be read.
    """
    lock = data_dir / "lock"
    try:
        with lock.open() as file:
            if _taken(file, fcntl.LOCK_SH):
                return None
            holder = Holder.of(file.read())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise Unreadable(
            f"{lock} cannot be read: {error.strerror}. Check who owns the directory, or choose "
            "another with --data-dir."
        ) from error
    return holder if holder.who == _SERVER else None


def server_of(data_dir: Path, url: str) -> Holder | None:
    """
    The server that uses both a data directory and an SQLite journal; None if none does.

    Raises:
        Unreadable: a lock cannot be read.
    """
    holder = server_at(data_dir)
    if holder is None or not url.startswith("sqlite"):
        return None
    lock = _lock_of(url)
    try:
        with lock.open() as file:
            if _taken(file, fcntl.LOCK_SH):
                return None
            writes = Holder.of(file.read())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise Unreadable(
            f"{lock} cannot be read: {error.strerror}. Check who owns the directory."
        ) from error
    return holder if writes.process == holder.process else None


def _file_of(url: str) -> Path:
    """The file of an SQLite journal, by its own path."""
    from cairn.journal.rows.database.urls import (
        sqlite_path,  # SQLAlchemy, which few commands need
    )

    return Path(os.path.realpath(sqlite_path(url)))


def _is_of_node(url: str) -> bool:
    """Whether a journal is a node's, which a server with another data directory cannot serve."""
    from cairn.journal.rows.database.urls import node_of

    return node_of(url) is not None


def _lock_of(url: str) -> Path:
    """The file that the server of an SQLite journal locks, beside it, by whatever path it is."""
    journal = _file_of(url)
    return journal.with_name(f"{journal.name}.lock")


@contextlib.contextmanager
def hold(data_dir: Path, url: str) -> Iterator[Held]:
    """
    Lock the data directory and the journal while the context lasts.

    An SQLite journal is locked by a file beside it, because a server with another data directory
    may use the same journal. A journal on PostgreSQL is locked by the connection that writes
    (``database.postgres``).

    Raises:
        Unreadable: another process has one of the locks, or they cannot be written.
    """
    other = "or choose another directory with --data-dir"
    if _is_of_node(url):
        other = "or, if it does not answer, kill its process"
    with hold_directory(data_dir, other, who=_SERVER) as held, hold_journal(url, who=_SERVER):
        yield held


@contextlib.contextmanager
def hold_directory(data_dir: Path, other: str, *, who: str) -> Iterator[Held]:
    """
    Lock the data directory, whichever journal its server writes. See ``hold``.

    Args:
        other: what the operator can do instead of stopping the process that has the lock.
        who: this command.
    """
    with _locked(data_dir / "lock", data_dir, other, who) as held:
        yield held


@contextlib.contextmanager
def hold_journal(
    url: str, other: str = "or choose another journal with --journal", *, who: str
) -> Iterator[None]:
    """
    Lock the journal, wherever the server's data directory is. See ``hold``.

    Args:
        other: what the operator can do instead of stopping the process that has the lock.
        who: this command.
    """
    if not url.startswith("sqlite"):
        yield
        return
    journal = _file_of(url)
    _check_one_name(journal)
    with _locked(_lock_of(url), journal, other, who):
        yield


def _check_one_name(journal: Path) -> None:
    """
    Refuse a file that has several names (hard links). The lock is beside one of them, and SQLite
    keeps its log beside the name by which it opened the file: servers that use two of the names
    would each write a log for the same file, and damage it.

    Raises:
        Unreadable: there is another name.
    """
    try:
        links = journal.stat().st_nlink
    except OSError:
        return  # does not exist yet, or the next step says why it cannot be used
    if links > 1:
        raise Unreadable(
            f"{journal} has {links} names (hard links), and servers that use two of them would "
            "damage it. Keep one: remove the other links, or copy the journal and use the copy."
        )


@contextlib.contextmanager
def _locked(lock: Path, what: Path, other: str, who: str) -> Iterator[Held]:
    try:
        lock.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        file = os.fdopen(os.open(lock, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600), "a+")
        with contextlib.suppress(OSError):  # one of an earlier version that belongs to another user
            os.fchmod(file.fileno(), 0o600)
    except OSError as error:
        raise Unreadable(
            f"{lock} cannot be written: {error.strerror}. Check who owns the directory, {other}."
        ) from error
    with _closed(file):
        if not _taken(file):
            file.seek(0)
            raise Unreadable(_taken_words(file.read(), who, what, other))
        try:
            file.truncate(0)
            file.write(f"{os.getpid()} {who}")
            file.flush()
        except OSError as error:
            raise Unreadable(
                f"{lock} cannot be written: {error.strerror}. Free some space on its disk, {other}."
            ) from error
        yield Held(file)


@contextlib.contextmanager
def _closed(file: IO[str]) -> Iterator[None]:
    """Close a file when the context ends, without an error for what could not be written."""
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            file.close()


def _taken_words(text: str, who: str, what: Path, other: str) -> str:
    """
    Which process has a lock, and what to do.

    Args:
        text: of the lock's file.
        who: this command.
    """
    holder = Holder.of(text)
    if holder.who == _SERVER:
        server = "Another server" if who == _SERVER else "A server"
        where = f" and answers at {holder.address}" if holder.address else ""
        return f"{server} (process {holder.process}) uses {what}{where}. Stop it, {other}."
    return (
        f"`ops {holder.who}` (process {holder.process}) works on {what}. Wait until it ends, "
        f"{other}."
    )


def _taken(file: IO[str], kind: int = fcntl.LOCK_EX) -> bool:
    """
    Try to take a lock; returns whether that worked. Tries again for a moment, because a command
    that checks for a running server takes the lock briefly (``Source.is_held``).
    """
    for attempt in range(_ATTEMPTS):
        if attempt:
            time.sleep(_BETWEEN_S)
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        return True
    return False


def root_secret(data_dir: Path) -> bytes:
    """
    The secret that the tenants' secrets derive from, which name blocks and parts of conversations;
    created at first use.

    Raises:
        Unreadable: the file is damaged, or cannot be written.
    """
    path = data_dir / "secret"
    if not path.exists():
        try:
            _write_secret(path)
        except OSError as error:
            raise Unreadable(
                f"{path} cannot be written: {error.strerror}. Check the free space on its disk, "
                "and who owns the directory."
            ) from error
    secret = path.read_bytes()
    if len(secret) != _SECRET_BYTES:
        raise Unreadable(
            f"{path} is damaged: it has {len(secret)} bytes instead of {_SECRET_BYTES}. Restore it "
            "from a backup; without it, nothing that was computed earlier can be reused."
        )
    return secret


def _write_secret(path: Path) -> None:
    draft = path.with_name("secret.new")
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(secrets.token_bytes(_SECRET_BYTES))
        file.flush()
        os.fsync(file.fileno())
    draft.rename(path)
