"""What is read and done over the whole database of a fleet: its nodes, and a takeover."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import sqlalchemy as sa

from cairn.journal.errors import StoreError
from cairn.journal.nodes import NodeHead
from cairn.journal.rows.database import lease, postgres
from cairn.journal.rows.database.connections import BUSY_S, connected, let_go
from cairn.journal.rows.database.failures import store_errors
from cairn.journal.rows.database.schema import other_revision, schema_revision
from cairn.journal.rows.database.tables import REVISION
from cairn.journal.rows.database.urls import parsed_url, place_name


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
    parsed = parsed_url(url)
    place = place_name(parsed)
    if parsed.get_backend_name() != "postgresql":
        raise StoreError(f"{place} is not on PostgreSQL, so it has no lease.")
    if (revision := schema_revision(url)) != REVISION:
        raise StoreError(other_revision(place, revision))
    with store_errors(place, "take over"):
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
            let_go(connection)
    if token is None:
        raise StoreError(f"{place} was never served, so there is nothing to take over.")
    return token, ended


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
    parsed = parsed_url(url)
    if parsed.get_backend_name() != "postgresql":
        raise StoreError(
            f"{place_name(parsed)} has no nodes, because the nodes of a fleet share a PostgreSQL "
            "database. Write postgresql://user@host/name."
        )
    connection = connected(parsed, mode="ro")
    try:
        with store_errors(place_name(parsed), "read"):
            yield connection
    finally:
        let_go(connection)
