"""
Rows in a database: SQLite by default, PostgreSQL by URL. What is PostgreSQL's alone is in
``postgres``, ``lease`` and ``key_table``; no other module uses SQLAlchemy.

Rules of this module:

1. Rows are added and read, never changed. A base replaces the first rows when the journal is pruned
   (``cut``); they are removed after that (``removal``), and are read no more. The migrations define
   the schema; the tables below must equal what they make of an empty database, and a test compares
   the two.
2. One connection writes; SQLite can be damaged if two write or checkpoint (up to 3.51.2). All
   others open read-only, even while the server runs. On PostgreSQL a connection that may write has
   the journal's lock from its beginning to its end, so that a lost one is replaced only by one that
   has the lock again.
3. A database that cannot be used is refused with a sentence that says what to do, and is left
   unchanged.
"""

from __future__ import annotations

import errno
import os
import socket
import sqlite3
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import attrs
import sqlalchemy as sa
from sqlalchemy.dialects import sqlite
from sqlalchemy.exc import DBAPIError, IntegrityError, NoSuchModuleError, SQLAlchemyError

from cairn.journal.errors import (
    HeadMoved,
    LeaseLost,
    StoreError,
    StoreFull,
    StoreLocked,
    StoreLost,
    StoreUnready,
)
from cairn.journal.nodes import NodeHead, node_in, node_of_schema, schema_of
from cairn.journal.rows.base import Base
from cairn.journal.rows.codec import COLUMNS, GENESIS, Row, opened, shown
from cairn.journal.rows.database import key_table, lease, postgres
from cairn.journal.rows.database.lease import Lease
from cairn.journal.rows.removal import REMOVED_ROWS, Replaced
from cairn.journal.rows.sealing import KeyRing

T = TypeVar("T")

REVISION = "0001"
"""The head of the migrations. Defined here so that a store opens without loading Alembic."""

VERSION_TABLE = "cairn_schema"
"""Where Alembic keeps the revision. The name is Cairn's own, and identifies a Cairn journal."""

BATCH_ROWS = 2000
BUSY_S = 5.0
"""How long the database waits for another process's lock, in seconds."""

PAGE_BYTES = 2048
"""The page of a new SQLite journal. A commit writes whole pages, and most have few rows."""

LOG_BYTES = 4 * 1024 * 1024
"""
The size at which SQLite writes its log into the file, and to which it cuts it back after that. It
grows beyond that while a program keeps reading the journal in one transaction.
"""

Sync = Literal["full", "normal"]
"""
When rows count as committed: when they are on the disk, or when the operating system has them, so
that the last ones may be lost if that fails.
"""

_ROOM_BYTES = 64 * 1024  # the least that SQLite's shared memory and a few rows take
_MAKE_ROOM = "Free some space on its disk; what was journaled before is safe."
_MAKE_MORE_ROOM = (
    "Free some space on its disk: up to twice as much as the journal takes there, until this is "
    "done. What is in the journal is safe."
)

_STRANGE = "Cairn did not make it"

metadata = sa.MetaData()
"""The tables, as the migrations make them."""
_big = sa.BigInteger().with_variant(sa.Integer(), "sqlite")  # INTEGER is SQLite's row id
# There is no index besides the key: one by stream would write a page for each row of each session
# that answers. A reader of one stream reads all rows.
_events = sa.Table(
    "events",
    metadata,
    sa.Column("position", _big, primary_key=True, autoincrement=False),
    sa.Column("stream", sa.Text, nullable=False),
    sa.Column("seq", _big, nullable=False),
    sa.Column("event_id", sa.Text, nullable=False),
    sa.Column("kind", sa.Text, nullable=False),
    sa.Column("version", sa.Integer, nullable=False),
    sa.Column("time_us", _big, nullable=False),
    sa.Column("public", sa.LargeBinary, nullable=False),
    sa.Column("private", sa.LargeBinary),
    sa.Column("private_digest", sa.Text, nullable=False),
    sa.Column("previous_hash", sa.Text, nullable=False),
    sa.Column("hash", sa.Text, nullable=False),
)
_bases = sa.Table(
    "bases",
    metadata,
    sa.Column("position", _big, primary_key=True, autoincrement=False),
    sa.Column("head", sa.Text, nullable=False),
    sa.Column("state", sa.LargeBinary, nullable=False),
    sa.Column("state_digest", sa.Text, nullable=False),
)
_names = COLUMNS
# Bytes are read as the driver returns them: a row that was changed by hand may hold text instead,
# and must be reported as a broken chain, not as a type error of the database layer.
_columns: tuple[Any, ...] = tuple(
    sa.type_coerce(_events.c[name], sa.types.NullType()).label(name) for name in _names
)
# Made once, because each commit needs them.
_LAST = (
    sa.select(_events.c.position, sa.type_coerce(_events.c.hash, sa.types.NullType()).label("hash"))
    .order_by(_events.c.position.desc())
    .limit(1)
)
_INSERT = sa.insert(_events)
_LINKS = sa.select(
    *(
        sa.type_coerce(column, sa.types.NullType())
        for column in (_events.c.position, _events.c.hash, _events.c.previous_hash)
    )
).order_by(_events.c.position.desc())
_AFTER_BASE = _events.c.position > sa.func.coalesce(
    sa.select(sa.func.max(_bases.c.position)).scalar_subquery(), -(2**62)
)


def journal_url(data_dir: Path) -> str:
    """The URL of the journal in a data directory. Creates nothing."""
    return sqlite_url(data_dir / "journal.db")


