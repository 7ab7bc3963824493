"""
What is PostgreSQL's alone: connections with the journal's lock, and what another program can add to
a database.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import sqlalchemy as sa

from cairn.journal.errors import StoreError, StoreHeld, StoreLost
from cairn.journal.events import HeadsSeen, LossAccepted
from cairn.journal.nodes import SCHEMA_PREFIX, NodeHead, node_of_schema, schema_of

CLAIM_TRIES = 50
"""
How often the lock of a journal on PostgreSQL is tried, every tenth of a second: the database may
take a moment to notice that a server was killed.
"""

# What a server reports, by SQLSTATE.
DISK_FULL = "53100"
LOCKED = "55P03"
# Connection errors, a server that shuts down or starts, and one that has no free connection.
LOST = ("08", "57P", "53300")
_LOCKS = 0x4361_6972  # the upper half of the locks' keys; the lower is the schema
# A connection without an answer ends after about a minute, at both ends: the lock goes with it.
_CONNECT = {
    "application_name": "cairn",
    "connect_timeout": 10,
    "keepalives_idle": 30,
    "keepalives_interval": 10,
    "keepalives_count": 3,
    "tcp_user_timeout": 60_000,
}
_SESSION = (
    "SET tcp_keepalives_idle = 30",
    "SET tcp_keepalives_interval = 10",
    "SET tcp_keepalives_count = 3",
    "SET tcp_user_timeout = 60000",
)
_END_MS = 10_000
_END_WRITERS = sa.text("""
SELECT CASE WHEN pg_terminate_backend(pid, :wait_ms) THEN pid END
FROM pg_locks WHERE locktype = 'advisory' AND granted AND pid <> pg_backend_pid()
AND classid = :upper AND objid = (SELECT oid FROM pg_namespace WHERE nspname = current_schema())
AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
""")
LOOK_MS = 5000
"""How long one look into the journal of another node may take."""

LOOK_LOCK_MS = 1000
"""How long such a look waits for a lock."""

_SCHEMAS = sa.text(
    "SELECT schemaname FROM pg_tables WHERE tablename = :table AND schemaname LIKE :like ORDER BY 1"
)
# Rows that only say what a node saw of others do not count: nodes would answer each other for ever.
_HEAD = """
SELECT position, hash,
EXISTS (SELECT 1 FROM {events} WHERE position > :since AND kind <> :itself),
(SELECT hash FROM {events} WHERE position = :since), (SELECT version_num FROM {revision})
FROM {events} ORDER BY position DESC LIMIT 1
"""

_LOCKED = sa.text("""
SELECT nspname FROM pg_locks JOIN pg_namespace ON pg_namespace.oid = objid
WHERE locktype = 'advisory' AND granted AND classid = :upper
AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
""")
_ACCEPTED = "SELECT position, hash, public FROM {events} WHERE kind = :kind ORDER BY position DESC"
_HOLDER = """
SELECT coalesce(string_agg(format(
    'process %%s of the database server%%s', pid, ', connected from ' || host(client_addr)
), ' and '), 'it has just ended'), coalesce(array_agg(pid), '{}')
FROM pg_locks JOIN pg_stat_activity USING (pid)
WHERE locktype = 'advisory' AND granted AND classid = %s AND objid = %s AND database =
    (SELECT oid FROM pg_database WHERE datname = current_database())
