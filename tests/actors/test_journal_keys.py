"""The keys of a journal's private fields: stored before they are needed, wrapped, and removed."""

import contextlib
import os
import resource
import sqlite3
import stat
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import attrs
import pytest

from cairn.actors.clock import clock
from cairn.actors.journal_keys import KeyFile, overwrite
from cairn.journal import events as ev
from cairn.journal.errors import StoreError, StoreLocked, StoreStarved
from cairn.journal.ledger import Ledger
from cairn.journal.rows.database.schema import migrate
from cairn.journal.rows.database.urls import journal_url
from cairn.journal.rows.sealing import SERVER
from cairn.journal.rows.store_sql import SqlStore


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where the keys are."""
    return tmp_path / "keys.db"


def test_a_key_lasts_once_it_is_committed(path: Path):
    """A subject has one key, which another process finds after ``commit`` and not before."""
    with closing(KeyFile.open(path)) as keys:
        assert keys.is_new
        keys.confirm()
        key = keys.key_of("s1")
        assert key is keys.key_of("s1")
        assert key is keys.get(key.id)
        other = KeyFile.read(path)
        assert other is not None
        with closing(other):
            assert None is other.get(key.id)
            keys.commit()
            found = other.get(key.id)
            assert found is not None
            assert key.secret == found.secret
        assert key.secret not in path.read_bytes()
        assert keys.key_of("s2").secret != key.secret
        keys.commit()
        keys.commit()  # nothing is new
    with closing(KeyFile.open(path)) as again:
        assert not again.is_new
        assert key.secret == again.key_of("s1").secret
        assert {"s1", "s2"} == again.subjects()
        assert (key.id,) == again.ids_of("s1")


def test_a_removed_key_is_gone(path: Path):
    """It is in no cache and not in the file; its subject gets another one."""
    with closing(KeyFile.open(path)) as keys:
        key, kept = keys.key_of("s1"), keys.key_of("s2")
        keys.commit()
        assert 1 == keys.remove("s1", [key.id])
        assert 0 == keys.remove("s1", [key.id])
        assert None is keys.get(key.id)
        assert kept is keys.get(kept.id)
        assert keys.key_of("s1").id != key.id
        fresh = keys.key_of("s3")
        assert 0 == keys.remove("s3", [fresh.id])  # not stored yet
        keys.commit()
        assert () == keys.ids_of("s3")


def test_keys_of_another_stay(path: Path):
    """A row may name any key, and its session is forgotten with its own alone."""
    with closing(KeyFile.open(path)) as keys:
        key, of_server = keys.key_of("s1"), keys.key_of(SERVER)
        keys.commit()
        assert 0 == keys.remove("s2", [key.id, of_server.id])
        assert key is keys.get(key.id)
        assert of_server is keys.get(of_server.id)


def test_a_removed_key_is_in_no_log(path: Path, monkeypatch: pytest.MonkeyPatch):
    """The rollback journal had it, and is overwritten before it goes."""
    kept: list[tuple[bytes, bytes]] = []

    def watched(log: Path) -> None:
        before = log.read_bytes()
        overwrite(log)
        kept.append((before, log.read_bytes()))

    monkeypatch.setattr("cairn.actors.journal_keys.overwrite", watched)
    with closing(KeyFile.open(path)) as keys, closing(sqlite3.connect(path)) as reader:
        key = keys.key_of("s1")
        keys.commit()
        ((wrapped,),) = reader.execute("SELECT wrapped FROM keys")
        reader.rollback()
        keys.remove("s1", [key.id])
        ((before, after),) = kept
        assert (True, False) == (wrapped in before, wrapped in after)
        assert wrapped not in path.read_bytes()
        assert not path.with_name("keys.db-journal").exists()
        assert (1, 1) == keys.counts()


def test_keys_are_new_until_they_fit(path: Path):
    """A start that was refused leaves nothing that a later one takes for the journal's keys."""
    for _ in range(2):
        with closing(KeyFile.open(path)) as keys:
            assert keys.is_new
    with closing(KeyFile.open(path)) as keys:
        keys.confirm()
        keys.confirm()
    with closing(KeyFile.open(path)) as keys:
        assert not keys.is_new
        assert (0, 0) == keys.counts()


@pytest.mark.long
def test_many_keys(path: Path):
    """More keys than the cache holds are found again, and none is lost before it is stored."""
    with closing(KeyFile.open(path)) as keys:
        made = {keys.key_of(f"s{n}").id: n for n in range(5000)}
        keys.commit()
        assert 5000 == len(made)
        for key_id, number in list(made.items())[::500]:
            found = keys.get(key_id)
            assert found is not None
            assert found.secret == keys.key_of(f"s{number}").secret


def test_files_are_for_their_owner(path: Path, tmp_path: Path):
    """Both files are 0600, whatever the umask."""
    before = os.umask(0)
    try:
        KeyFile.open(path).close()
    finally:
        os.umask(before)
    for name in ("keys.db", "journal-key"):
        assert 0o600 == stat.S_IMODE((tmp_path / name).stat().st_mode), name