def sqlite_url(path: Path) -> str:
    """The URL of an SQLite file, whatever characters are in its path."""
    url = sa.URL.create("sqlite", database=str(path.absolute()))
    return url.render_as_string(hide_password=False)


def sqlite_path(url: str) -> Path:
    """The file of an SQLite URL."""
    path = _file(_parsed(url))
    if path is None:
        raise StoreError(f"{_place(_parsed(url))} is not a file.")
    return path


def node_url(url: str, node: str) -> str:
    """
    The URL of a node's journal: its schema in the database of the fleet.

    Raises:
        StoreError: the database is not PostgreSQL, or the URL names a schema.
    """
    parsed = _parsed(url)
    if parsed.get_backend_name() != "postgresql":
        raise StoreError(
            f"{_place(parsed)} cannot have the journal of a node, because the nodes of a fleet "
            "share a PostgreSQL database. Write --journal postgresql://user@host/name."
        )
    given = parsed.query.get("options", "")
    options = given if isinstance(given, str) else " ".join(given)
    if "search_path" in options:
        raise StoreError(
            f"{_place(parsed)} names a schema, and so does --node {node}. Omit one of them."
        )
    chosen = f"{options} -csearch_path={schema_of(node)}".strip()
    return _text_of(parsed.update_query_dict({"options": chosen}))


def node_of(url: str) -> str | None:
    """The node whose journal a URL names; None if it is not that of a node."""
    parsed = _parsed(url)
    given = parsed.query.get("options", "")
    options = given if isinstance(given, str) else " ".join(given)
    return node_in(options) if parsed.get_backend_name() == "postgresql" else None


def fleet_url(url: str) -> str:
    """The URL of the database of a fleet, by that of a node's journal in it (``node_url``)."""
    parsed = _parsed(url)
    given = parsed.query.get("options", "")
    words = given.split() if isinstance(given, str) else list(given)
    own = [word for word in words if node_of_schema(word.removeprefix("-csearch_path=")) is None]
    if own == words:
        return url
    rest = {name: value for name, value in parsed.query.items() if name != "options"}
    if own:
        rest["options"] = " ".join(own)
    return _text_of(parsed.set(query=rest))


