"""
A start compares the journal with what was recorded outside of it, and refuses if rows are lost,
unless the operator accepts that.
"""

import contextlib
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from cairn.actors.threads.heads import HeadKeeper
from cairn.journal.errors import StoreError
from cairn.journal.events import LossAccepted
from cairn.journal.rows.database.schema import migrate
from cairn.journal.rows.database.urls import journal_url
from cairn.journal.rows.heads import Head
from cairn.journal.rows.store_sql import SqlStore
from cairn.ops.cli import Unreadable
from cairn.ops.common.heads import HeadFiles
from cairn.ops.serve.recorded_heads import head_keeper, require_known_head
from tests.support.journals import healthy
from tests.support.processes.subprocess_server import ask, recorded, run_ops, started, user

ROWS = healthy()


def head_of(position: int) -> Head:
    """The head when this row was the last one."""
    return Head(position, ROWS[position - 1].hash)


@pytest.fixture
def files(tmp_path: Path) -> HeadFiles:
    """A journal with all rows, of which the head was recorded and signed."""
    migrate(journal_url(tmp_path))
    with contextlib.closing(SqlStore.open(journal_url(tmp_path))) as store:
        store.append(ROWS)
    made = HeadFiles.of(tmp_path, None)
    with head_keeper(made, None, None) as keeper:
        keep(keeper, 20, 31)
    return made


def keep(keeper: HeadKeeper, *positions: int) -> None:
    """Record heads as a server does."""
    for position in positions:
        keeper.committed(head_of(position))
    keeper.end()


def contents(files: HeadFiles) -> dict[str, bytes]:
    """The files of the data directory, without those that every reader of SQLite makes."""
    return {
        path.name: path.read_bytes()
        for path in files.data_dir.iterdir()
        if not path.name.startswith("journal.db-")
    }


def fault(files: HeadFiles) -> str | None:
    """Why a start is refused; None if it is not."""
    try:
        assert None is require_known_head(files, journal_url(files.data_dir), accept=False)
    except Unreadable as refused:
        return str(refused)
    return None


def cut(files: HeadFiles) -> None:
    """Remove the last row."""
    with contextlib.closing(sqlite3.connect(files.data_dir / "journal.db")) as database:
        database.execute("DELETE FROM events WHERE position = 31")
        database.commit()


def rewrite(files: HeadFiles) -> None:
    """Put another hash in the place of the last one."""
    with contextlib.closing(sqlite3.connect(files.data_dir / "journal.db")) as database:
        database.execute(f"UPDATE events SET hash = '{'0' * 64}' WHERE position = 31")
        database.commit()


def empty(files: HeadFiles) -> None:
    """Leave a file of 0 bytes."""
    (files.data_dir / "journal.db").write_bytes(b"")


def remove(files: HeadFiles) -> None:
    """Remove the journal."""
    (files.data_dir / "journal.db").unlink()


LOSSES = [
    (cut, "it ends at row 30, and had row 31 before"),
    (rewrite, f"row 31 has the hash {'0' * 64}, and had {ROWS[-1].hash} before"),
    (empty, "it ends at row 0, and had row 31 before"),
    (remove, "it ends at row 0, and had row 31 before"),
]


def test_nothing_is_lost(files: HeadFiles):
    """The journal as it was, or longer."""
    assert fault(files) is None
    with head_keeper(files, None, None) as keeper:
        keep(keeper, 12)
    assert fault(files) is None


@pytest.mark.parametrize("record", [True, False], ids=["record", "checkpoints"])
@pytest.mark.parametrize(("damage", "words"), LOSSES)
def test_a_loss(files: HeadFiles, damage: Callable[[HeadFiles], None], words: str, record: bool):
    """
    It is found by the record, and without that by the last checkpoint; nothing is changed, and the
    operator can accept it.
    """
    damage(files)
    if not record:
        files.record.unlink()
    there = contents(files)
    refused = fault(files)
    assert refused is not None
    assert words in refused
    assert "--accept-lost-rows" in refused
    assert there == contents(files)
    accepted = require_known_head(files, journal_url(files.data_dir), accept=True)
    assert accepted is not None
    assert words in accepted.fact
    gone = (20, 31) if damage in (empty, remove) else (31,)
    assert {str(head_of(position)) for position in gone} == {*accepted.heads}


def test_earlier_checkpoints_are_lost(files: HeadFiles):
    """The last head is there, and an earlier one is not: a start accepts that with the option."""
    with head_keeper(files, None, None) as keeper:
        keeper.committed(Head(25, "0" * 64))
        keep(keeper, 31)
    assert fault(files) is None
    accepted = require_known_head(files, journal_url(files.data_dir), accept=True)
    assert accepted is not None
    assert (f"25:{'0' * 64}",) == accepted.heads
    assert "rows that were signed for" in accepted.fact


