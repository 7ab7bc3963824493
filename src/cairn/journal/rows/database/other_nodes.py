"""
The blocks that other nodes of a fleet have sealed, by the rows in their journals.

Reads public fields alone: the keys of other nodes' texts are not needed, and are not here.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from typing import Final

import attrs
import msgspec
import sqlalchemy as sa

from cairn.journal.errors import DamagedRow, StoreError, UnknownEvent
from cairn.journal.events import BlockSealed, BlocksQuarantined
from cairn.journal.nodes import schema_of
from cairn.journal.rows.codec import COLUMNS, Row, decode, row_hash
from cairn.journal.rows.database import postgres

INDEXED_MOST: Final = 200_000
"""The most rows that are indexed; the oldest ones are left out. One takes some 300 bytes."""

STATEMENT_MS: Final = 5_000

WAIT_S: Final = 1.0
"""How long a thread waits until it may read. No request waits longer for its answer."""

_KINDS = (BlockSealed.kind, BlocksQuarantined.kind)


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
    event: BlockSealed


class OtherNodes:
    """
    Finds the rows of other nodes by the keys of blocks, over a connection that is opened when it is
    first needed. One thread at a time reads; the others wait for it.
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
        self._read: dict[str, int] = {}  # up to which row each node's journal is indexed
        # key to the (node, position) of each row by which it was sealed
        self._places: dict[bytes, tuple[tuple[str, int], ...]] = {}
        self._quarantined: set[tuple[str, str]] = set()  # (node, key)
        self._in_use = threading.Lock()

    def sealed(self, keys: Collection[str]) -> Mapping[str, Sequence[SealedRow]]:
        """
        The rows of other nodes by which these blocks were sealed, one of each node, in the order of
        the nodes' names. Rows that were pruned or changed are left out, and so are blocks that a
        node quarantined or has two digests of. Empty if other threads read for longer than ``WAIT_S``.

        Raises:
            StoreError: they cannot be read.
        """
        if not self._in_use.acquire(timeout=WAIT_S):
            return {}
        try:
            connection = self._connected()
            with connection.begin():
                connection.exec_driver_sql(f"SET LOCAL statement_timeout = {STATEMENT_MS}")
                nodes = self._index(connection)
                return self._found(connection, nodes, keys)
        except sa.exc.SQLAlchemyError as error:
            self._drop()
            fact = (str(error).splitlines() or ["no message"])[0]
            raise StoreError(f"The journals of other nodes cannot be read: {fact}") from error
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

    def _index(self, connection: sa.Connection) -> set[str]:
        """Index the rows that came since the last time. The nodes that have a journal now."""
        nodes = set()
        for node in postgres.nodes(connection):
            if node == self._node:
                continue
            nodes.add(node)
            events = _events_of(node)
            last = connection.execute(sa.select(sa.func.max(events.c.position))).scalar_one() or 0
            read = self._read.get(node, 0)
            if last < read:  # another journal has the node's name by now
                read = 0
            after = events.c.position.between(read + 1, last)
            query = sa.select(events.c.position, events.c.kind, events.c.public)
            found = connection.execute(query.where(after, events.c.kind.in_(_KINDS)))
            for position, kind, public in found:
                self._note(node, position, kind, public)
            self._read[node] = last
        return nodes

    def _note(self, node: str, position: int, kind: str, public: bytes) -> None:
        try:
            if kind == BlockSealed.kind:
                key = bytes.fromhex(msgspec.json.decode(public, type=_Sealed).key)
                self._places[key] = (*self._places.get(key, ()), (node, position))
            else:
                keys = msgspec.json.decode(public, type=_Quarantined).keys
                self._quarantined.update((node, key) for key in keys)
        except ValueError:
            return  # it was changed, and `ops verify` says so
        if len(self._places) > INDEXED_MOST:
            del self._places[next(iter(self._places))]

    def _found(
        self, connection: sa.Connection, nodes: Collection[str], keys: Collection[str]
    ) -> dict[str, Sequence[SealedRow]]:
        places: dict[str, list[int]] = {}
        for key in keys:
            for node, position in self._places.get(bytes.fromhex(key), ()):
                if node in nodes and (node, key) not in self._quarantined:
                    places.setdefault(node, []).append(position)
        found: dict[str, list[SealedRow]] = {}
        for node, positions in sorted(places.items()):
            of_node: dict[str, list[SealedRow]] = {}
            for row in _rows_at(connection, node, positions):
                if (sealed := _sealed(node, row)) is not None:
                    of_node.setdefault(sealed.event.key, []).append(sealed)
            for key, rows in of_node.items():
                if len({row.event.digest for row in rows}) == 1:
                    found.setdefault(key, []).append(rows[-1])
        return {key: found[key] for key in keys if key in found}

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class _Sealed(msgspec.Struct):
    key: str


class _Quarantined(msgspec.Struct):
    keys: list[str]


def _events_of(node: str) -> sa.TableClause:
    columns = [sa.column(name, sa.types.NullType()) for name in COLUMNS]
    return sa.table("events", *columns, schema=schema_of(node))


def _rows_at(connection: sa.Connection, node: str, positions: Collection[int]) -> list[Row]:
    """The rows at these positions that were not pruned."""
    events = _events_of(node)
    bases = sa.table("bases", sa.column("position"), schema=schema_of(node))
    pruned = sa.select(sa.func.coalesce(sa.func.max(bases.c.position), 0)).scalar_subquery()
    query = sa.select(events).where(events.c.position.in_(positions), events.c.position > pruned)
    found = connection.execute(query.order_by(events.c.position))
    return [Row(**row._mapping) for row in found]


def _sealed(node: str, row: Row) -> SealedRow | None:
    """The block that a row seals; None if the row was changed, or is of another kind."""
    try:
        event = decode(row).event if row_hash(row) == row.hash else None
    except (DamagedRow, UnknownEvent):
        return None
    if not isinstance(event, BlockSealed):
        return None
    return SealedRow(node=node, position=row.position, row_hash=row.hash, event=event)