class SqlStore:
    """
    The rows of a journal in a database. See ``store.Store``.

    A thread other than the one that opened it may use it; one thread at a time.
    """

    def __init__(
        self,
        connection: sa.Connection,
        place: str,
        file: Path | None,
        keys: KeyRing | None = None,
        token: int | None = None,
    ) -> None:
        self._connection = connection
        self._token = token  # of the lease; None for a reader, and on SQLite
        self._keys = keys
        self._place = place
        self._file = file
        self._known_by = _known_by(file)
        self._schema_version: int | None = None
        self._log = None if file is None else _log_of(file.resolve())

    @classmethod
    def open(
        cls,
        url: str,
        *,
        read_only: bool = False,
        sync: Sync = "full",
        keys: KeyRing | None = None,
        holder: str | None = None,
    ) -> SqlStore:
        """
        Open an existing journal. Changes nothing in it, and runs no migration.

        Args:
            read_only: for every process except the server: can read while another process writes,
                and cannot write.
            sync: for a writer: see ``Sync``.
            keys: open the sealed payloads of the rows; new ones are stored before rows are.
            holder: who holds the lease from now on, for people; by default this process.

        Raises:
            StoreError: there is no journal, it is not a Cairn journal, its schema is not this
                version's, or it cannot be reached.
        """
        parsed = _parsed(url)
        place = _place(parsed)
        if (path := _file(parsed)) is not None and not path.exists():
            raise StoreError(
                f"There is no journal at {place}. Start the server once, which creates it, "
                "or check --data-dir or --journal."
            )
        revision = schema_revision(url)
        if revision != REVISION:
            raise StoreError(_other_revision(place, revision))
        connection = _connected(parsed, mode="ro" if read_only else "rw", sync=sync)
        token = None
        if path is None and not read_only:
            try:
                with _errors(place, "write to"), connection.begin():
                    token = lease.taken(connection, holder or _this_process())
            except BaseException:
                _let_go(connection)
                raise
        return cls(connection, place, path, keys, token)

    @property
    def token(self) -> int | None:
        """Of the lease of a writer on PostgreSQL; None if there is none."""
        return self._token

    def leases(self) -> list[tuple[str, int]]:
        """The schemas and tokens of the leases of a journal on PostgreSQL: one, once served."""
        with _errors(self._place, "read"), self._connection.begin():
            return lease.listed(self._connection)

    @property
    def place(self) -> str:
        """Where the journal is, for people; without a password."""
        return self._place

    def append(self, rows: Sequence[Row]) -> None:
        """See ``Store.append``."""
        if not rows:
            return
        if self._keys is not None:
            self._keys.commit(self._within)
        self._lasting(lambda: self._commit(rows))
        self._require_own_file()

    def _require_own_file(self) -> None:
        # SQLite would keep writing to an open file that was deleted, and the rows would be lost in
        # the end.
        if _known_by(self._file) != self._known_by:
            raise StoreError(
                f"{self._place} was removed, moved or replaced while it was in use, so that rows "
                "would be lost. Put it back as it was, or a copy of it, and start again."
            )

    def _require_own_schema(self) -> None:
        """Refuse to write if another program changed the schema: a trigger would spoil the rows."""
        if self._connection.dialect.name != "sqlite":
            return
        ((version,),) = self._raw().execute("PRAGMA schema_version").fetchall()
        if version == self._schema_version:
            return
        if faults := self._schema_faults():
            raise StoreError(strange_words(self._place, faults))
        self._schema_version = version

    @contextmanager
    def _writing(self, doing: str, make_room: str = _MAKE_ROOM) -> Iterator[None]:
        """A transaction of the writer. See ``_errors``."""
        try:
            with _errors(self._place, doing, make_room), self._connection.begin():
                self._require_own_schema()
                self._require_lease()
                yield
        except LeaseLost:
            self.close()  # with the lock, for which the takeover may wait
            raise

    def _require_lease(self) -> None:
        """Refuse to write if the journal was taken over, and keep that out until the commit."""
        if self._token is None:
            return
        found = lease.held(self._connection)
        if found is None:
            raise StoreError(
                f"{self._place} has lost its lease, which another program removed. Start again."
            )
        if found.token != self._token:
            raise self._lost(found)

    def _lasting(self, step: Callable[[], T]) -> T:
        """
        A step that may be done again. If the connection was lost, perhaps long ago, it is done over
        a new one.
        """
        try:
            return step()
        except StoreLost:
            try:
                if self._token is not None:
                    # The new connection has the lock, for which the next server of the node waits.
                    with self._writing("read"):
                        pass
                return step()
            except (StoreUnready, LeaseLost):
                raise
            except StoreError as error:
                # It may have lost its connection because it was taken over.
                raise self._taken_over() or error from error

    def _taken_over(self) -> LeaseLost | None:
        """Why the lease is lost, looked up without the lock; None if it is not."""
        if self._token is None:
            return None
        with _errors(self._place, "read"):
            connection = postgres.unlocked(self._connection.engine.url)
            try:
                with connection.begin():
                    found = lease.held(connection)
            finally:
                _let_go(connection)
        return self._lost(found) if found is not None and found.token != self._token else None

    def _lost(self, found: Lease) -> LeaseLost:
        return LeaseLost(
            f"{self._place} was taken over by {found.holder} (lease {found.token}; this server's "
            f"was {self._token}), so this server may not write to it any more. What it had "
            "committed before is in the journal."
        )

    def _within(self, work: Callable[[Any], None]) -> None:
        """See ``sealing.Within``."""
        self._lasting(lambda: self._step(work))

    def _step(self, work: Callable[[Any], None]) -> None:
        with self._writing("write to"):
            work(self._connection)

    def _commit(self, rows: Sequence[Row]) -> None:
        with self._writing("write to"):
            self._append(rows)

    def _append(self, rows: Sequence[Row]) -> None:
        position, head = self._head()
        if (rows[0].position - 1, rows[0].previous_hash) != (position, head):
            rows = self._not_stored(rows, position, head)
        if rows:
            values = [{name: getattr(row, name) for name in _names} for row in rows]
            self._connection.execute(_INSERT, values)

    def base(self) -> Base | None:
        """See ``Store.base``."""
        with _errors(self._place, "read"), self._connection.begin():
            found = self._base()
        if found is None:
            return None
        # A value of another type was set by hand, and is not a base that a row names.
        position, head, state, digest = found
        return Base(
            position=position, head=_text(head), state=_bytes(state), state_digest=_text(digest)
        )

    def cut(self, base: Base, rows: Sequence[Row]) -> None:
        """See ``Store.cut``."""
        if self._keys is not None:
            self._keys.commit(self._within)
        self._lasting(lambda: self._cut(base, rows))
        self._require_own_file()

    def _cut(self, base: Base, rows: Sequence[Row]) -> None:
        ends = sa.select(_events.c.hash).where(_events.c.position == base.position)
        with self._writing("prune", _MAKE_MORE_ROOM):
            if self._is_cut(base, rows):
                return  # by an earlier try, whose end was not reported
            if self._connection.execute(ends).scalar_one_or_none() != base.head:
                raise HeadMoved(
                    f"Row {base.position} of {self._place} is not the one that the base ends with; "
                    "another process changed the journal meanwhile. Nothing was pruned."
                )
            if rows:
                self._append(rows)
            self._connection.execute(sa.delete(_bases))
            self._connection.execute(sa.insert(_bases), attrs.asdict(base))

    def _is_cut(self, base: Base, rows: Sequence[Row]) -> bool:
        found = self._base()
        if found is None or tuple(found) != attrs.astuple(base):
            return False
        return not rows or self._head() == (rows[-1].position, rows[-1].hash)

    def removal(self, most: int = REMOVED_ROWS) -> Iterator[int]:
        """See ``Store.removal``. The file keeps the space of the rows; ``give_back`` returns it."""
        replaced = None
        for found in self._replaced(most):
            replaced = found
            yield 0
        while replaced is not None and replaced.first <= replaced.last:
            first, end = replaced.first, min(replaced.first + most - 1, replaced.last)
            self._lasting(partial(self._remove, first, end))
            replaced.first = end + 1
            yield end - first + 1

    def _remove(self, first: int, last: int) -> None:
        with self._writing("prune", _MAKE_MORE_ROOM):
            query = sa.delete(_events).where(_events.c.position.between(first, last))
            self._connection.execute(query)

    def _replaced(self, most: int) -> Iterator[Replaced]:
        """
        The rows that the base has replaced and that are there still, after each ``most`` of them
        that were found; none if the journal has no base. Looked for from the base backwards,
        because a process that removes them begins at the other end.
        """
        found = self._found(sa.select(_bases.c.position, _bases.c.head).limit(1))
        if not found:
            return
        replaced, count = Replaced(*found[0]), most
        while count == most:
            query = _LINKS.where(_events.c.position < replaced.first).limit(most)
            count = replaced.feed(tuple(link) for link in self._found(query))
            yield replaced

    def has_slack(self) -> bool:
        """Whether ``give_back`` has something to do: free pages in the file, or a log."""
        if self._connection.dialect.name != "sqlite":
            return False
        with _errors(self._place, "read"):
            free = self._free_pages()
            path = self._path()
        return free > 0 or _size(_log_of(path)) > 0

    def give_back(self) -> None:
        """
        Return the space of removed rows to the disk, unless the database does so itself. The
        removed rows are then no longer in the file either. While it runs, it needs free space of
        twice the size of the remaining journal: SQLite first writes it to a temporary file, next to
        the journal or in the folder that the operator named by SQLITE_TMPDIR.

        Raises:
            StoreError: there is not enough space, or another process is reading; the journal is
                unchanged. It can be tried again.
        """
        if self._connection.dialect.name != "sqlite":
            return
        with _errors(self._place, "shrink"):
            home = self._path().parent
        spare = _named_spare() or home
        with _errors(self._place, "shrink", _more_room(home, spare)):
            # First the log: it may be as large as what was removed, and emptying it frees that
            # space.
            self._emptied_log()
            if self._free_pages():
                with self._temporary_files_in(spare):
                    self._raw().execute("VACUUM")
                self._emptied_log()

    def _raw(self) -> sqlite3.Connection:
        raw = self._connection.connection.driver_connection
        assert isinstance(raw, sqlite3.Connection)
        return raw

    def _path(self) -> Path:
        """The file, with links resolved."""
        (_, _, path), *_ = self._raw().execute("PRAGMA database_list").fetchall()
        return Path(path)

    @contextmanager
    def _temporary_files_in(self, folder: Path) -> Iterator[None]:
        """
        Have SQLite write its temporary files to a folder. It would otherwise choose /var/tmp or the
        like, outside the private directory, and it read SQLITE_TMPDIR when it was loaded. The
        setting applies to the whole process, so it is only set while it is needed.
        """
        pragma = "PRAGMA temp_store_directory"
        before = self._raw().execute(pragma).fetchone()
        try:
            self._raw().execute(f"{pragma} = {_quoted(str(folder))}")
            yield
        finally:
            self._raw().execute(f"{pragma} = {_quoted(before[0] if before else '')}")

    def _free_pages(self) -> int:
        ((count,),) = self._raw().execute("PRAGMA freelist_count").fetchall()
        return int(count)

    def _emptied_log(self) -> None:
        """
        Write the log into the file, and empty it.

        Raises:
            StoreError: another process is reading what would be overwritten.
        """
        ((busy, _, _),) = self._raw().execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        if busy:
            raise StoreError(
                f"Cannot shrink {self._place}: another program reads it. Wait for it, or end it."
            )

    def log_bytes(self) -> int:
        """See ``Store.log_bytes``."""
        return 0 if self._log is None else _size(self._log)

    def time_at(self, position: int) -> int | None:
        """When the row at a position was written, in microseconds since 1970."""
        query = sa.select(_events.c.time_us).where(_events.c.position == position)
        with _errors(self._place, "read"), self._connection.begin():
            found = self._connection.execute(query).scalar_one_or_none()
        return found if isinstance(found, int) else None  # another program may have changed it

    def size_bytes(self) -> int:
        """
        The size of an SQLite database, with rows that are only in its write-ahead log yet. The log
        itself does not count: it has each change of a page, until it is overwritten.
        """
        with _errors(self._place, "read"), self._connection.begin():
            pages, page = (
                self._connection.exec_driver_sql(f"PRAGMA {name}").scalar_one()
                for name in ("page_count", "page_size")
            )
        return int(pages) * int(page)

    def head(self) -> tuple[int, str]:
        """See ``Store.head``."""
        with _errors(self._place, "read"), self._connection.begin():
            return self._head()

    def read(
        self,
        after: int | None = None,
        *,
        stream: str | None = None,
        kinds: Collection[str] | None = None,
    ) -> Iterator[Row]:
        """
        See ``Store.read``. Reads rows in batches, each in a transaction of its own, so that a slow
        reader does not block other processes.

        Args:
            kinds: only the rows of these kinds; None for all.
        """
        query = sa.select(*_columns).order_by(_events.c.position).limit(BATCH_ROWS)
        if stream is not None:
            query = query.where(_events.c.stream == stream)
        if kinds is not None:
            query = query.where(_events.c.kind.in_(kinds))
        if after is None:
            *_, replaced = None, *self._replaced(BATCH_ROWS)
            if replaced is not None:
                query = query.where(~_events.c.position.between(replaced.first, replaced.last))
        while True:
            batch = self._found(query if after is None else query.where(_events.c.position > after))
            for values in batch:
                yield self.opened(_row(values))
            if len(batch) < BATCH_ROWS:
                return
            after = batch[-1][0]

    def row(self, position: int) -> Row | None:
        """See ``Store.row``."""
        query = sa.select(*_columns).where(_events.c.position == position, _AFTER_BASE)
        found = self._lasting(lambda: self._found(query))
        return self.opened(_row(found[0])) if found else None

    def opened(self, row: Row) -> Row:
        """See ``Store.opened``."""
        return row if self._keys is None else opened(row, self._keys)

    def last(self, count: int, *, stream: str | None = None) -> list[Row]:
        """The last ``count`` rows in order, of one stream if one is named."""
        query = sa.select(*_columns).order_by(_events.c.position.desc()).limit(count)
        query = query.where(_AFTER_BASE)
        if stream is not None:
            query = query.where(_events.c.stream == stream)
        return [self.opened(_row(values)) for values in reversed(self._found(query))]

    def streams(self) -> set[str]:
        """The names of all streams that have a row."""
        query = sa.select(_events.c.stream).where(_AFTER_BASE).distinct()
        return {name for (name,) in self._found(query) if isinstance(name, str)}

    def _found(self, query: Any) -> Sequence[Any]:
        with _errors(self._place, "read"), self._connection.begin():
            return self._executed(query)

    def _executed(self, query: Any) -> Sequence[Any]:
        """What a query finds; a text that is not UTF-8 does not stop it."""
        try:
            return self._connection.execute(query).all()
        except DBAPIError as error:
            if "Could not decode" not in str(error.orig):
                raise
            self._raw().text_factory = _escaped  # slower, so only from here on
            return self._connection.execute(query).all()

    def schema_faults(self) -> list[tuple[str, str]]:
        """
        What another program added to the database or changed in its tables: (part, fact) each. A
        database server may have tables of other programs.
        """
        with _errors(self._place, "read"), self._connection.begin():
            return self._schema_faults()

    def _schema_faults(self) -> list[tuple[str, str]]:
        if self._connection.dialect.name == "sqlite":
            return _sqlite_faults(self._raw())
        return _postgres_faults(self._connection)

    def close(self) -> None:
        """See ``Store.close``."""
        _let_go(self._connection)

    def _head(self) -> tuple[int, str]:
        last = self._executed(_LAST)
        if last:
            return last[0][0], shown(last[0][1])
        base = self._base()
        return (base[0], _text(base[1])) if base is not None else (0, GENESIS)

    def _base(self) -> Sequence[Any] | None:
        # As the driver returns it, like a row: a base that was changed by hand is a finding.
        columns = [sa.type_coerce(column, sa.types.NullType()) for column in _bases.c]
        found = self._executed(sa.select(*columns).limit(2))
        if len(found) > 1:
            raise StoreError(
                f"{self._place} has more than one base in the place of its first rows; Cairn keeps "
                "one, so another program changed it. Keep a copy of it, and restore a backup."
            )
        return found[0] if found else None

    def _not_stored(self, rows: Sequence[Row], position: int, head: str) -> Sequence[Row]:
        """
        The rows after those that an earlier append has stored.

        Raises:
            HeadMoved: the rest does not follow the head, or different rows are stored in their
                place.
        """
        query = sa.select(_events.c.position, _events.c.event_id, _events.c.hash)
        first, last = rows[0].position, rows[-1].position
        found = self._connection.execute(query.where(_events.c.position.between(first, last))).all()
        stored = {at: (event_id, row_hash) for at, event_id, row_hash in found}
        new = [row for row in rows if stored.get(row.position) != (row.event_id, row.hash)]
        if new and (new[0].position - 1, new[0].previous_hash) != (position, head):
            raise HeadMoved(
                f"Row {new[0].position} does not follow row {position} of {self._place}: another "
                "writer appended to it. Let one server at a time use a journal."
            )
        return new


