"""
All stores keep rows in the same way: memory, SQLite, and PostgreSQL if it is installed. A database
that is not a Cairn journal is left unchanged.
"""

import errno
import io
import os
import pickle
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, get_args

import attrs
import pytest
import sqlalchemy as sa
from alembic.config import Config
from alembic.script import ScriptDirectory

from cairn.journal.errors import HeadMoved, StoreError, StoreFull, StoreLocked, StoreLost
from cairn.journal.replay import replay
from cairn.journal.rows import store_sql
from cairn.journal.rows.base import Base, base_of
from cairn.journal.rows.codec import GENESIS, Row
from cairn.journal.rows.database import connections, key_table, lease, tables, urls
from cairn.journal.rows.database import postgres as postgres_store
from cairn.journal.rows.database.connections import Sync
from cairn.journal.rows.database.schema import migrate, schema_revision
from cairn.journal.rows.database.urls import journal_url
from cairn.journal.rows.database.urls import sqlite_url as url_of_file
from cairn.journal.rows.store import MemoryStore, Store
from cairn.journal.rows.store_sql import SqlStore
from tests.support.journals import healthy, unrecorded
from tests.support.processes.postgres import Postgres, lossy_proxy

ROWS = healthy()


@pytest.fixture(params=["memory", "sqlite", "postgresql"])
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    """An empty store of each kind."""
    if request.param == "memory":
        yield MemoryStore()
        return
    url = request.getfixturevalue(f"{request.param}_url")
    with closing(SqlStore.open(url)) as opened:
        yield opened


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest) -> str:
    """The URL of an empty journal in each kind of database."""
    found: str = request.getfixturevalue(f"{request.param}_url")
    return found


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    """The URL of an empty journal in a file."""
    migrate(journal_url(tmp_path))
    return journal_url(tmp_path)


@pytest.fixture
def postgresql_url(postgres: Postgres) -> str:
    """The URL of an empty journal on the PostgreSQL server."""
    url = postgres.new_database()
    migrate(url)
    return url


@contextmanager
def changing(url: str) -> Iterator[sa.Connection]:
    """A connection that changes a journal as an operator could by hand."""
    engine = sa.create_engine(url.replace("postgresql://", "postgresql+psycopg://"))
    with engine.begin() as connection:
        yield connection
    engine.dispose()


# --- all stores ----------------------------------------------------------------------------------


def test_empty(store: Store):
    """An empty store is at position 0 and the first hash."""
    assert (0, GENESIS) == store.head()
    assert [] == list(store.read())
    store.append([])
    assert (0, GENESIS) == store.head()


def test_rows_come_back_as_they_were(store: Store):
    """Rows that were appended in batches are read in order, byte for byte."""
    store.append(ROWS[:1])
    store.append(ROWS[1:7])
    store.append(ROWS[7:])
    assert ROWS == list(store.read())
    assert (len(ROWS), ROWS[-1].hash) == store.head()


def test_rows_after_a_position(store: Store):
    """Reading starts after the position that is named."""
    store.append(ROWS)
    assert ROWS[5:] == list(store.read(5))
    assert [] == list(store.read(len(ROWS)))


def test_rows_of_one_stream(store: Store):
    """A single stream can be read, also from a position on."""
    store.append(ROWS)
    mine = [row for row in ROWS if row.stream == "session/s1"]
    assert mine == list(store.read(stream="session/s1"))
    assert [row for row in mine if row.position > 9] == list(store.read(9, stream="session/s1"))
    assert [] == list(store.read(stream="session/s2"))


def test_one_row(store: Store):
    """A row is found by its position; None if it does not exist yet, or any more."""
    assert store.row(1) is None
    store.append(ROWS)
    assert ROWS == [store.row(row.position) for row in ROWS]
    assert [None, None] == [store.row(at) for at in (0, len(ROWS) + 1)]


def test_appending_again_changes_nothing(store: Store):
    """Appending the same rows again skips them; new rows after them are still appended."""
    store.append(ROWS[:4])
    store.append(ROWS[:4])
    store.append(ROWS[2:8])
    assert ROWS[:8] == list(store.read())


@pytest.mark.parametrize("first", [3, 5])
def test_rows_that_do_not_follow(store: Store, first: int):
    """A gap, or rows that do not follow by position, change nothing."""
    store.append(ROWS[:4])
    rows = [attrs.evolve(row, event_id=f"new-{row.event_id}") for row in ROWS[first:8]]
    with pytest.raises(HeadMoved):
        store.append(rows)
    assert ROWS[:4] == list(store.read())


def test_a_foreign_head(store: Store):
    """Rows chained to a different head than the store's are refused."""
    store.append(ROWS[:4])
    with pytest.raises(HeadMoved):
        store.append([attrs.evolve(ROWS[4], previous_hash="1" * 64), *ROWS[5:7]])
    assert ROWS[:4] == list(store.read())
    store.append(ROWS[4:])
    assert ROWS == list(store.read())


def test_an_append_between_two_reads(store: Store):
    """A reader that has begun does not block the writer."""
    store.append(ROWS[:6])
    reading = store.read()
    assert ROWS[0] == next(reading)
    store.append(ROWS[6:])
    assert ROWS[1:6] == [next(reading) for _ in range(5)]


# --- all stores: a cut ---------------------------------------------------------------------------


def base_at(position: int) -> Base:
    """The base of the first rows."""
    return base_of(replay(ROWS, until=position).state, ROWS[position - 1].hash)


def cut(store: Store, base: Base, rows: Sequence[Row]) -> None:
    """Put a base in the place of the first rows, and remove them."""
    store.cut(base, rows)
    assert sum(store.removal(3)) <= base.position


def test_a_cut(store: Store):
    """The base replaces the rows up to it; rows above it stay byte for byte."""
    store.append(ROWS[:20])
    assert store.base() is None
    cut(store, base_at(8), ROWS[20:22])
    assert base_at(8) == store.base()
    assert ROWS[8:22] == list(store.read())
    assert ROWS[10:22] == list(store.read(10))
    assert (22, ROWS[21].hash) == store.head()
    store.append(ROWS[22:])
    assert ROWS[8:] == list(store.read())


