"""The rows of other nodes by which they sealed blocks, read from one database."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from threading import Event
from typing import Any

import attrs
import psycopg
import pytest
import sqlalchemy as sa

from cairn.journal import events as ev
from cairn.journal.errors import StoreError
from cairn.journal.rows.codec import GENESIS, Row, encode, row_hash
from cairn.journal.rows.database import other_nodes, postgres
from cairn.journal.rows.database.other_nodes import OtherNodes
from cairn.journal.rows.database.schema import migrate
from cairn.journal.rows.database.urls import node_url
from cairn.journal.rows.store_sql import SqlStore
from tests.support.processes.postgres import Postgres

SEALED = ev.BlockSealed(
    session="s",
    key="ab" * 32,
    parent=None,
    digest="d1",
    start=0,
    end=4,
    bytes=10,
    resealed=False,
    stored=True,
    memory_blocks=1,
    memory_bytes=10,
)
KEY = SEALED.key
OTHER = "cd" * 32


@pytest.fixture
def url(postgres: Postgres) -> str:
    """An empty database."""
    return postgres.new_database()


@pytest.fixture
def nodes(url: str) -> Iterator[OtherNodes]:
    """What n1 sees of the others."""
    with closing(OtherNodes(node_url(url, "n1"), "n1")) as found:
        yield found


def chained(*events: ev.Event, after: Row | None = None) -> list[Row]:
    """Rows of these events, one after the other."""
    rows: list[Row] = []
    last = after
    for event in events:
        position = 1 if last is None else last.position + 1
        place = ev.Recorded(
            position=position,
            stream=event.stream,
            seq=position,
            event_id=f"id-{position}",
            time_us=5,
            event=event,
        )
        last = encode(place, GENESIS if last is None else last.hash)
        rows.append(last)
    return rows


def journal(url: str, node: str, *rows: Row) -> None:
    """A node's journal, with these rows more."""
    where = node_url(url, node)
    migrate(where)
    with closing(SqlStore.open(where)) as store:
        store.append(rows)


def execute(url: str, command: str) -> None:
    """Another program changes the database."""
    with psycopg.connect(url.replace("+psycopg", "")) as connection:
        connection.execute(command)


def test_rows_of_others(url: str, nodes: OtherNodes):
    """One of each other node, in the order of their names; none of its own."""
    rows = chained(SEALED)
    for node in ("n3", "n1", "n2"):
        journal(url, node, *rows)
    found = nodes.sealed([OTHER, KEY])
    assert {KEY} == found.keys()
    assert ["n2", "n3"] == [one.node for one in found[KEY]]
    assert {(1, rows[0].hash, SEALED)} == {
        (one.position, one.row_hash, one.event) for one in found[KEY]
    }
    assert {} == nodes.sealed([])


def test_rows_that_come_later(url: str, nodes: OtherNodes):
    """They are found at the next look, and so are those of a node that is new."""
    first = chained(ev.OperatorActed(action="note", detail="-"))
    journal(url, "n2", *first)
    assert {} == nodes.sealed([KEY])
    journal(url, "n2", *chained(SEALED, after=first[-1]))
    assert [2] == [one.position for one in nodes.sealed([KEY])[KEY]]
    journal(url, "n3", *chained(SEALED))
    assert ["n2", "n3"] == [one.node for one in nodes.sealed([KEY])[KEY]]


def test_a_journal_in_the_place_of_another(url: str, nodes: OtherNodes):
    """It is read from its beginning."""
    note = ev.OperatorActed(action="note", detail="-")
    journal(url, "n2", *chained(note, note, SEALED))
    assert nodes.sealed([KEY])
    execute(url, "DROP SCHEMA node_n2 CASCADE")
    assert {} == nodes.sealed([KEY])
    journal(url, "n2", *chained(attrs.evolve(SEALED, digest="d2")))
    (one,) = nodes.sealed([KEY])[KEY]
    assert (1, "d2") == (one.position, one.event.digest)


def sealed(key: str, parent: str | None = None, **changes: Any) -> ev.BlockSealed:
    """A block on another one."""
    start = 0 if parent is None else 4
    return attrs.evolve(SEALED, key=key, parent=parent, start=start, end=start + 4, **changes)