def migrate(url: str) -> str | None:
    """
    Bring a journal's schema up to date; creates a journal if there is none.

    Returns:
        The revision before, None for a new journal.

    Raises:
        StoreError: the database is not Cairn's, is newer than this version, or cannot be written.
            It is then unchanged.
    """
    from alembic import command  # slow to load, and only this function needs it
    from alembic.config import Config

    parsed = _parsed(url)
    place = _place(parsed)
    before = schema_revision(url)
    if before is not None and before > REVISION:
        raise StoreError(_other_revision(place, before))
    if (path := _file(parsed)) is not None:
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"{path.parent} cannot be made: {error.strerror}.") from error
        _make_private(path)
    connection = _connected(parsed, mode="rwc")
    try:
        with _errors(place, "migrate"), connection.begin():
            config = Config()
            config.set_main_option("script_location", "cairn:migrations")
            config.set_main_option("path_separator", "os")
            config.attributes["connection"] = connection
            command.upgrade(config, "head")
    finally:
        _let_go(connection)
    return before


def take_over(url: str, by: str) -> tuple[int, list[int]]:
    """
    Take a journal on PostgreSQL over: its writer, wherever it is, can commit nothing any more.
    Appends no row.

    Args:
        by: who does that, for people.

    Returns:
        The new token of the lease, and the processes of the database server whose connections were
        ended.

    Raises:
        StoreError: there is no such journal, or it cannot be reached.
    """
    parsed = _parsed(url)
    place = _place(parsed)
    if parsed.get_backend_name() != "postgresql":
        raise StoreError(f"{place} is not on PostgreSQL, so it has no lease.")
    if (revision := schema_revision(url)) != REVISION:
        raise StoreError(_other_revision(place, revision))
    with _errors(place, "take over"):
        connection = postgres.unlocked(parsed)
        try:
            with connection.begin():
                connection.exec_driver_sql(f"SET LOCAL lock_timeout = {int(BUSY_S * 1000)}")
                # First, because a process that hangs in the middle of a commit keeps the token.
                ended = postgres.end_writers(connection)
                token = lease.raised(connection, by)
            with connection.begin():
                ended += postgres.end_writers(connection)  # which connected meanwhile
        finally:
            _let_go(connection)
    if token is None:
        raise StoreError(f"{place} was never served, so there is nothing to take over.")
    return token, ended