def test_replaced_rows_are_not_read(store: Store):
    """
    From the cut on, whether none, some or all of them are removed. Another process that removes
    them goes on where the one before ended.
    """
    store.append(ROWS[:20])
    store.cut(base_at(8), ROWS[20:22])
    removed: list[int] = []
    while True:
        assert ROWS[8:22] == list(store.read())
        assert (None, ROWS[8]) == (store.row(8), store.row(9))
        assert (22, ROWS[21].hash) == store.head()
        assert () == replay(store.read(), base=store.base(), until=22).findings
        if len(removed) == 4:
            break
        removal = store.removal(3)
        removed.append(next((count for count in removal if count), 0))
    assert [3, 3, 2, 0] == removed
    assert ROWS[8:22] == list(store.read(0))


def test_a_cut_before_all_rows_of_the_last_one_are_removed(store: Store):
    """What is left of both is removed."""
    store.append(ROWS[:20])
    store.cut(base_at(8), ROWS[20:21])
    removal = store.removal(3)
    assert 3 == next(count for count in removal if count)
    store.cut(base_at(15), ROWS[21:])
    assert ROWS[15:] == list(store.read())
    assert 12 == sum(store.removal(4))
    assert ROWS[15:] == list(store.read(0))
    assert 0 == sum(store.removal())


STRANGE = [
    attrs.evolve(ROWS[2], hash="0" * 64),  # below what is left, not chained to it
    attrs.evolve(ROWS[2], position=2),
    attrs.evolve(ROWS[2], position=4, previous_hash="0" * 64),  # in the place of another
]


def assert_it_is_found(store: Store, strange: Row) -> None:
    """Assert that a row that is in no chain stays, is read, and is a finding."""
    for _ in store.removal(3):
        assert [strange, *ROWS[8:]] == list(store.read())
    assert [strange, *ROWS[8:]] == list(store.read())
    found = replay(store.read(), base=store.base(), until=ROWS[-1].position).findings
    assert [("INV-8", strange.position)] == [(one.invariant, one.position) for one in found]
    assert "a position where none can be" in found[0].message


@pytest.mark.parametrize("strange", STRANGE)
def test_only_rows_of_the_chain_are_removed(url: str, strange: Row):
    """A row that another program put below the base is none of them."""
    with closing(SqlStore.open(url)) as store:
        store.append(ROWS[:20])
        store.cut(base_at(8), ROWS[20:])
        assert 3 == next(count for count in store.removal(3) if count)
        with changing(url) as other:
            events = sa.Table("events", sa.MetaData(), autoload_with=other)
            other.execute(sa.delete(events).where(events.c.position == strange.position))
            other.execute(sa.insert(events), attrs.asdict(strange))
        assert_it_is_found(store, strange)


@pytest.mark.parametrize("strange", STRANGE)
def test_only_rows_of_the_chain_are_removed_from_memory(strange: Row):
    """The same."""
    store = MemoryStore(ROWS[:20])
    store.cut(base_at(8), ROWS[20:])
    assert 3 == next(count for count in store.removal(3) if count)
    store.rows = [strange, *(row for row in store.rows if row.position != strange.position)]
    assert_it_is_found(store, strange)


@pytest.mark.parametrize("rows", [ROWS[20:22], []])
def test_a_cut_that_is_repeated(store: Store, rows: list[Row]):
    """It changes nothing: its end was perhaps not reported. With other rows it is refused."""
    store.append(ROWS[:20])
    cut(store, base_at(8), rows)
    cut(store, base_at(8), rows)
    assert base_at(8) == store.base()
    assert [*ROWS[8:20], *rows] == list(store.read())
    with pytest.raises(HeadMoved):
        cut(store, base_at(8), ROWS[23:24])


def test_a_trigger_is_noticed_by_a_cut(sqlite_url: str):
    """As by an append: it could spoil what the cut writes."""
    with closing(SqlStore.open(sqlite_url)) as store:
        store.append(ROWS[:20])
        with changing(sqlite_url) as connection:
            connection.exec_driver_sql(
                "CREATE TRIGGER spoil AFTER INSERT ON events BEGIN UPDATE events SET hash = ''; END"
            )
        with pytest.raises(StoreError, match="trigger spoil"):
            cut(store, base_at(8), ROWS[20:22])
        assert store.base() is None


def test_a_cut_of_a_cut(store: Store):
    """The base moves on; there is one at a time."""
    store.append(ROWS[:20])
    cut(store, base_at(8), ROWS[20:21])
    cut(store, base_at(15), ROWS[21:])
    assert base_at(15) == store.base()
    assert ROWS[15:] == list(store.read())


def test_a_cut_of_everything(store: Store):
    """If no row is left, the journal continues from the base."""
    store.append(ROWS[:20])
    cut(store, base_at(20), [])
    assert (20, ROWS[19].hash) == store.head()
    assert [] == list(store.read())
    store.append(ROWS[20:])
    assert ROWS[20:] == list(store.read())


@pytest.mark.parametrize(
    ("base", "rows"),
    [
        (attrs.evolve(base_at(8), head="1" * 64), ROWS[20:22]),  # it ends with a different row
        (attrs.evolve(base_at(8), position=25), ROWS[20:22]),  # there is no such row
        (base_at(8), ROWS[21:23]),  # another writer appended meanwhile, or a gap
    ],
)
def test_a_cut_that_is_refused(store: Store, base: Base, rows: list[Row]):
    """All or nothing: if the rows cannot be appended, nothing is cut."""
    store.append(ROWS[:20])
    with pytest.raises(HeadMoved):
        cut(store, base, rows)
    assert store.base() is None
    assert ROWS[:20] == list(store.read())


# --- the store on disk ---------------------------------------------------------------------------


def test_rows_outlive_the_store(url: str):
    """A reopened store has its rows and takes more."""
    first = SqlStore.open(url)
    first.append(ROWS[:9])
    first.close()
    second = SqlStore.open(url)
    second.append(ROWS[9:])
    assert ROWS == list(second.read())
    second.close()


def test_more_rows_than_a_batch(url: str, monkeypatch: pytest.MonkeyPatch):
    """Reading in batches gives every row once."""
    monkeypatch.setattr(store_sql, "BATCH_ROWS", 5)
    store = SqlStore.open(url)
    store.append(ROWS[:30])
    assert ROWS[:30] == list(store.read())
    assert ROWS[27:30] == store.last(3)
    store.close()


def test_another_writer(sqlite_url: str):
    """The second of two writers learns that it is not up to date, and its rows are not stored."""
    one, two = SqlStore.open(sqlite_url), SqlStore.open(sqlite_url)
    one.append(ROWS[:5])
    foreign = [attrs.evolve(row, event_id=f"new-{row.event_id}") for row in ROWS[:3]]
    with pytest.raises(HeadMoved):
        two.append(foreign)
    assert ROWS[:5] == list(two.read())
    one.close()
    two.close()


