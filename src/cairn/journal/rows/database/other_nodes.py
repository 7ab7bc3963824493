"""
The blocks that other nodes of a fleet have sealed, by the rows in their journals.

Reads public fields alone: the keys of other nodes' texts are not needed, and are not here. Each
journal is read in transactions of its own, so that one that is locked or not as expected does not
keep the node from reading the others.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Final, TypeVar

import attrs
import msgspec
import sqlalchemy as sa

from cairn.journal import events as ev
from cairn.journal.errors import DamagedRow, StoreError, UnknownEvent
from cairn.journal.nodes import schema_of
from cairn.journal.rows.codec import COLUMNS, Row, decode, row_hash
from cairn.journal.rows.database import postgres
from cairn.journal.rows.database.tables import REVISION, VERSION_TABLE

T = TypeVar("T")

INDEXED_MOST: Final = 200_000
"""
The most blocks of a node that are indexed. Those that were not used for longest are left out,
where the use of a block is one of all that it is built on. One takes some 500 bytes.
"""

PAGE_ROWS: Final = 10_000
"""So many rows are indexed in one transaction."""

STATEMENT_MS: Final = 5_000

LOCK_MS: Final = 100
"""How long a statement waits for the lock of another program."""

WAIT_S: Final = 1.0
"""How long a thread waits until it may read. No request waits longer for its answer."""

RETRY_AFTER: Final = 16
"""After so many looks a journal that could not be read is read again."""

_KINDS = (
    ev.BlockSealed.kind,
    ev.BlocksQuarantined.kind,
    ev.BlockSpilled.kind,
    ev.BlockFileRemoved.kind,
    ev.BlockFileRejected.kind,
)


@attrs.frozen(kw_only=True)
class SealedRow:
    """
    A row by which another node sealed a block.

    Attributes:
        position: in that node's journal.
        row_hash: its hash, which was computed again.
    """

    node: str
    position: int
    row_hash: str
    event: ev.BlockSealed


class OtherNodes:
    """
    Finds the rows of other nodes by the keys of blocks, over a connection that is opened when it is
    first needed. One thread at a time reads; the others wait for it.

    Attributes:
        skipped: why a node's journal could not be read when it was last tried, by node.
    """

    def __init__(self, url: str, node: str) -> None:
        """
        Args:
            url: of this node's journal, on PostgreSQL.
            node: its name, whose own rows are left out.
        """
        self._url = sa.make_url(url).set(drivername="postgresql+psycopg")
        self._node = node
        self._connection: sa.Connection | None = None
        self._journals: dict[str, _Journal] = {}
        self._looks = 0
        self._retry_at: dict[str, int] = {}  # the look at which a skipped journal is read again
        self._in_use = threading.Lock()
        self.skipped: Mapping[str, str] = {}

    def sealed(
        self, keys: Sequence[str], above: Sequence[str] = ()
    ) -> Mapping[str, Sequence[SealedRow]]:
        """
        The rows of other nodes by which these blocks were sealed, one of each node, in the order of
        the nodes' names. Rows that were pruned or changed are left out, and so are those of files
        that their node has removed. Ends before a block that any node has quarantined or has two
        digests of: it is taken from none. Empty if other threads read for longer than ``WAIT_S``.

        Args:
            keys: of blocks that are built on each other, in their order.
            above: of those that the first one is built on.

        Raises:
            StoreError: no journal can be read.
        """
        if not self._in_use.acquire(timeout=WAIT_S):
            return {}
        try:
            connection = self._connected()
            with _limited(connection):
                nodes = [one for one in postgres.nodes(connection) if one != self._node]
            self._looks += 1
            self._journals = {one: self._journals.get(one, _Journal()) for one in nodes}
            self.skipped = {one: fact for one, fact in self.skipped.items() if one in nodes}
            for node in nodes:
                self._tried(node, partial(self._index, connection, node))
            return self._found(connection, self._usable(keys, above))
        except sa.exc.SQLAlchemyError as error:
            self._drop()
            raise StoreError(
                f"The journals of other nodes cannot be read: {_fact(error)}"
            ) from error
        finally:
            self._in_use.release()

    def close(self) -> None:
        """Close the connection, unless a thread is reading."""
        if self._in_use.acquire(blocking=False):
            self._drop()
            self._in_use.release()

    def _connected(self) -> sa.Connection:
        if self._connection is None:
            connection = postgres.unlocked(self._url)
            self._connection = connection.execution_options(postgresql_readonly=True)
        return self._connection

    def _tried(self, node: str, read: Callable[[], T]) -> T | None:
        """
        Read a node's journal. None if it is skipped, or cannot be read; then it is skipped for a
        while.
        """
        if node in self.skipped and self._looks < self._retry_at[node]:
            return None
        try:
            found = read()
        except (sa.exc.SQLAlchemyError, StoreError) as error:
            if isinstance(error, sa.exc.DBAPIError) and error.connection_invalidated:
                raise
            self.skipped = {**self.skipped, node: _fact(error)}
            self._retry_at[node] = self._looks + RETRY_AFTER
            return None
        self.skipped = {one: fact for one, fact in self.skipped.items() if one != node}
        return found

    def _index(self, connection: sa.Connection, node: str) -> None:
        """Index the rows that came since the last time, in pages: what was read is not lost."""
        events = _events_of(node)
        ends = sa.select(sa.func.min(events.c.position), sa.func.max(events.c.position))
        with _limited(connection):
            _check_revision(connection, node)
            first, last = connection.execute(ends).one()
        if last is None or last < self._journals[node].read:
            self._journals[node] = _Journal()  # another journal has the node's name by now
        journal = self._journals[node]
        journal.read = max(journal.read, (first or 1) - 1)
        while journal.read < (last or 0):
            end = min(last, journal.read + PAGE_ROWS)
            query = sa.select(events.c.position, events.c.kind, events.c.public).where(
                events.c.position.between(journal.read + 1, end), events.c.kind.in_(_KINDS)
            )
            with _limited(connection):
                found = connection.execute(query.order_by(events.c.position)).all()
            for position, kind, public in found:
                journal.note(position, kind, public)
            journal.read = end

    def _usable(self, keys: Sequence[str], above: Sequence[str]) -> list[bytes]:
        """The keys up to the first one that a node has reason not to use."""
        usable: list[bytes] = []
        for place, key in enumerate(map(bytes.fromhex, [*above, *keys])):
            if any(key in journal.doubtful for journal in self._journals.values()):
                break
            if place >= len(above):
                usable.append(key)
        return usable

    def _found(
        self, connection: sa.Connection, keys: Sequence[bytes]
    ) -> dict[str, Sequence[SealedRow]]:
        found: dict[str, list[SealedRow]] = {}
        for node, journal in self._journals.items():
            positions = journal.places(keys)
            read = partial(_rows_at, connection, node, positions)
            for row in (self._tried(node, read) if positions else None) or ():
                if (sealed := _sealed(node, row)) is not None:
                    found.setdefault(sealed.event.key, []).append(sealed)
        return {key.hex(): found[key.hex()] for key in keys if key.hex() in found}

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


@attrs.define
class _Indexed:
    """
    A block that a node has sealed.

    Attributes:
        position: of the last row by which it did.
        used: the node's last row when the block was last sealed, or looked up.
        has_file: False if its file is on record as removed.
    """

    position: int
    parent: bytes | None
    start: int
    digest: str
    used: int
    has_file: bool = True


@attrs.define
class _Journal:
    """
    What is known of a node's journal.

    Attributes:
        read: up to which row it is indexed.
        doubtful: blocks that the node has quarantined, or has two digests of.
    """

    read: int = 0
    blocks: dict[bytes, _Indexed] = attrs.field(factory=dict)
    doubtful: set[bytes] = attrs.field(factory=set)

    def note(self, position: int, kind: str, public: bytes) -> None:
        """Take a row in. One that cannot be read was changed, and `ops verify` says so."""
        try:
            said = msgspec.json.decode(public, type=_Public)
            keys = [bytes.fromhex(key) for key in said.keys]
            key = bytes.fromhex(said.key)
            parent = None if said.parent is None else bytes.fromhex(said.parent)
        except ValueError:
            return
        known = self.blocks.get(key)
        if kind == ev.BlocksQuarantined.kind:
            self.doubtful.update(keys)
        elif kind == ev.BlockSealed.kind:
            if known is not None and known.digest != said.digest:
                self.doubtful.add(key)
            has_file = known is None or known.has_file
            self.blocks[key] = _Indexed(
                position, parent, said.start, said.digest, position, has_file
            )
            if len(self.blocks) > INDEXED_MOST:
                self._trim()
        elif known is not None and said.node is None:
            known.has_file = kind == ev.BlockSpilled.kind

    def places(self, keys: Sequence[bytes]) -> list[int]:
        """The rows by which the node sealed those of these blocks that have a file."""
        found = [self.blocks[key] for key in keys if key in self.blocks]
        for block in found:
            block.used = self.read
        return [block.position for block in found if block.has_file]

    def _trim(self) -> None:
        for block in sorted(self.blocks.values(), key=lambda block: block.start, reverse=True):
            parent = self.blocks.get(block.parent) if block.parent is not None else None
            if parent is not None:
                parent.used = max(parent.used, block.used)
        by_use = sorted(self.blocks.items(), key=lambda one: (-one[1].used, one[1].start))
        self.blocks = dict(by_use[: INDEXED_MOST - INDEXED_MOST // 10])


class _Public(msgspec.Struct):
    """The fields of any of ``_KINDS`` that count."""

    key: str = ""
    keys: list[str] = []
    parent: str | None = None
    start: int = 0
    digest: str = ""
    node: str | None = None


@contextmanager
def _limited(connection: sa.Connection) -> Iterator[None]:
    """A transaction whose statements do not wait for long."""
    with connection.begin():
        connection.exec_driver_sql(f"SET LOCAL statement_timeout = {STATEMENT_MS}")
        connection.exec_driver_sql(f"SET LOCAL lock_timeout = {LOCK_MS}")
        yield


def _check_revision(connection: sa.Connection, node: str) -> None:
    version = sa.table(VERSION_TABLE, sa.column("version_num"), schema=schema_of(node))
    found = connection.execute(sa.select(version.c.version_num)).scalars().all()
    if found != [REVISION]:
        raise StoreError(f"its schema is {', '.join(found) or 'none'}, and not {REVISION}")


def _fact(error: Exception) -> str:
    return (str(error).splitlines() or ["no message"])[0]


def _events_of(node: str) -> sa.TableClause:
    columns = [sa.column(name, sa.types.NullType()) for name in COLUMNS]
    return sa.table("events", *columns, schema=schema_of(node))


def _rows_at(connection: sa.Connection, node: str, positions: Collection[int]) -> list[Row]:
    """The rows at these positions that were not pruned."""
    events = _events_of(node)
    bases = sa.table("bases", sa.column("position"), schema=schema_of(node))
    pruned = sa.select(sa.func.coalesce(sa.func.max(bases.c.position), 0)).scalar_subquery()
    query = sa.select(events).where(events.c.position.in_(positions), events.c.position > pruned)
    with _limited(connection):
        found = connection.execute(query.order_by(events.c.position)).all()
    return [Row(**row._mapping) for row in found]


def _sealed(node: str, row: Row) -> SealedRow | None:
    """The block that a row seals; None if the row was changed, or is of another kind."""
    try:
        event = decode(row).event if row_hash(row) == row.hash else None
    except (DamagedRow, UnknownEvent):
        return None
    if not isinstance(event, ev.BlockSealed):
        return None
    return SealedRow(node=node, position=row.position, row_hash=row.hash, event=event)
