"""
The keys of a journal's private fields: a small database beside the journal, or tables beside that
of a node; and in no export.

1. Each key is wrapped by the *journal key*, which is in a file of its own and may be on another
   disk. The database says where that file was last.
2. A key is stored before a row that it seals: ``SqlStore`` calls ``commit`` before its own.
3. A removed key is overwritten (``secure_delete``), in SQLite's rollback journal too. That reaches
   neither backups nor what a disk keeps of overwritten blocks. PostgreSQL overwrites nothing.
4. The database counts the keys that it ever got and lost, so that an older copy of it is found out:
   a snapshot of the journal has the counts of its time.
"""

from __future__ import annotations

import abc
import contextlib
import errno
import hashlib
import hmac
import os
import secrets
import shutil
import sqlite3
import threading
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import attrs
from cryptography.hazmat.primitives.keywrap import InvalidUnwrap, aes_key_unwrap, aes_key_wrap

from cairn.journal.errors import StoreError, StoreFull, StoreLocked, StoreStarved
from cairn.journal.rows.sealing import KEY_BYTES, Key, Within

if TYPE_CHECKING:
    from cairn.journal.rows.database.key_table import Entry, OtherNode

_CACHED = 4096
BUSY_S = 5.0
"""How long a lock of another program is waited for, at a time."""
_LEAST_ROOM = 64 * 1024
_KNOWN = bytes(KEY_BYTES)
"""What is wrapped to recognize the journal key."""
_OF_SECRET = b"cairn secret of a fleet"
"""What is authenticated to recognize the secret."""
_SCHEMA = """
CREATE TABLE IF NOT EXISTS keys (id TEXT PRIMARY KEY, subject TEXT NOT NULL, wrapped BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS keys_subject ON keys (subject);
CREATE TABLE IF NOT EXISTS wrapped_by (known BLOB NOT NULL, place TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS counts (made INTEGER NOT NULL, removed INTEGER NOT NULL);
"""


class JournalKeys(abc.ABC):
    """
    The keys of one journal. ``get`` and ``key_of`` are for any thread, ``commit`` for the one that
    writes the journal.

    Attributes:
        is_new: whether they were not ``confirm``ed before, so that there is none of an earlier row.
        left_in: where a removed key can still be, for people.
    """

    left_in: ClassVar[str]

    def __init__(self, journal_key: bytes, named: str | None, name: str) -> None:
        """
        Args:
            named: the file with the journal key, to be stored by ``confirm``; None if it is.
            name: of the keys, for people.
        """
        self.is_new = named is not None
        self._named = named
        self._name = name
        self._journal_key = journal_key
        self._lock = threading.Lock()
        self._by_id: dict[str, Key] = {}
        self._by_subject: dict[str, Key] = {}
        self._new: list[tuple[str, Key]] = []

    @abc.abstractmethod
    def confirm(self) -> None:
        """
        Say that the keys fit the journal. Until then, or until one is stored, the next start takes
        them for new.
        """

    @abc.abstractmethod
    def counts(self) -> tuple[int, int]:
        """How many keys were ever stored, and removed."""

    @abc.abstractmethod
    def close(self) -> None:
        """Close the database."""

    def get(self, key_id: str) -> Key | None:
        """See ``sealing.Keys``."""
        with self._lock:
            found = self._by_id.get(key_id)
            return found if found is not None else self._opened(self._wrapped_of(key_id))

    def key_of(self, subject: str) -> Key:
        """The key of a subject; a new one, which the next ``commit`` stores, if it has none."""
        with self._lock:
            found = self._by_subject.get(subject)
            if found is None:
                found = self._opened(self._wrapped_for(subject))
                if found is None:
                    found = Key(secrets.token_bytes(KEY_BYTES))
                    self._new.append((subject, found))
                self._forget_some()
                self._by_subject[subject] = self._by_id[found.id] = found
            return found

    @abc.abstractmethod
    def commit(self, within: Within | None = None) -> None:
        """
        Store the new keys. Does nothing if there are none.

        Args:
            within: see ``sealing.Within``.

        Raises:
            StoreUnready: there is no room now, or another program has locked the database.
            StoreError: it cannot be written.
        """

    @abc.abstractmethod
    def subjects(self) -> set[str]:
        """Those that have a stored key."""

    def ids_of(self, subject: str) -> tuple[str, ...]:
        """The ids of a subject's keys, stored or new."""
        with self._lock:
            return tuple(sorted({*self._stored(subject), *self._new_of(subject)}))

    def _new_of(self, subject: str) -> set[str]:
        return {key.id for of, key in self._new if of == subject}

    @abc.abstractmethod
    def remove(self, subject: str, key_ids: Iterable[str]) -> int:
        """
        Remove keys for good; returns how many were there. What they sealed is unreadable.

        Args:
            subject: whose they are. Those of others stay, whatever a row says.
        """

    # Called with the lock.

    @abc.abstractmethod
    def _stored(self, subject: str) -> set[str]:
        """The ids of a subject's stored keys."""

    @abc.abstractmethod
    def _wrapped_of(self, key_id: str) -> bytes | None:
        """A stored key, wrapped."""

    @abc.abstractmethod
    def _wrapped_for(self, subject: str) -> bytes | None:
        """A stored key of a subject, wrapped."""

    def _wrap_new(self) -> list[tuple[str, str, bytes]]:
        return [
            (key.id, subject, aes_key_wrap(self._journal_key, key.secret))
            for subject, key in self._new
        ]

    def _opened(self, wrapped: bytes | None) -> Key | None:
        if wrapped is None:
            return None
        try:
            key = Key(aes_key_unwrap(self._journal_key, wrapped))
        except (InvalidUnwrap, ValueError) as error:
            raise StoreError(
                f"A key in {self._name} is damaged. Restore it from a backup."
            ) from error
        self._forget_some()
        self._by_id[key.id] = key
        return key

    def _drop(self, gone: Collection[str]) -> None:
        """Keep no copy of keys that were removed."""
        self._new = [(of, key) for of, key in self._new if key.id not in gone]
        self._by_id = {name: key for name, key in self._by_id.items() if name not in gone}
        self._by_subject = {of: key for of, key in self._by_subject.items() if key.id not in gone}

    def _forget_some(self) -> None:
        """Keep the caches small. New keys stay until they are stored."""
        if len(self._by_id) < _CACHED:
            return
        self._by_id = {key.id: key for _, key in self._new}
        self._by_subject = dict(self._new)