def test_the_journal_key_may_be_elsewhere(path: Path, tmp_path: Path):
    """It is found where it was last, and it may be moved."""
    far = tmp_path / "other disk"
    far.mkdir()
    with closing(KeyFile.open(path, far / "key")) as keys:
        key = keys.key_of("s1")
        keys.commit()
    assert not (tmp_path / "journal-key").exists()
    assert None is not KeyFile.read(path)
    (far / "key").rename(far / "moved")
    with pytest.raises(StoreError, match=r"is missing.*--journal-key"):
        KeyFile.open(path)
    with pytest.raises(StoreError, match="is missing"):
        KeyFile.read(path)
    with closing(KeyFile.open(path, far / "moved")) as again:
        assert key.secret == again.key_of("s1").secret
    found = KeyFile.read(path)
    assert found is not None
    found.close()


@pytest.mark.parametrize(
    ("contents", "words"), [(bytes(32), "is not the journal key"), (b"short", "is damaged")]
)
def test_another_journal_key(path: Path, tmp_path: Path, contents: bytes, words: str):
    """A wrong one is refused with what to do, and nothing is changed."""
    with closing(KeyFile.open(path)) as keys:
        keys.confirm()
    before = path.read_bytes()
    (tmp_path / "journal-key").write_bytes(contents)
    for open_ in (KeyFile.open, KeyFile.read):
        with pytest.raises(StoreError, match=words):
            open_(path)
    assert before == path.read_bytes()


def test_there_are_none(path: Path):
    """A reader of a journal without keys makes none."""
    assert None is KeyFile.read(path)
    assert not path.exists()


def test_a_damaged_file(path: Path):
    """What is no database, is not complete, or has a damaged key is an error in a sentence."""
    path.write_bytes(b"no database, but long enough for one to be read as such" * 100)
    for open_ in (KeyFile.open, KeyFile.read):
        with pytest.raises(StoreError, match="cannot be used"):
            open_(path)
    path.unlink()
    with closing(KeyFile.open(path)) as keys:
        key = keys.key_of("s1")
        keys.commit()
    with closing(sqlite3.connect(path)) as database:
        database.execute("UPDATE keys SET wrapped = ?", (bytes(40),))
        database.commit()
    with closing(KeyFile.open(path)) as keys, pytest.raises(StoreError, match="is damaged"):
        keys.get(key.id)
    with closing(sqlite3.connect(path)) as database:
        database.execute("DELETE FROM wrapped_by")
        database.commit()
    with pytest.raises(StoreError, match="not complete"):
        KeyFile.read(path)


def test_a_lock_of_another_program(path: Path, monkeypatch: pytest.MonkeyPatch):
    """It is waited out as that of the journal is: the keys can be stored later."""
    monkeypatch.setattr("cairn.actors.journal_keys.BUSY_S", 0.0)
    with closing(KeyFile.open(path)) as keys, closing(sqlite3.connect(path)) as other:
        key = keys.key_of("s1")
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(StoreLocked):
            keys.commit()
        other.rollback()
        keys.commit()
        assert key is keys.get(key.id)


@contextlib.contextmanager
def no_descriptors() -> Iterator[None]:
    """This process may open no more files while the context lasts."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = max(int(one.name) for one in Path("/proc/self/fd").iterdir()) + 1
    opened: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, before[1]))
    try:
        with contextlib.suppress(OSError):
            while True:
                opened.append(os.open(os.devnull, os.O_RDONLY))
        yield
    finally:
        for handle in opened:
            os.close(handle)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
def test_no_descriptors_are_left(path: Path):
    """It is waited out, too: the keys can be stored when connections have ended."""
    with closing(KeyFile.open(path)) as keys:
        key = keys.key_of("s1")
        with no_descriptors(), pytest.raises(StoreStarved):
            keys.commit()
        keys.commit()
        assert key is keys.get(key.id)


def test_keys_are_stored_before_rows(path: Path, monkeypatch: pytest.MonkeyPatch):
    """While its key cannot be stored, a row is not stored either; both can be later."""
    monkeypatch.setattr("cairn.actors.journal_keys.BUSY_S", 0.0)
    url = journal_url(path.parent)
    migrate(url)
    with (
        closing(KeyFile.open(path)) as keys,
        closing(SqlStore.open(url, keys=keys)) as store,
        closing(sqlite3.connect(path)) as other,
    ):
        outside = attrs.evolve(clock(), key_of=keys.key_of)
        rows = Ledger(outside).propose([ev.ModelLoadFailed(name="m", reason="no disk")]).rows
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(StoreLocked):
            store.append(rows)
        assert [] == list(store.read())
        other.rollback()
        store.append(rows)
        assert rows == tuple(store.read())
        assert 1 == len(keys.ids_of(SERVER))
