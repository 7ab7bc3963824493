"""The tables with the keys of a node."""

from __future__ import annotations

import pytest
import sqlalchemy as sa

from cairn.journal.errors import StoreError, StoreLost
from cairn.journal.nodes import node_in
from cairn.journal.rows.database import key_table
from cairn.journal.rows.database.connections import in_database
from cairn.journal.rows.database.key_table import Entry, OtherNode
from cairn.journal.rows.database.schema import migrate
from cairn.journal.rows.database.urls import journal_url, node_of, node_url
from tests.support.processes.postgres import Postgres

KEYS = [("a", "s1", b"one"), ("b", "s2", b"two")]


@pytest.mark.parametrize(
    ("options", "node"),
    [
        ("-csearch_path=node_n1", "n1"),
        ("-cjit=off -c search_path=node_n1 -ca=b", "n1"),
        ("-csearch_path=node_N1", None),
        ("-csearch_path=node_n1,public", None),
        ("-csearch_path=two", None),
        (f"-csearch_path=node_{'a' * 17}", None),
        ("", None),
    ],
)
def test_the_node_of_a_url(options: str, node: str | None):
    """It is that whose schema the URL names, however it was written."""
    assert node == node_in(options)
    url = sa.make_url("postgresql://db/one").update_query_dict({"options": options})
    assert node == node_of(url.render_as_string())


def test_journals_that_are_of_no_node():
    """A file has no node, whatever options its URL has."""
    assert None is node_of("sqlite:////tmp/a.db?options=-csearch_path%3Dnode_n1")
    assert None is node_of("postgresql://db/one")
    twice = node_url("postgresql://db/one?options=-ca%3Db&options=-cc%3Dd", "n1")
    assert "n1" == node_of(twice)


def test_keys_are_stored_once_and_counted(postgres: Postgres):
    """What an earlier try has stored is not stored again; a removed key is in no row."""
    url = node_url(postgres.new_database(), "n1")
    migrate(url)
    with pytest.raises(StoreError, match="Cannot read"):
        in_database(url, "read", lambda found: found.exec_driver_sql("SELECT 1 FROM none"))
    assert None is in_database(url, "read", key_table.entry)
    in_database(url, "write to", lambda found: key_table.enter(found, b"known", "here", b"secret"))
    for _ in range(2):
        in_database(url, "write to", lambda found: key_table.add(found, KEYS[:1]))
    in_database(url, "write to", lambda found: key_table.add(found, KEYS))
    assert sorted(KEYS) == sorted(in_database(url, "read", key_table.read))
    assert Entry(b"known", "here", 2, 0) == in_database(url, "read", key_table.entry)
    assert KEYS[1] == in_database(url, "read", lambda found: key_table.one(found, "b"))
    assert 1 == in_database(url, "write to", lambda found: key_table.remove(found, ["a", "c"]))
    assert None is in_database(url, "read", lambda found: key_table.one(found, "a"))
    in_database(url, "write to", lambda found: key_table.enter(found, b"other", "there", None))
    assert Entry(b"known", "there", 2, 1) == in_database(url, "read", key_table.entry)


def test_the_journal_key_of_other_nodes(postgres: Postgres):
    """Each node that was started has an entry; other schemas count for nothing."""
    database = postgres.new_database()
    one, two, three = (node_url(database, name) for name in ("n1", "n2", "n3"))
    for url in (one, two, three):
        migrate(url)
    in_database(one, "write to", lambda found: key_table.enter(found, b"first", "here", None))
    in_database(three, "write to", lambda found: key_table.enter(found, b"third", "here", b"mac"))
    in_database(three, "write to", lambda found: key_table.enter(found, b"", "there", None))
    first, third = OtherNode("n1", b"first", None), OtherNode("n3", b"third", b"mac")
    assert [first, third] == in_database(two, "read", key_table.of_other_nodes)
    in_database(three, "write to", lambda found: key_table.enter(found, b"", "there", b"new"))
    third = OtherNode("n3", b"third", b"new")
    assert [third] == in_database(one, "read", key_table.of_other_nodes)


def test_a_database_that_cannot_be_reached(tmp_path_factory: pytest.TempPathFactory):
    """The error is that of a lost connection, so that it may be tried again."""
    folder = tmp_path_factory.mktemp("none")
    with pytest.raises(StoreLost, match="Cannot read"):
        in_database(f"postgresql://cairn@/one?host={folder}", "read", key_table.entry)
    assert None is node_of(journal_url(folder))
