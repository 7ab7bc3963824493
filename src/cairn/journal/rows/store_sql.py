"""
Rows in a database: SQLite by default, PostgreSQL by URL. Only this module and those of the room
``database`` use SQLAlchemy.

Rules of this module:

1. Rows are added and read, never changed. A base replaces the first rows when the journal is pruned
   (``cut``); they are removed after that (``removal``), and are read no more.
2. A database that cannot be used is refused with a sentence that says what to do, and is left
   unchanged.
"""

from __future__ import annotations

import os
import socket
import sqlite3
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import attrs
import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError

from cairn.journal.errors import (
    HeadMoved,
    LeaseLost,
    StoreError,
    StoreLost,
    StoreUnready,
)
from cairn.journal.rows.base import Base
from cairn.journal.rows.codec import COLUMNS, GENESIS, Row, opened, shown
from cairn.journal.rows.database import lease, postgres
from cairn.journal.rows.database.connections import Sync, connected, let_go, log_of, size_of
from cairn.journal.rows.database.failures import MAKE_ROOM, store_errors
from cairn.journal.rows.database.lease import Lease
from cairn.journal.rows.database.schema import (
    as_text,
    other_revision,
    postgres_faults,
    schema_revision,
    sqlite_faults,
    strange_words,
)
from cairn.journal.rows.database.tables import REVISION, bases, events
from cairn.journal.rows.database.urls import file_of, parsed_url, place_name
from cairn.journal.rows.removal import REMOVED_ROWS, Replaced
from cairn.journal.rows.sealing import KeyRing

T = TypeVar("T")

