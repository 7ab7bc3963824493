"""What a shell may complete. tests/ops/state/test_small.py has the scripts of `ops completion`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner

from cairn.ops.cli import COMMANDS, ops
from cairn.ops.common import completions
from cairn.ops.models.short_names import KNOWN_MODELS

HUB = "models--mlx-community--Qwen3-4B-4bit"


def completed(*words: str) -> list[str]:
    """What may complete the last of some words."""
    *before, incomplete = words
    complete = ShellComplete(ops, {}, "cairn", "_CAIRN_COMPLETE")
    return [one.value for one in complete.get_completions(before, incomplete)]


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_with_it(tmp_path: Path):
    """The script and the program agree: bash gets the commands."""
    program = tmp_path / "cairn"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -P -m cairn "$@"\n')
    program.chmod(0o755)
    script = CliRunner().invoke(ops, ["completion", "bash"], prog_name="cairn").stdout
    (tmp_path / "script").write_text(script)
    code = (
        f'source "{tmp_path}/script"; COMP_WORDS=(cairn sto); COMP_CWORD=1; '
        "_cairn_completion cairn; echo ${COMPREPLY[@]}"
    )
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert "stop" == done.stdout.strip(), done.stderr


def test_commands_are_completed_without_loading_one(monkeypatch: pytest.MonkeyPatch):
    """Their help comes from the table."""

    def loaded(*_: object) -> None:
        pytest.fail("a command was loaded")

    monkeypatch.setattr(type(ops), "get_command", loaded)
    assert ["serve", "sessions", "service"] == completed("se")
    assert list(COMMANDS) == completed("")
    assert ["--version"] == completed("--v")


def test_options_of_a_command_are_completed():
    """Those of the server have groups, and are completed like any other."""
    assert ["--disk-mb"] == completed("serve", "--dis")


def test_models_of_the_cache_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """With directories; a path names only a directory, and without a cache there are none."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    (tmp_path / HUB).mkdir()
    (tmp_path / "datasets--a--b").mkdir()
    for command in ("serve", "chat"):
        assert ["mlx", "mlx-community/Qwen3-4B-4bit"] == completed(command, "--model", "mlx")
        assert ["./mlx"] == completed(command, "--model", "./mlx")
        assert KNOWN_MODELS[0].name in completed(command, "--model", KNOWN_MODELS[0].name[:3])
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "none"))
    assert [] == completions.cached_models()
    monkeypatch.delenv("HF_HUB_CACHE")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    tmp_path.joinpath("hub").mkdir()
    tmp_path.joinpath("hub", HUB).mkdir()
    assert ["mlx-community/Qwen3-4B-4bit"] == completions.cached_models()


def test_models_to_pull_and_to_remove(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Short names and names of the hub; only what is here can be removed."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert [] == completed("rm", "")
    first, second = KNOWN_MODELS[:2]
    assert {first.name, second.name} <= set(completed("pull", ""))
    (tmp_path / f"models--{first.hub_name.replace('/', '--')}").mkdir()
    assert [first.name, first.hub_name] == completed("rm", "")
    assert first.hub_name in completed("pull", first.hub_name[:4])
    assert [] == completed("pull", "no-such")


def test_sessions_of_the_journal_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The last used one first; without a journal there are none, and no message."""
    monkeypatch.setenv("CAIRN_DATA_DIR", str(tmp_path))
    assert [] == completed("explain", "")
    assert not list(tmp_path.iterdir())
    made = CliRunner().invoke(ops, ["migrate", "--data-dir", str(tmp_path)])
    assert 0 == made.exit_code, made.output
    assert [] == completed("explain", "")

    class Rows:
        def __init__(self, *streams: str) -> None:
            self.stream = streams[0]

    class Store:
        """A store with the rows of two sessions and the server."""

        @classmethod
        def open(cls, *_: object, **__: object) -> Store:
            """Open it."""
            return cls()

        def last(self, _: int) -> list[Rows]:
            """Its rows."""
            streams = ("session/aa1", "session/@ann/ab2", "server", "session/aa1", "server")
            return [Rows(one) for one in streams]

        def close(self) -> None:
            """Close it."""

    monkeypatch.setattr("cairn.journal.rows.store_sql.SqlStore", Store)
    for command in ("explain", "replay", "forget"):
        assert ["aa1", "ab2"] == completed(command, "a")
        assert ["ab2"] == completed(command, "ab")


def test_a_journal_that_cannot_be_read_completes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A shell shows no messages while a user types."""
    monkeypatch.setenv("CAIRN_DATA_DIR", str(tmp_path))
    (tmp_path / "journal.db").write_bytes(b"no database" * 100)
    assert [] == completed("explain", "")


def test_without_a_server_no_chat_is_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """None is started for it."""
    monkeypatch.setenv("CAIRN_DATA_DIR", str(tmp_path))
    assert [] == completed("chat", "--resume", "")
    context = click.Context(click.Command("chat"))
    assert [] == completions.complete_chat(context, click.Option(["--resume"]), "")
