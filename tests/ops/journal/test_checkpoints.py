"""
`ops verify` compares a chain with the heads and checkpoints that are known of it: kept by the
operator, beside the journal, or in the last line of an export.
"""

from collections.abc import Sequence
from pathlib import Path

import attrs
import pytest

from cairn.journal import events as ev
from cairn.journal.errors import StoreError
from cairn.journal.ledger import Clock, Ledger
from cairn.journal.replay import replay
from cairn.journal.rows.base import base_of
from cairn.journal.rows.codec import Row, decode, encode
from cairn.journal.rows.export import (
    SignedEnd,
    base_to_line,
    checkpoint_to_line,
    read_checkpoint,
    read_export,
    to_line,
)
from cairn.journal.rows.heads import Head
from cairn.journal.rows.signed_notes import Signer
from cairn.ops.common.heads import HeadFiles
from cairn.ops.serve.recorded_heads import head_keeper
from tests.support.journals import healthy

ROWS = healthy()
SIGNER = Signer(bytes(range(32)))
KEY = str(SIGNER.public)


def head_of(position: int, rows: Sequence[Row] = ROWS) -> Head:
    """The head when this row was the last one."""
    return Head(position, rows[position - 1].hash)


def rewritten() -> list[Row]:
    """The rows with another time in the last ones, and a chain that is right again."""
    rows = list(ROWS[:25])
    for row in ROWS[25:]:
        recorded = attrs.evolve(decode(row), time_us=row.time_us + 1)
        rows.append(encode(recorded, rows[-1].hash))
    return rows


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    """Checkpoints that were kept elsewhere."""
    path = tmp_path / "saved"
    path.write_text("".join(SIGNER.note(head_of(at)) for at in (1, 20, 31)))
    return path


def export(path: Path, rows: Sequence[Row], *after: bytes) -> Path:
    """An export."""
    path.write_bytes(b"".join([*map(to_line, rows), *after]))
    return path


@pytest.mark.parametrize("text", [False, True])
def test_checkpoints_kept_elsewhere(run, stored, notes: Path, text: bool):
    """All are in the chain, from a file or as a text; what comes after the last stays unseen."""
    stored(ROWS)
    given = notes.read_text() if text else notes
    result = run("verify", "--checkpoint", given, "--public-key", KEY)
    assert 0 == result.exit_code
    assert "saved checkpoints: 3 checkpoints, the last of row 31: in the chain" in result.stdout
    assert f"public key: {KEY}\n" in result.stdout
    assert "removed from the end, or rewritten, after row 31.\n" in result.stdout


def test_a_cut_tail_and_a_rewritten_chain(run, tmp_path: Path, notes: Path):
    """Both pass without a checkpoint, and fail with one."""
    for rows, words in (
        (ROWS[:30], "row 31: not in the chain: rows were removed from the end, row 31 too"),
        (rewritten(), "row 31: not in the chain: row 31 has another hash, so it was rewritten"),
    ):
        path = export(tmp_path / "x.jsonl", rows)
        assert 0 == run("verify", path).exit_code
        result = run("verify", path, "--checkpoint", notes, "--public-key", KEY)
        assert 1 == result.exit_code
        assert f"saved checkpoints: {words}\n" in result.stdout
        assert "broken: 0\nnot vouched for: 1 head or checkpoint does not" in result.stdout


def test_a_note_of_another_key(run, stored, tmp_path: Path, notes: Path):
    """It does not count, and is not passed over; nor is one whose signature does not fit."""
    stored(ROWS)
    other = str(Signer(bytes(32)).public)
    result = run("verify", "--checkpoint", notes, "--public-key", other)
    assert 1 == result.exit_code
    assert "checkpoint: saved checkpoints, line 1: not signed by cairn-journal/" in result.stdout
    notes.write_text(notes.read_text().replace("\n20\n", "\n21\n"))
    result = run("verify", "--checkpoint", notes, "--public-key", KEY)
    assert 1 == result.exit_code
    assert "saved checkpoints, line 7: the signature does not fit\n" in result.stdout
    assert "\nnot vouched for: 1 head or checkpoint does not fit (named above)\n" in result.stdout


@pytest.mark.parametrize(
    ("content", "options", "words"),
    [
        ("hello\n", ("--public-key", KEY), "the note at line 1 has no signature"),
        (None, ("--public-key", KEY), "does not exist"),
        ("", (), "No key is known"),
        ("", ("--public-key", "x"), "expected NAME+ID+KEY"),
    ],
)
def test_checkpoints_that_cannot_be_read(
    run, stored, tmp_path: Path, content: str | None, options: tuple[str, ...], words: str
):
    """Exit code 2 and a sentence."""
    stored(ROWS)
    path = tmp_path / "notes"
    if content is not None:
        path.write_text(content)
    result = run("verify", "--checkpoint", path, *options)
    assert (2, "") == (result.exit_code, result.stdout)
    assert words in result.stderr
    if content == "hello\n":
        assert 2 == run("verify", "--checkpoint", content * 2, *options).exit_code
    assert 2 == run("verify", "--checkpoint", tmp_path, "--public-key", KEY).exit_code