THIRD = "ef" * 32
QUARANTINED = ev.BlocksQuarantined(session=None, bug_id="bug", keys=(KEY,))


@pytest.mark.parametrize(
    "events",
    [
        (SEALED, QUARANTINED),
        (SEALED, attrs.evolve(SEALED, digest="d2", resealed=True)),
        (QUARANTINED,),
    ],
)
def test_a_block_that_a_node_does_not_use(
    url: str, nodes: OtherNodes, events: tuple[ev.Event, ...]
):
    """
    One that is quarantined, or has two digests in one journal, is taken from no node, nor what is
    built on it: it is not known which node is wrong.
    """
    journal(url, "n2", *chained(*events))
    journal(url, "n3", *chained(sealed(KEY), sealed(OTHER, KEY), sealed(THIRD)))
    assert {} == nodes.sealed([KEY, OTHER])
    assert {} == nodes.sealed([OTHER], [KEY])
    assert {THIRD} == nodes.sealed([THIRD, KEY, OTHER]).keys()
    execute(url, "DROP SCHEMA node_n2 CASCADE")
    assert {KEY, OTHER} == nodes.sealed([KEY, OTHER]).keys()
    assert {OTHER} == nodes.sealed([OTHER], [KEY]).keys()


def test_a_block_that_is_sealed_again(url: str, nodes: OtherNodes):
    """The last row of a node counts. Two nodes may differ: the engine measures who is right."""
    journal(url, "n2", *chained(SEALED, attrs.evolve(SEALED, resealed=True)))
    journal(url, "n3", *chained(attrs.evolve(SEALED, digest="d2")))
    found = nodes.sealed([KEY])[KEY]
    assert [("n2", 2, "d1"), ("n3", 1, "d2")] == [
        (one.node, one.position, one.event.digest) for one in found
    ]


def test_a_file_that_its_node_has_removed(url: str, nodes: OtherNodes):
    """The node is not asked for it, until it has written it again."""
    gone = ev.BlockFileRemoved(key=KEY, bytes=10, disk_blocks=0, disk_bytes=0, reason="space")
    damaged = ev.BlockFileRejected(key=KEY, reason="digest", moved_to=None, node=None)
    of_other = attrs.evolve(damaged, node="n9")
    written = ev.BlockSpilled(key=KEY, digest="d1", bytes=10, disk_blocks=1, disk_bytes=10)
    unknown = attrs.evolve(gone, key=OTHER)
    rows = chained(unknown, SEALED, written, of_other)
    journal(url, "n2", *rows)
    assert nodes.sealed([KEY])
    for one in (gone, damaged):
        journal(url, "n2", *(rows := [*rows, *chained(one, after=rows[-1])])[-1:])
        assert {} == nodes.sealed([KEY])
        again = attrs.evolve(SEALED, resealed=True)
        journal(url, "n2", *(rows := [*rows, *chained(again, after=rows[-1])])[-1:])
        assert {} == nodes.sealed([KEY])
        journal(url, "n2", *(rows := [*rows, *chained(written, after=rows[-1])])[-1:])
        assert nodes.sealed([KEY])


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE node_n2.events SET time_us = 6",
        "UPDATE node_n2.events SET kind = 'note' WHERE position = 1",
        "UPDATE node_n2.events SET public = 'no JSON'",
        "DELETE FROM node_n2.events",
        "INSERT INTO node_n2.bases VALUES (1, 'h', 's', 'd')",
    ],
)
@pytest.mark.parametrize("indexed", [False, True])
def test_rows_that_are_changed_or_gone(url: str, nodes: OtherNodes, change: str, indexed: bool):
    """They are not used, whether that happened before they were indexed or after."""
    journal(url, "n2", *chained(SEALED))
    if indexed:
        assert nodes.sealed([KEY])
    execute(url, change)
    assert {} == nodes.sealed([KEY])


def test_a_row_that_is_another_event_by_now(url: str, nodes: OtherNodes):
    """A sound row, but not one that seals a block."""
    journal(url, "n2", *chained(SEALED))
    assert nodes.sealed([KEY])
    execute(url, "DROP SCHEMA node_n2 CASCADE")
    journal(url, "n2", *chained(ev.OperatorActed(action="note", detail="-")))
    assert {} == nodes.sealed([KEY])


