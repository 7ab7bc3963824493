"""An old SQLite causes a warning only if a second program could write to the journal."""

from pathlib import Path

import pytest

from cairn.ops.serve import second_writer as module
from cairn.ops.serve.second_writer import file_system, second_writer, warning

OLD, NEW = (3, 40, 1), (3, 51, 3)
MOUNTS = (
    "overlay / overlay rw 0 0",
    "server:/home /home nfs4 rw 0 0",
    "tmpfs /home/me/fast tmpfs rw 0 0",
    "//host/share /mnt/a\\040b cifs rw 0 0",
    "damaged",
)


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    """A journal in a folder that only its user can write to."""
    tmp_path.chmod(0o700)
    path = tmp_path / "journal.db"
    path.touch(mode=0o600)
    return path


def test_a_private_folder(journal: Path):
    """No other user writes there: neither an old version nor a missing file causes a warning."""
    assert second_writer(journal) is None
    assert warning(journal, OLD) is None
    assert warning(journal.parent / "none" / "journal.db", OLD) is None


@pytest.mark.parametrize("bit", [0o020, 0o002])
@pytest.mark.parametrize("which", ["file", "folder"])
def test_others_may_write(journal: Path, which: str, bit: int):
    """The place is named, and an old version with what to do; a new one handles it."""
    place = journal if which == "file" else journal.parent
    place.chmod(place.stat().st_mode | bit)
    said = warning(journal, OLD)
    assert said is not None
    fact, advice = said
    assert fact.startswith("SQLite 3.40.1 can damage")
    assert fact.endswith(f"other users may write to {place}")
    assert "SQLite 3.51.3" in advice
    assert warning(journal, NEW) is None


def test_a_folder_like_tmp(journal: Path):
    """
    If others may write to the folder, but not to files of other owners, the file's mode counts.
    """
    journal.parent.chmod(0o1777)
    assert second_writer(journal) is None


def test_a_link(journal: Path, tmp_path: Path):
    """The file's real location counts."""
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    (shared / "real.db").touch(mode=0o600)
    link = tmp_path / "link.db"
    link.symlink_to(shared / "real.db")
    assert f"other users may write to {shared}" == second_writer(link)


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/srv/journal.db", "overlay"),
        ("/home/me/journal.db", "nfs4"),
        ("/home/me/fast/journal.db", "tmpfs"),
        ("/mnt/a b/journal.db", "cifs"),
        ("/homely/journal.db", "overlay"),
    ],
)
def test_file_systems(path: str, kind: str):
    """The nearest mount above a path is its file system."""
    assert kind == file_system(Path(path), MOUNTS)


def test_the_network(journal: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A second machine may not see the lock."""
    table = tmp_path / "mounts"
    table.write_text(f"server:/x {tmp_path} nfs4 rw 0 0\n")
    monkeypatch.setattr(module, "MOUNTS", table)
    assert f"{journal} is on a network file system (nfs4)" == second_writer(journal)
    table.write_text(f"/dev/x {tmp_path} ext4 rw 0 0\n")
    assert second_writer(journal) is None
    monkeypatch.setattr(module, "MOUNTS", tmp_path / "none")
    assert second_writer(journal) is None
