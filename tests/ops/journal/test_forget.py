"""A prune removes the block files that only pruned conversations had."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import attrs
import pytest

from cairn.actors.clock import clock
from cairn.engine.block_folder import place_of
from cairn.journal import events as ev
from cairn.journal import paths
from cairn.journal.errors import StoreFull
from cairn.journal.keys import block_keys, ids_hash
from cairn.journal.ledger import Ledger
from cairn.journal.replay import Replay
from cairn.journal.rows.codec import decode
from cairn.journal.rows.database.urls import journal_url
from cairn.journal.rows.store_sql import SqlStore
from cairn.ops.serve.data_dir import hold
from tests.support.journals import (
    BLOCK_BYTES,
    CHUNK,
    FINGERPRINT,
    JUNE_US,
    SECRET,
    TENANT,
    Builder,
    beside_files,
)

PRUNE = ("journal", "prune", "--before", "2026-03-01", "--close-idle")
SIZE = 300


@attrs.frozen
class Setup:
    """
    A journal in a data directory, with block files next to it.

    Attributes:
        gone, kept: the keys of the blocks that only s2 of January had; and of those that s3 of June
            shares with s1, and of one of its answer.
    """

    data: Path
    gone: set[str]
    kept: set[str]

    @property
    def folder(self) -> Path:
        """The folder of blocks."""
        return self.data / "blocks"

    def there(self) -> set[str]:
        """The keys of the blocks that have a file."""
        return {path.stem for path in self.folder.rglob("*.safetensors")}

    def read(self) -> Any:
        """What the journal records, and whether it holds."""
        store = SqlStore.open(journal_url(self.data), read_only=True)
        try:
            fold = Replay(store.base())
            for row in store.read():
                fold.feed(row)
            return fold.report()
        finally:
            store.close()

    def put(self, key: str, ending: str, contents: bytes = b"") -> Path:
        """A file next to a block's."""
        path = place_of(self.folder, FINGERPRINT, key).with_name(f"{key}{ending}")
        path.write_bytes(contents)
        return path

    def append(self, event: ev.Event) -> None:
        """Take an event into the journal."""
        read = self.read()
        outcome = Ledger(clock(), state=read.state, head=read.head).propose([event])
        assert outcome.bug is None
        store = SqlStore.open(journal_url(self.data))
        store.append(outcome.rows)
        store.close()

    def dropped(self) -> set[str]:
        """The blocks whose files the journal records as removed."""
        store = SqlStore.open(journal_url(self.data), read_only=True)
        try:
            events = [decode(row).event for row in store.read()]
        finally:
            store.close()
        return {event.key for event in events if isinstance(event, ev.BlockFileRemoved)}


@pytest.fixture
def setup(stored) -> Setup:
    """
    Sessions s1 and s2 of January and s3 of June, which continues from blocks of s1. All blocks have
    files.
    """
    made, kept, gone = beside_files(SIZE)
    made.start()
    made.propose(
        ev.BlockFilesScanned(
            budget_bytes=1 << 30, disk_blocks=4, disk_bytes=4 * SIZE, removed_files=0
        )
    )
    kept.add(settled_turn(made, (*range(11, 19), 90, 91), (61, 62)))
    made.spill(SIZE)
    made.stop()
    found = Setup(stored(made.rows), gone, kept)
    for key in gone | kept:
        path = place_of(found.folder, FINGERPRINT, key)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(SIZE))
    return found


def settled_turn(made: Builder, prompt: tuple[int, ...], answer: tuple[int, ...]) -> str:
    """
    A turn of s3 after which its answer is settled: the key of the answer's block, which only the
    event names that sealed it.
    """
    ids = (*prompt, *answer)
    keys = block_keys(
        secret=SECRET, fingerprint=FINGERPRINT, tenant=TENANT, ids=ids, block_tokens=CHUNK
    )
    start, end = len(ids) - CHUNK, len(ids)
    for event in made.steps("s3", "r3", ["Hello", "No", "Well"], prompt, answer):
        if isinstance(event, ev.SessionSettled):
            made.propose(
                attrs.evolve(
                    made.extended("s3", "r3", "settle", (start, end), ids[start:], ()),
                    request=None,
                )
            )
            pool = made.ledger.state.pool
            made.propose(
                ev.BlockSealed(
                    session="s3",
                    key=keys[-1],
                    parent=keys[-2],
                    digest=ids_hash(ids),
                    start=start,
                    end=end,
                    bytes=BLOCK_BYTES,
                    resealed=False,
                    stored=True,
                    memory_blocks=pool.blocks + 1,
                    memory_bytes=pool.block_bytes + BLOCK_BYTES,
                )
            )
            event = attrs.evolve(event, canonical_tokens=end)
        made.propose(event)
    assert made.bug is None
    return keys[-1]