def test_a_second_writer_on_postgresql(postgresql_url: str, monkeypatch: pytest.MonkeyPatch):
    """
    A journal has one writer at a time: a second one, and a migration, are refused before they read,
    with who has the lock. Readers are not. The lock ends with its connection.
    """
    monkeypatch.setattr(postgres_store, "CLAIM_TRIES", 2)
    with closing(SqlStore.open(postgresql_url)) as store:
        store.append(ROWS[:5])
        with pytest.raises(StoreError, match=r"process \d+ of the database server\. Stop it"):
            SqlStore.open(postgresql_url)
        with pytest.raises(StoreError, match="Another server or command uses"):
            migrate(postgresql_url)
        with closing(SqlStore.open(postgresql_url, read_only=True)) as reader:
            assert ROWS[:5] == list(reader.read())
        store.append(ROWS[5:9])
    migrate(postgresql_url)
    with closing(SqlStore.open(postgresql_url)) as store:
        assert ROWS[:9] == list(store.read())


def test_two_journals_in_one_database(postgresql_url: str):
    """Each schema has a journal and a lock of its own; one that does not exist is refused."""
    with changing(postgresql_url) as connection:
        connection.execute(sa.text("CREATE SCHEMA other"))
    other = f"{postgresql_url}&options=-csearch_path%3Dother"
    migrate(other)
    with closing(SqlStore.open(postgresql_url)) as one, closing(SqlStore.open(other)) as two:
        one.append(ROWS[:5])
        two.append(ROWS[:3])
        assert (5, 3) == (one.head()[0], two.head()[0])
    with pytest.raises(StoreError, match="names a schema that does not exist"):
        migrate(f"{postgresql_url}&options=-csearch_path%3Dnone")


def cut_connections(url: str) -> None:
    """End all other connections of a database."""
    end = (
        "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity "
        "WHERE datname = current_database() AND pid <> pg_backend_pid()"
    )
    with changing(url) as connection:
        connection.execute(sa.text(end))


def test_a_lost_connection_is_replaced(postgresql_url: str):
    """Rows are stored, and read, over a new connection that has the lock again."""
    with closing(SqlStore.open(postgresql_url)) as store:
        store.append(ROWS[:4])
        cut_connections(postgresql_url)
        store.append(ROWS[2:8])
        assert ROWS[:8] == list(store.read())
        cut_connections(postgresql_url)
        assert ROWS[4] == store.row(5)
        store.append(ROWS[8:])
        assert ROWS == list(store.read())
        with changing(postgresql_url) as connection:
            held = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND granted"
            assert 1 == connection.execute(sa.text(held)).scalar_one()


def test_a_connection_that_cannot_be_replaced(postgresql_url: str):
    """
    As long as the database takes no connection, rows can be tried again, as on a full disk. They
    are then stored once.
    """
    name = postgresql_url.partition("@/")[2].partition("?")[0]
    elsewhere = postgresql_url.replace(f"/{name}?", "/postgres?")
    with closing(SqlStore.open(postgresql_url)) as store:
        store.append(ROWS[:4])
        with changing(elsewhere) as connection:
            connection.execute(sa.text(f"ALTER DATABASE {name} ALLOW_CONNECTIONS false"))
        with changing(elsewhere) as connection:
            end = (
                "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE datname = :at"
            )
            connection.execute(sa.text(end), {"at": name})
        for _ in range(2):
            with pytest.raises(StoreLost, match="not currently accepting connections"):
                store.append(ROWS[4:9])
            with pytest.raises(StoreLost):
                store.row(1)
        with changing(elsewhere) as connection:
            connection.execute(sa.text(f"ALTER DATABASE {name} ALLOW_CONNECTIONS true"))
        store.append(ROWS[4:9])
        assert ROWS[:9] == list(store.read())


def test_a_journal_that_another_server_took(postgresql_url: str, monkeypatch: pytest.MonkeyPatch):
    """A writer that lost its connection does not get another's lock, and writes nothing."""
    monkeypatch.setattr(postgres_store, "CLAIM_TRIES", 2)
    with closing(SqlStore.open(postgresql_url)) as first:
        first.append(ROWS[:4])
        cut_connections(postgresql_url)
        with closing(SqlStore.open(postgresql_url)) as second:
            for _ in range(2):
                with pytest.raises(StoreError, match="Another server or command uses") as refused:
                    first.append(ROWS[4:6])
                assert not isinstance(refused.value, StoreLost)
            second.append(ROWS[4:5])
        with pytest.raises(HeadMoved):
            first.append([attrs.evolve(row, event_id=f"new-{row.event_id}") for row in ROWS[4:6]])
        assert ROWS[:5] == list(first.read())


def test_a_connection_that_the_database_still_keeps(
    postgresql_url: str, monkeypatch: pytest.MonkeyPatch
):
    """
    A network may lose a connection without the database's knowledge, which keeps the lock with it.
    The writer waits for that as for the database itself, and does not take it for another server.
    """
    monkeypatch.setattr(postgres_store, "CLAIM_TRIES", 2)
    with (
        lossy_proxy(postgresql_url) as (through, lose),
        closing(SqlStore.open(through)) as store,
    ):
        store.append(ROWS[:4])
        lose()
        for _ in range(2):
            with pytest.raises(StoreLost, match="still keeps a lost connection"):
                store.append(ROWS[4:6])
        cut_connections(postgresql_url)
        store.append(ROWS[4:6])
        assert ROWS[:6] == list(store.read())


def remove(path: Path) -> None:
    """The file is gone."""
    path.unlink()


def move(path: Path) -> None:
    """The file was moved."""
    path.rename(path.with_name("elsewhere.db"))


def put_a_copy(path: Path) -> None:
    """A copy has its name."""
    copy = path.with_name("copy.db")
    shutil.copy(path, copy)
    copy.replace(path)


def move_the_folder(path: Path) -> None:
    """The folder of the file was renamed."""
    path.parent.rename(path.parent.with_name("elsewhere"))


@pytest.mark.parametrize("change", [remove, move, put_a_copy, move_the_folder])
def test_a_file_that_is_another(tmp_path: Path, change: Callable[[Path], None]):
    """
    Rows are not confirmed as stored if they go into a file that cannot be found again. Until then
    they are, and a link to the same file as before is the same file.
    """
    home = tmp_path / "home"
    migrate(journal_url(home))
    with closing(SqlStore.open(journal_url(home))) as opened:
        opened.append(ROWS[:4])
        (home / "journal.db").rename(home / "real.db")
        (home / "journal.db").symlink_to(home / "real.db")
        opened.append(ROWS[4:6])
        (home / "real.db").replace(home / "journal.db")
        opened.append(ROWS[6:7])
        change(home / "journal.db")
        with pytest.raises(StoreError, match=r"removed, moved or replaced.* Put it back"):
            opened.append(ROWS[7:8])