class KeyFile(JournalKeys):
    """Keys in a file of the data directory. See ``JournalKeys``."""

    left_in = "with a backup of keys.db"

    def __init__(
        self, connection: sqlite3.Connection, path: Path, journal_key: bytes, named: str | None
    ) -> None:
        super().__init__(journal_key, named, str(path))
        self._connection = connection
        self._path = path

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
                secret = _secret_of(place, str(path), may_make=known is None)
                named = _named(place, path)
                if known is not None:
                    _require(secret, known[0], place, str(path))
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
                secret = _secret_of(place, str(path), may_make=False)
                _require(secret, known[0], place, str(path))
            except BaseException:
                connection.close()
                raise
        return cls(connection, path, secret, None)

    def confirm(self) -> None:
        """See ``JournalKeys.confirm``."""
        with self._lock, _errors(self._path):
            with self._connection:
                self._confirm()
            self._named = None

    def _confirm(self) -> None:
        """As ``confirm``, within a transaction. ``_named`` goes once that is committed."""
        if self._named is None:
            return
        wrapped = aes_key_wrap(self._journal_key, _KNOWN)
        self._connection.execute("INSERT INTO wrapped_by VALUES (?, ?)", (wrapped, self._named))
        self._connection.execute("INSERT INTO counts VALUES (0, 0)")

    def counts(self) -> tuple[int, int]:
        """See ``JournalKeys.counts``."""
        with self._lock, _errors(self._path):
            row = self._connection.execute("SELECT made, removed FROM counts").fetchone()
            return row or (0, 0)

    def close(self) -> None:
        """See ``JournalKeys.close``."""
        self._connection.close()

    def commit(self, within: Within | None = None) -> None:
        """See ``JournalKeys.commit``. The file is no part of the journal's transaction."""
        with self._lock:
            if not self._new:
                return
            values = self._wrap_new()
            with _errors(self._path), self._connection:
                self._confirm()
                self._connection.executemany("INSERT INTO keys VALUES (?, ?, ?)", values)
                self._connection.execute("UPDATE counts SET made = made + ?", (len(values),))
            self._named = None
            self._new.clear()

    def subjects(self) -> set[str]:
        """See ``JournalKeys.subjects``."""
        with self._lock, _errors(self._path):
            return {of for (of,) in self._connection.execute("SELECT subject FROM keys")}

    def _stored(self, subject: str) -> set[str]:
        with _errors(self._path):
            rows = self._connection.execute("SELECT id FROM keys WHERE subject = ?", (subject,))
            return {key_id for (key_id,) in rows}

    def remove(self, subject: str, key_ids: Iterable[str]) -> int:
        """See ``JournalKeys.remove``."""
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
            self._drop(gone)
            return removed

    def _wrapped_of(self, key_id: str) -> bytes | None:
        return self._found("SELECT wrapped FROM keys WHERE id = ?", key_id)

    def _wrapped_for(self, subject: str) -> bytes | None:
        return self._found("SELECT wrapped FROM keys WHERE subject = ?", subject)

    def _found(self, query: str, name: str) -> bytes | None:
        with _errors(self._path):
            row = self._connection.execute(query, (name,)).fetchone()
        return row[0] if row is not None else None


