"""
Which other nodes of a fleet have blocks of a text, by the public fields of their journals: those
that computed it, and those that adopted it.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec
import sqlalchemy as sa

from cairn.journal.events import BlockAdopted, BlockSealed
from cairn.journal.nodes import schema_of
from cairn.journal.rows.database import postgres

STATEMENT_MS = 30_000
ROWS_A_FETCH = 1_000

_KINDS = (BlockSealed.kind, BlockAdopted.kind)


class _Keyed(msgspec.Struct):
    key: str


def places_elsewhere(url: str, node: str, keys: Collection[str]) -> list[str]:
    """
    Where other nodes have, or had, blocks with these keys, a phrase for each node, over a
    connection of its own. A journal that cannot be read now is named, too.

    Args:
        url: of the node's journal.
        node: whose blocks they are.
    """
    wanted = frozenset(keys)
    try:
        with postgres.unlocked(sa.make_url(url).set(drivername="postgresql+psycopg")) as connection:
            others = [name for name in postgres.nodes(connection) if name != node]
            connection.rollback()
            found = [_phrase(connection, name, wanted) for name in others]
    except sa.exc.SQLAlchemyError:
        return ["perhaps on other nodes, whose journals cannot be read now"]
    return [phrase for phrase in found if phrase is not None]


def _phrase(connection: sa.Connection, node: str, keys: Collection[str]) -> str | None:
    try:
        if not _names(connection, node, keys):
            return None
    except sa.exc.SQLAlchemyError:
        return f"perhaps on node {node}, whose journal cannot be read now"
    return (
        f"on node {node}, whose journal has blocks of the same text: forget the session that has "
        "them there"
    )


def _names(connection: sa.Connection, node: str, keys: Collection[str]) -> bool:
    """Whether a row of a node seals or adopts one of these blocks."""
    events = sa.table(
        "events", sa.column("kind"), sa.column("public", sa.LargeBinary), schema=schema_of(node)
    )
    query = sa.select(events.c.public).where(events.c.kind.in_(_KINDS))
    with connection.begin():
        connection.exec_driver_sql(f"SET LOCAL statement_timeout = {STATEMENT_MS}")
        with connection.execute(query, execution_options={"yield_per": ROWS_A_FETCH}) as rows:
            return any(_key_of(bytes(public)) in keys for (public,) in rows)


def _key_of(public: bytes) -> str | None:
    try:
        return msgspec.json.decode(public, type=_Keyed).key
    except msgspec.MsgspecError:
        return None  # it was changed, and `ops verify` says so