def test_files_of_what_was_pruned_go(run, setup: Setup):
    """
    Quarantined files are removed too; those that remaining conversations need stay. Rows record it.
    """
    aside = place_of(setup.folder, FINGERPRINT, min(setup.gone))
    aside = aside.with_name(f"{aside.name}.rejected")
    aside.write_bytes(b"looked at")
    result = run(*PRUNE)
    assert 0 == result.exit_code
    assert "2 block files removed\n" in result.stdout
    assert setup.kept == setup.there()
    assert not aside.exists()
    assert setup.gone == setup.dropped()
    read = setup.read()
    assert () == read.findings
    assert (3, 3 * SIZE) == (read.state.pool.disk_blocks, read.state.pool.disk_bytes)
    assert "block file" not in run(*PRUNE).output


def anticipating(made: Builder, name: str, request: str, ids: tuple[int, ...]) -> None:
    """
    A turn of a session after which blocks that are in memory are anticipated, and shared into its
    slab. No prompt of its own has them.
    """
    keys = block_keys(
        secret=SECRET, fingerprint=FINGERPRINT, tenant=TENANT, ids=ids, block_tokens=CHUNK
    )
    for event in made.steps(name, request, ["Tell"], tuple(range(70, 80)), (81, 82)):
        if not isinstance(event, ev.SessionSettled):
            made.propose(event)
            continue
        made.propose(
            ev.PrewarmStarted(
                session=name,
                next_role="user",
                rules_version=paths.RULES_VERSION,
                tokens=len(ids),
                base_tokens=0,
                new_ids=ids,
                base_keys=0,
                new_keys=keys,
                tokens_from_slab=0,
                blocks_from_slab=0,
                blocks_from_pool=1,
                partial_key=None,
                tokens_from_partial=0,
            ),
            made.trimmed(name, event.canonical_tokens, 0),
            ev.BlocksRestored(
                session=name,
                request=None,
                start=0,
                end=CHUNK,
                keys=keys[:1],
                digests=(made.ledger.state.blocks[keys[0]].digest,),
                coverage=made.coverage(CHUNK),
                duration_us=5,
            ),
            ev.PrewarmAbandoned(session=name, reason="request", computed_tokens=0),
            attrs.evolve(event, canonical_tokens=CHUNK, complete=False),
        )
    assert made.bug is None


def test_a_file_that_a_prewarm_needs_stays(run, stored):
    """
    A remaining session has a block in its slab that only its prewarm names: the session that
    computed it is pruned, and its file is still needed.
    """
    made = Builder()
    made.start()
    made.propose(
        ev.BlockFilesScanned(budget_bytes=1 << 30, disk_blocks=0, disk_bytes=0, removed_files=0)
    )
    made.turn("s1", "r1", ["Another"], range(40, 50), (51, 52))
    first, second = made.ledger.state.session("s1").slab_keys
    made.spill(SIZE)
    made.time_us = JUNE_US
    anticipating(made, "s2", "r2", tuple(range(40, 40 + CHUNK)) + (1, 1, 1, 1)[:CHUNK])
    made.spill(SIZE)
    made.stop()
    found = Setup(stored(made.rows), set(), set())
    for key in (first, second):
        path = place_of(found.folder, FINGERPRINT, key)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(SIZE))
    assert 0 == run(*PRUNE).exit_code
    assert {first} == found.there()
    assert () == found.read().findings


def test_a_dry_run_leaves_files(run, setup: Setup):
    """Nothing is removed where nothing is pruned."""
    assert 0 == run(*PRUNE, "--dry-run").exit_code
    assert setup.gone | setup.kept == setup.there()


def test_a_file_that_cannot_be_removed(run, setup: Setup, monkeypatch: pytest.MonkeyPatch):
    """It is reported with its path, and no row says that it is gone. The next prune removes it."""
    plain = Path.unlink

    def failing(self: Path, missing_ok: bool = False) -> None:
        if self.stem == min(setup.gone):
            raise PermissionError(1, "Operation not permitted")
        plain(self, missing_ok)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", failing)
        result = run(*PRUNE)
    assert 0 == result.exit_code
    assert "1 block file removed\n" in result.stdout
    words = f"1 block file not removed from {setup.folder} "
    assert f"{words}(Operation not permitted). " in result.stderr
    assert {max(setup.gone)} == setup.dropped()
    assert "1 block file removed\n" in run(*PRUNE).stdout
    assert setup.kept == setup.there()
    assert () == setup.read().findings


def test_files_that_are_elsewhere(run, setup: Setup):
    """Without a folder, no prune removes files: that is reported, and nothing is on record."""
    setup.folder.rename(setup.data / "moved")
    result = run(*PRUNE)
    words = f"2 block files not removed from {setup.folder} (it does not exist). "
    assert words in result.stderr
    assert set() == setup.dropped()
    assert () == setup.read().findings