class KeyTable(JournalKeys):
    """
    Keys of a node, in tables of its journal (``journal/rows/database/key_table.py``). See
    ``JournalKeys``.

    All of them are read at the first use and stay in memory, wrapped, so that no request waits for
    the database, nor fails because it is stopped.
    """

    left_in = (
        "with a backup or a replica of the database, or what it keeps of removed rows and in its "
        "write-ahead log"
    )

    def __init__(
        self,
        url: str,
        name: str,
        journal_key: bytes,
        named: str | None,
        *,
        is_new: bool,
        secret: _Secret | None = None,
    ) -> None:
        """
        Args:
            url: of the journal.
            named: the file with the journal key, for a server; None for a reader, which finds keys
                that the server stores meanwhile.
            secret: of the data directory, for a server; None for a command that serves nothing.
        """
        super().__init__(journal_key, named, name)
        self.is_new = is_new
        self._url = url
        self._follows = named is None
        self._secret = secret
        self._wrapped: dict[str, bytes] | None = None  # by id
        self._ids: dict[str, tuple[str, ...]] = {}  # by subject
        self._counts = (0, 0)

    @classmethod
    def open(
        cls, url: str, path: Path, journal_key: Path | None = None, secret: bytes | None = None
    ) -> KeyTable:
        """
        Open the keys of a node for its server. As ``KeyFile.open``; changes nothing in the database
        before ``confirm``.

        Args:
            url: of the journal, whose tables exist.
            path: where a file of keys would be.
            secret: as for ``open_keys``.

        Raises:
            StoreError: the journal key is missing or another one, other nodes have another one or
                another secret, or the database cannot be reached.
        """
        from cairn.journal.rows.database import connections, key_table, urls

        name = f"the journal {urls.place_of(url)}"
        known = connections.in_database(url, "read", key_table.entry)
        place = cls._place(path, known, journal_key)
        others = connections.in_database(url, "read", key_table.of_other_nodes)
        own = _Secret(path.parent / "secret", _mac(secret)) if secret is not None else None
        if known is None:
            if others and not place.exists():
                raise StoreError(
                    f"The journal key {place} is missing, and the nodes of a fleet have one: copy "
                    f"that of node {others[0].node} to there, or name the file with --journal-key."
                )
            key = _secret_of(place, name, may_make=True)
            _require_one(key, others, place)
        else:
            key = _secret_of(place, name, may_make=False)
            _require(key, known.known, place, name)
        _require_one_secret(own, others)
        return cls(url, name, key, _named(place, path), is_new=known is None, secret=own)

    @classmethod
    def read(cls, url: str, path: Path) -> KeyTable | None:
        """
        Open the keys of a node for a command that changes nothing; None if there are none.

        Raises:
            StoreError: the journal key is missing or another one, or the database cannot be
                reached.
        """
        from cairn.journal.rows.database import connections, key_table, schema, tables, urls

        if schema.schema_revision(url) != tables.REVISION:
            return None  # which opening the journal reports
        known = connections.in_database(url, "read", key_table.entry)
        if known is None:
            return None
        name = f"the journal {urls.place_of(url)}"
        place = cls._place(path, known, None)
        secret = _secret_of(place, name, may_make=False)
        _require(secret, known.known, place, name)
        return cls(url, name, secret, None, is_new=False)

    def of_other(self, url: str) -> KeyTable:
        """
        The keys of another node, for a reader: the nodes of a fleet have one journal key.

        Args:
            url: of that node's journal.
        """
        from cairn.journal.rows.database.urls import place_of

        name = f"the journal {place_of(url)}"
        return KeyTable(url, name, self._journal_key, None, is_new=False)

    @staticmethod
    def _place(path: Path, entry: Entry | None, named: Path | None) -> Path:
        """As ``_place_of``. Where the journal key was last may have been on another machine."""
        place = _place_of(path, None if entry is None else (entry.known, entry.place), named)
        own = _place_of(path, None, None)
        return own if named is None and own.exists() and not place.exists() else place

    def confirm(self) -> None:
        """
        See ``JournalKeys.confirm``.

        Raises:
            StoreError: another server made this node's journal key meanwhile, or another node that
                of the fleet, or has another secret.
        """
        from cairn.journal.rows.database import connections

        with self._lock:
            self._load()
        connections.in_database(self._url, "write to", self._enter)
        self._named = None

    def _enter(self, connection: Any) -> None:
        from cairn.journal.rows.database import key_table

        if self._named is not None:
            # Since ``open``, another node may have made another journal key at its first start, or
            # entered another secret.
            key_table.hold_first_starts(connection)
            others = key_table.of_other_nodes(connection)
            if self.is_new:
                _require_one(self._journal_key, others, Path(self._named))
            _require_one_secret(self._secret, others)
            wrapped = aes_key_wrap(self._journal_key, _KNOWN)
            known = self._secret.known if self._secret is not None else None
            key_table.enter(connection, wrapped, self._named, known)

    def counts(self) -> tuple[int, int]:
        """See ``JournalKeys.counts``."""
        with self._lock:
            self._load()
            return self._counts

    def close(self) -> None:
        """See ``JournalKeys.close``. No connection is kept open."""

    def commit(self, within: Within | None = None) -> None:
        """See ``JournalKeys.commit``."""
        from cairn.journal.rows.database import key_table

        with self._lock:
            self._load()
            values = self._wrap_new()
        if not values:
            return
        assert within is not None

        def store(connection: Any) -> None:
            self._enter(connection)
            key_table.add(connection, values)

        within(store)  # without the lock, for which requests wait
        with self._lock:
            self._named = None
            stored = {key_id for key_id, _, _ in values}
            self._new = [one for one in self._new if one[1].id not in stored]
            for value in values:
                self._hold(*value)
            self._counts = (self._counts[0] + len(values), self._counts[1])

    def subjects(self) -> set[str]:
        """See ``JournalKeys.subjects``."""
        with self._lock:
            self._load()
            return {subject for subject, held in self._ids.items() if held}

    def remove(self, subject: str, key_ids: Iterable[str]) -> int:
        """See ``JournalKeys.remove``. Needs no lease: a committed row says that they go."""
        from cairn.journal.rows.database import connections, key_table

        with self._lock:
            held = {*self._stored(subject), *self._new_of(subject)}
        if not (gone := held.intersection(key_ids)):
            return 0
        removed = connections.in_database(
            self._url, "write to", lambda connection: key_table.remove(connection, gone)
        )
        with self._lock:
            self._drop(gone)
            self._ids[subject] = tuple(self._stored(subject) - gone)
            for key_id in gone:
                self._all().pop(key_id, None)
            self._counts = (self._counts[0], self._counts[1] + removed)
        return removed

    def _stored(self, subject: str) -> set[str]:
        self._load()
        return {*self._ids.get(subject, ())}

    def _wrapped_of(self, key_id: str) -> bytes | None:
        from cairn.journal.rows.database import connections, key_table

        found = self._all().get(key_id)
        if found is None and self._follows:
            later = connections.in_database(
                self._url, "read", lambda connection: key_table.one(connection, key_id)
            )
            found = self._hold(*later) if later is not None else None
        return found

    def _wrapped_for(self, subject: str) -> bytes | None:
        for key_id in sorted(self._stored(subject)):
            return self._all()[key_id]
        return None

    def _hold(self, key_id: str, subject: str, wrapped: bytes) -> bytes:
        self._all()[key_id] = wrapped
        self._ids[subject] = (*self._ids.get(subject, ()), key_id)
        return wrapped

    def _all(self) -> dict[str, bytes]:
        self._load()
        assert self._wrapped is not None
        return self._wrapped

    def _load(self) -> None:
        """
        Read the keys, if that was not done. For a server not before it has the journal's lock, so
        that none is stored after that by another one.
        """
        if self._wrapped is not None:
            return
        from cairn.journal.rows.database import connections, key_table

        entry, keys = connections.in_database(
            self._url, "read", lambda found: (key_table.entry(found), key_table.read(found))
        )
        if entry is not None:
            _require(self._journal_key, entry.known, Path(self._named or entry.place), self._name)
            self._counts = (entry.made, entry.removed)
        self._wrapped = {}
        for key in keys:
            self._hold(*key)


