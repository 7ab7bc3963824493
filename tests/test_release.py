"""What `make release` refuses, and what it writes beside the files of a release."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import release


def git(at: Path, *words: str) -> None:
    """As someone who is not configured on this machine."""
    who = ("-c", "user.name=n", "-c", "user.email=e@example.org")
    subprocess.run(["git", *who, *words], cwd=at, check=True, capture_output=True)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository that can be released as 1.2.3."""
    (tmp_path / "src/cairn").mkdir(parents=True)
    (tmp_path / "src/cairn/__init__.py").write_text('__version__ = "1.2.3"\n')
    (tmp_path / "pyproject.toml").write_text('[project]\nversion = "1.2.3"\n')
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## [1.2.3] - 2026-11-27\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "all")
    return tmp_path


def test_a_release(root: Path) -> None:
    """Its version."""
    assert "1.2.3" == release.checked(root)


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("src/cairn/__init__.py", '__version__ = "1.2.4"\n', "the version differs"),
        ("CHANGELOG.md", "# Changelog\n\n## [Unreleased]: 1.2.3\n", "has no heading"),
    ],
)
def test_what_does_not_fit(root: Path, file: str, content: str, words: str) -> None:
    """What is not committed is refused first, and then what does not fit."""
    (root / file).write_text(content)
    with pytest.raises(release.Refused, match="not committed"):
        release.checked(root)
    git(root, "commit", "-qam", "changed")
    with pytest.raises(release.Refused, match=words):
        release.checked(root)


def test_a_version_that_was_released(root: Path) -> None:
    """A tag is never moved."""
    git(root, "tag", "v1.2.3")
    with pytest.raises(release.Refused, match="is a tag already"):
        release.checked(root)


def test_hashes(tmp_path: Path) -> None:
    """As `sha256sum` reads them; written again they are the same."""
    (tmp_path / "a.whl").write_bytes(b"a")
    for _ in range(2):
        release.write_hashes(tmp_path)
        line = "ca978112ca1bbdcafac231b39a23dc4da786eff8147c4e72b9807785afee48bb  a.whl\n"
        assert line == (tmp_path / release.HASHES).read_text()
