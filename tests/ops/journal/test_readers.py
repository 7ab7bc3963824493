"""A journal that every user of the machine can read is warned of."""

import os
import stat
from pathlib import Path

import pytest

from cairn.journal.rows.database.schema import migrate
from cairn.journal.rows.database.urls import journal_url
from cairn.journal.rows.store_sql import SqlStore
from cairn.ops import doctor
from cairn.ops.journal.readers import blocks_warning, readers_warning, secret_warning
from cairn.ops.serve import run as serve_run
from cairn.ops.serve.command import serve


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that others can enter, as they can all above it, wherever the tests are run."""
    place = tmp_path / "open"
    place.mkdir()
    place.chmod(0o755)
    real = Path.stat

    def look(self: Path, **options: bool) -> os.stat_result:
        found = real(self, **options)
        if self in place.parents:
            return os.stat_result((found.st_mode | stat.S_IXOTH, *found[1:]))
        return found

    monkeypatch.setattr(Path, "stat", look)
    return place


def test_a_journal_that_cairn_made(folder: Path):
    """Only its owner can read it, and the files next to it, in an open folder too."""
    migrate(journal_url(folder))
    store = SqlStore.open(journal_url(folder))
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    store.close()
    assert dict.fromkeys(("journal.db", "journal.db-wal", "journal.db-shm"), 0o600) == modes
    assert readers_warning(folder / "journal.db") is None
    assert readers_warning(folder / "none.db") is None


def test_a_journal_that_was_there_stays_as_it_is(folder: Path):
    """Opening it changes no mode: a warning says how to close it, also in the doctor."""
    path = folder / "journal.db"
    migrate(journal_url(folder))
    path.chmod(0o644)
    migrate(journal_url(folder))
    assert 0o644 == stat.S_IMODE(path.stat().st_mode)
    found_warning = readers_warning(path)
    assert found_warning is not None
    assert found_warning[0].startswith(f"every user of this machine can read {path}")
    assert f"`chmod o-rwx {path}`" == found_warning[1]
    found = doctor.check_journal(journal_url(folder))
    # Reading it creates the files next to it, with its own mode.
    assert ("warn", f"`chmod o-rwx {path} {path}-wal {path}-shm`") == (found.status, found.advice)
    assert found.fact.endswith(f"rows are correct; {found_warning[0]}")
    folder.chmod(0o700)
    assert "ok" == doctor.check_journal(journal_url(folder)).status


def test_the_files_beside_it(folder: Path):
    """The last rows are in them, and the command names those that other users can read."""
    for name in ("my journal.db", "my journal.db-wal", "my journal.db-shm"):
        (folder / name).touch()
        (folder / name).chmod(0o640 if name.endswith(".db") else 0o644)
    found_warning = readers_warning(folder / "my journal.db")
    assert found_warning is not None
    start = folder / "my journal.db"
    assert f"`chmod o-rwx '{start}-wal' '{start}-shm'`" == found_warning[1]


@pytest.mark.parametrize("mode", [0o700, 0o770, 0o754])
def test_a_folder_that_others_cannot_enter(folder: Path, mode: int):
    """They cannot read what is in it, whatever its mode."""
    (folder / "journal.db").touch()
    (folder / "journal.db").chmod(0o666)
    assert readers_warning(folder / "journal.db") is not None
    folder.chmod(mode)
    assert readers_warning(folder / "journal.db") is None


def test_serve_warns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """When the journal is open, with all the files next to it, and before anything is served."""
    seen: list[set[str]] = []

    def warned(path: Path) -> tuple[str, str]:
        seen.append({file.name for file in path.parent.glob("journal.db*")} - {"journal.db.lock"})
        return f"open: {path.name}", "close it"

    monkeypatch.setattr(serve_run, "readers_warning", warned)
    monkeypatch.setattr(serve_run, "set_up_logs", lambda *_: None)
    monkeypatch.setattr(serve_run, "use_one_heap", lambda: None)
    monkeypatch.setattr("cairn.ops.serve.run.trio.run", lambda *_: True)
    arguments = ["--port", "0", "--data-dir", str(tmp_path / "home")]
    serve_run.run(serve.make_context("serve", arguments).params)
    assert [{"journal.db", "journal.db-wal", "journal.db-shm"}] == seen
    assert "Warning: open: journal.db; close it.\n" in capsys.readouterr().err


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_a_secret_of_others(tmp_path: Path, mode: int):
    """A secret that others than its owner can use is warned of, with the command that fixes it."""
    assert secret_warning(tmp_path) is None
    secret = tmp_path / "secret"
    secret.touch(mode=0o600)
    assert secret_warning(tmp_path) is None
    secret.chmod(mode)
    found = secret_warning(tmp_path)
    assert found is not None
    assert f"other users of this machine can read {secret}" in found[0]
    assert f"`chmod 600 {secret}`" == found[1]


@pytest.mark.parametrize("mode", [0o755, 0o750, 0o711])
def test_a_folder_of_blocks_that_others_can_enter(tmp_path: Path, mode: int):
    """The warning has the command that closes it."""
    tmp_path.chmod(mode)
    found = blocks_warning(tmp_path)
    assert found is not None
    assert f"`chmod 700 {tmp_path}`" == found[1]
    tmp_path.chmod(0o700)
    assert blocks_warning(tmp_path) is None
