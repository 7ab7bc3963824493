"""The program is named as a person can call it."""

from __future__ import annotations

from pathlib import Path

import pytest

from cairn.ops.common.program import VARIABLE, as_called, note_call, program


@pytest.fixture
def bin_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the program, and no word of how it was called."""
    monkeypatch.setenv(VARIABLE, "")
    for name in ("cairn", "ops"):
        (tmp_path / name).touch(mode=0o755)
    return tmp_path


def test_without_a_launcher(bin_folder: Path) -> None:
    """Names alone are used."""
    note_call("/usr/bin/python")
    assert ("ops", "cairn") == (program(), program("cairn"))


def test_a_program_that_is_found(bin_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It needs no path."""
    monkeypatch.setenv("PATH", str(bin_folder))
    note_call(str(bin_folder / "cairn"))
    assert ("cairn", "ops") == (program(), program("ops"))


def test_a_program_that_is_not_found(bin_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is named with its path, and so is its other name."""
    monkeypatch.setenv("PATH", "/nowhere")
    note_call(".venv/bin/cairn")
    assert (".venv/bin/cairn", ".venv/bin/ops") == (program(), program("ops"))


def test_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its word counts, and what a shell would divide is quoted."""
    monkeypatch.setenv(VARIABLE, "./ops")
    note_call("/x/.venv/bin/cairn")
    assert ("./ops", "./cairn") == (program(), program("cairn"))
    monkeypatch.setenv(VARIABLE, "/a b/cairn")
    assert "'/a b/ops'" == program("ops")


def test_commands_in_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each begins as a person calls it; what is no command stays."""
    words = "Run `ops verify` or `ops doctor --report F`; ops is `make env`."
    monkeypatch.delenv(VARIABLE, raising=False)
    assert words == as_called(words)
    monkeypatch.setenv(VARIABLE, "./cairn")
    expected = "Run `./cairn verify` or `./cairn doctor --report F`; ops is `make env`."
    assert expected == as_called(words)