def test_a_position_twice(url: str):
    """A position that the database already has makes the whole append fail."""
    store = SqlStore.open(url)
    store.append(ROWS[:5])
    with pytest.raises(HeadMoved):
        store.append([ROWS[5], attrs.evolve(ROWS[6], position=ROWS[2].position)])
    assert ROWS[:5] == list(store.read())
    store.append(ROWS[5:])
    store.close()


def test_a_writer_on_another_thread(url: str):
    """The thread that appends need not be the one that opened the store."""
    store = SqlStore.open(url)
    worker = threading.Thread(target=store.append, args=(ROWS,))
    worker.start()
    worker.join()
    assert ROWS == list(store.read())
    store.close()


def test_a_reader_beside_the_writer(url: str):
    """A reader sees what is committed while the writer is open, and cannot write."""
    writer = SqlStore.open(url)
    writer.append(ROWS[:5])
    reader = SqlStore.open(url, read_only=True)
    assert ROWS[:5] == list(reader.read())
    writer.append(ROWS[5:9])
    assert ROWS[:9] == list(reader.read())
    with pytest.raises(StoreError, match=r"readonly|read-only"):
        reader.append(ROWS[9:])
    reader.close()
    writer.append(ROWS[9:])
    writer.close()


@contextmanager
def connected(
    url: str, *, sync: Sync = "full", **options: Any
) -> Iterator[tuple[SqlStore, sqlite3.Connection]]:
    """A store on SQLite, and the connection that it made, with more options for that."""
    made: list[sqlite3.Connection] = []
    connect = sqlite3.connect

    def remember(*arguments: Any, **given: Any) -> sqlite3.Connection:
        made.append(connect(*arguments, **{**given, **options}))
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sqlite3, "connect", remember)
        store = SqlStore.open(url, sync=sync)
    with closing(store):
        yield store, made[-1]


def test_a_full_disk_leaves_nothing_half(sqlite_url: str):
    """
    If rows do not fit, none of them are stored, and the message says what to do. Once there is
    room, the same append succeeds.
    """
    big = [attrs.evolve(ROWS[0], public=b"x" * 100_000)]
    with connected(sqlite_url) as (store, raw):
        raw.execute("PRAGMA max_page_count = 20")
        with pytest.raises(StoreFull, match="Free some space"):
            store.append(big)
        assert (0, GENESIS) == store.head()
        raw.execute("PRAGMA max_page_count = 1000")
        store.append(big)
        assert big == list(store.read())


def test_a_cut_on_a_full_disk(sqlite_url: str):
    """A cut whose event does not fit leaves every row in place."""
    big = [attrs.evolve(ROWS[20], public=b"x" * 1_000_000)]
    with connected(sqlite_url) as (store, raw):
        store.append(ROWS[:20])
        raw.execute("PRAGMA max_page_count = 40")
        with pytest.raises(
            StoreFull, match="Free some space on its disk: up to twice as much as the journal takes"
        ):
            cut(store, base_at(8), big)
        assert store.base() is None
        assert ROWS[:20] == list(store.read())


@pytest.mark.parametrize("table", ["INSERT ON events", "INSERT ON bases"])
def test_a_cut_that_fails_half_way(url: str, table: str):
    """Whichever step of a cut fails, nothing has changed."""
    with closing(SqlStore.open(url)) as store:
        store.append(ROWS[:20])
        with changing(url) as other:
            for statement in broken_trigger(other.dialect.name, table):
                other.exec_driver_sql(statement)
        with pytest.raises(StoreError):
            cut(store, base_at(8), ROWS[20:])
        assert store.base() is None
        assert ROWS[:20] == list(store.read())


def broken_trigger(database: str, table: str) -> list[str]:
    """Statements after which a kind of change fails."""
    if database == "sqlite":
        fails = "SELECT RAISE(ABORT, 'broken on purpose');"
        return [f"CREATE TRIGGER broken BEFORE {table} BEGIN {fails} END"]
    fails = "BEGIN RAISE EXCEPTION 'broken on purpose'; END"
    return [
        f"CREATE FUNCTION broken() RETURNS trigger LANGUAGE plpgsql AS $$ {fails} $$",
        f"CREATE TRIGGER broken BEFORE {table} FOR EACH ROW EXECUTE FUNCTION broken()",
    ]


def test_a_process_that_dies_in_a_cut(url: str):
    """
    If a process is killed before its commit, the cut has not happened: the next one finds all rows.
    """
    store = SqlStore.open(url)
    store.append(ROWS[:20])
    store.close()
    script = (
        "import os, pickle, sys\n"
        "import sqlalchemy as sa\n"
        "from cairn.journal.rows.base import Base\n"
        "from cairn.journal.rows.codec import Row\n"
        "from cairn.journal.rows.store_sql import SqlStore\n"
        "url, base, rows = pickle.load(sys.stdin.buffer)\n"
        "store = SqlStore.open(url)\n"
        "die = lambda *_: os.kill(os.getpid(), 9)\n"
        "sa.event.listen(sa.Engine, 'commit', die)\n"
        "store.cut(Base(**base), [Row(**row) for row in rows])\n"
    )
    given = pickle.dumps((url, attrs.asdict(base_at(8)), [attrs.asdict(r) for r in ROWS[20:]]))
    environment = {**os.environ, "PYTHONPATH": str(Path("src").resolve())}
    command = [sys.executable, "-P", "-c", script]
    assert -9 == subprocess.run(command, input=given, env=environment, check=False).returncode
    store = SqlStore.open(url)
    assert store.base() is None
    assert ROWS[:20] == list(store.read())
    store.close()


