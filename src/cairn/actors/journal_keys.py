"""
The keys of a journal's private fields: a small database beside the journal, and in no export.

1. Each key is wrapped by the *journal key*, which is in a file of its own and may be on another
   disk. The database says where that file was last.
2. A key is stored before a row that it seals: ``SqlStore`` calls ``commit`` before its own.
3. A removed key is overwritten (``secure_delete``), in SQLite's rollback journal too. That reaches
   neither backups nor what a disk keeps of overwritten blocks.
4. The database counts the keys that it ever got and lost, so that an older copy of it is found out:
   a snapshot of the journal has the counts of its time.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import sqlite3
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

from cryptography.hazmat.primitives.keywrap import InvalidUnwrap, aes_key_unwrap, aes_key_wrap

from cairn.journal.errors import StoreError, StoreFull, StoreLocked, StoreStarved
from cairn.journal.rows.sealing import KEY_BYTES, Key

_CACHED = 4096
BUSY_S = 5.0
"""How long a lock of another program is waited for, at a time."""
_LEAST_ROOM = 64 * 1024
_KNOWN = bytes(KEY_BYTES)
"""What is wrapped to recognize the journal key."""
_SCHEMA = """
CREATE TABLE IF NOT EXISTS keys (id TEXT PRIMARY KEY, subject TEXT NOT NULL, wrapped BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS keys_subject ON keys (subject);
CREATE TABLE IF NOT EXISTS wrapped_by (known BLOB NOT NULL, place TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS counts (made INTEGER NOT NULL, removed INTEGER NOT NULL);
"""


class KeyFile:
    """
    The keys of one journal. ``get`` and ``key_of`` are for any thread, ``commit`` for the one that
    writes the journal.

    Attributes:
        is_new: whether it was not ``confirm``ed before, so that it has no key of an earlier row.
    """

    def __init__(
        self, connection: sqlite3.Connection, path: Path, journal_key: bytes, place: str | None
    ) -> None:
        """
        Args:
            place: of the file with the journal key, to be stored by ``confirm``; None if it is.
        """
        self.is_new = place is not None
        self._place = place
        self._connection = connection
        self._path = path
        self._journal_key = journal_key
        self._lock = threading.Lock()
        self._by_id: dict[str, Key] = {}
        self._by_subject: dict[str, Key] = {}
        self._new: list[tuple[str, Key]] = []

    @classmethod
    def open(cls, path: Path, journal_key: Path | None = None) -> KeyFile:
        """
        Open the keys for a server, and make what is missing at its first start. They are new until
        ``confirm`` says that they fit the journal.

        Args:
            path: of the database.
            journal_key: the file with the journal key; None for the last one, or ``journal-key``
                beside the database.

        Raises:
            StoreError: the journal key is missing or another one, or a file cannot be used.
        """
        with _errors(path):
            connection = _connected(path, read_only=False)
            try:
                connection.executescript(_SCHEMA)
                known = connection.execute("SELECT known, place FROM wrapped_by").fetchone()
                place = _place_of(path, known, journal_key)
                secret = _secret_of(place, path, may_make=known is None)
                # A data directory may be moved as a whole.
                named = place.name if place.parent == path.absolute().parent else str(place)
                if known is not None:
                    _require(secret, known[0], place, path)
                    connection.execute("UPDATE wrapped_by SET place = ?", (named,))
                    connection.commit()
            except BaseException:
                connection.close()
                raise
        return cls(connection, path, secret, named if known is None else None)

    @classmethod
    def read(cls, path: Path) -> KeyFile | None:
        """
        Open the keys for a command that changes nothing; None if there are none.

        Raises:
            StoreError: the journal key is missing or another one, or a file cannot be read.
        """
        if not path.exists():
            return None
        with _errors(path):
            connection = _connected(path, read_only=True)
            try:
                known = connection.execute("SELECT known, place FROM wrapped_by").fetchone()
                if known is None:
                    raise StoreError(f"{path} is not complete; start the server once.")
                place = _place_of(path, known, None)
                secret = _secret_of(place, path, may_make=False)
                _require(secret, known[0], place, path)
            except BaseException:
                connection.close()
                raise
        return cls(connection, path, secret, None)

    def confirm(self) -> None:
        """
        Say that the keys fit the journal. Until then, or until one is stored, the next start takes
        them for new.
        """
        with self._lock, _errors(self._path):
            with self._connection:
                self._confirm()
            self._place = None

    def _confirm(self) -> None:
        """As ``confirm``, within a transaction. ``_place`` goes once that is committed."""
        if self._place is None:
            return
        wrapped = aes_key_wrap(self._journal_key, _KNOWN)
        self._connection.execute("INSERT INTO wrapped_by VALUES (?, ?)", (wrapped, self._place))
        self._connection.execute("INSERT INTO counts VALUES (0, 0)")

    def counts(self) -> tuple[int, int]:
        """How many keys were ever stored, and removed."""
        with self._lock, _errors(self._path):
            row = self._connection.execute("SELECT made, removed FROM counts").fetchone()
            return row or (0, 0)

    def close(self) -> None:
        """Close the database."""
        self._connection.close()

    def get(self, key_id: str) -> Key | None:
        """See ``sealing.Keys``."""
        with self._lock:
            found = self._by_id.get(key_id)
            if found is None:
                query = "SELECT wrapped FROM keys WHERE id = ?"
                found = self._found(query, key_id)
            return found

    def key_of(self, subject: str) -> Key:
        """The key of a subject; a new one, which the next ``commit`` stores, if it has none."""
        with self._lock:
            found = self._by_subject.get(subject)
            if found is None:
                query = "SELECT wrapped FROM keys WHERE subject = ?"
                found = self._found(query, subject)
                if found is None:
                    found = Key(secrets.token_bytes(KEY_BYTES))
                    self._new.append((subject, found))
                self._forget_some()
                self._by_subject[subject] = self._by_id[found.id] = found
            return found

    def commit(self) -> None:
        """
        Store the new keys. Does nothing if there are none.

        Raises:
            StoreUnready: there is no room now, or another program has locked the database.
            StoreError: it cannot be written.
        """
        with self._lock:
            if not self._new:
                return
            values = [
                (key.id, subject, aes_key_wrap(self._journal_key, key.secret))
                for subject, key in self._new
            ]
            with _errors(self._path), self._connection:
                self._confirm()
                self._connection.executemany("INSERT INTO keys VALUES (?, ?, ?)", values)
                self._connection.execute("UPDATE counts SET made = made + ?", (len(values),))
            self._place = None
            self._new.clear()

    def subjects(self) -> set[str]:
        """Those that have a stored key."""
        with self._lock, _errors(self._path):
            return {of for (of,) in self._connection.execute("SELECT subject FROM keys")}

    def ids_of(self, subject: str) -> tuple[str, ...]:
        """The ids of a subject's keys, stored or new."""
        with self._lock, _errors(self._path):
            return tuple(sorted({*self._stored(subject), *self._new_of(subject)}))

    def _stored(self, subject: str) -> set[str]:
        rows = self._connection.execute("SELECT id FROM keys WHERE subject = ?", (subject,))
        return {key_id for (key_id,) in rows}

    def _new_of(self, subject: str) -> set[str]:
        return {key.id for of, key in self._new if of == subject}

    def remove(self, subject: str, key_ids: Iterable[str]) -> int:
        """
        Remove keys for good; returns how many were there. What they sealed is unreadable.

        Args:
            subject: whose they are. Those of others stay, whatever a row says.
        """
        with self._lock, _errors(self._path):
            held = {*self._stored(subject), *self._new_of(subject)}
            if not (gone := held.intersection(key_ids)):
                return 0  # a start asks for each session that was ever forgotten
            # The rollback journal has the key, and stays until it is overwritten.
            self._connection.execute("PRAGMA journal_mode = PERSIST")
            try:
                with self._connection:
                    removed = sum(
                        self._connection.execute(
                            "DELETE FROM keys WHERE id = ?", (key_id,)
                        ).rowcount
                        for key_id in sorted(gone)
                    )
                    self._connection.execute("UPDATE counts SET removed = removed + ?", (removed,))
            finally:
                overwrite(self._path.with_name(f"{self._path.name}-journal"))
                self._connection.execute("PRAGMA journal_mode = DELETE")
            self._new = [(of, key) for of, key in self._new if key.id not in gone]
            self._by_id = {name: key for name, key in self._by_id.items() if name not in gone}
            self._by_subject = {
                of: key for of, key in self._by_subject.items() if key.id not in gone
            }
            return removed

    def _found(self, query: str, name: str) -> Key | None:
        with _errors(self._path):
            row = self._connection.execute(query, (name,)).fetchone()
        if row is None:
            return None
        try:
            key = Key(aes_key_unwrap(self._journal_key, row[0]))
        except (InvalidUnwrap, ValueError) as error:
            raise StoreError(
                f"A key in {self._path} is damaged. Restore the file from a backup."
            ) from error
        self._forget_some()
        self._by_id[key.id] = key
        return key

    def _forget_some(self) -> None:
        """Keep the caches small. New keys stay until they are stored."""
        if len(self._by_id) < _CACHED:
            return
        self._by_id = {key.id: key for _, key in self._new}
        self._by_subject = dict(self._new)


def _connected(path: Path, *, read_only: bool) -> sqlite3.Connection:
    if not read_only:
        # Created first, so that it never has another mode.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    connection = sqlite3.connect(
        f"{path.absolute().as_uri()}?mode={'ro' if read_only else 'rw'}",
        uri=True,
        check_same_thread=False,
        timeout=BUSY_S,
    )
    if not read_only:
        connection.execute("PRAGMA journal_mode = DELETE")
        connection.execute("PRAGMA synchronous = EXTRA")
        connection.execute("PRAGMA secure_delete = ON")
    return connection


def overwrite(path: Path) -> None:
    """Fill a file with zeros. Does nothing if there is none."""
    with contextlib.suppress(FileNotFoundError), path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))
        file.flush()
        os.fsync(file.fileno())