def open_keys(
    path: Path, url: str, journal_key: Path | None = None, secret: bytes | None = None
) -> JournalKeys:
    """
    The keys of a journal for its server: of a node in the database, else in a file.

    Args:
        path: of the file.
        url: of the journal, whose tables exist.
        journal_key: as for ``KeyFile.open``.
        secret: which names blocks, and is one for all nodes; None for a command that serves none.

    Raises:
        StoreError: they cannot be used, or the secret is not that of the other nodes.
    """
    from cairn.journal.rows.database.urls import node_of

    node = node_of(url)
    if node is None:
        return KeyFile.open(path, journal_key)
    if path.exists():
        raise StoreError(
            f"{path} has the keys of node {node} from a development version; now they are in the "
            "database, and are not moved there. Serve with another name (--node), or drop the "
            f"schema of {node} and remove this file to begin again: its texts are lost then. If "
            "other nodes saw its rows, start it once with --accept-lost-rows."
        )
    return KeyTable.open(url, path, journal_key, secret)


def read_keys(path: Path, url: str) -> JournalKeys | None:
    """
    The keys of a journal for a command that changes nothing; None if there are none.

    Raises:
        StoreError: they cannot be used.
    """
    from cairn.journal.rows.database.urls import node_of

    return KeyFile.read(path) if node_of(url) is None else KeyTable.read(url, path)


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