"""


def connected(
    url: sa.URL, place: str, *, read_only: bool, may_create: bool, wait_s: float, is_synced: bool
) -> sa.Connection:
    """
    A connection to a database. One that may write has the lock of the journal.

    Args:
        place: of the journal, for people.
        may_create: whether to create the schema of a node. Any other schema must exist.
        wait_s: how long it waits for another process's lock, in seconds.
        is_synced: whether a commit waits for the disk, if the database's own setting says so.
    """
    if read_only:
        return unlocked(url).execution_options(postgresql_readonly=True)

    engine = _engine(url)
    own = set[int]()  # the processes of earlier connections

    # SQLAlchemy replaces a lost connection by itself, and calls this for each.
    @sa.event.listens_for(engine, "connect")
    def claimed(raw: Any, _: object) -> None:
        try:
            if may_create:
                _create_schema_of_node(raw)
            _claim(raw, place, own, wait_s, is_synced)
        except BaseException:
            raw.close()
            raise
        own.add(raw.info.backend_pid)

    return engine.connect()


def unlocked(url: sa.URL) -> sa.Connection:
    """A connection without the lock of the journal. It must not change the journal's rows."""
    return _engine(url).connect()


def end_writers(connection: sa.Connection) -> list[int]:
    """
    End all connections that have the lock of a journal, and wait until they have ended.

    Returns:
        The processes of the database server that they had.
    """
    found = connection.execute(_END_WRITERS, {"upper": _LOCKS, "wait_ms": _END_MS})
    return [process for (process,) in found if process is not None]


def _engine(url: sa.URL) -> sa.Engine:
    asked = {name: value for name, value in _CONNECT.items() if name not in url.query}
    return sa.create_engine(url, poolclass=sa.NullPool, connect_args=asked)


def _create_schema_of_node(raw: Any) -> None:
    with raw.cursor() as cursor:
        cursor.execute("SHOW search_path")
        (path,) = cursor.fetchone()
        if node_of_schema(path) is not None:
            cursor.execute(f"CREATE SCHEMA IF NOT EXISTS {path}")
        raw.commit()


def _claim(raw: Any, place: str, own: set[int], wait_s: float, is_synced: bool) -> None:
    """
    Take the lock of a journal on PostgreSQL, which its connection has until it ends.

    Args:
        own: the database's processes of earlier connections of this store.

    Raises:
        StoreLost: an earlier connection has it, of which the database does not know yet that it is
            lost.
        StoreHeld: another server's connection has it.
    """
    settings = [*_SESSION, f"SET lock_timeout = {int(wait_s * 1000)}"]
    if not is_synced:  # otherwise the setting of the database server counts
        settings.append("SET synchronous_commit = off")
    with raw.cursor() as cursor:
        for setting in settings:
            cursor.execute(setting)
        cursor.execute(
            "SELECT oid::bigint, nspname FROM pg_namespace WHERE nspname = current_schema()"
        )
        found = cursor.fetchone()
        if found is None:
            raise StoreError(f"{place} names a schema that does not exist; create it first.")
        schema, name = found
        for _ in range(CLAIM_TRIES):
            cursor.execute("SELECT pg_try_advisory_lock(%s)", (_LOCKS << 32 | schema,))
            (is_free,) = cursor.fetchone()
            raw.commit()
            if is_free:
                return
            cursor.execute("SELECT pg_sleep(0.1)")
        cursor.execute(_HOLDER, (_LOCKS, schema))
        holder, processes = cursor.fetchone()
    if own & {*processes}:
        raise StoreLost(f"The database still keeps a lost connection to {place} ({holder}).")
    node = node_of_schema(name)
    advice = (
        "choose another journal with --journal."
        if node is None
        else f"if it does not answer, take the node over: `ops takeover {node}`."
    )
    raise StoreHeld(f"{place}: {holder}", f"Stop it, or {advice}")


def nodes(connection: sa.Connection) -> list[str]:
    """The nodes that have a journal in a database, in order of their names."""
    like = SCHEMA_PREFIX.replace("_", r"\_") + "%"
    found = connection.execute(_SCHEMAS, {"like": like, "table": "events"})
    return [node for (schema,) in found if (node := node_of_schema(schema)) is not None]


def locked_nodes(connection: sa.Connection) -> set[str]:
    """The nodes of a database whose journals are locked by a writer."""
    found = connection.execute(_LOCKED, {"upper": _LOCKS})
    return {node for (schema,) in found if (node := node_of_schema(schema)) is not None}