def in_database(url: str, doing: str, work: Callable[[sa.Connection], T]) -> T:
    """
    A step in a transaction of its own, without the lock of the journal: it must not change rows.

    Args:
        doing: what it does to the journal, for the message of an error.

    Raises:
        StoreError: the database cannot be reached, or refuses.
    """
    parsed = _parsed(url)
    with _errors(_place(parsed), doing):
        connection = postgres.unlocked(parsed)
        try:
            with connection.begin():
                return work(connection)
        finally:
            _let_go(connection)


def is_empty(store: SqlStore) -> bool:
    """Whether a journal has no rows, and never had."""
    return store.base() is None and store.head()[0] == 0


def running_nodes(url: str) -> set[str]:
    """
    The nodes of a fleet whose journals are locked: by a server, or by a command that writes.

    Raises:
        StoreError: it is not PostgreSQL, or cannot be reached.
    """
    with _looking(url) as connection, connection.begin():
        return postgres.locked_nodes(connection)


def nodes_of(url: str) -> list[str]:
    """
    The nodes that have a journal in the database of a fleet, in order of their names.

    Raises:
        StoreError: it is not PostgreSQL, or cannot be reached.
    """
    with _looking(url) as connection, connection.begin():
        return postgres.nodes(connection)


def heads_of_others(url: str, node: str, since: Mapping[str, tuple[int, str]]) -> list[NodeHead]:
    """
    What the journals of the other nodes of a fleet end with, over a connection of its own. One that
    cannot be read has a ``fault``.

    Args:
        url: the database, or the journal of a node in it.
        node: the one that looks.
        since: node to position and hash of the head that it saw last.

    Raises:
        StoreError: the database cannot be reached.
    """
    with _looking(url) as connection:
        with connection.begin():
            others = [other for other in postgres.nodes(connection) if other != node]
        return postgres.heads_of(connection, others, since, REVISION)