def _named(place: Path, path: Path) -> str:
    """How a file with the journal key is recorded. A data directory may be moved as a whole."""
    return place.name if place.parent == path.absolute().parent else str(place)


def _secret_of(place: Path, name: str, *, may_make: bool) -> bytes:
    """The journal key in a file, which is made at the first start."""
    try:
        if may_make and not place.exists():
            _write_secret(place)
        secret = place.read_bytes()
    except FileNotFoundError as error:
        raise StoreError(
            f"The journal key {place} is missing, and without it the keys in {name} cannot be "
            "used. If it is in another data directory, give that with --data-dir; else restore it "
            "from a backup. `serve` takes any file, with --journal-key."
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


def _require(secret: bytes, known: bytes, place: Path, name: str) -> None:
    try:
        if aes_key_unwrap(secret, known) == _KNOWN:
            return
    except (InvalidUnwrap, ValueError):
        pass
    raise StoreError(
        f"{place} is not the journal key of {name}. Restore the one that belongs to it from a "
        "backup, or name it with --journal-key."
    )


def _require_one(secret: bytes, others: Iterable[OtherNode], place: Path) -> None:
    """Refuse another journal key than that of the other nodes."""
    for other in others:
        words = f"node {other.node}, and the nodes of a fleet have one"
        _require(secret, other.known, place, words)


@attrs.frozen
class _Secret:
    """The file with the secret of a data directory, and what recognizes that."""

    place: Path
    known: bytes


def _mac(secret: bytes) -> bytes:
    return hmac.digest(secret, _OF_SECRET, hashlib.sha256)


def _require_one_secret(own: _Secret | None, others: Iterable[OtherNode]) -> None:
    """Refuse another secret than that of the other nodes."""
    for other in others:
        if own is not None and other.secret_known not in (None, own.known):
            raise StoreError(
                f"{own.place} is not the secret of node {other.node}, and the nodes of a fleet "
                "have one: it names blocks, so this node would share none. Copy that of node "
                f"{other.node} to there."
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
