"""`ops bundle` packs what another machine needs to replay a bug."""

import tarfile
from pathlib import Path

import pytest

from cairn.journal.rows.export import to_line
from cairn.ops import doctor
from tests.support.journals import BREAKABLE, broken, healthy


@pytest.fixture(autouse=True)
def _short_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks that start other processes are left out."""
    for name in ("check_mlx", "check_blas", "check_disk"):
        monkeypatch.setattr(doctor, name, lambda *_: doctor.Found("ok", "left out"))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("invariant", BREAKABLE)
def test_a_bundle(run, stored, here: Path, invariant: str):
    """Replay says the same of it as of the journal; it has all four files, for its owner alone."""
    rows, bug_id = broken(invariant)
    stored(rows)
    result = run("bundle", bug_id[:8])
    assert 0 == result.exit_code
    path = here / f"cairn-bug-{bug_id[:8]}.tar.gz"
    assert f"`ops replay {bug_id[:8]} {path.name}`" in result.stdout
    assert "has the texts of all conversations" in result.stderr
    assert 0o600 == path.stat().st_mode & 0o777
    with tarfile.open(path) as packed:
        names = packed.getnames()
        files = {}
        for name in names:
            member = packed.extractfile(name)
            assert member is not None
            files[name] = member.read()
    assert ["README.md", "journal.jsonl", "bug.jsonl", "doctor.txt"] == names
    assert files["journal.jsonl"] == b"".join(map(to_line, rows))
    assert f"ops replay {bug_id} {path.name}\n".encode() in files["README.md"]
    assert b"journal" in files["doctor.txt"]
    assert files["bug.jsonl"].splitlines()[0] in files["journal.jsonl"]
    of_journal, of_bundle = run("replay", bug_id), run("replay", bug_id, path)
    assert (of_journal.exit_code, of_journal.stdout) == (of_bundle.exit_code, of_bundle.stdout)
    assert run("verify").stdout == run("verify", path).stdout


def test_of_an_export(run, here: Path):
    """The facts of this machine are not those of the export's, and are left out."""
    rows, bug_id = broken("INV-1")
    export = here / "x.jsonl"
    export.write_bytes(b"".join(map(to_line, rows)))
    assert 0 == run("bundle", bug_id, export, "-o", here / "bug.tgz").exit_code
    with tarfile.open(here / "bug.tgz") as packed:
        assert 0 == packed.getmember("doctor.txt").size
    assert 0 == run("replay", bug_id, here / "bug.tgz").exit_code


def test_no_bug(run, stored, here: Path):
    """A session is not one, and nothing is written."""
    stored(healthy())
    for target, words in (("s1", "s1 is a session, not a bug"), ("abcdef12", "No bug id")):
        result = run("bundle", target)
        assert (2, True) == (result.exit_code, words in result.stderr)
    assert [] == list(here.glob("*.gz"))


def test_an_archive_without_an_export(run, here: Path):
    """It is not a bundle."""
    (here / "note").write_text("Hello")
    with tarfile.open(here / "x.tgz", "w:gz") as packed:
        packed.add(here / "note", "note")
    result = run("verify", here / "x.tgz")
    assert 2 == result.exit_code
    assert "is not a bundle: it has no journal.jsonl" in result.stderr
