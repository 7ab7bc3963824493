"""A release is made of a clean commit whose version is written in all places, and once."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import release


def git(root: Path, *words: str) -> None:
    """Call git."""
    author = ("-c", "user.name=A", "-c", "user.email=a@example.org")
    subprocess.run(["git", *author, *words], cwd=root, check=True, capture_output=True)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository that can be released as 1.2.3."""
    (tmp_path / "src" / "cairn").mkdir(parents=True)
    (tmp_path / "src" / "cairn" / "__init__.py").write_text('__version__ = "1.2.3"\n')
    (tmp_path / "pyproject.toml").write_text('[project]\nversion = "1.2.3"\n')
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## [1.2.3] - 2026-11-27\n")
    git(tmp_path, "init", "-q")
    commit(tmp_path)
    return tmp_path


def commit(root: Path) -> None:
    """Commit everything."""
    git(root, "add", "-A")
    git(root, "commit", "-qm", "a change")


def test_a_clean_commit_can_be_released(root: Path):
    """There is no reason against it."""
    assert [] == list(release.faults_of(root, "1.2.3"))


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("pyproject.toml", '[project]\nversion = "1.2.4"\n', "pyproject.toml has version 1.2.4"),
        ("src/cairn/__init__.py", '__version__ = "1.2"\n', "has version 1.2, not 1.2.3"),
        ("src/cairn/__init__.py", "", "has version None, not 1.2.3"),
        ("CHANGELOG.md", "## [Unreleased]: 1.2.3\n", "CHANGELOG.md has no heading"),
    ],
)
def test_a_version_that_differs_in_one_place(root: Path, name: str, text: str, words: str):
    """The place is named."""
    (root / name).write_text(text)
    commit(root)
    (fault,) = release.faults_of(root, "1.2.3")
    assert words in fault


def test_a_tree_with_changes(root: Path):
    """Also one with a file that git does not know."""
    (root / "new.txt").touch()
    (fault,) = release.faults_of(root, "1.2.3")
    assert "new.txt" in fault


def test_a_version_is_released_once(root: Path):
    """Its tag exists after that."""
    git(root, "tag", "v1.2.3")
    (fault,) = release.faults_of(root, "1.2.3")
    assert "The tag v1.2.3 exists" in fault


@pytest.mark.parametrize("version", ["", "v1.2.3", "1.2", "1.2.3 "])
def test_what_is_no_version(root: Path, version: str):
    """It is refused before anything else is compared."""
    (fault,) = release.faults_of(root, version)
    assert "is not a version" in fault


def test_hashes_can_be_checked(tmp_path: Path):
    """`sha256sum --check` reads them, and finds a changed file."""
    (tmp_path / "a.whl").write_bytes(b"wheel")
    (tmp_path / "b.tar.gz").write_bytes(b"source")
    release.write_sums(tmp_path)
    assert 2 == len(release.write_sums(tmp_path).splitlines())  # its own file is not in it
    check = ["sha256sum", "--check", release.SUMS]
    assert 0 == subprocess.run(check, cwd=tmp_path, capture_output=True, check=False).returncode
    (tmp_path / "a.whl").write_bytes(b"changed")
    assert 1 == subprocess.run(check, cwd=tmp_path, capture_output=True, check=False).returncode