def test_a_row_of_a_newer_version(url: str, nodes: OtherNodes):
    """What it says is not known here."""
    (row,) = chained(SEALED)
    newer = attrs.evolve(row, version=99)
    journal(url, "n2", attrs.evolve(newer, hash=row_hash(newer)))
    assert {} == nodes.sealed([KEY])


def test_the_index_has_an_end(url: str, nodes: OtherNodes, monkeypatch: pytest.MonkeyPatch):
    """
    The blocks that were not used for longest leave it. A system prompt that new conversations are
    built on stays, and of those that are used at once the first ones do.
    """
    monkeypatch.setattr(other_nodes, "INDEXED_MOST", 3)
    a, b = "0a" * 32, "0b" * 32
    rows = chained(sealed(KEY), sealed(a), sealed(b), sealed(OTHER, KEY))
    journal(url, "n2", *rows)
    asked = [KEY, OTHER, a, b]
    assert {KEY, OTHER, b} == nodes.sealed(asked).keys()
    journal(url, "n2", *(rows := [*rows, *chained(sealed(a), after=rows[-1])])[-1:])
    assert {KEY, b, a} == nodes.sealed(asked).keys()


def test_a_long_journal(url: str, nodes: OtherNodes, monkeypatch: pytest.MonkeyPatch):
    """It is read in pages. What was read is not read again if the next page fails."""
    monkeypatch.setattr(other_nodes, "PAGE_ROWS", 2)
    note = ev.OperatorActed(action="note", detail="-")
    journal(url, "n2", *chained(sealed(KEY), note, note, note, sealed(OTHER)))
    pages = watch(monkeypatch, sa.exc.OperationalError("-", None, Exception("too slow")), 2)
    monkeypatch.setattr(other_nodes, "RETRY_AFTER", 1)
    nodes.sealed([KEY])
    assert {"n2": "(builtins.Exception) too slow"} == nodes.skipped
    assert {KEY, OTHER} == nodes.sealed([KEY, OTHER]).keys()
    assert [(1, 2), (3, 4), (3, 4), (5, 5)] == pages


def watch(monkeypatch: pytest.MonkeyPatch, error: Exception, at: int) -> list[tuple[int, int]]:
    """The pages that are read, of which one raises an error."""
    connect, pages = postgres.unlocked, list[tuple[int, int]]()

    def watched(where: sa.URL) -> sa.Connection:
        connection = connect(where)
        sa.event.listen(connection, "before_cursor_execute", seen)
        return connection

    def seen(*of: Any) -> None:
        if "BETWEEN" in of[2]:
            pages.append((of[3]["position_1"], of[3]["position_2"]))
            if at == len(pages):
                raise error

    monkeypatch.setattr(postgres, "unlocked", watched)
    return pages


def test_schemas_of_others(url: str, nodes: OtherNodes):
    """One with a name that no node may have is not read."""
    execute(url, 'CREATE SCHEMA "node_N2"')
    execute(url, 'CREATE TABLE "node_N2".events (x int)')
    assert {} == nodes.sealed([KEY])


@pytest.mark.parametrize(
    ("change", "fact", "back"),
    [
        (
            "ALTER TABLE node_n2.events RENAME COLUMN hash TO other",
            "hash does not exist",
            "ALTER TABLE node_n2.events RENAME COLUMN other TO hash",
        ),
        (
            "UPDATE node_n2.cairn_schema SET version_num = '0002'",
            "its schema is 0002, and not 0001",
            "UPDATE node_n2.cairn_schema SET version_num = '0001'",
        ),
        (
            "DELETE FROM node_n2.cairn_schema",
            "its schema is none, and not 0001",
            "INSERT INTO node_n2.cairn_schema VALUES ('0001')",
        ),
    ],
)
def test_a_journal_that_cannot_be_read(
    url: str, nodes: OtherNodes, change: str, fact: str, back: str
):
    """It is skipped and named, and the others are read. After a while it is tried again."""
    for node in ("n2", "n3"):
        journal(url, node, *chained(SEALED))
    assert 2 == len(nodes.sealed([KEY])[KEY])
    execute(url, change)
    assert ["n3"] == [one.node for one in nodes.sealed([KEY])[KEY]]
    assert {"n2"} == nodes.skipped.keys()
    assert fact in nodes.skipped["n2"]
    execute(url, back)
    for _ in range(other_nodes.RETRY_AFTER - 1):
        assert ["n3"] == [one.node for one in nodes.sealed([KEY])[KEY]]
    assert ["n2", "n3"] == [one.node for one in nodes.sealed([KEY])[KEY]]
    assert {} == nodes.skipped