@contextmanager
def _looking(url: str) -> Iterator[sa.Connection]:
    """A connection to the database of a fleet that changes nothing."""
    parsed = _parsed(url)
    if parsed.get_backend_name() != "postgresql":
        raise StoreError(
            f"{_place(parsed)} has no nodes, because the nodes of a fleet share a PostgreSQL "
            "database. Write postgresql://user@host/name."
        )
    connection = _connected(parsed, mode="ro")
    try:
        with _errors(_place(parsed), "read"):
            yield connection
    finally:
        _let_go(connection)


def schema_revision(url: str) -> str | None:
    """
    The revision of a journal's schema; None if there is no journal yet. Changes nothing: opens an
    existing file read-only first, because opening it for writing already changes it.

    Raises:
        StoreError: the database is not Cairn's or cannot be read.
    """
    parsed = _parsed(url)
    path = _file(parsed)
    if path is not None and not path.exists():
        return None
    connection = _connected(parsed, mode="ro")
    try:
        with _errors(_place(parsed), "read"), connection.begin():
            return _revision(connection, _place(parsed))
    finally:
        _let_go(connection)


def strange_words(place: str, faults: Sequence[tuple[str, str]]) -> str:
    """What to do about what another program changed in the database of a journal."""
    what = "; ".join(f"{part}: {fact}" for part, fact in faults)
    return (
        f"Another program changed the database {place} ({what}). Remove what it added, or restore "
        "a backup. `ops verify` checks the rows."
    )


# --- connections ---------------------------------------------------------------------------------


def _parsed(url: str) -> sa.URL:
    try:
        parsed = sa.make_url(url)
    except SQLAlchemyError as error:
        raise StoreError(
            f"{url!r} is not a database URL; write sqlite:////path/to/journal.db or "
            "postgresql://user@host/name."
        ) from error
    if parsed.get_backend_name() == "sqlite" and not parsed.database:
        raise StoreError("A journal in memory would be lost; name a file: sqlite:////path/to/it.db")
    # The bare name means psycopg2 to some versions of SQLAlchemy; Cairn uses psycopg.
    if parsed.drivername in ("postgresql", "postgres"):
        parsed = parsed.set(drivername="postgresql+psycopg")
    return parsed


def _text_of(url: sa.URL, *, hide_password: bool = False) -> str:
    """A URL without the driver, which ``_parsed`` adds."""
    is_psycopg = url.drivername == "postgresql+psycopg"
    plain = url.set(drivername="postgresql") if is_psycopg else url
    return plain.render_as_string(hide_password=hide_password)


def place_of(url: str) -> str:
    """Where a journal is, for people; never shows a password."""
    return _place(_parsed(url))


def _file(url: sa.URL) -> Path | None:
    return Path(url.database) if url.get_backend_name() == "sqlite" and url.database else None


def _log_of(path: Path) -> Path:
    """The write-ahead log of an SQLite file."""
    return path.with_name(f"{path.name}-wal")