def _place_of(path: Path, known: tuple[bytes, str] | None, named: Path | None) -> Path:
    """Where the journal key is: as the operator says, else where it was last, else the default."""
    if named is not None:
        return named.absolute()
    return path.absolute().parent / (known[1] if known is not None else "journal-key")


def _secret_of(place: Path, path: Path, *, may_make: bool) -> bytes:
    """The journal key in a file, which is made at the first start."""
    try:
        if may_make and not place.exists():
            _write_secret(place)
        secret = place.read_bytes()
    except FileNotFoundError as error:
        raise StoreError(
            f"The journal key {place} is missing, and without it the keys in {path} cannot be "
            "used. Restore it from a backup, or name the file with --journal-key."
        ) from error
    except OSError as error:
        raise StoreError(f"The journal key {place} cannot be used: {error.strerror}.") from error
    if len(secret) != KEY_BYTES:
        raise StoreError(
            f"The journal key {place} is damaged: it has {len(secret)} bytes instead of "
            f"{KEY_BYTES}. Restore it from a backup."
        )
    return secret


def _write_secret(place: Path) -> None:
    draft = place.with_name(f"{place.name}.new")
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(secrets.token_bytes(KEY_BYTES))
        file.flush()
        os.fsync(file.fileno())
    draft.rename(place)
    folder = os.open(place.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # before a key that it wraps is stored
    finally:
        os.close(folder)


def _require(secret: bytes, known: bytes, place: Path, path: Path) -> None:
    try:
        if aes_key_unwrap(secret, known) == _KNOWN:
            return
    except (InvalidUnwrap, ValueError):
        pass
    raise StoreError(
        f"{place} is not the journal key of {path}. Restore the one that belongs to it from a "
        "backup, or name it with --journal-key."
    )


def _has_room(path: Path) -> bool:
    try:
        return shutil.disk_usage(path.parent).free >= _LEAST_ROOM
    except OSError:
        return True


def _has_descriptors() -> bool:
    """Whether this process may open a file."""
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        return error.errno not in (errno.EMFILE, errno.ENFILE)
    return True


@contextlib.contextmanager
def _errors(path: Path) -> Iterator[None]:
    """Raise what SQLite reports as an error of a store."""
    try:
        yield
    except sqlite3.Error as error:
        words = f"The keys {path} cannot be used: {error}."
        full = f"{words} Free some space on its disk; what was journaled before is safe."
        code = getattr(error, "sqlite_errorcode", None)
        kind = code & 0xFF if code is not None else None
        # If the files next to it cannot grow, SQLite reports another error.
        beside = kind in (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN) and not _has_room(path)
        if kind == sqlite3.SQLITE_FULL or beside:
            raise StoreFull(full) from error
        if kind in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            raise StoreLocked(words) from error
        if kind == sqlite3.SQLITE_CANTOPEN and not _has_descriptors():
            raise StoreStarved(words) from error
        raise StoreError(words) from error
    except OSError as error:
        raise StoreError(f"The keys {path} cannot be used: {error.strerror}.") from error