def heads_of(
    connection: sa.Connection,
    names: Iterable[str],
    since: Mapping[str, tuple[int, str]],
    revision: str,
) -> list[NodeHead]:
    """
    The heads of nodes that have a row. One that cannot be read, or is locked for longer than a
    second, does not keep the others from being read.

    Args:
        since: node to position and hash of the head that was seen last.
        revision: of the schema that this version reads.
    """
    found = []
    with connection.begin():
        connection.exec_driver_sql(f"SET LOCAL statement_timeout = {LOOK_MS}")
        connection.exec_driver_sql(f"SET LOCAL lock_timeout = {LOOK_LOCK_MS}")
        for node in names:
            try:
                with connection.begin_nested():
                    head = _head(connection, node, since.get(node, (0, "")), revision)
            except sa.exc.DBAPIError as error:
                if error.connection_invalidated:
                    raise
                head = NodeHead.unread(node, str(error.orig).partition("\n")[0])
            if head is not None:
                found.append(head)
    return found


def _head(
    connection: sa.Connection, node: str, since: tuple[int, str], revision: str
) -> NodeHead | None:
    """The head of a node; None if it has no row."""
    at, row_hash = since
    # A schema is a name that needs no quotes.
    schema = schema_of(node)
    query = sa.text(_HEAD.format(events=f"{schema}.events", revision=f"{schema}.cairn_schema"))
    row = connection.execute(query, {"since": at, "itself": HeadsSeen.kind}).one_or_none()
    if row is None:
        return None
    position, last, has_more, known, has = row
    if has != revision:
        return NodeHead.unread(node, f"it has schema {has}, and this version reads {revision}")
    is_lost = position < at or (known is not None and known != row_hash)
    accepted = _accepted(connection, node, f"{at}:{row_hash}") if is_lost else None
    return NodeHead(node, position, last, has_more and not is_lost, is_lost, accepted)


def _accepted(connection: sa.Connection, node: str, head: str) -> tuple[int, str] | None:
    """The last row of a node by which its operator accepted that a head is lost."""
    query = sa.text(_ACCEPTED.format(events=f"{schema_of(node)}.events"))
    for position, row_hash, public in connection.execute(query, {"kind": LossAccepted.kind}):
        # A row that was changed accepts nothing; `ops verify` finds it.
        with contextlib.suppress(ValueError):
            if head in msgspec.json.decode(public, type=_Loss).heads:
                return position, row_hash
    return None


class _Loss(msgspec.Struct):
    heads: list[str]


def strange_parts(connection: sa.Connection, tables: Iterable[str]) -> list[str]:
    """The triggers and rules that another program added to these tables."""
    names = ", ".join(f"'{name}'" for name in tables)
    parts = (
        "SELECT 'trigger', tgname FROM pg_trigger JOIN pg_class ON pg_class.oid = tgrelid "
        f"WHERE NOT tgisinternal AND relname IN ({names}) AND pg_table_is_visible(pg_class.oid) "
        "UNION ALL SELECT 'rule', rulename FROM pg_rules "
        f"WHERE tablename IN ({names}) AND schemaname = current_schema()"
    )
    return [f"{kind} {name}" for kind, name in connection.exec_driver_sql(parts).all()]


def columns(
    connection: sa.Connection, table: sa.Table
) -> tuple[dict[str, object], dict[str, object]]:
    """The columns of a table as they are, and as they should be."""
    inspector = sa.inspect(connection)
    there = inspector.get_columns(table.name) if inspector.has_table(table.name) else []
    found: dict[str, object] = {
        column["name"]: (str(column["type"]), column["nullable"]) for column in there
    }
    due: dict[str, object] = {
        column.name: (column.type.compile(dialect=connection.dialect), bool(column.nullable))
        for column in table.columns
    }
    return found, due
