"""Which other nodes have blocks of a text, by their journals."""

from contextlib import closing

import pytest

from cairn.journal import events as ev
from cairn.journal.rows.codec import decode
from cairn.journal.rows.database import same_blocks
from cairn.journal.rows.database.schema import migrate
from cairn.journal.rows.database.urls import node_url
from cairn.journal.rows.store_sql import SqlStore
from tests.support.journals import Builder, healthy
from tests.support.processes.postgres import Postgres

KEYS = [
    recorded.event.key
    for recorded in map(decode, healthy())
    if isinstance(recorded.event, ev.BlockSealed)
]


@pytest.fixture
def fleet(postgres: Postgres) -> str:
    """A database of n1 and n2, which have the same blocks, and of n3, which has none."""
    url = postgres.new_database()
    empty = Builder()
    empty.start()
    for node, rows in (("n1", healthy()), ("n2", healthy()), ("n3", empty.rows)):
        migrate(node_url(url, node))
        with closing(SqlStore.open(node_url(url, node))) as store:
            store.append(rows)
    return url


def test_nodes_with_the_same_blocks_are_named(fleet: str):
    """Those that sealed one of them, and not the node itself."""
    (place,) = same_blocks.places_elsewhere(node_url(fleet, "n1"), "n1", KEYS)
    assert "on node n2, " in place
    assert [] == same_blocks.places_elsewhere(node_url(fleet, "n1"), "n1", ["ab" * 32])


def test_a_journal_that_cannot_be_read(
    fleet: str, postgres: Postgres, monkeypatch: pytest.MonkeyPatch
):
    """It is named, and the others are read: one of another program, and one that is locked."""
    monkeypatch.setattr(same_blocks, "STATEMENT_MS", 200)
    name = fleet.partition("?")[0].rpartition("/")[2]
    with postgres.connect(name) as connection:
        connection.execute("CREATE SCHEMA node_m9")
        connection.execute("CREATE TABLE node_m9.events (position bigint)")
        connection.execute("UPDATE node_n2.events SET public = 'x' WHERE kind = 'block_sealed'")
    with postgres.connect(name) as connection:
        connection.autocommit = False
        connection.execute("LOCK TABLE node_n1.events IN ACCESS EXCLUSIVE MODE")
        places = same_blocks.places_elsewhere(node_url(fleet, "n3"), "n3", KEYS)
        connection.rollback()
    assert ["perhaps on node m9, ", "perhaps on node n1, "] == [
        place[: len("perhaps on node n1, ")] for place in places
    ]
    gone = node_url(f"{fleet.partition('?')[0]}x", "n1")
    (place,) = same_blocks.places_elsewhere(gone, "n1", KEYS)
    assert "perhaps on other nodes" in place