def test_after_a_loss_was_accepted(files: HeadFiles):
    """The head that was signed last counts, not one of a higher row that was signed before."""
    with head_keeper(files, None, None) as keeper:
        keep(keeper, 12)
    files.record.unlink()
    cut(files)
    assert fault(files) is None


def test_a_damaged_record(files: HeadFiles):
    """What is damaged says nothing, so it cannot be known whether rows are lost."""
    files.record.write_text("x")
    assert "nothing says up to which row" in str(fault(files))
    assert require_known_head(files, journal_url(files.data_dir), accept=True) is not None


def test_damaged_checkpoints(files: HeadFiles):
    """They are not needed while the record is there."""
    files.checkpoints.write_text("x")
    assert fault(files) is None
    files.record.unlink()
    with pytest.raises(StoreError, match="the note at line 1 has no signature"):
        fault(files)


def test_a_first_start(tmp_path: Path):
    """Nothing is known; keys are made, the private half for the owner alone, and used again."""
    files = HeadFiles.of(tmp_path, None)
    assert fault(files) is None
    assert files.public_key() is None
    with head_keeper(files, None, None):
        first = files.public_key()
        assert first is not None
    assert (0o600, 32) == (files.key.stat().st_mode & 0o777, files.key.stat().st_size)
    with head_keeper(files, None, None):
        assert first == files.public_key()


def test_another_journal(files: HeadFiles, tmp_path: Path):
    """A data directory keeps the heads of each journal apart; the same file is the same one."""
    other = HeadFiles.of(files.data_dir, str(tmp_path / "other.db"))
    with head_keeper(other, None, None) as keeper:
        keep(keeper, 3)
    assert fault(files) is None
    assert head_of(3) == other.recorded_head()
    assert head_of(31) == files.recorded_head()
    assert files == HeadFiles.of(files.data_dir, str(files.data_dir / "journal.db"))
    by_url = HeadFiles.of(files.data_dir, "postgresql://me:secret@host/cairn")
    assert by_url == HeadFiles.of(files.data_dir, "postgresql://me:other@host/cairn")
    assert by_url.tag not in ("", other.tag)


@pytest.mark.parametrize("name", ["signing-key", "signing-key.pub", "head", "checkpoints"])
def test_a_file_that_cannot_be_written(tmp_path: Path, name: str):
    """A folder is in its place: the sentence names it."""
    (tmp_path / name).mkdir()
    with (
        pytest.raises((Unreadable, OSError), match=name),
        head_keeper(HeadFiles.of(tmp_path, None), None, None),
    ):
        pass


def test_a_damaged_key(files: HeadFiles):
    """No other is made in its place."""
    files.key.write_bytes(b"short")
    with (
        pytest.raises(Unreadable, match="has 5 bytes instead of 32"),
        head_keeper(files, None, None),
    ):
        pass


@pytest.mark.long
@pytest.mark.model
@pytest.mark.slow
def test_a_server(tmp_path: Path):
    """
    A server that is killed and has lost its write-ahead log does not start again unsaid; with the
    option it does, and that is journaled. Its checkpoints elsewhere find the loss afterwards, too.
    """
    data, elsewhere = tmp_path / "data", tmp_path / "elsewhere"
    with started(data, "--checkpoints", elsewhere) as server:
        ask(server, user("Hello"), max_tokens=4)
        health = server.health()
        position, _, _ = health["journal_head"].partition(":")
        assert int(position) >= health["journal_position"] - 1
        assert health["journal_checkpoint"]
        server.kill()
    # The server may have committed a row between the question and its end.
    last = HeadFiles.of(data, None).recorded_head()
    assert last is not None
    assert last.position >= int(position)
    assert (data / "journal.db-wal").stat().st_size > 0
    kept = (data / "journal.db-wal").read_bytes()
    (data / "journal.db-wal").write_bytes(kept[: len(kept) // 2])
    code, _, words = run_ops("serve", "--data-dir", data, "--port", 0)
    assert 2 == code
    assert "The journal does not contain what the head record" in words
    code, printed, _ = run_ops("verify", "--data-dir", data)
    assert (1, True) == (code, "head record: not in the chain: rows were removed" in printed)
    with started(data, "--checkpoints", elsewhere, "--accept-lost-rows") as server:
        ask(server, user("Hello"), max_tokens=4)
        server.stop()
    with started(data, "--checkpoints", elsewhere, "--accept-lost-rows") as server:
        server.stop()
    (accepted,) = [one.event for one in recorded(data) if isinstance(one.event, LossAccepted)]
    assert str(last) in accepted.heads
    code, printed, _ = run_ops("verify", "--data-dir", data, "--checkpoint", elsewhere)
    assert (0, True) == (code, "saved checkpoints: " in printed)