def test_a_process_that_dies_while_it_removes(url: str):
    """After each step: the rows of that step are gone, and the next one removes the others."""
    script = (
        "import os, pickle, sys\n"
        "from cairn.journal.rows.base import Base\n"
        "from cairn.journal.rows.store_sql import SqlStore\n"
        "url, base, steps = pickle.load(sys.stdin.buffer)\n"
        "store = SqlStore.open(url)\n"
        "store.cut(Base(**base), [])\n"
        "for count in store.removal(2):\n"
        "    steps -= count > 0\n"
        "    steps or os.kill(os.getpid(), 9)\n"
    )
    with closing(SqlStore.open(url)) as store:
        store.append(ROWS)
    environment = {**os.environ, "PYTHONPATH": str(Path("src").resolve())}
    for _ in range(3):
        given = pickle.dumps((url, attrs.asdict(base_at(8)), 1))
        command = [sys.executable, "-P", "-c", script]
        assert -9 == subprocess.run(command, input=given, env=environment, check=False).returncode
        with closing(SqlStore.open(url, read_only=True)) as reader:
            assert ROWS[8:] == list(reader.read())
    with closing(SqlStore.open(url)) as store:
        assert 2 == sum(store.removal())
        assert ROWS[8:] == list(store.read(0))


def test_space_is_given_back(sqlite_url: str, tmp_path: Path):
    """After a cut, the file is smaller, and no longer contains what was cut off."""
    path = tmp_path / "journal.db"
    secret = b"a word that occurs nowhere else"
    rows = [attrs.evolve(ROWS[0], private=secret * 20_000), *ROWS[1:]]
    store = SqlStore.open(sqlite_url)
    store.append(rows)
    cut(store, base_at(8), [])
    store.give_back()
    assert ROWS[8:] == list(store.read())
    files = [path, *tmp_path.glob("journal.db-*")]
    assert sum(file.stat().st_size for file in files) < 200_000
    assert not any(secret in file.read_bytes() for file in files)
    store.append([])
    store.close()


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="no way to see open files")
@pytest.mark.parametrize("named", [None, "spare", "not there"])
def test_where_a_journal_is_rewritten(
    sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str | None
):
    """
    The temporary file, which contains all remaining texts, is next to the journal, or in the folder
    that the operator named by SQLITE_TMPDIR. Afterwards SQLite chooses as before.
    """
    spare = tmp_path / "it's spare"
    spare.mkdir()
    monkeypatch.delenv("SQLITE_TMPDIR", raising=False)
    if named is not None:
        monkeypatch.setenv("SQLITE_TMPDIR", str(spare if named == "spare" else tmp_path / named))
    large = os.urandom(2_000_000)
    rows = [
        attrs.evolve(row, private=large) if row.position in (1, 12, 13) else row for row in ROWS
    ]
    seen = set()

    def look() -> int:
        for held in Path("/proc/self/fd").iterdir():
            with suppress(OSError):
                path = held.readlink()
                if path.name.startswith("etilqs_"):
                    seen.add(path.parent)
        return 0

    with connected(sqlite_url) as (store, raw):
        store.append(rows)
        cut(store, base_at(8), [])
        raw.set_progress_handler(look, 1)
        store.give_back()
        raw.set_progress_handler(None, 1)
        assert [] == raw.execute("PRAGMA temp_store_directory").fetchall()
    assert {spare if named == "spare" else tmp_path} == seen


@pytest.mark.parametrize("named", [False, True])
def test_no_room_to_rewrite_a_journal(
    sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: bool
):
    """The message says which disk needs space; the journal is unchanged."""
    monkeypatch.delenv("SQLITE_TMPDIR", raising=False)
    if named:
        spare = tmp_path / "spare"
        spare.mkdir()
        monkeypatch.setenv("SQLITE_TMPDIR", str(spare))
        room = f"as much as the journal takes, on its disk and in {spare} (SQLITE_TMPDIR)"
    else:
        room = "on its disk: up to twice as much as the journal takes there"

    class Full(sqlite3.Connection):
        full = True

        def execute(self, words: str, *parameters: Any) -> sqlite3.Cursor:
            if words == "VACUUM" and self.full:
                error = sqlite3.OperationalError("database or disk is full")
                error.sqlite_errorname = "SQLITE_FULL"
                raise error
            return super().execute(words, *parameters)

    with connected(sqlite_url, factory=Full) as (store, raw):
        store.append([attrs.evolve(ROWS[0], private=bytes(100_000)), *ROWS[1:]])
        cut(store, base_at(8), [])
        with pytest.raises(StoreFull) as refused:
            store.give_back()
        assert [] == raw.execute("PRAGMA temp_store_directory").fetchall()
        assert ROWS[8:] == list(store.read())
        Full.full = False
        store.give_back()
    assert room in str(refused.value)


def test_space_that_is_left(url: str):
    """SQLite has slack until space is given back; PostgreSQL reuses it by itself."""
    is_sqlite = url.startswith("sqlite")
    with closing(SqlStore.open(url)) as store:
        store.append([attrs.evolve(ROWS[0], private=bytes(100_000)), *ROWS[1:]])
        cut(store, base_at(8), [])
        assert is_sqlite == store.has_slack()
        store.give_back()
        assert not store.has_slack()
        store.give_back()
        assert ROWS[8:] == list(store.read())


