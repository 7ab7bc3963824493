"""The head of a journal is kept outside of it, after each commit, and signed now and then."""

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from cairn.actors.threads import heads as module
from cairn.actors.threads.heads import HeadKeeper, record_of
from cairn.actors.threads.writer import JournalWriter
from cairn.journal.rows.codec import decode
from cairn.journal.rows.heads import Head
from cairn.journal.rows.signed_notes import Signer, read_notes
from cairn.journal.rows.store import MemoryStore
from tests.support.journals import healthy

SIGNER = Signer(bytes(range(32)))


def head(position: int) -> Head:
    """A head."""
    return Head(position, f"{position:064x}")


@pytest.fixture
def keeper(tmp_path: Path) -> Iterator[HeadKeeper]:
    """Keeps heads in two files of checkpoints."""
    files = (tmp_path / "checkpoints", tmp_path / "elsewhere")
    with contextlib.closing(HeadKeeper(tmp_path / "head", files, SIGNER)) as made:
        yield made


def signed(path: Path) -> list[Head]:
    """The heads of the checkpoints of a file, all of them signed."""
    notes = list(read_notes(path.read_text()))
    assert all(note.signed_by(SIGNER.public) for note in notes)
    return [note.head for note in notes]


def test_the_record_after_each_commit(keeper: HeadKeeper, tmp_path: Path):
    """It has the last head, and its length never changes."""
    sizes = set()
    for position in (1, 5, 123456789):
        keeper.committed(head(position))
        text = (tmp_path / "head").read_text()
        assert head(position) == record_of(text)
        sizes.add(len(text))
    assert 1 == len(sizes)
    assert 0o600 == (tmp_path / "head").stat().st_mode & 0o777


def test_when_checkpoints_are_signed(
    keeper: HeadKeeper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """At the first commit, every so many rows, and at the end; in all files."""
    monkeypatch.setattr(module, "CHECKPOINT_ROWS", 10)
    for position in (3, 9, 12, 13, 14, 40, 41):
        keeper.committed(head(position))
    keeper.end()
    keeper.end()
    assert list(map(head, (3, 13, 40, 41))) == signed(tmp_path / "checkpoints")
    assert signed(tmp_path / "checkpoints") == signed(tmp_path / "elsewhere")
    assert head(41) == keeper.signed
    assert 0o600 == (tmp_path / "elsewhere").stat().st_mode & 0o777


def test_one_file_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The other one has its checkpoints, and no more of them than usual."""
    monkeypatch.setattr(module, "CHECKPOINT_ROWS", 10)
    files = (Path("/dev/full"), tmp_path / "checkpoints")
    with contextlib.closing(HeadKeeper(tmp_path / "head", files, SIGNER)) as keeper:
        for position in range(1, 25):
            keeper.committed(head(position))
        assert head(21) == keeper.signed
    assert list(map(head, (1, 11, 21))) == signed(tmp_path / "checkpoints")


def test_a_run_without_a_row(keeper: HeadKeeper, tmp_path: Path):
    """It signs nothing."""
    keeper.end()
    assert b"" == (tmp_path / "checkpoints").read_bytes()


def test_checkpoints_are_appended(keeper: HeadKeeper, tmp_path: Path):
    """Those of an earlier run stay."""
    keeper.committed(head(1))
    with contextlib.closing(
        HeadKeeper(tmp_path / "head", [tmp_path / "checkpoints"], SIGNER)
    ) as later:
        later.committed(head(2))
    assert [head(1), head(2)] == signed(tmp_path / "checkpoints")


@pytest.mark.parametrize("notes", [0, 1, 300])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.99])
def test_a_torn_checkpoint(tmp_path: Path, notes: int, share: float):
    """The last one was not written to its end: it goes, and those before it stay."""
    path = tmp_path / "checkpoints"
    torn = SIGNER.note(head(999))
    whole = "".join(SIGNER.note(head(at)) for at in range(notes))
    path.write_text(whole + torn[: int(len(torn) * share)])
    HeadKeeper(tmp_path / "head", [path], SIGNER).close()
    assert whole == path.read_text()


@pytest.mark.parametrize("written", [0, 20])
def test_a_disk_without_room(
    keeper: HeadKeeper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: int
):
    """
    Half a checkpoint does not stay, the failure is reported once, and the next one is signed.
    """
    lines: list[str] = []
    for level in ("error", "warning"):
        monkeypatch.setattr(module.log, level, lambda event, **_: lines.append(event))
    real = os.write
    keeper.committed(head(1))

    def full(file: int, content: bytes) -> int:
        if written:
            return real(file, content[:written])
        raise OSError(errno.ENOSPC, "no room")

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        keeper.end()
        patched.setattr(module, "CHECKPOINT_ROWS", 1)
        keeper.committed(head(2))
        keeper.committed(head(3))
        assert head(1) == keeper.signed
    assert [head(1)] == signed(tmp_path / "checkpoints")
    keeper.end()
    assert [head(1), head(3)] == signed(tmp_path / "checkpoints")
    assert "the journal's head cannot be recorded" in lines
    assert "the journal's head can be recorded again" == lines[-1]


@pytest.mark.parametrize("text", ["", "x", "cairn head 1 1 00", f"cairn head 1 1 {'0' * 64}\n"])
def test_a_damaged_record(text: str):
    """What is no record is not read as one."""
    with pytest.raises(ValueError):
        record_of(text)


def test_files_that_cannot_be_opened(tmp_path: Path):
    """The error names the file."""
    with pytest.raises(OSError) as failed:
        HeadKeeper(tmp_path / "head", [tmp_path], SIGNER)
    assert str(tmp_path) == failed.value.filename


@pytest.mark.trio
async def test_beside_a_writer(keeper: HeadKeeper, tmp_path: Path):
    """What the writer commits is recorded before it is announced, and signed at its end."""
    rows = healthy()
    writer = JournalWriter(MemoryStore(), keeper)
    assert (Head.parse(f"0:{'0' * 64}"), None) == (writer.head, writer.signed_head)
    async with trio.open_nursery() as nursery:
        await nursery.start(writer.run)
        for row in rows:
            await writer.wait_committed(writer.submit([row], [decode(row)]))
            recorded = record_of((tmp_path / "head").read_text())
            assert Head(row.position, row.hash) == recorded == writer.head
        writer.close()
    assert [Head(rows[at].position, rows[at].hash) for at in (0, -1)] == signed(
        tmp_path / "checkpoints"
    )
    assert writer.head == writer.signed_head
