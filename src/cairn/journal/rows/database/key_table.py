"""
The keys of a node's private fields, in tables beside its journal on PostgreSQL, so that the node
can be started on a machine that has the fleet's journal key and none of the node's files.

Each key is wrapped by the journal key, which is never here. A removed key is in no table, but
PostgreSQL keeps it for a while: in the table's pages until VACUUM, in its write-ahead log, in
replicas and in backups.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import attrs
import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert

from cairn.journal.nodes import SCHEMA_PREFIX

metadata = sa.MetaData()
"""The tables, as the migrations make them on PostgreSQL."""

_keys = sa.Table(
    "keys",
    metadata,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("subject", sa.Text, nullable=False),
    sa.Column("wrapped", sa.LargeBinary, nullable=False),
)
_entry = sa.Table(
    "journal_key",
    metadata,
    sa.Column("node", sa.Text, primary_key=True),
    sa.Column("known", sa.LargeBinary, nullable=False),
    sa.Column("place", sa.Text, nullable=False),
    sa.Column("made", sa.BigInteger, nullable=False),
    sa.Column("removed", sa.BigInteger, nullable=False),
    sa.Column("secret_known", sa.LargeBinary),
)
_OF_ENTRY = (_entry.c.known, _entry.c.place, _entry.c.made, _entry.c.removed)
_NODE = sa.text("current_schema()")
_FIRST_STARTS = 0x6361_6972_0000_0000
"""The advisory lock of first starts; one of the database, whatever the schema."""

_WAIT_MS = 10_000
_OTHERS = sa.text("""
SELECT nspname FROM pg_class JOIN pg_namespace ON pg_namespace.oid = relnamespace
WHERE relname = 'journal_key' AND relkind = 'r' AND starts_with(nspname, :prefix)
AND EXISTS (SELECT 1 FROM pg_attribute WHERE attrelid = pg_class.oid AND attname = 'secret_known')
AND nspname <> current_schema() AND has_table_privilege(pg_class.oid, 'SELECT') ORDER BY nspname
""")

Values = tuple[str, str, bytes]
"""The id of a key, its subject, and the wrapped key."""


@attrs.frozen
class Entry:
    """
    The one row of ``journal_key``.

    Attributes:
        known: what is wrapped to recognize the journal key.
        place: the file with the journal key, on the machine of the last server.
        made: how many keys were ever stored.
        removed: how many were removed.
    """

    known: bytes
    place: str
    made: int
    removed: int


@attrs.frozen
class OtherNode:
    """
    What another node has in its ``journal_key``.

    Attributes:
        known: as of ``Entry``.
        secret_known: what recognizes its secret, which names blocks; None if none is recorded.
    """

    node: str
    known: bytes
    secret_known: bytes | None


def entry(connection: sa.Connection) -> Entry | None:
    """The entry; None before the first start."""
    found = connection.execute(sa.select(*_OF_ENTRY)).one_or_none()
    return Entry(*found) if found is not None else None


def enter(connection: sa.Connection, known: bytes, place: str, secret_known: bytes | None) -> None:
    """Make the entry, or change its place and what recognizes the secret; None leaves that."""
    values = {"known": known, "place": place, "made": 0, "removed": 0, "secret_known": secret_known}
    made = insert(_entry).values(node=_NODE, **values)
    change = {"place": made.excluded.place}
    if secret_known is not None:
        change["secret_known"] = made.excluded.secret_known
    connection.execute(made.on_conflict_do_update(index_elements=["node"], set_=change))


def hold_first_starts(connection: sa.Connection) -> None:
    """Keep the first starts of other nodes from entering, until the transaction ends."""
    connection.exec_driver_sql(f"SET LOCAL lock_timeout = {_WAIT_MS}")
    connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_FIRST_STARTS)))


def of_other_nodes(connection: sa.Connection) -> list[OtherNode]:
    """What recognizes the journal key and the secret of each other node of the database."""
    connection.exec_driver_sql(f"SET LOCAL lock_timeout = {_WAIT_MS}")
    found = []
    for (schema,) in connection.execute(_OTHERS, {"prefix": SCHEMA_PREFIX}).all():
        table = sa.table(
            "journal_key", sa.column("known"), sa.column("secret_known"), schema=schema
        )
        row = connection.execute(sa.select(*table.c).limit(1)).one_or_none()
        if row is not None:
            found.append(OtherNode(schema.removeprefix(SCHEMA_PREFIX), *row))
    return found


def read(connection: sa.Connection) -> Sequence[Values]:
    """All keys."""
    return [(key, of, wrapped) for key, of, wrapped in connection.execute(sa.select(_keys))]


def one(connection: sa.Connection, key_id: str) -> Values | None:
    """The key of an id; None if there is none."""
    found = connection.execute(sa.select(_keys).where(_keys.c.id == key_id)).one_or_none()
    return (found[0], found[1], found[2]) if found is not None else None


def add(connection: sa.Connection, values: Iterable[Values]) -> None:
    """Store keys; those of an earlier try, whose end was not reported, are there already."""
    rows = [dict(zip(("id", "subject", "wrapped"), one, strict=True)) for one in values]
    stored = connection.execute(
        insert(_keys).values(rows).on_conflict_do_nothing().returning(_keys.c.id)
    )
    made = len(stored.all())
    connection.execute(sa.update(_entry).values(made=_entry.c.made + made))


def remove(connection: sa.Connection, key_ids: Iterable[str]) -> int:
    """Remove keys; returns how many were there."""
    gone = connection.execute(sa.delete(_keys).where(_keys.c.id.in_(list(key_ids)))).rowcount
    connection.execute(sa.update(_entry).values(removed=_entry.c.removed + gone))
    return gone