def test_a_reader_keeps_space(sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The log cannot be emptied while another program reads it; then it can."""
    monkeypatch.setattr(connections, "BUSY_S", 0.05)
    with closing(SqlStore.open(sqlite_url)) as store:
        store.append(ROWS)
        with closing(sqlite3.connect(tmp_path / "journal.db", isolation_level=None)) as reader:
            reader.execute("BEGIN")
            reader.execute("SELECT count(*) FROM events").fetchall()
            cut(store, base_at(8), [])
            with pytest.raises(StoreError, match="another program reads it"):
                store.give_back()
            reader.execute("ROLLBACK")
        store.give_back()
        assert ROWS[8:] == list(store.read())


@pytest.mark.parametrize("room", [0, 100, None], ids=["quota", "a little", "enough"])
def test_a_disk_error(sqlite_url: str, monkeypatch: pytest.MonkeyPatch, room: int | None):
    """SQLite reports a general error if the disk is full. Whether it is, is tried."""

    class Failing(sqlite3.Connection):
        def execute(self, words: str, *parameters: Any) -> sqlite3.Cursor:
            if words == "VACUUM":
                error = sqlite3.OperationalError("disk I/O error")
                error.sqlite_errorname = "SQLITE_IOERR_WRITE"
                raise error
            return super().execute(words, *parameters)

    real = tempfile.TemporaryFile

    class Small(io.BytesIO):
        def write(self, data: Any) -> int:
            return super().write(data[:room])

    def tried(**options: Any) -> Any:
        if room == 0:
            raise OSError(errno.EDQUOT, "Disk quota exceeded")
        return real(**options) if room is None else Small()

    with connected(sqlite_url, factory=Failing) as (store, _):
        store.append([attrs.evolve(ROWS[0], private=bytes(100_000)), *ROWS[1:]])
        cut(store, base_at(8), [])
        monkeypatch.setattr(tempfile, "TemporaryFile", tried)
        with pytest.raises(StoreError) as refused:
            store.give_back()
        assert ROWS[8:] == list(store.read())
    assert (room is not None) == isinstance(refused.value, StoreFull)
    assert ("The disk failed" in str(refused.value)) == (room is None)


def test_two_bases(sqlite_url: str, tmp_path: Path):
    """Cairn keeps one, so which one is right is unknown."""
    with closing(SqlStore.open(sqlite_url)) as store:
        store.append(ROWS)
        cut(store, base_at(8), [])
        with closing(sqlite3.connect(tmp_path / "journal.db")) as other, other:
            other.execute("INSERT INTO bases SELECT 1, head, state, state_digest FROM bases")
        with pytest.raises(StoreError, match="more than one base"):
            store.base()


def test_the_time_of_a_row(url: str):
    """The time of a row by its position; None if there is no such row."""
    store = SqlStore.open(url)
    store.append(ROWS)
    assert (ROWS[4].time_us, None) == (store.time_at(5), store.time_at(99))
    store.close()


def test_a_base_changed_into_text(sqlite_url: str, tmp_path: Path):
    """A state that was changed to text by hand is read as its bytes, and bytes as text."""
    store = SqlStore.open(sqlite_url)
    store.append(ROWS)
    cut(store, base_at(8), [])
    with closing(sqlite3.connect(tmp_path / "journal.db")) as other, other:
        other.execute("UPDATE bases SET state = '{}', head = x'61ff'")
    assert attrs.evolve(base_at(8), state=b"{}", head="a\\xff") == store.base()
    store.close()


def test_what_is_cut_is_wiped(sqlite_url: str, monkeypatch: pytest.MonkeyPatch):
    """However SQLite was built, a writing connection overwrites what it removes."""
    connect = sqlite3.connect

    def careless(*arguments: Any, **options: Any) -> sqlite3.Connection:
        made = connect(*arguments, **options)
        made.execute("PRAGMA secure_delete = OFF").fetchall()
        return made

    monkeypatch.setattr(sqlite3, "connect", careless)
    with connected(sqlite_url) as (_, raw):
        assert [(1,)] == raw.execute("PRAGMA secure_delete").fetchall()


def test_a_locked_database(sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A writer that cannot get the lock says so."""
    monkeypatch.setattr(connections, "BUSY_S", 0.05)
    store = SqlStore.open(sqlite_url)
    with closing(sqlite3.connect(tmp_path / "journal.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreLocked, match="one server at a time"):
            store.append(ROWS)
        other.execute("ROLLBACK")
    store.append(ROWS)
    store.close()


def test_a_locked_table(postgresql_url: str, monkeypatch: pytest.MonkeyPatch):
    """So does a writer on PostgreSQL, and what it holds can be stored later."""
    monkeypatch.setattr(connections, "BUSY_S", 0.05)
    with closing(SqlStore.open(postgresql_url)) as store:
        with changing(postgresql_url) as other:
            other.execute(sa.text("LOCK TABLE events IN ACCESS EXCLUSIVE MODE"))
            with pytest.raises(StoreLocked, match="lock"):
                store.append(ROWS)
        store.append(ROWS)
        assert ROWS == list(store.read())


def test_sqlite_is_set_for_durability(sqlite_url: str):
    """SQLite uses a write-ahead log, and every commit is on disk when append returns."""
    with connected(sqlite_url) as (_, raw):
        assert [("wal",)] == raw.execute("PRAGMA journal_mode").fetchall()
        assert [(2,)] == raw.execute("PRAGMA synchronous").fetchall()
        assert [(connections.PAGE_BYTES,)] == raw.execute("PRAGMA page_size").fetchall()


def test_a_commit_that_the_operating_system_has(sqlite_url: str):
    """With ``normal``, SQLite does not wait for the disk at each commit."""
    with connected(sqlite_url, sync="normal") as (store, raw):
        assert [(1,)] == raw.execute("PRAGMA synchronous").fetchall()
        store.append(ROWS)
        assert ROWS == list(store.read())


def test_a_commit_that_postgresql_has(postgresql_url: str, monkeypatch: pytest.MonkeyPatch):
    """With ``normal``, PostgreSQL does not wait for the disk; otherwise its own setting counts."""
    with changing(postgresql_url) as connection:
        name = sa.make_url(postgresql_url).database
        connection.exec_driver_sql(f"ALTER DATABASE {name} SET synchronous_commit = on")
    made, create = [], sa.create_engine

    def remember(*arguments: Any, **given: Any) -> sa.Engine:
        engine = create(*arguments, **given)
        sa.event.listen(engine, "connect", lambda raw, _: made.append(raw))
        return engine

    monkeypatch.setattr(sa, "create_engine", remember)
    found = []
    for sync in get_args(Sync):
        with closing(SqlStore.open(postgresql_url, sync=sync)) as store:
            store.append(ROWS)
            assert ROWS == list(store.read())
            found.append(made[-1].execute("SHOW synchronous_commit").fetchone()[0])
    assert ["on", "off"] == found


def test_the_log_is_cut_back(sqlite_url: str, monkeypatch: pytest.MonkeyPatch):
    """
    The log grows while a program reads in one transaction. After that it is cut back to its limit
    by the next appends.
    """
    monkeypatch.setattr(connections, "LOG_BYTES", limit := 64 * 1024)
    big = [attrs.evolve(row, public=b"x" * 40_000) for row in ROWS]
    with closing(SqlStore.open(sqlite_url)) as store:
        path = urls.sqlite_path(sqlite_url)
        store.append(big[:1])
        with closing(sqlite3.connect(path)) as reader:
            reader.execute("BEGIN").execute("SELECT count(*) FROM events").fetchall()
            for row in big[1:20]:
                store.append([row])
            grown = store.log_bytes()
            assert grown > 10 * limit
            assert path.with_name(f"{path.name}-wal").stat().st_size == grown
        for row in big[20:22]:
            store.append([row])
        assert limit >= store.log_bytes() > 0
        assert big[:22] == list(store.read())


def test_no_log(url: str):
    """A log that is not there has no bytes."""
    store = SqlStore.open(url)
    store.close()
    assert 0 == store.log_bytes()


def test_text_in_place_of_bytes(sqlite_url: str, tmp_path: Path):
    """A payload that was changed to text by hand is read as its bytes."""
    store = SqlStore.open(sqlite_url)
    store.append(ROWS)
    with closing(sqlite3.connect(tmp_path / "journal.db")) as other, other:
        other.execute("UPDATE events SET public = '{\"a\":1}', private = 'x' WHERE position = 4")
    row = next(store.read(3))
    assert (b'{"a":1}', b"x") == (row.public, row.private)
    store.close()


@pytest.mark.parametrize("name", ["a b", "50%", "what?", "#1", "Grüße", "a&b=c;d"])
def test_any_folder_name(tmp_path: Path, name: str):
    """No character in a path is taken for a part of the URL."""
    url = journal_url(tmp_path / name)
    migrate(url)
    store = SqlStore.open(url)
    store.append(ROWS[:2])
    store.close()
    reader = SqlStore.open(url, read_only=True)
    assert ROWS[:2] == list(reader.read())
    reader.close()
    assert {"journal.db"} == {path.name.split("-")[0] for path in (tmp_path / name).iterdir()}


# --- the schema ----------------------------------------------------------------------------------


def test_migrations_make_the_table_that_the_store_knows(
    request: pytest.FixtureRequest, url: str, tmp_path: Path
):
    """The last migration leaves the schema that the store declares."""
    if url.startswith("sqlite"):
        declared = url_of_file(tmp_path / "declared.db")
    else:
        declared = request.getfixturevalue("postgres").new_database()
        declared = declared.replace("postgresql:", "postgresql+psycopg:")
    other = sa.create_engine(declared)
    tables.metadata.create_all(other)
    due = 2
    if not url.startswith("sqlite"):
        lease.table.metadata.create_all(other)
        key_table.metadata.create_all(other)
        due = 5
    made = sa.create_engine(url.replace("postgresql:", "postgresql+psycopg:"))

    def described(engine: sa.Engine) -> list[object]:
        look = sa.inspect(engine)
        return [
            [
                [(c["name"], str(c["type"]), c["nullable"]) for c in look.get_columns(table)],
                look.get_pk_constraint(table),
                sorted(look.get_unique_constraints(table), key=str),
                sorted(look.get_indexes(table), key=str),
            ]
            for table in sorted(set(look.get_table_names()) - {tables.VERSION_TABLE})
        ]

    def names_in(table: str) -> list[str]:
        return [column.name for column in tables.metadata.tables[table].c]

    assert due == len(described(made))
    assert described(other) == described(made)
    assert [field.name for field in attrs.fields(Base)] == names_in("bases")
    assert [field.name for field in attrs.fields(Row) if field.eq] == names_in("events")


def test_the_revision_known_is_the_head_of_the_migrations():
    """The store knows the last migration by its number."""
    config = Config()
    config.set_main_option("script_location", "cairn:migrations")
    config.set_main_option("path_separator", "os")
    assert tables.REVISION == ScriptDirectory.from_config(config).get_current_head()


def test_migrate_twice(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    """Migrating again after creating a journal changes nothing, and prints nothing."""
    url = journal_url(tmp_path / "new" / "folder")
    assert schema_revision(url) is None
    assert migrate(url) is None
    assert tables.REVISION == schema_revision(url)
    assert tables.REVISION == migrate(url)
    assert ("", "") == tuple(capfd.readouterr())


def test_a_folder_that_cannot_be_made(tmp_path: Path):
    """The error names the folder."""
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=r"file/folder cannot be made: Not a directory\."):
        migrate(journal_url(tmp_path / "file" / "folder"))


def test_a_read_only_medium(sqlite_url: str, monkeypatch: pytest.MonkeyPatch):
    """A journal can be read on it unless a log remains: the rows in the log would be missing."""
    connect = sqlite3.connect

    def read_only(address: str, **options: Any) -> sqlite3.Connection:
        if "immutable=1" not in address:
            raise sqlite3.OperationalError("unable to open database file")
        return connect(address, **options)

    with closing(SqlStore.open(sqlite_url)) as writer:
        writer.append(ROWS)
        with monkeypatch.context() as patched:
            patched.setattr(sqlite3, "connect", read_only)
            with pytest.raises(StoreError, match="unable to open database file"):
                SqlStore.open(sqlite_url, read_only=True)
    monkeypatch.setattr(sqlite3, "connect", read_only)
    with closing(SqlStore.open(sqlite_url, read_only=True)) as reader:
        assert ROWS == list(reader.read())


# --- refused databases ---------------------------------------------------------------------------


def _no_schema(path: Path) -> None:
    path.touch()


def _something_else(path: Path) -> None:
    with closing(sqlite3.connect(path)) as made, made:
        made.execute("CREATE TABLE events (id INTEGER)")


def _no_database(path: Path) -> None:
    path.write_bytes(b"Dear diary, " * 100)


def _newer(path: Path) -> None:
    migrate(url_of_file(path))
    with closing(sqlite3.connect(path)) as made, made:
        made.execute("UPDATE cairn_schema SET version_num = '0999'")


@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize(
    ("make", "says"),
    [
        (_no_schema, "ops migrate"),
        (_something_else, "not a Cairn journal"),
        (_no_database, "not a Cairn journal"),
        (_newer, "newer"),
    ],
)
def test_a_database_that_is_refused(
    tmp_path: Path, make: Callable[[Path], None], says: str, read_only: bool
):
    """
    A database that is not a journal of this version is not opened, not migrated, and left
    unchanged.
    """
    path = tmp_path / "journal.db"
    make(path)
    before = path.read_bytes()
    with pytest.raises(StoreError, match=says):
        SqlStore.open(url_of_file(path), read_only=read_only)
    assert before == path.read_bytes()
    if make is not _no_schema:
        with pytest.raises(StoreError, match=says):
            migrate(url_of_file(path))
        assert before == path.read_bytes()


@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize(
    ("statements", "says"),
    [
        ([], "ops migrate"),
        (["CREATE TABLE events (id INTEGER)"], "not a Cairn journal"),
        (
            [
                "CREATE TABLE cairn_schema (version_num TEXT)",
                "INSERT INTO cairn_schema VALUES ('0999')",
            ],
            "newer",
        ),
    ],
)
def test_a_database_of_postgresql_that_is_refused(
    postgres: Postgres, statements: list[str], says: str, read_only: bool
):
    """It is not opened and not migrated. Tables with different names do not cause a refusal."""
    url = postgres.new_database()
    with changing(url) as other:
        for statement in ["CREATE TABLE diary (day INTEGER)", *statements]:
            other.exec_driver_sql(statement)
        before = sorted(sa.inspect(other).get_table_names())
    with pytest.raises(StoreError, match=says):
        SqlStore.open(url, read_only=read_only)
    if statements:
        with pytest.raises(StoreError, match=says):
            migrate(url)
        with changing(url) as other:
            assert before == sorted(sa.inspect(other).get_table_names())
    else:
        assert migrate(url) is None
        SqlStore.open(url, read_only=read_only).close()


def test_no_server_of_postgresql(tmp_path: Path):
    """The message says what to check, and shows no password."""
    url = f"postgresql://user:geheim@/name?host={tmp_path}"
    with pytest.raises(StoreError, match="Check that the database server runs") as refused:
        SqlStore.open(url)
    assert "geheim" not in str(refused.value)


def test_postgresql_has_nothing_to_give_back(postgresql_url: str):
    """The database returns the space of removed rows itself."""
    with closing(SqlStore.open(postgresql_url)) as store:
        store.append(ROWS)
        cut(store, base_at(8), [])
        assert not store.has_slack()
        store.give_back()
        assert ROWS[8:] == list(store.read())


def test_no_journal(tmp_path: Path):
    """Opening makes no file."""
    for read_only in (False, True):
        with pytest.raises(StoreError, match="no journal at"):
            SqlStore.open(journal_url(tmp_path / "x"), read_only=read_only)
    assert [] == list(tmp_path.iterdir())


@pytest.mark.parametrize("url", ["nonsense", "sqlite://", "mysql://u:geheim@h/d", "odd://h/d"])
def test_urls_that_are_refused(url: str):
    """A URL that names no usable database is refused, without its password in the message."""
    with pytest.raises(StoreError) as refused:
        SqlStore.open(url)
    assert "geheim" not in str(refused.value)


def test_rows_of_a_broken_journal_are_stored(url: str):
    """The store keeps rows and does not judge them."""
    store = SqlStore.open(url)
    store.append(unrecorded("INV-1"))
    assert unrecorded("INV-1") == list(store.read())
    store.close()


def test_rows_of_some_kinds(url: str):
    """Only these are read, also from a position on."""
    migrate(url)
    store = SqlStore.open(url)
    store.append(ROWS)
    kinds = ("path_selected", "request_finished")
    chosen = [row for row in ROWS if row.kind in kinds]
    assert set(kinds) == {row.kind for row in chosen}
    assert chosen == list(store.read(kinds=kinds))
    assert chosen[1:] == list(store.read(chosen[0].position, kinds=kinds))
    assert [] == list(store.read(kinds=()))
    store.close()


def test_the_last_rows(url: str):
    """The last rows in order, of all streams or of one; and the names of the streams."""
    migrate(url)
    store = SqlStore.open(url)
    store.append(ROWS)
    assert ROWS[-3:] == store.last(3)
    of_one = [row for row in ROWS if row.stream == "server"]
    assert of_one[-2:] == store.last(2, stream="server")
    assert {row.stream for row in ROWS} == store.streams()
    store.close()


def test_the_file_of_a_url(tmp_path: Path):
    """Only an SQLite database is a file."""
    path = tmp_path / "a journal.db"
    assert path == urls.sqlite_path(url_of_file(path))
    with pytest.raises(StoreError, match=r"postgresql.*host/name is not a file"):
        urls.sqlite_path("postgresql://host/name")


def test_a_journal_of_a_newer_schema(sqlite_url: str):
    """A journal of a newer schema is refused and left unchanged."""
    migrate(sqlite_url)
    with changing(sqlite_url) as connection:
        connection.execute(sa.text("UPDATE cairn_schema SET version_num = '9999'"))
    for refused in (migrate, SqlStore.open):
        with pytest.raises(StoreError, match="written by a newer Cairn"):
            refused(sqlite_url)
    assert "9999" == schema_revision(sqlite_url)


# --- what another program changed ----------------------------------------------------------------


def test_a_schema_as_cairn_made_it(url: str):
    """Nothing is strange about it, also after rows were written and the space was given back."""
    with closing(SqlStore.open(url)) as store:
        assert [] == store.schema_faults()
        store.append(ROWS)
        store.give_back()
        assert [] == store.schema_faults()


def test_a_column_that_another_program_added(url: str):
    """It is named in each kind of database."""
    with changing(url) as connection:
        connection.exec_driver_sql("ALTER TABLE events ADD COLUMN note TEXT")
    with closing(SqlStore.open(url)) as store:
        assert [("column events.note", "Cairn did not make it")] == store.schema_faults()


def test_a_trigger_and_a_rule_in_postgresql(postgresql_url: str):
    """Both can change what is written; a table of another program in the database cannot."""
    with changing(postgresql_url) as connection:
        connection.exec_driver_sql("CREATE TABLE notes (text TEXT)")
        connection.exec_driver_sql(
            "CREATE FUNCTION spoil() RETURNS trigger AS 'BEGIN RETURN NEW; END' LANGUAGE plpgsql"
        )
        connection.exec_driver_sql(
            "CREATE TRIGGER spoiled BEFORE INSERT ON events FOR EACH ROW EXECUTE FUNCTION spoil()"
        )
        connection.exec_driver_sql("CREATE RULE lost AS ON INSERT TO bases DO INSTEAD NOTHING")
    with closing(SqlStore.open(postgresql_url)) as store:
        assert ["rule lost", "trigger spoiled"] == sorted(part for part, _ in store.schema_faults())


def test_a_base_with_values_of_other_types(sqlite_url: str):
    """They come out as texts and bytes, which no row names."""
    with changing(sqlite_url) as connection:
        connection.exec_driver_sql(
            "INSERT INTO bases VALUES (3, x'00ff', 7, cast(x'ff41' as text))"
        )
    with closing(SqlStore.open(sqlite_url)) as store:
        base = store.base()
    assert base is not None
    found = (base.position, base.head, base.state, base.state_digest)
    assert (3, "\x00\\xff", b"7", "'\\udcffA'") == found


def test_all_rows_or_those_after(store: Store):
    """Without a position, rows before the first one are read, too."""
    store.append(ROWS[:2])
    assert ROWS[:2] == list(store.read())
    assert ROWS[:2] == list(store.read(0))


def test_a_time_that_is_none(sqlite_url: str):
    """A time that is no number is no time."""
    with closing(SqlStore.open(sqlite_url)) as store:
        store.append(ROWS)
        assert ROWS[0].time_us == store.time_at(1)
        with changing(sqlite_url) as connection:
            connection.exec_driver_sql("UPDATE events SET time_us = 'x' WHERE position = 1")
        assert store.time_at(1) is None
