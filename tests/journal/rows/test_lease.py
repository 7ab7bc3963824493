"""The lease of a journal on PostgreSQL: a writer that was taken over stores nothing."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import sqlalchemy as sa

from cairn.journal.errors import LeaseLost, StoreError, StoreLocked
from cairn.journal.nodes import is_node_name, on_node, schema_of
from cairn.journal.rows.database import fleet, key_table, tables
from cairn.journal.rows.database import postgres as postgres_store
from cairn.journal.rows.database.fleet import take_over
from cairn.journal.rows.database.schema import migrate
from cairn.journal.rows.database.urls import journal_url, node_url
from cairn.journal.rows.store_sql import SqlStore
from tests.support.journals import conversation
from tests.support.processes.postgres import Postgres

ROWS = conversation().rows


@pytest.fixture
def url(postgres: Postgres) -> str:
    """The URL of the empty journal of a node."""
    made = node_url(postgres.new_database(), "n1")
    migrate(made)
    return made


@contextmanager
def connected(url: str) -> Iterator[sa.Connection]:
    """Another program's transaction in the same database."""
    engine = sa.create_engine(url.replace("postgresql://", "postgresql+psycopg://"))
    with engine.connect() as connection:
        yield connection
        connection.rollback()
    engine.dispose()


@pytest.mark.parametrize(
    ("name", "may"), [("n1", True), ("a" * 16, True), ("a" * 17, False), ("N1", False), ("", False)]
)
def test_the_name_of_a_node(name: str, may: bool):
    """It is short, of lower-case letters and digits, so that it can be in schemas, ids and URLs."""
    assert may is is_node_name(name)


def test_ids_of_a_node():
    """They begin with its name once; without a node they are as they are."""
    assert ("x", "n1.x", "n1.x") == (on_node(None, "x"), on_node("n1", "x"), on_node("n1", "n1.x"))
    assert "node_n1" == schema_of("n1")


def test_the_url_of_a_node():
    """It keeps the URL's password and its other options."""
    url = node_url("postgresql://cairn:secret@db/one?options=-cjit%3Doff", "n1")
    parsed = sa.make_url(url)
    assert ("secret", "-cjit=off -csearch_path=node_n1") == (
        parsed.password,
        parsed.query["options"],
    )
    with pytest.raises(StoreError, match="names a schema, and so does --node n1"):
        node_url("postgresql://db/one?options=-csearch_path%3Dx", "n1")
    twice = node_url("postgresql://db/one?options=-ca%3Db&options=-cc%3Dd", "n1")
    assert "-ca=b -cc=d -csearch_path=node_n1" == sa.make_url(twice).query["options"]


def test_a_migration_makes_the_schema_of_a_node(postgres: Postgres):
    """It makes one that is missing, and no other schema; its tables are in it alone."""
    database = postgres.new_database()
    migrate(node_url(database, "n1"))
    migrate(node_url(database, "n1"))
    with connected(database) as connection:
        look = sa.inspect(connection)
        assert {"node_n1", "public"} <= set(look.get_schema_names())
        of_keys = {*key_table.metadata.tables}
        assert {"events", "bases", "lease", tables.VERSION_TABLE} | of_keys == {
            *look.get_table_names("node_n1")
        }
        assert [] == look.get_table_names("public")
    with pytest.raises(StoreError, match="names a schema that does not exist"):
        migrate(f"{database}&options=-csearch_path%3Dother")


def test_a_writer_that_was_taken_over(url: str):
    """
    Its connection is ended, and it stores nothing over a new one, which it closes at once. The next
    writer has the new token.
    """
    with closing(SqlStore.open(url)) as first:
        first.append(ROWS[:4])
        assert 1 == first.token
        token, ended = take_over(url, "operator")
        assert (2, 1) == (token, len(ended))
        with pytest.raises(LeaseLost, match=r"taken over by operator \(lease 2; this server's was"):
            first.append(ROWS[4:6])
        with closing(SqlStore.open(url)) as second:
            assert 2 == second.token
            assert ROWS[:4] == list(second.read())
            second.append(ROWS[4:6])
    with connected(url) as connection:
        ((node, holder),) = connection.exec_driver_sql("SELECT node, holder FROM lease").all()
        assert "node_n1" == node
        assert holder.endswith(socket.gethostname())


def test_a_reader_that_was_taken_over(url: str):
    """A server that was taken over and reads does not take the lock from the next one."""
    with closing(SqlStore.open(url)) as first:
        first.append(ROWS[:4])
        take_over(url, "operator")
        with pytest.raises(LeaseLost, match="taken over by operator"):
            first.row(1)
        with closing(SqlStore.open(url, holder="jo")) as second:
            assert ROWS[:4] == list(second.read())
            second.append(ROWS[4:6])
            with connected(url) as connection:
                holders = connection.exec_driver_sql("SELECT holder FROM lease").scalars().all()
            assert ["jo"] == holders