BATCH_ROWS = 2000
_MAKE_MORE_ROOM = (
    "Free some space on its disk: up to twice as much as the journal takes there, until this is "
    "done. What is in the journal is safe."
)
_names = COLUMNS
# Bytes are read as the driver returns them: a row that was changed by hand may hold text instead,
# and must be reported as a broken chain, not as a type error of the database layer.
_columns: tuple[Any, ...] = tuple(
    sa.type_coerce(events.c[name], sa.types.NullType()).label(name) for name in _names
)
# Made once, because each commit needs them.
_LAST = (
    sa.select(events.c.position, sa.type_coerce(events.c.hash, sa.types.NullType()).label("hash"))
    .order_by(events.c.position.desc())
    .limit(1)
)
_INSERT = sa.insert(events)
_LINKS = sa.select(
    *(
        sa.type_coerce(column, sa.types.NullType())
        for column in (events.c.position, events.c.hash, events.c.previous_hash)
    )
).order_by(events.c.position.desc())
_AFTER_BASE = events.c.position > sa.func.coalesce(
    sa.select(sa.func.max(bases.c.position)).scalar_subquery(), -(2**62)
)


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
        self._log = None if file is None else log_of(file.resolve())

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
        parsed = parsed_url(url)
        place = place_name(parsed)
        if (path := file_of(parsed)) is not None and not path.exists():
            raise StoreError(
                f"There is no journal at {place}. Start the server once, which creates it, "
                "or check --data-dir or --journal."
            )
        revision = schema_revision(url)
        if revision != REVISION:
            raise StoreError(other_revision(place, revision))
        connection = connected(parsed, mode="ro" if read_only else "rw", sync=sync)
        token = None
        if path is None and not read_only:
            try:
                with store_errors(place, "write to"), connection.begin():
                    token = lease.taken(connection, holder or _this_process())
            except BaseException:
                let_go(connection)
                raise
        return cls(connection, place, path, keys, token)

    @property
    def token(self) -> int | None:
        """Of the lease of a writer on PostgreSQL; None if there is none."""
        return self._token

    def leases(self) -> list[tuple[str, int]]:
        """The schemas and tokens of the leases of a journal on PostgreSQL: one, once served."""
        with store_errors(self._place, "read"), self._connection.begin():
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
    def _writing(self, doing: str, make_room: str = MAKE_ROOM) -> Iterator[None]:
        """A transaction of the writer. See ``store_errors``."""
        try:
            with store_errors(self._place, doing, make_room), self._connection.begin():
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
        with store_errors(self._place, "read"):
            connection = postgres.unlocked(self._connection.engine.url)
            try:
                with connection.begin():
                    found = lease.held(connection)
            finally:
                let_go(connection)
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
        with store_errors(self._place, "read"), self._connection.begin():
            found = self._base()
        if found is None:
            return None
        # A value of another type was set by hand, and is not a base that a row names.
        position, head, state, digest = found
        return Base(
            position=position, head=as_text(head), state=_bytes(state), state_digest=as_text(digest)
        )

    def cut(self, base: Base, rows: Sequence[Row]) -> None:
        """See ``Store.cut``."""
        if self._keys is not None:
            self._keys.commit(self._within)
        self._lasting(lambda: self._cut(base, rows))
        self._require_own_file()

    def _cut(self, base: Base, rows: Sequence[Row]) -> None:
        ends = sa.select(events.c.hash).where(events.c.position == base.position)
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
            self._connection.execute(sa.delete(bases))
            self._connection.execute(sa.insert(bases), attrs.asdict(base))

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
            query = sa.delete(events).where(events.c.position.between(first, last))
            self._connection.execute(query)

    def _replaced(self, most: int) -> Iterator[Replaced]:
        """
        The rows that the base has replaced and that are there still, after each ``most`` of them
        that were found; none if the journal has no base. Looked for from the base backwards,
        because a process that removes them begins at the other end.
        """
        found = self._found(sa.select(bases.c.position, bases.c.head).limit(1))
        if not found:
            return
        replaced, count = Replaced(*found[0]), most
        while count == most:
            query = _LINKS.where(events.c.position < replaced.first).limit(most)
            count = replaced.feed(tuple(link) for link in self._found(query))
            yield replaced

    def has_slack(self) -> bool:
        """Whether ``give_back`` has something to do: free pages in the file, or a log."""
        if self._connection.dialect.name != "sqlite":
            return False
        with store_errors(self._place, "read"):
            free = self._free_pages()
            path = self._path()
        return free > 0 or size_of(log_of(path)) > 0

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
        with store_errors(self._place, "shrink"):
            home = self._path().parent
        spare = _named_spare() or home
        with store_errors(self._place, "shrink", _more_room(home, spare)):
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
        return 0 if self._log is None else size_of(self._log)

    def time_at(self, position: int) -> int | None:
        """When the row at a position was written, in microseconds since 1970."""
        query = sa.select(events.c.time_us).where(events.c.position == position)
        with store_errors(self._place, "read"), self._connection.begin():
            found = self._connection.execute(query).scalar_one_or_none()
        return found if isinstance(found, int) else None  # another program may have changed it

    def size_bytes(self) -> int:
        """
        The size of an SQLite database, with rows that are only in its write-ahead log yet. The log
        itself does not count: it has each change of a page, until it is overwritten.
        """
        with store_errors(self._place, "read"), self._connection.begin():
            pages, page = (
                self._connection.exec_driver_sql(f"PRAGMA {name}").scalar_one()
                for name in ("page_count", "page_size")
            )
        return int(pages) * int(page)

    def head(self) -> tuple[int, str]:
        """See ``Store.head``."""
        with store_errors(self._place, "read"), self._connection.begin():
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
        query = sa.select(*_columns).order_by(events.c.position).limit(BATCH_ROWS)
        if stream is not None:
            query = query.where(events.c.stream == stream)
        if kinds is not None:
            query = query.where(events.c.kind.in_(kinds))
        if after is None:
            *_, replaced = None, *self._replaced(BATCH_ROWS)
            if replaced is not None:
                query = query.where(~events.c.position.between(replaced.first, replaced.last))
        while True:
            batch = self._found(query if after is None else query.where(events.c.position > after))
            for values in batch:
                yield self.opened(_row(values))
            if len(batch) < BATCH_ROWS:
                return
            after = batch[-1][0]

    def row(self, position: int) -> Row | None:
        """See ``Store.row``."""
        query = sa.select(*_columns).where(events.c.position == position, _AFTER_BASE)
        found = self._lasting(lambda: self._found(query))
        return self.opened(_row(found[0])) if found else None

    def opened(self, row: Row) -> Row:
        """See ``Store.opened``."""
        return row if self._keys is None else opened(row, self._keys)

    def last(self, count: int, *, stream: str | None = None) -> list[Row]:
        """The last ``count`` rows in order, of one stream if one is named."""
        query = sa.select(*_columns).order_by(events.c.position.desc()).limit(count)
        query = query.where(_AFTER_BASE)
        if stream is not None:
            query = query.where(events.c.stream == stream)
        return [self.opened(_row(values)) for values in reversed(self._found(query))]

    def streams(self) -> set[str]:
        """The names of all streams that have a row."""
        query = sa.select(events.c.stream).where(_AFTER_BASE).distinct()
        return {name for (name,) in self._found(query) if isinstance(name, str)}

    def _found(self, query: Any) -> Sequence[Any]:
        with store_errors(self._place, "read"), self._connection.begin():
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
        with store_errors(self._place, "read"), self._connection.begin():
            return self._schema_faults()

    def _schema_faults(self) -> list[tuple[str, str]]:
        if self._connection.dialect.name == "sqlite":
            return sqlite_faults(self._raw())
        return postgres_faults(self._connection)

    def close(self) -> None:
        """See ``Store.close``."""
        let_go(self._connection)

    def _head(self) -> tuple[int, str]:
        last = self._executed(_LAST)
        if last:
            return last[0][0], shown(last[0][1])
        base = self._base()
        return (base[0], as_text(base[1])) if base is not None else (0, GENESIS)

    def _base(self) -> Sequence[Any] | None:
        # As the driver returns it, like a row: a base that was changed by hand is a finding.
        columns = [sa.type_coerce(column, sa.types.NullType()) for column in bases.c]
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
        query = sa.select(events.c.position, events.c.event_id, events.c.hash)
        first, last = rows[0].position, rows[-1].position
        found = self._connection.execute(query.where(events.c.position.between(first, last))).all()
        stored = {at: (event_id, row_hash) for at, event_id, row_hash in found}
        new = [row for row in rows if stored.get(row.position) != (row.event_id, row.hash)]
        if new and (new[0].position - 1, new[0].previous_hash) != (position, head):
            raise HeadMoved(
                f"Row {new[0].position} does not follow row {position} of {self._place}: another "
                "writer appended to it. Let one server at a time use a journal."
            )
        return new


def is_empty(store: SqlStore) -> bool:
    """Whether a journal has no rows, and never had."""
    return store.base() is None and store.head()[0] == 0


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


def _row(values: Sequence[Any]) -> Row:
    fields = dict(zip(_names, values, strict=True))
    for name in ("public", "private"):
        if isinstance(fields[name], str):
            fields[name] = fields[name].encode(errors="surrogateescape")
    return Row(**fields)


def _escaped(text: bytes) -> str:
    """A stored text; a byte that is not of UTF-8 becomes a lone surrogate."""
    return text.decode(errors="surrogateescape")


def _bytes(value: Any) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode(errors="surrogateescape")