def _size(path: Path) -> int:
    """The size of a file; 0 if there is none."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _make_private(path: Path) -> None:
    """
    Create a file that only its owner can read, whatever the umask. SQLite would use the default
    mode, and gives the files next to it the mode of this one. An existing file keeps its mode.
    """
    # SQLite opens it next, and its errors are better.
    with suppress(OSError):
        if not path.exists():
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))


def _known_by(path: Path | None) -> tuple[int, int] | None:
    """What identifies a file to the system, whatever its name; None if there is none."""
    if path is None:
        return None
    try:
        of = path.stat()
    except OSError:
        return None
    return of.st_dev, of.st_ino


def _this_process() -> str:
    """The holder of a lease, for people."""
    return f"process {os.getpid()} on {socket.gethostname()}"


def _place(url: sa.URL) -> str:
    """Where a journal is, for people; never shows a password."""
    path = _file(url)
    return str(path) if path is not None else _text_of(url, hide_password=True)


def _connected(url: sa.URL, *, mode: str, sync: Sync = "full") -> sa.Connection:
    place = _place(url)
    path = _file(url)
    try:
        if path is None:
            with _errors(place, "connect to"):
                return postgres.connected(
                    url,
                    place,
                    read_only=mode == "ro",
                    may_create=mode == "rwc",
                    wait_s=BUSY_S,
                    is_synced=sync == "full",
                )
        with _errors(place, "open"):
            try:
                return _sqlite(path, mode, sync)
            except DBAPIError:
                # A reader of a WAL database has to create files next to it. On a read-only medium
                # no other process can write either, so it is safe to read without them, unless a
                # log remains.
                if mode != "ro" or _size(_log_of(path)):
                    raise
                return _sqlite(path, "ro&immutable=1", sync)
    except ModuleNotFoundError as error:
        raise StoreError(
            f"{place} needs the package {error.name}; install the extra `postgres`."
        ) from error
    except NoSuchModuleError as error:
        raise StoreError(f"{place}: Cairn supports only SQLite and PostgreSQL.") from error


def _sqlite(path: Path, mode: str, sync: Sync) -> sa.Connection:
    address = f"{path.absolute().as_uri()}?mode={mode}"

    def connect() -> sqlite3.Connection:
        # No implicit transactions: `begun` below says when one begins.
        made = sqlite3.connect(
            address, uri=True, timeout=BUSY_S, isolation_level=None, check_same_thread=False
        )
        if mode.startswith("rw"):
            made.execute(f"PRAGMA page_size = {PAGE_BYTES}")  # has no effect on an existing file
            made.execute("PRAGMA journal_mode = WAL")
            made.execute(f"PRAGMA synchronous = {sync}")
            ((page,),) = made.execute("PRAGMA page_size").fetchall()
            made.execute(f"PRAGMA wal_autocheckpoint = {LOG_BYTES // page}").fetchall()
            made.execute(f"PRAGMA journal_size_limit = {LOG_BYTES}").fetchall()
            # Pruning a journal removes rows; their texts should not remain anywhere.
            made.execute("PRAGMA secure_delete = ON").fetchall()
        else:
            made.execute("SELECT 1 FROM sqlite_schema LIMIT 1").fetchall()  # fails now, not later
        return made

    engine = sa.create_engine("sqlite://", creator=connect, poolclass=sa.NullPool)

    @sa.event.listens_for(engine, "begin")
    def begun(connection: sa.Connection) -> None:
        # A writer takes its lock at once, so that what it reads cannot change before it writes.
        connection.exec_driver_sql("BEGIN IMMEDIATE" if mode.startswith("rw") else "BEGIN")

    return engine.connect()


def _let_go(connection: sa.Connection) -> None:
    connection.close()
    connection.engine.dispose()


# --- schema and errors ---------------------------------------------------------------------------


def _revision(connection: sa.Connection, place: str) -> str | None:
    """The schema's revision; None for a database that is empty."""
    tables = set(sa.inspect(connection).get_table_names())
    if VERSION_TABLE not in tables:
        if tables and (connection.dialect.name == "sqlite" or "events" in tables):
            raise StoreError(
                f"{place} is the database of another program, not a Cairn journal. It was not "
                "changed; choose another with --data-dir or --journal."
            )
        return None
    version = sa.table(VERSION_TABLE, sa.column("version_num", sa.Text))
    found = connection.execute(sa.select(version.c.version_num).limit(2)).scalars().all()
    if len(found) > 1:
        raise StoreError(
            f"{place} names two schemas as its own; another program changed it. Restore a backup."
        )
    return _text(found[0]) if found else None


def _sqlite_faults(raw: sqlite3.Connection) -> list[tuple[str, str]]:
    dialect = sqlite.dialect()
    known = {("table", name) for name in (*metadata.tables, VERSION_TABLE)}
    query = "SELECT type, name FROM sqlite_schema WHERE type != 'index'"
    parts = {(_text(kind), _text(name)) for kind, name in raw.execute(query)}
    # SQLite's own names cannot be taken by another program.
    strange = {part for part in parts - known if not part[1].startswith("sqlite_")}
    faults = [(f"{kind} {name}", _STRANGE) for kind, name in sorted(strange)]
    faults += [(f"table {name}", "it is missing") for _, name in sorted(known - parts)]
    for table in metadata.tables.values():
        if ("table", table.name) not in parts:
            continue
        found = {
            _text(name): (_text(kind).upper(), bool(required or key), bool(key))
            for _, name, kind, required, _, key, _ in raw.execute(
                f"PRAGMA table_xinfo({table.name})"
            )
        }
        due = {
            column.name: (
                column.type.compile(dialect=dialect),
                not column.nullable,
                column.primary_key,
            )
            for column in table.columns
        }
        faults += _column_faults(table.name, found, due)
    return faults


