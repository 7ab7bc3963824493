"""
The data directory of a server: made once, private, held by one server at a time, as is its journal.
"""

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

from cairn.journal.store_sql import sqlite_path
from cairn.ops.cli import Unreadable

_SECRET_BYTES = 32
_ATTEMPTS = 10
_BETWEEN_S = 0.02
_SERVER = "serve"


def make_home(data_dir: Path) -> None:
    """
    Make the data directory, readable by its owner alone.

    Raises:
        Unreadable: it cannot be made, or belongs to something else.
    """
    try:
        data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        data_dir.chmod(0o700)
    except OSError as error:
        raise Unreadable(
            f"The data directory {data_dir} cannot be used: {error.strerror}. "
            "Name another with --data-dir."
        ) from error


class Held:
    """A lock that is held, and what others read in its file."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file

    def answers_at(self, address: str) -> None:
        """
        Say where the server answers that holds it. It is others who want to know, so nothing comes
        of a disk that has no room for it.
        """
        with contextlib.suppress(OSError):
            self._file.write(f" {address}")
            self._file.flush()


@attrs.frozen
class Holder:
    """
    Who holds a lock, by what is in its file.

    Attributes:
        process: its id, as text; ``unknown`` where it is not told.
        who: the command.
        address: of a server, where it answers; None where it is not told.
    """

    process: str
    who: str
    address: str | None

    @classmethod
    def of(cls, text: str) -> Holder:
        """Parse the text of a lock file."""
        process, _, who = text.strip().partition(" ")
        # Other commands are of several words.
        name, _, address = who.partition(" ")
        if name in ("", _SERVER):
            return cls(process or "unknown", _SERVER, address or None)
        return cls(process, who, None)


def server_at(data_dir: Path) -> Holder | None:
    """
    The server that holds a data directory; None where none does.

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
            f"{lock} cannot be read: {error.strerror}. Check who owns the folder, or name another "
            "with --data-dir."
        ) from error
    return holder if holder.who == _SERVER else None


@contextlib.contextmanager
def hold(data_dir: Path, url: str) -> Iterator[Held]:
    """
    Hold the data directory and the journal against other servers while the context lasts.

    A journal in SQLite is held by a file beside it, since a server with another data directory may
    be pointed at it. One in PostgreSQL is not held: the lock would have to be the database's own,
    on the store's connection. There, who starts two servers on one database has to know better.

    Raises:
        Unreadable: another server holds one of them, or they cannot be locked.
    """
    other = "or name another directory with --data-dir"
    with hold_directory(data_dir, other, who=_SERVER) as held, hold_journal(url, who=_SERVER):
        yield held


@contextlib.contextmanager
def hold_directory(data_dir: Path, other: str, *, who: str) -> Iterator[Held]:
    """
    Hold the data directory alone, whatever journal its server writes. See ``hold``.

    Args:
        other: what else can be done, than to stop the server that holds it.
        who: the command that holds it.
    """
    with _locked(data_dir / "lock", data_dir, other, who) as held:
        yield held


@contextlib.contextmanager
def hold_journal(
    url: str, other: str = "or name another journal with --journal", *, who: str
) -> Iterator[None]:
    """
    Hold the journal alone, wherever the server's data directory is. See ``hold``.

    Args:
        other: what else can be done, than to stop the server that holds it.
        who: the command that holds it, for whom it keeps out.
    """
    if not url.startswith("sqlite"):
        yield
        return
    # Whatever path leads there, it is one file.
    journal = Path(os.path.realpath(sqlite_path(url)))
    with _locked(journal.with_name(f"{journal.name}.lock"), journal, other, who):
        yield


@contextlib.contextmanager
def _locked(lock: Path, what: Path, other: str, who: str) -> Iterator[Held]:
    try:
        lock.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        file = lock.open("a+")
    except OSError as error:
        raise Unreadable(
            f"{lock} cannot be written: {error.strerror}. Check who owns the folder, {other}."
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
    """Close a file in the end. What could not be written to it before is not tried again."""
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            file.close()


def _taken_words(held: str, asks: str, what: Path, other: str) -> str:
    """
    Who holds a lock, by what is in its file, and what to do.

    Args:
        asks: the command that wants it.
    """
    holder = Holder.of(held)
    if holder.who == _SERVER:
        server = "Another server" if asks == _SERVER else "A server"
        where = f" and answers at {holder.address}" if holder.address else ""
        return f"{server} (process {holder.process}) uses {what}{where}. Stop it, {other}."
    return (
        f"`ops {holder.who}` (process {holder.process}) works on {what}. Wait until it ends, "
        f"{other}."
    )


def _taken(file: IO[str], kind: int = fcntl.LOCK_EX) -> bool:
    """
    Whether the lock could be had. Who looks whether a server runs holds it for a moment
    (``Source.is_held``), so that a lock that is held is asked for again before it counts as held.
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
    The secret of which the tenants' follow, under which blocks and parts of conversations get their
    names; made at first use.

    Raises:
        Unreadable: the file is damaged.
    """
    path = data_dir / "secret"
    if not path.exists():
        try:
            _write_secret(path)
        except OSError as error:
            raise Unreadable(
                f"{path} cannot be written: {error.strerror}. Check the space on its disk and who "
                "owns the folder."
            ) from error
    secret = path.read_bytes()
    if len(secret) != _SECRET_BYTES:
        raise Unreadable(
            f"{path} is damaged: it has {len(secret)} bytes instead of {_SECRET_BYTES}. Put it "
            "back from a copy; without it nothing that was computed before can be reused."
        )
    return secret


def _write_secret(path: Path) -> None:
    draft = path.with_name("secret.new")
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(secrets.token_bytes(_SECRET_BYTES))
        file.flush()
        os.fsync(file.fileno())
    draft.rename(path)
