"""
A prune removes the block files that only pruned conversations had.
"""

from pathlib import Path
from typing import Any

import attrs
import pytest

from cairn.engine.block_folder import place_of
from cairn.journal import events as ev
from cairn.journal.codec import decode
from cairn.journal.replay import Replay
from cairn.journal.store_sql import SqlStore, journal_url
from tests.journals import FINGERPRINT, Builder

JUNE_US = 1_780_272_000_000_000
PRUNE = ("journal", "prune", "--before", "2026-03-01", "--close-idle")
SIZE = 300


@attrs.frozen
class House:
    """
    A journal in a data directory, with block files beside it.

    Attributes:
        gone, kept: the keys of the blocks that only s2 of January had, and of those that s3 of June
            shares with s1.
    """

    data: Path
    gone: set[str]
    kept: set[str]

    @property
    def folder(self) -> Path:
        """
        The folder of blocks.
        """
        return self.data / "blocks"

    def there(self) -> set[str]:
        """
        The keys of the blocks that have a file.
        """
        return {path.stem for path in self.folder.rglob("*.safetensors")}

    def read(self) -> Any:
        """
        What the journal says, and whether it holds.
        """
        store = SqlStore.open(journal_url(self.data), read_only=True)
        try:
            fold = Replay(store.base())
            for row in store.read():
                fold.feed(row)
            return fold.report()
        finally:
            store.close()

    def dropped(self) -> set[str]:
        """
        The blocks whose files are gone by the journal.
        """
        store = SqlStore.open(journal_url(self.data), read_only=True)
        try:
            events = [decode(row).event for row in store.read()]
        finally:
            store.close()
        return {event.key for event in events if isinstance(event, ev.BlockDropped)}


@pytest.fixture
def house(stored) -> House:
    """
    Sessions s1 and s2 of January and s3 of June, which goes on from blocks of s1. All have files.
    """
    made = Builder()
    made.start()
    made.propose(ev.BlocksFound(budget_bytes=1 << 30, disk_blocks=0, disk_bytes=0, removed_files=0))
    made.turn("s1", "r1", ["Hello", "Hi", "Who?"], range(11, 21), (21, 22))
    kept = set(made.ledger.state.blocks)
    made.turn("s2", "r2", ["Another"], range(40, 50), (51, 52))
    for number, block in enumerate(list(made.ledger.state.blocks.values()), start=1):
        made.propose(
            ev.BlockSpilled(
                key=block.key,
                digest=block.digest,
                bytes=SIZE,
                disk_blocks=number,
                disk_bytes=SIZE * number,
            )
        )
    gone = set(made.ledger.state.blocks) - kept
    made.stop()
    made._time_us = JUNE_US
    made.start()
    made.turn("s3", "r3", ["Hello", "No", "Well"], (*range(11, 19), 90, 91), (61, 62))
    made.stop()
    found = House(stored(made.rows), gone, kept)
    for key in gone | kept:
        path = place_of(found.folder, FINGERPRINT, key)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(SIZE))
    return found


def test_files_of_what_was_pruned_go(run, house: House):
    """What was set aside goes too; what a conversation that is left needs stays. Rows tell it."""
    aside = place_of(house.folder, FINGERPRINT, min(house.gone))
    aside = aside.with_name(f"{aside.name}.rejected")
    aside.write_bytes(b"looked at")
    result = run(*PRUNE)
    assert 0 == result.exit_code
    assert "2 block files of what was removed are gone too\n" in result.stdout
    assert house.kept == house.there()
    assert not aside.exists()
    assert house.gone == house.dropped()
    read = house.read()
    assert () == read.findings
    assert (2, 2 * SIZE) == (read.state.pool.disk_blocks, read.state.pool.disk_bytes)
    assert "block file" not in run(*PRUNE).output


def test_a_dry_run_leaves_files(run, house: House):
    """Nothing is removed where nothing is pruned."""
    assert 0 == run(*PRUNE, "--dry-run").exit_code
    assert house.gone | house.kept == house.there()


def test_a_file_that_cannot_be_removed(run, house: House, monkeypatch: pytest.MonkeyPatch):
    """It is told, with where it lies; no row says that it is gone. The next prune removes it."""
    plain = Path.unlink

    def failing(self: Path, missing_ok: bool = False) -> None:
        if self.stem == min(house.gone):
            raise PermissionError(1, "Operation not permitted")
        plain(self, missing_ok)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", failing)
        result = run(*PRUNE)
    assert 0 == result.exit_code
    assert "1 block file of what was removed is gone too\n" in result.stdout
    words = "1 block file of what was removed is not gone (Operation not permitted). "
    assert f"{words}They were looked for in {house.folder}. " in result.stderr
    assert {max(house.gone)} == house.dropped()
    assert "1 block file of what was removed is gone too\n" in run(*PRUNE).stdout
    assert house.kept == house.there()
    assert () == house.read().findings


def test_files_that_are_elsewhere(run, house: House):
    """A folder without the files is no prune of theirs: that is said, and nothing is on record."""
    house.folder.rename(house.data / "moved")
    result = run(*PRUNE)
    assert "2 block files of what was removed are not gone (not there). " in result.stderr
    assert set() == house.dropped()
    assert () == house.read().findings
