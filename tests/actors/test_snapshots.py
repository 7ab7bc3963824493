"""Snapshots of the fold on disk: when they are written, and when they are used."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import attrs
import pytest
import structlog
import trio

from cairn.actors import snapshots
from cairn.actors.journal_start import start_journal
from cairn.actors.settings import no_progress
from cairn.actors.snapshots import SnapshotFile
from cairn.journal import events as ev
from cairn.journal.replay import Replay
from cairn.journal.rows.base import base_of
from cairn.journal.rows.snapshots import Folds, Snapshot, pieces, snapshot_of
from cairn.journal.rows.store import MemoryStore
from tests.support import journals
from tests.support.in_process_server import ask, chat, events_of, generate, serving_fake

NOT_USED = "the snapshot is not used, so the whole journal is read"


@pytest.fixture
def file(tmp_path: Path) -> SnapshotFile:
    """The file of snapshots in a data directory."""
    return SnapshotFile(tmp_path / "snapshot")


def snapshot_at(store: MemoryStore, position: int) -> Snapshot:
    """The snapshot after a row."""
    fold, folds = Replay(store.base()), Folds()
    for row in store.rows[:position]:
        recorded = fold.feed(row)
        assert recorded is not None
        folds.see(recorded)
    return folds.snapshot(fold.state, store.rows[position - 1].hash)


class CountedStore(MemoryStore):
    """A store that counts the rows that are read in order."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.read_rows = 0

    def read(self, after: int | None = None, *, stream: str | None = None) -> Any:
        """See ``Store.read``."""
        for row in super().read(after, stream=stream):
            self.read_rows += 1
            yield row


def rows_read(store: MemoryStore, file: SnapshotFile) -> int:
    """How many rows a start reads. The state has to be that of all rows."""
    counted = CountedStore(store.rows, store.base())
    started = start_journal(counted, file, no_progress, lambda: None)
    whole = start_journal(store, None, no_progress, lambda: None)
    assert whole.ledger.state == started.ledger.state
    assert whole.ledger.head == started.ledger.head
    assert whole.folds.snapshot(whole.ledger.state, "") == started.folds.snapshot(
        started.ledger.state, ""
    )
    return counted.read_rows


def test_a_start_reads_the_rows_after_a_snapshot(file: SnapshotFile):
    """Only those, and the state is that of all rows."""
    store = MemoryStore(journals.healthy())
    assert len(store.rows) == rows_read(store, file)
    file.write(snapshot_at(store, 10))
    assert len(store.rows) - 10 == rows_read(store, file)
    assert 0o600 == file.path.stat().st_mode & 0o777
    assert [file.path] == list(file.path.parent.iterdir())


def test_a_snapshot_that_was_changed_is_not_used(file: SnapshotFile):
    """A flipped bit anywhere, and a file that is cut anywhere, has the whole journal read."""
    store = MemoryStore(journals.healthy())
    file.write(snapshot_at(store, 10))
    content = file.path.read_bytes()
    for at in range(0, len(content), 97):
        for damaged in (
            content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :],
            content[:at],
        ):
            file.path.write_bytes(damaged)
            file.path.chmod(0o600)
            with structlog.testing.capture_logs() as logged:
                assert file.read(store) is None
            assert [NOT_USED] == [line["event"] for line in logged]
            assert not file.path.exists()
    assert len(store.rows) == rows_read(store, file)


def test_a_draft_is_removed(file: SnapshotFile):
    """What a server that was killed while it wrote has left has texts, too."""
    store = MemoryStore(journals.healthy())
    file.write(snapshot_at(store, 10))
    draft = file.path.with_name(f".{file.path.name}.abc.new")
    draft.write_bytes(b"the first half")
    assert file.read(store) is not None
    assert [file.path] == list(file.path.parent.iterdir())


@pytest.mark.parametrize("older", [(2, 1), (3, 0)], ids=["made", "removed"])
def test_a_snapshot_with_older_keys_is_not_used(file: SnapshotFile, older: tuple[int, int]):
    """
    Keys that were restored from before it miss sessions of rows that would not be read, or have
    those that were forgotten since.
    """
    store = MemoryStore(journals.healthy())
    now = (3, 1)
    counted = SnapshotFile(file.path, lambda: now)
    counted.write(snapshot_at(store, 10))
    assert counted.read(store) is not None
    now = (4, 2)
    assert counted.read(store) is not None
    now = older
    with structlog.testing.capture_logs() as logged:
        assert counted.read(store) is None
    assert ["the keys of the journal are older than it"] == [line["fact"] for line in logged]


def _pruned(store: MemoryStore) -> MemoryStore:
    taken = snapshot_at(store, 12)
    return MemoryStore(store.rows[12:], base_of(taken.state, taken.place.head))


def _rewritten(store: MemoryStore) -> MemoryStore:
    row = attrs.evolve(store.rows[9], time_us=store.rows[9].time_us + 1)
    return MemoryStore([*store.rows[:9], row, *store.rows[10:]])