def test_files_that_are_gone(run, setup: Setup):
    """A folder without these files is searched once: that is on record, and reported."""
    for key in setup.gone:
        place_of(setup.folder, FINGERPRINT, key).unlink()
    result = run(*PRUNE)
    assert "2 block files removed\n" in result.stdout
    assert f"2 of them were missing from {setup.folder} already. If the " in result.stderr
    assert setup.gone == setup.dropped()
    assert "block file" not in run(*PRUNE).output


def test_a_folder_that_cannot_be_looked_into(run, setup: Setup, monkeypatch: pytest.MonkeyPatch):
    """A file that cannot be seen is not counted as gone."""
    key = min(setup.gone)
    place = place_of(setup.folder, FINGERPRINT, key)
    place.unlink()
    plain = Path.lstat

    def failing(self: Path) -> os.stat_result:
        if self == place:
            raise PermissionError(13, "Permission denied")
        return plain(self)

    monkeypatch.setattr(Path, "lstat", failing)
    result = run(*PRUNE)
    words = f"1 block file not removed from {setup.folder} (another file is in the"
    assert words in result.stderr
    assert setup.gone - {key} == setup.dropped()


def test_a_directory_in_use(run, setup: Setup):
    """
    The journal is a copy, and a server with the original uses the folder: no file is removed, and
    that is reported. When the server has stopped, the same command removes them.
    """
    copy = setup.data.parent / "copy.db"
    shutil.copy(setup.data / "journal.db", copy)
    command = (*PRUNE, "--journal", copy)
    with hold(setup.data, journal_url(setup.data)):
        result = run(*command)
    assert 0 == result.exit_code
    assert "2 sessions removed" in result.stdout
    words = "2 block files not removed. "
    who = f"A server (process {os.getpid()}) uses {setup.data}. "
    assert f"{words}{who}Stop it, and run the same command again.\n" in result.stderr
    assert setup.gone | setup.kept == setup.there()
    assert "2 block files removed\n" in run(*command).stdout
    assert setup.kept == setup.there()


def test_a_file_that_is_not_on_record(run, setup: Setup):
    """A file at the place of a block that has none on record is another journal's, and stays."""
    stays, goes = sorted(setup.gone)
    setup.append(
        ev.BlockFileRemoved(
            key=stays, bytes=SIZE, disk_blocks=4, disk_bytes=4 * SIZE, reason="space"
        ),
    )
    result = run(*PRUNE)
    assert "1 block file removed\n" in result.stdout
    assert setup.kept | {stays} == setup.there()
    assert {stays, goes} == setup.dropped()


def written_by(key: str, run: str) -> bytes:
    """The head of a block's file that says which run wrote it."""
    header = {"__metadata__": {"key": key, "fingerprint": FINGERPRINT, "run": run}}
    head = json.dumps(header).encode()
    return len(head).to_bytes(8, "little") + head


def test_files_of_other_runs(run, setup: Setup):
    """
    Files that another journal's run quarantined or has not finished stay, and are counted. Files of
    a run that only pruned rows mention are removed.
    """
    first, second = sorted(setup.gone)
    theirs = [
        setup.put(first, ".boot-9.unfinished"),
        setup.put(first, ".safetensors.rejected", written_by(first, "boot-9")),
    ]
    ours = [
        setup.put(second, ".boot-1.unfinished"),
        setup.put(second, ".safetensors.rejected", written_by(second, "boot-1")),
    ]
    result = run("journal", "prune", "--before", "0m", "--recent", "--close-idle")
    assert set() == setup.there()
    assert [True] * 2 == [path.exists() for path in theirs]
    assert [False] * 2 == [path.exists() for path in ours]
    assert "2 files of the same blocks, set aside or incomplete, left in" in result.stderr
    assert () == setup.read().findings


def test_a_disk_that_is_full_afterwards(run, setup: Setup, monkeypatch: pytest.MonkeyPatch):
    """
    If removed files cannot be put on record, the prune still completes, because the rows are gone:
    it is reported, the space is freed, and the next prune records them.
    """
    plain = SqlStore.append

    def full(self: SqlStore, rows: Any) -> None:
        if rows and rows[0].kind == "block_file_removed":
            raise StoreFull("Cannot write to it: disk full.")
        plain(self, rows)

    with monkeypatch.context() as patch:
        patch.setattr(SqlStore, "append", full)
        result = run(*PRUNE)
    assert 0 == result.exit_code
    words = "could be removed and recorded: Cannot write to it: disk full. Run the same command"
    assert words in result.stderr
    assert "on disk: " in result.stdout
    assert (setup.kept, set()) == (setup.there(), setup.dropped())
    assert "2 block files removed\n" in run(*PRUNE).stdout
    assert setup.gone == setup.dropped()
    assert "block file" not in run(*PRUNE).output
