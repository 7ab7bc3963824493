"""The documentation's picture of path decisions is drawn only from its own conversation."""

from __future__ import annotations

import sys
from pathlib import Path

import path_picture
import pytest

from cairn.journal.rows.export import to_line
from tests.support.journals import healthy


def test_another_journal_leaves_the_documentations_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Without a file name, the picture of another journal is written to the current directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "journal.jsonl").write_bytes(b"".join(map(to_line, healthy())))
    monkeypatch.setattr(sys, "argv", ["path_picture.py", "--journal", "journal.jsonl"])
    path_picture.main()
    assert {"journal.jsonl", "paths.svg"} == {path.name for path in tmp_path.iterdir()}
