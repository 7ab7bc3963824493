"""The keys of a node: in its database, in memory while it serves, wrapped by the fleet's key."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import attrs
import pytest
import sqlalchemy as sa

from cairn.actors.clock import clock
from cairn.actors.journal_keys import KeyFile, KeyTable, open_keys, read_keys
from cairn.journal import events as ev
from cairn.journal.errors import LeaseLost, StoreError
from cairn.journal.ledger import Ledger
from cairn.journal.rows.codec import Row, decode
from cairn.journal.rows.database import key_table
from cairn.journal.rows.database.connections import in_database
from cairn.journal.rows.database.fleet import take_over
from cairn.journal.rows.database.schema import migrate
from cairn.journal.rows.database.urls import journal_url, node_url
from cairn.journal.rows.sealing import SERVER
from cairn.journal.rows.store_sql import SqlStore
from tests.support.processes.postgres import Postgres

_WAITING = "SELECT EXISTS (SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND NOT granted)"
_UNKNOWN = "UPDATE journal_key SET secret_known = NULL"
FAILED = ev.ModelLoadFailed(name="m", reason="no disk")


@pytest.fixture
def url(postgres: Postgres) -> str:
    """The URL of the empty journal of a node."""
    made = node_url(postgres.new_database(), "n1")
    migrate(made)
    return made


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where a file of keys would be."""
    return tmp_path / "keys.db-1234"


def rows_of(keys: KeyTable, ledger: Ledger | None = None) -> tuple[Row, ...]:
    """A first row, sealed with a new key of the server."""
    outside = attrs.evolve(clock(), key_of=keys.key_of)
    return (ledger or Ledger(outside)).propose([FAILED]).rows


def opened(url: str, path: Path) -> KeyTable:
    """The keys of a node, for its server."""
    keys = open_keys(path, url)
    assert isinstance(keys, KeyTable)
    return keys


def test_keys_are_in_the_database(url: str, path: Path):
    """A row's key is stored before it, by the writer, and another machine reads it."""
    assert None is read_keys(path, url)
    with closing(opened(url, path)) as keys:
        assert keys.is_new
        assert (0, 0) == keys.counts()
        with closing(SqlStore.open(url, keys=keys)) as store:
            keys.confirm()
            reader = read_keys(path, url)
            assert reader is not None
            assert set() == reader.subjects()
            rows = rows_of(keys)
            store.append(rows)
            assert rows == tuple(store.read())
            store.append([])
            keys.commit()  # nothing is new
            assert ((1, 0), {SERVER}) == (keys.counts(), keys.subjects())
            # A reader finds what was stored since it was opened.
            with closing(SqlStore.open(url, read_only=True, keys=reader)) as other:
                (read,) = other.read()
                assert None is decode(read).unread
            assert None is reader.get("0" * 16)
    assert not path.exists()
    (key_id,) = keys.ids_of(SERVER)
    key = keys.get(key_id)
    assert key is not None
    stored = in_database(url, "read", lambda found: found.exec_driver_sql("TABLE keys").all())
    assert key.secret not in repr(stored).encode()
    with closing(opened(url, path)) as again:
        assert not again.is_new
        assert key.secret == again.key_of(SERVER).secret
        assert (1, 0) == again.counts()


def test_removed_keys(url: str, path: Path):
    """They are in no table and in no cache; those of others stay, whatever a row says."""
    with (
        closing(opened(url, path)) as keys,
        closing(SqlStore.open(url, keys=keys)) as store,
    ):
        key, of_server = keys.key_of("s1"), keys.key_of(SERVER)
        store.append(rows_of(keys))
        assert 0 == keys.remove("s2", [key.id, of_server.id])
        assert 1 == keys.remove("s1", [key.id, of_server.id])
        assert 0 == keys.remove("s1", [key.id])
        assert ((2, 1), {SERVER}) == (keys.counts(), keys.subjects())
        assert None is keys.get(key.id)
        assert key.id != keys.key_of("s1").id
        assert of_server is keys.get(of_server.id)
    with closing(opened(url, path)) as again:
        assert ((2, 1), None) == (again.counts(), again.get(key.id))


def test_a_server_that_was_taken_over_stores_no_key(url: str, path: Path):
    """The key goes the way of the row: not stored, and the writer ends."""
    with (
        closing(opened(url, path)) as keys,
        closing(SqlStore.open(url, keys=keys)) as store,
    ):
        rows = rows_of(keys)
        take_over(url, "operator")
        with pytest.raises(LeaseLost):
            store.append(rows)
        assert [] == in_database(
            url, "read", lambda found: found.execute(sa.text("TABLE keys")).all()
        )


def test_another_journal_key(url: str, path: Path, tmp_path: Path):
    """A missing, damaged or different one is refused with what to do; nothing is made."""
    with closing(opened(url, path)) as keys:
        keys.confirm()
    held = (tmp_path / "journal-key").read_bytes()
    (tmp_path / "journal-key").unlink()
    for open_ in (open_keys, read_keys):
        with pytest.raises(StoreError, match="is missing"):
            open_(path, url)
    assert not (tmp_path / "journal-key").exists()
    (tmp_path / "journal-key").write_bytes(bytes(32))
    for open_ in (open_keys, read_keys):
        with pytest.raises(StoreError, match="is not the journal key of the journal postgresql"):
            open_(path, url)
    (tmp_path / "far").write_bytes(held)
    with closing(open_keys(path, url, tmp_path / "far")) as keys:
        keys.confirm()
    assert None is not read_keys(path, url)  # where it was last
    (tmp_path / "journal-key").write_bytes(held)
    (tmp_path / "far").unlink()  # that was on another machine
    for open_ in (open_keys, read_keys):
        assert None is not open_(path, url)
    with pytest.raises(StoreError, match="far is missing"):
        open_keys(path, url, tmp_path / "far")