def test_a_reader_whose_journal_is_gone(url: str):
    """A reader has no lease that it could have lost."""
    with closing(SqlStore.open(url)) as store:
        store.append(ROWS[:4])
    with closing(SqlStore.open(url, read_only=True)) as reader, connected(url) as connection:
        connection.exec_driver_sql(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        connection.exec_driver_sql("ALTER TABLE events RENAME TO gone")
        connection.commit()
        with pytest.raises(StoreError, match="events") as refused:
            reader.row(1)
        assert not isinstance(refused.value, LeaseLost)


def test_a_table_that_is_missing(url: str):
    """It is a finding, with the names of its columns."""
    with closing(SqlStore.open(url)) as store:
        store.append(ROWS[:4])
    with connected(url) as connection:
        connection.exec_driver_sql("DROP TABLE lease")
        connection.commit()
    with closing(SqlStore.open(url, read_only=True)) as store:
        assert ("column lease.token", "it is missing") in store.schema_faults()


def test_a_writer_that_was_taken_over_finds_the_next_one(url: str, monkeypatch: pytest.MonkeyPatch):
    """It gets no lock, and says who took it over; not so if that was without a takeover."""
    monkeypatch.setattr(postgres_store, "CLAIM_TRIES", 2)
    with closing(SqlStore.open(url)) as first:
        first.append(ROWS[:4])
        take_over(url, "operator")
        with closing(SqlStore.open(url)) as second:
            second.append(ROWS[4:6])
            with pytest.raises(LeaseLost, match="taken over by process"):
                first.append(ROWS[4:6])
            with connected(url) as connection:
                connection.exec_driver_sql("UPDATE lease SET token = 1")
                connection.commit()
            with pytest.raises(StoreError, match="Another server or command") as refused:
                first.append(ROWS[4:6])
            assert not isinstance(refused.value, LeaseLost)


def test_a_takeover_waits_for_a_commit(url: str, monkeypatch: pytest.MonkeyPatch):
    """
    A commit that has read the token is finished before the token changes: a takeover that cannot
    wait for it says so, and changes nothing.
    """
    monkeypatch.setattr(fleet, "BUSY_S", 0.2)
    SqlStore.open(url).close()
    with connected(url) as connection:
        connection.exec_driver_sql("SELECT token FROM lease FOR SHARE")
        with pytest.raises(StoreLocked, match="lock timeout"):
            take_over(url, "operator")
    assert (2, []) == take_over(url, "operator")


def test_what_cannot_be_taken_over(url: str, postgres: Postgres, tmp_path: Path):
    """A journal that no server has written yet, that does not exist, or that is a file."""
    with pytest.raises(StoreError, match="never served"):
        take_over(url, "operator")
    with pytest.raises(StoreError, match="no schema yet"):
        take_over(node_url(postgres.new_database(), "n1"), "operator")
    with pytest.raises(StoreError, match="not on PostgreSQL"):
        take_over(journal_url(tmp_path), "operator")
    with pytest.raises(StoreError, match="share a PostgreSQL database"):
        node_url(journal_url(tmp_path), "n1")


def test_a_lease_that_another_program_removed(url: str):
    """The writer stops with a sentence; without the table, a start does."""
    with closing(SqlStore.open(url)) as store:
        with connected(url) as connection:
            connection.exec_driver_sql("DELETE FROM lease")
            connection.commit()
        with pytest.raises(StoreError, match="has lost its lease"):
            store.append(ROWS[:4])
    with connected(url) as connection:
        connection.exec_driver_sql("DROP TABLE lease")
        connection.commit()
    with pytest.raises(StoreError, match="Cannot write to"):
        SqlStore.open(url)


def test_the_lock_of_a_node_is_its_own(postgres: Postgres, monkeypatch: pytest.MonkeyPatch):
    """Two nodes of a database are written at the same time; ending one leaves the other."""
    monkeypatch.setattr(postgres_store, "CLAIM_TRIES", 2)
    database = postgres.new_database()
    urls = [node_url(database, name) for name in ("n1", "n2")]
    for each in urls:
        migrate(each)
    with closing(SqlStore.open(urls[0])) as one, closing(SqlStore.open(urls[1])) as two:
        one.append(ROWS[:2])
        two.append(ROWS[:2])
        with pytest.raises(StoreError, match="Another server or command uses"):
            SqlStore.open(urls[0])
        assert 1 == len(take_over(urls[0], "operator")[1])
        two.append(ROWS[2:4])
        with pytest.raises(LeaseLost):
            one.append(ROWS[2:4])
