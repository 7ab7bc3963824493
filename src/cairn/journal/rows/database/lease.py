"""
The lease of a journal on PostgreSQL, which fences a writer that was taken over.

The advisory lock keeps a second server out; but that of a process that hangs lasts as long as its
connection, and a lock says nothing about a commit that is on its way. So each commit reads the
lease's token ``FOR SHARE``, and ``raised`` waits for that commit. The writer's next one finds
another token than its own, and stores nothing.
"""

from __future__ import annotations

import attrs
import sqlalchemy as sa

table = sa.Table(
    "lease",
    sa.MetaData(),
    sa.Column("node", sa.Text, primary_key=True),
    sa.Column("token", sa.BigInteger, nullable=False),
    sa.Column("holder", sa.Text, nullable=False),
)
"""One row, which the migrations do not make: ``taken`` does. The node is the schema's name."""

_NODE = sa.text("current_schema()")
_LISTED = sa.select(table.c.node, table.c.token)
_HELD = sa.select(table.c.token, table.c.holder).with_for_update(read=True)


@attrs.frozen
class Lease:
    """
    Attributes:
        token: of the writer that may commit. It only grows.
        holder: that writer, or the operator who took the journal over, for people.
    """

    token: int
    holder: str


def taken(connection: sa.Connection, holder: str) -> int:
    """Enter the holder of the lease, and return its token. The holder has the journal's lock."""
    found = connection.execute(sa.update(table).values(holder=holder).returning(table.c.token))
    token = found.scalar_one_or_none()
    if token is None:
        token = 1
        connection.execute(sa.insert(table).values(node=_NODE, token=token, holder=holder))
    return int(token)


def held(connection: sa.Connection) -> Lease | None:
    """The lease, which cannot change until the transaction ends; None if there is none."""
    found = connection.execute(_HELD).one_or_none()
    return Lease(*found) if found is not None else None


def listed(connection: sa.Connection) -> list[tuple[str, int]]:
    """The nodes and tokens of all rows, of which there should be one. Locks nothing."""
    return [(node, token) for node, token in connection.execute(_LISTED)]


def raised(connection: sa.Connection, by: str) -> int | None:
    """Raise the token, once no commit has read it, and return it; None if there is none."""
    change = sa.update(table).values(token=table.c.token + 1, holder=by).returning(table.c.token)
    token = connection.execute(change).scalar_one_or_none()
    return int(token) if token is not None else None