def test_two_first_starts(url: str, path: Path, tmp_path: Path):
    """One that waited for the lock while another one made its journal key is refused."""
    late = opened(url, path)
    (tmp_path / "journal-key").unlink()
    with closing(opened(url, path)) as first:
        first.confirm()
    with pytest.raises(StoreError, match="is not the journal key"):
        late.confirm()


def test_nodes_of_a_fleet_have_one_journal_key(postgres: Postgres, path: Path, tmp_path: Path):
    """The first start of a node is refused without it."""
    database = postgres.new_database()
    one, two = (node_url(database, name) for name in ("n1", "n2"))
    for url in (one, two):
        migrate(url)
    with closing(opened(one, path)) as keys:
        keys.confirm()
    other = tmp_path / "other" / "keys.db"
    other.parent.mkdir()
    with pytest.raises(StoreError, match="copy that of node n1 to there"):
        open_keys(other, two)
    assert [] == list(other.parent.iterdir())
    (other.parent / "journal-key").write_bytes(bytes(32))
    with pytest.raises(StoreError, match="is not the journal key of node n1"):
        open_keys(other, two)
    with closing(open_keys(other, two, tmp_path / "journal-key")) as keys:
        assert keys.is_new


def test_first_starts_of_two_nodes(postgres: Postgres, tmp_path: Path):
    """Each makes a journal key. The second one waits for the first, and is refused."""
    database = postgres.new_database()
    made = []
    for node in ("n1", "n2"):
        url = node_url(database, node)
        migrate(url)
        (tmp_path / node).mkdir()
        made.append((opened(url, tmp_path / node / "keys.db"), url))
    (first, one), (late, two) = made
    refused: list[StoreError] = []

    def confirm_late() -> None:
        try:
            late.confirm()
        except StoreError as error:
            refused.append(error)

    thread = threading.Thread(target=confirm_late)

    def within(store: Callable[[sa.Connection], object]) -> None:
        def entered(connection: sa.Connection) -> None:
            store(connection)
            thread.start()
            for _ in range(600):  # until the late one waits for the end of this transaction
                if connection.exec_driver_sql(_WAITING).scalar_one():
                    return
                time.sleep(0.1)
            raise AssertionError("the late one does not wait")

        in_database(one, "write to", entered)

    first.key_of("s1")
    first.commit(within)
    thread.join(60)
    (error,) = refused
    assert "is not the journal key of node n1" in str(error)
    assert None is in_database(two, "read", key_table.entry)


def test_a_first_start_whose_first_step_is_a_row(postgres: Postgres, tmp_path: Path):
    """It is refused with the row, if another node has made the fleet's journal key meanwhile."""
    database = postgres.new_database()
    one, two = (node_url(database, node) for node in ("n1", "n2"))
    for url in (one, two):
        migrate(url)
    late = opened(two, tmp_path / "keys.db")
    (tmp_path / "journal-key").unlink()
    with closing(opened(one, tmp_path / "keys.db")) as first:
        first.confirm()
    with closing(SqlStore.open(two, keys=late)) as store:
        with pytest.raises(StoreError, match="is not the journal key of node n1"):
            store.append(rows_of(late))
        assert [] == list(store.read())


def test_nodes_of_a_fleet_have_one_secret(postgres: Postgres, path: Path):
    """Another one is refused at each start, before and while the node enters its own."""
    database = postgres.new_database()
    one, two = (node_url(database, name) for name in ("n1", "n2"))
    for url in (one, two):
        migrate(url)
    with closing(open_keys(path, two, None, b"late")) as late:
        for secret in (b"lost", b"first"):  # a node alone may get another one
            with closing(open_keys(path, one, None, secret)) as keys:
                keys.confirm()
        with pytest.raises(StoreError, match="is not the secret of node n1"):
            late.confirm()
    with closing(opened(one, path)) as keys:
        keys.confirm()  # a command, which leaves it
    words = f"{path.parent / 'secret'} is not the secret of node n1.*Copy that of node n1 to there"
    with pytest.raises(StoreError, match=words):
        open_keys(path, two, None, b"another")
    for _ in range(2):
        with closing(open_keys(path, two, None, b"first")) as keys:
            keys.confirm()
    with pytest.raises(StoreError, match="is not the secret of node n2"):
        open_keys(path, one, None, b"another")
    for url in (one, two):  # if no node has it any more
        in_database(url, "write to", lambda found: found.exec_driver_sql(_UNKNOWN))
    with closing(open_keys(path, one, None, b"another")) as keys:
        keys.confirm()


def test_what_is_there_already(url: str, path: Path, tmp_path: Path):
    """A file of keys from before, a journal without tables, and a damaged key are errors."""
    path.touch()
    with pytest.raises(StoreError, match="from a development version"):
        open_keys(path, url)
    path.unlink()
    bare = url.replace("node_n1", "node_n2")
    assert None is read_keys(path, bare)
    with closing(opened(url, path)) as keys, closing(SqlStore.open(url, keys=keys)) as store:
        store.append(rows_of(keys))
    in_database(
        url, "write to", lambda found: found.exec_driver_sql(r"UPDATE keys SET wrapped = '\x00'")
    )
    with closing(opened(url, path)) as keys, pytest.raises(StoreError, match="is damaged"):
        keys.key_of(SERVER)
    assert isinstance(open_keys(path, journal_url(tmp_path)), KeyFile)