def _column_faults(
    table: str, found: Mapping[str, object], due: Mapping[str, object]
) -> list[tuple[str, str]]:
    facts = [(name, _STRANGE) for name in found if name not in due]
    facts += [(name, "it is missing") for name in due if name not in found]
    facts += [
        (name, "it was changed") for name in due if name in found and found[name] != due[name]
    ]
    return [(f"column {table}.{name}", fact) for name, fact in facts]


def _postgres_faults(connection: sa.Connection) -> list[tuple[str, str]]:
    tables = [*metadata.tables.values(), lease.table, *key_table.metadata.tables.values()]
    names = [table.name for table in tables]
    faults = [(part, _STRANGE) for part in postgres.strange_parts(connection, names)]
    for table in tables:
        faults += _column_faults(table.name, *postgres.columns(connection, table))
    return faults


def _other_revision(place: str, revision: str | None) -> str:
    if revision is not None and revision > REVISION:
        return (
            f"{place} was written by a newer Cairn (schema {revision}; this one knows {REVISION}). "
            "Use that version or a newer one; the journal was not changed."
        )
    has = "has no schema yet" if revision is None else f"has schema {revision}, not {REVISION}"
    return f"{place} {has}. Run `ops migrate`."


@contextmanager
def _errors(place: str, doing: str, make_room: str = _MAKE_ROOM) -> Iterator[None]:
    """
    Convert errors of the database to errors of the journal.

    Args:
        make_room: what to do if the disk is full.
    """
    try:
        yield
    except IntegrityError as error:
        raise HeadMoved(
            f"Another writer appended to {place}. Let one server at a time use a journal."
        ) from error
    except Exception as error:
        # A driver's error is raw if it comes from a connection that replaces a lost one.
        raw = error.orig if isinstance(error, DBAPIError) else error
        if not (isinstance(raw, sqlite3.Error) or type(raw).__module__.startswith("psycopg")):
            raise
        fact = str(raw)
        first = (fact.strip().splitlines() or ["no message"])[0].rstrip(".")
        unready = _unready(raw, place)
        advice = make_room if unready is StoreFull else _advice(fact)
        raise (unready or StoreError)(
            f"Cannot {doing} {place}: {first}. {advice}".strip()
        ) from error


def _named_spare() -> Path | None:
    """The folder that the operator named for SQLite's temporary files, if it can be used."""
    named = os.environ.get("SQLITE_TMPDIR")
    if named and Path(named).is_dir() and os.access(named, os.W_OK | os.X_OK):
        return Path(named).absolute()
    return None


def _quoted(text: str) -> str:
    return "'{}'".format(text.replace("'", "''"))


def _more_room(home: Path, spare: Path) -> str:
    """
    What to do if there is not enough space to shrink the file of a journal.

    Args:
        home: the folder of the journal.
        spare: the folder of SQLite's temporary file.
    """
    if spare == home:
        return _MAKE_MORE_ROOM
    return (
        f"Free some space, as much as the journal takes, on its disk and in {spare} "
        "(SQLITE_TMPDIR), until this is done. What is in the journal is safe."
    )


def _unready(error: BaseException | None, place: str) -> type[StoreUnready] | None:
    """What a database error means if the same may succeed later; None if it does not."""
    name, state = getattr(error, "sqlite_errorname", ""), getattr(error, "sqlstate", "")
    is_operational = any(kind.__name__ == "OperationalError" for kind in type(error).__mro__)
    # What the server did not report itself is about the connection to it.
    if is_operational and (state is None or state.startswith(postgres.LOST)):
        return StoreLost
    if name.startswith("SQLITE_BUSY") or state == postgres.LOCKED:
        return StoreLocked
    if name.startswith("SQLITE_IOERR"):
        # When over a quota, or when the files next to the database cannot grow, SQLite reports a
        # general disk error.
        return None if _has_room(Path(place).parent) else StoreFull
    return StoreFull if name == "SQLITE_FULL" or state == postgres.DISK_FULL else None


def _has_room(folder: Path) -> bool:
    """Try whether a few rows could be written there."""
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as tried:
            return tried.write(bytes(_ROOM_BYTES)) == _ROOM_BYTES
    except OSError as error:
        return error.errno not in (errno.ENOSPC, errno.EDQUOT)


def _advice(fact: str) -> str:
    """What to do about a database error, by its message: drivers have no codes in common."""
    for words, advice in (
        ("locked", "Another program writes to it; let one server at a time use a journal."),
        (
            "not a database",
            "It is not a Cairn journal. Nothing was changed. Check --data-dir or --journal.",
        ),
        ("malformed", "The file is damaged; keep a copy of it, and restore a backup."),
        ("readonly", "Check who owns the file and its folder."),
        ("unable to open", "Check the path, and who owns the file and its folder."),
        ("I/O", "The disk failed; check it before the server is started again."),
        ("refused", "Check that the database server runs and that the URL names it."),
        ("No such file", "Check that the database server runs and that the URL names it."),
    ):
        if words in fact:
            return advice
    return ""


def _row(values: Sequence[Any]) -> Row:
    fields = dict(zip(_names, values, strict=True))
    for name in ("public", "private"):
        if isinstance(fields[name], str):
            fields[name] = fields[name].encode(errors="surrogateescape")
    return Row(**fields)


def _escaped(text: bytes) -> str:
    """A stored text; a byte that is not of UTF-8 becomes a lone surrogate."""
    return text.decode(errors="surrogateescape")


def _text(value: Any) -> str:
    if isinstance(value, bytes):
        return value.decode(errors="backslashreplace")
    return shown(value)


def _bytes(value: Any) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode(errors="surrogateescape")