@pytest.mark.parametrize(
    ("journal", "why"),
    [
        (lambda store: MemoryStore(store.rows[:9]), "is not in the journal"),
        (_pruned, "pruned since"),
        (_rewritten, "row 10"),
        (lambda _: MemoryStore(journals.aged()), "row 10"),
    ],
    ids=["cut", "pruned", "rewritten", "another"],
)
def test_a_snapshot_of_another_journal_is_not_used(file: SnapshotFile, journal: Any, why: str):
    """One line of the log says why, and the file is removed."""
    store = MemoryStore(journals.healthy())
    file.write(snapshot_at(store, 10))
    with structlog.testing.capture_logs() as logged:
        assert file.read(journal(store)) is None
    assert [(NOT_USED, True)] == [(line["event"], why in line["fact"]) for line in logged]
    assert not file.path.exists()


def test_a_snapshot_of_other_code_is_not_used(file: SnapshotFile, monkeypatch: pytest.MonkeyPatch):
    """Code that was changed may fold the same rows to another state."""
    store = MemoryStore(journals.healthy())
    file.write(snapshot_at(store, 10))
    monkeypatch.setattr(snapshots, "code_hash", lambda _: "other")
    with structlog.testing.capture_logs() as logged:
        assert file.read(store) is None
    assert "another version of Cairn wrote it" == logged[0]["fact"]


def test_only_a_file_of_ones_own_is_used(file: SnapshotFile, tmp_path: Path):
    """Not a link, a folder or a pipe, nor a file that other users can write."""
    store = MemoryStore(journals.healthy())
    elsewhere = SnapshotFile(tmp_path / "elsewhere")
    elsewhere.write(snapshot_at(store, 10))
    file.path.symlink_to(elsewhere.path)
    assert file.read(store) is None
    os.mkfifo(file.path)
    assert file.read(store) is None
    file.path.mkdir()
    assert file.read(store) is None
    file.path.rmdir()
    assert file.write(snapshot_at(store, 10)) is not None
    file.path.chmod(0o620)
    assert file.read(store) is None
    assert elsewhere.read(store) is not None


def test_what_cannot_be_written_is_logged(tmp_path: Path):
    """A snapshot is a cache: without a place for it, the server goes on."""
    store = MemoryStore(journals.healthy())
    with structlog.testing.capture_logs() as logged:
        assert SnapshotFile(tmp_path / "none" / "snapshot").write(snapshot_at(store, 10)) is None
    assert ["warning"] == [line["log_level"] for line in logged]


@pytest.mark.trio
async def test_a_server_that_stops_leaves_a_snapshot(file: SnapshotFile):
    """The next start reads no row in order, and goes on as the run before."""
    store = MemoryStore()
    async with serving_fake(store, snapshot=file.path) as server:
        first = await ask(server, generate(chat("One two three.")))
    assert 0 == rows_read(store, file)
    again = CountedStore(store.rows)
    async with serving_fake(again, snapshot=file.path) as server:
        assert 0 == again.read_rows
        said = ("One two three.", first.text, "Four.")
        await ask(server, generate(chat(*said)))
    assert "continuation" == events_of(again, ev.PathSelected)[-1].path
    assert 0 == rows_read(again, file)
    async with serving_fake(again, snapshot=file.path, fold_all=True):
        assert again.read_rows >= len(store.rows)


@pytest.mark.trio
async def test_a_server_writes_snapshots_while_it_runs(
    file: SnapshotFile, monkeypatch: pytest.MonkeyPatch
):
    """After a kill, the next start reads few rows more than lie between two snapshots."""
    monkeypatch.setattr(snapshots, "ROWS_MIN", 40)
    monkeypatch.setattr(snapshots, "BYTES_A_ROW", 10**9)
    written: list[Snapshot] = []
    write = SnapshotFile.write

    def counted(self: SnapshotFile, snapshot: Snapshot) -> int | None:
        written.append(snapshot)
        return write(self, snapshot)

    monkeypatch.setattr(SnapshotFile, "write", counted)
    store = MemoryStore()
    async with serving_fake(store, snapshot=file.path) as server:
        for number in range(8):
            async with trio.open_nursery() as both:
                for text in ("and so on", "and on"):
                    said = generate(chat(f"{number} {text}"), max_tokens=60)
                    both.start_soon(ask, server, said)
    for snapshot in written:
        position = snapshot.place.position
        # As it is read again: what was a tuple in the server's memory is a list in a row, too.
        assert snapshot_at(store, position) == snapshot_of(pieces(snapshot))
    assert len(written) >= 3
    positions = [snapshot.place.position for snapshot in written[:-1]]
    assert all(later - one >= 40 for one, later in pairwise(positions))
    fold = Replay()
    for row in store.read():
        fold.feed(row)
    assert () == fold.report().findings