@pytest.fixture
def data(stored) -> Path:
    """A data directory whose server kept heads."""
    folder: Path = stored(ROWS)
    with head_keeper(HeadFiles.of(folder, None), None, None) as keeper:
        for position in (1, 31):
            keeper.committed(head_of(position))
        keeper.end()
    return folder


def test_what_is_beside_a_journal(run, data: Path):
    """It is compared without being asked, and said to be worth less than what lies elsewhere."""
    result = run("verify")
    assert 0 == result.exit_code
    assert "checkpoints beside the journal: 2 checkpoints, the last of row 31: in" in result.stdout
    assert "head record: in the chain, at row 31\n" in result.stdout
    (unseen,) = [line for line in result.stdout.splitlines() if "cannot detect" in line]
    assert "rows removed from the end, or rewritten, after row 31. Rows up to 31 are" in unseen
    assert "which may have been changed with it. To check for that, pass a checkpoint" in unseen
    (data / "head").write_text("x")
    result = run("verify")
    assert 1 == result.exit_code
    assert "is damaged, so nothing says up to which row the journal was" in result.stdout
    (data / "head").unlink()
    (data / "checkpoints").write_text("x")
    result = run("verify")
    assert 1 == result.exit_code
    assert "the note at line 1 has no signature" in result.stdout
    (data / "signing-key.pub").write_text("x")
    assert 2 == run("verify").exit_code


ACCEPTED = "lost; the operator accepted that (loss_accepted, row 31)"


def after_a_loss(*lost: Head) -> list[Row]:
    """The rows without the last one, and what an operator accepted then."""
    report = replay(ROWS[:30])
    clock = Clock(new_id=lambda: "the loss", now_us=lambda: 2**60, version="0.0.test")
    ledger = Ledger(clock, state=report.state, head=report.head)
    event = ev.LossAccepted(fact="row 31 is lost", heads=tuple(map(str, lost)))
    return [*ROWS[:30], *ledger.propose([event]).rows]


def test_a_loss_that_was_accepted(run, stored, notes: Path):
    """
    The checkpoint of the lost row is named with the row that accepts it, and is no violation. Alone
    it vouches for nothing. One that is lost after that is found.
    """
    rows = after_a_loss(head_of(31))
    folder: Path = stored(rows)
    options = ("verify", "--checkpoint", notes, "--public-key", KEY)
    result = run(*options)
    assert 0 == result.exit_code
    assert f"saved checkpoints: row 31: {ACCEPTED}\n" in result.stdout
    assert "saved checkpoints: 2 checkpoints, the last of row 20: in the chain" in result.stdout
    assert f"saved head: {ACCEPTED}\n" in run("verify", "--head", str(head_of(31))).stdout
    assert 3 == run("verify", "--head", str(head_of(31))).exit_code
    with head_keeper(HeadFiles.of(folder, None), None, None) as keeper:
        keeper.committed(head_of(31))
        keeper.committed(head_of(31, rows))
        keeper.end()
    assert 0 == run("verify").exit_code
    for later in (Head(31, "0" * 64), Head(32, rows[-1].hash)):
        notes.write_text(SIGNER.note(head_of(31)) + SIGNER.note(later))
        result = run(*options)
        assert 1 == result.exit_code
        assert f"saved checkpoints: row {later.position}: not in the chain" in result.stdout
    notes.write_text(SIGNER.note(head_of(31)))
    path = export(notes.with_name("x.jsonl"), after_a_loss())
    assert 1 == run("verify", path, *options[1:]).exit_code


def test_an_accepted_loss_in_exports(run, tmp_path: Path, notes: Path):
    """It is known without private contents, and from a base whose rows have it."""
    rows = after_a_loss(head_of(31))
    base = base_of(replay(rows).state, rows[-1].hash)
    path = tmp_path / "x.jsonl"
    options = ("verify", path, "--checkpoint", notes, "--public-key", KEY)
    export(path, [attrs.evolve(row, private=None) for row in rows])
    result = run(*options)
    assert (3, True) == (result.exit_code, ACCEPTED in result.stdout)
    path.write_bytes(base_to_line(base))
    assert ACCEPTED in run(*options).stdout
    damaged = attrs.evolve(base, state=(base.state or b"")[:-1])
    path.write_bytes(base_to_line(damaged))
    assert 1 == run(*options).exit_code


def test_the_last_line_of_an_export(run, data: Path, tmp_path: Path):
    """The public half of the key and the last checkpoint; a cut tail is found with it."""
    path = tmp_path / "x.jsonl"
    assert 0 == run("export", "-o", path).exit_code
    end = read_checkpoint(path)
    assert end is not None
    key = str(HeadFiles.of(data, None).public_key())
    assert key == end.public_key
    assert end.note.split("\n")[1] == "31"
    assert ROWS == list(read_export(path))
    result = run("verify", path)
    assert 0 == result.exit_code
    assert "checkpoint of the export: 1 checkpoint, the last of row 31: in the" in result.stdout
    assert f"public key: {key}\n" in result.stdout
    *lines, last = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:-1], last]))
    result = run("verify", path)
    assert 1 == result.exit_code
    assert "checkpoint of the export: row 31: not in the chain: rows were removed" in result.stdout
    result = run("verify", path, "--public-key", KEY)
    assert 1 == result.exit_code
    assert "checkpoint of the export, line 1: not signed by" in result.stdout
    assert 0 == run("sessions", path).exit_code