def test_a_journal_that_is_locked(url: str, nodes: OtherNodes, monkeypatch: pytest.MonkeyPatch):
    """It is skipped, too, and is not waited for by the looks that follow."""
    monkeypatch.setattr(other_nodes, "STATEMENT_MS", 600_000)
    for node in ("n2", "n3"):
        journal(url, node, *chained(SEALED))
    with psycopg.connect(url.replace("+psycopg", "")) as other:
        other.execute("LOCK TABLE node_n2.events IN ACCESS EXCLUSIVE MODE")
        assert ["n3"] == [one.node for one in nodes.sealed([KEY])[KEY]]
        assert "lock timeout" in nodes.skipped["n2"]


def test_a_connection_that_is_lost_while_reading(
    url: str, nodes: OtherNodes, monkeypatch: pytest.MonkeyPatch
):
    """It is no fault of the journal that was being read."""
    journal(url, "n2", *chained(SEALED))
    lost = sa.exc.OperationalError("-", None, Exception("gone"), connection_invalidated=True)
    watch(monkeypatch, lost, 1)
    with pytest.raises(StoreError, match="gone"):
        nodes.sealed([KEY])
    assert {} == nodes.skipped
    assert nodes.sealed([KEY])


def test_a_lost_connection(url: str, nodes: OtherNodes):
    """It is an error of the store, and the next look connects again."""
    journal(url, "n2", *chained(SEALED))
    assert nodes.sealed([KEY])
    execute(
        url,
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
        "WHERE pid <> pg_backend_pid() AND datname = current_database()",
    )
    with pytest.raises(StoreError, match="journals of other nodes cannot be read"):
        nodes.sealed([KEY])
    assert nodes.sealed([KEY])


def test_a_database_that_was_never_there():
    """It is an error of the store, too."""
    with (
        closing(OtherNodes("postgresql://cairn@/none?host=/nowhere", "n1")) as nodes,
        pytest.raises(StoreError, match="journals of other nodes cannot be read"),
    ):
        nodes.sealed([KEY])


def hold(monkeypatch: pytest.MonkeyPatch) -> tuple[Event, Event]:
    """The next connection is made when the second event is set. The first says that it began."""
    connect, began, may_go = postgres.unlocked, Event(), Event()

    def slow(where: sa.URL) -> sa.Connection:
        began.set()
        assert may_go.wait(60)
        return connect(where)

    monkeypatch.setattr(postgres, "unlocked", slow)
    return began, may_go


def test_threads_that_read_at_once(url: str, nodes: OtherNodes, monkeypatch: pytest.MonkeyPatch):
    """Each finds what is there, one after the other: when a node dies, all of its clients come."""
    monkeypatch.setattr(other_nodes, "WAIT_S", 60.0)
    journal(url, "n2", *chained(SEALED))
    began, may_go = hold(monkeypatch)
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(nodes.sealed, [KEY]) for _ in range(8)]
        assert began.wait(60)
        may_go.set()
        assert [{KEY}] * 8 == [one.result().keys() for one in asked]


def test_while_another_thread_reads_for_long(
    url: str, nodes: OtherNodes, monkeypatch: pytest.MonkeyPatch
):
    """It finds nothing; closing does not wait."""
    monkeypatch.setattr(other_nodes, "WAIT_S", 0.01)
    journal(url, "n2", *chained(SEALED))
    began, may_go = hold(monkeypatch)
    with ThreadPoolExecutor() as pool:
        other = pool.submit(nodes.sealed, [KEY])
        assert began.wait(60)
        assert {} == nodes.sealed([KEY])
        nodes.close()
        may_go.set()
        assert {KEY} == other.result().keys()
    assert nodes.sealed([KEY])