def test_an_excerpt_has_it_too(run, data: Path, tmp_path: Path):
    """Its checkpoint may be of a row that the excerpt lacks."""
    path = tmp_path / "x.jsonl"
    assert 0 == run("export", "--session", "s1", "-o", path).exit_code
    assert read_checkpoint(path) is not None
    assert 3 == run("verify", path).exit_code


def test_before_the_first_checkpoint(run, data: Path, tmp_path: Path):
    """The line has the key alone."""
    (data / "checkpoints").write_text(SIGNER.note(Head(99, "0" * 64)))
    path = tmp_path / "x.jsonl"
    assert 0 == run("export", "-o", path).exit_code
    end = read_checkpoint(path)
    assert end is not None
    assert "" == end.note
    assert 0 == run("verify", path).exit_code


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'{"checkpoint":2,"public_key":"","note":""}\n', "its last line is not a checkpoint"),
        (
            b'{"checkpoint":1,"public_key":"","note":"a","note":""}\n',
            "its last line is not a checkpoint: the key `note` is there twice",
        ),
        (b'{"checkpoint":1,"public_key":"","note":""}\n', "its last line is damaged"),
        (
            checkpoint_to_line(SignedEnd(public_key=KEY, note="hello")),
            "its last line is damaged: the note at line 1 has no signature",
        ),
    ],
)
def test_a_last_line_that_is_damaged(run, tmp_path: Path, line: bytes, words: str):
    """Exit code 2 and a sentence."""
    result = run("verify", export(tmp_path / "x.jsonl", ROWS, line))
    assert (2, "") == (result.exit_code, result.stdout)
    assert words in result.stderr


def test_a_checkpoint_that_is_not_last(run, tmp_path: Path):
    """A row after it is not part of the export that ended with it."""
    line = checkpoint_to_line(SignedEnd(public_key=KEY, note=""))
    result = run("verify", export(tmp_path / "x.jsonl", ROWS[:-1], line, to_line(ROWS[-1])))
    assert 2 == result.exit_code
    assert "line 31, is not a row of an export" in result.stderr


def test_a_forged_prune(run, tmp_path: Path):
    """
    Base and tail were forged. A checkpoint of a row after the base shows it: that row cannot have
    been pruned. One of a row before it cannot.
    """
    base = base_of(replay(ROWS, until=8).state, ROWS[7].hash)
    path = tmp_path / "x.jsonl"
    path.write_bytes(base_to_line(base) + b"".join(map(to_line, rewritten()[8:])))
    for position, words in (
        (31, "not in the chain: row 31 has another hash"),
        (4, "not in the chain: row 4 was pruned"),
    ):
        result = run("verify", path, "--head", str(head_of(position)))
        assert f"saved head: {words}" in result.stdout


def test_a_file_without_an_end(tmp_path: Path):
    """An empty file has no such line; one that is missing cannot be read."""
    path = tmp_path / "x.jsonl"
    with pytest.raises(StoreError, match="cannot be read: No such file"):
        read_checkpoint(path)
    path.write_bytes(b"")
    assert read_checkpoint(path) is None


def test_an_export_beside_damaged_checkpoints(run, data: Path, tmp_path: Path):
    """It is written all the same, without a checkpoint, and a warning says why."""
    (data / "checkpoints").write_text("x")
    path = tmp_path / "x.jsonl"
    result = run("export", "-o", path)
    assert 0 == result.exit_code
    assert "Warning: the export has no checkpoint." in result.stderr
    end = read_checkpoint(path)
    assert end is not None
    assert "" == end.note


def test_one_file_for_several_journals(run, stored, tmp_path: Path):
    """Those of another journal that the same key signs for are left out, and counted."""
    stored(ROWS)
    path = tmp_path / "notes"
    path.write_text(SIGNER.note(head_of(20)) + Signer(SIGNER.seed, "ab").note(Head(9, "0" * 64)))
    result = run("verify", "--checkpoint", path, "--public-key", KEY)
    assert 0 == result.exit_code
    assert "saved checkpoints: 1 checkpoint of other journals left out\n" in result.stdout
    assert "saved checkpoints: 1 checkpoint, the last of row 20: in the chain" in result.stdout
    path.write_text(Signer(SIGNER.seed, "ab").note(Head(9, "0" * 64)))
    result = run("verify", "--checkpoint", path, "--public-key", KEY)
    assert 1 == result.exit_code
    assert "checkpoint: saved checkpoints: none is of this journal\n" in result.stdout
