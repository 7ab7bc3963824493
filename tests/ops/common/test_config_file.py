"""The configuration file is read, or refused in words."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cairn.ops.cli import Unreadable
from cairn.ops.common.config_file import config_path, parsed, read_config
from cairn.ops.common.locations import default_data_dir

FILE = Path("c.toml")


def test_values_and_their_lines() -> None:
    """Dashes and underscores are the same; the place of an option is its line."""
    found = parsed(b'# mine\nport = 1\n"disk-mb" = 2\ncors = [\n  "a",\n]\nmodel = "x"\n', FILE)
    assert {"port": 1, "disk_mb": 2, "cors": ["a"], "model": "x"} == found.values
    assert {"port": 2, "disk_mb": 3, "cors": 4, "model": 7} == found.lines
    assert ["c.toml, line 3", "c.toml"] == [found.place("disk_mb"), found.place("unknown")]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            b"port = 1\nport = 2\n",
            "c.toml, lines 1 and 2: port is set more than once. Keep one.",
        ),
        (
            b"disk-mb = 1\n\ndisk_mb = 2\n",
            "c.toml, lines 1 and 3: disk_mb is set more than once. Keep one.",
        ),
        (b"[a]\n[a]\n", "c.toml, line 2: this is set more than once. Keep one."),
        (
            b"port 8000\n",
            "c.toml, line 1: this is not TOML (expected '=' after a key in a key/value pair).",
        ),
        (b"port =", "c.toml, at its end: this is not TOML (invalid value)."),
        (b"model = ~/models/x\n", "c.toml, line 1: this is not TOML (invalid value)."),
        (b"port = 1\nmodel = '\xff'\n", "c.toml, line 2: this is not UTF-8 text."),
    ],
)
def test_what_is_not_a_configuration(text: bytes, words: str) -> None:
    """The message has the line and what is wrong with it."""
    with pytest.raises(Unreadable) as refused:
        parsed(text, FILE)
    assert words in str(refused.value)


def test_an_option_set_twice_in_a_way_that_only_toml_sees() -> None:
    """Where the lines are not known, the name is."""
    with pytest.raises(Unreadable, match="disk_mb is set more than once"):
        parsed(b'a = """\n"""\ndisk_mb = 1\ndisk-mb = 2\n', FILE)


def test_where_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By CAIRN_CONFIG, by XDG_CONFIG_HOME, or in the home."""
    monkeypatch.setenv("CAIRN_CONFIG", "/a/b.toml")
    assert Path("/a/b.toml") == config_path()
    monkeypatch.delenv("CAIRN_CONFIG")
    monkeypatch.setenv("XDG_CONFIG_HOME", "/xdg")
    assert Path("/xdg/cairn/config.toml") == config_path()
    monkeypatch.delenv("XDG_CONFIG_HOME")
    assert Path.home() / ".config" / "cairn" / "config.toml" == config_path()


def test_one_that_is_missing_or_unreadable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The usual one need not exist; one that was named must, and be a file of moderate size."""
    monkeypatch.delenv("CAIRN_CONFIG")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert read_config() is None
    with pytest.raises(Unreadable, match=r"x\.toml cannot be read: No such file"):
        read_config(tmp_path / "x.toml")
    with pytest.raises(Unreadable, match="cannot be read: Is a directory"):
        read_config(tmp_path)
    monkeypatch.setenv("CAIRN_CONFIG", str(tmp_path / "x.toml"))
    with pytest.raises(Unreadable, match=r"x\.toml cannot be read: No such file"):
        read_config()
    (tmp_path / "x.toml").write_bytes(b"#" * (1 << 20) + b"\n")
    with pytest.raises(Unreadable, match="larger than 1048576 bytes"):
        read_config()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_one_without_permission(tmp_path: Path) -> None:
    """The message has the system's reason."""
    path = tmp_path / "x.toml"
    path.touch(mode=0)
    with pytest.raises(Unreadable, match="cannot be read: Permission denied"):
        read_config(path)


def test_all_commands_find_its_data_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A variable counts more; a relative path is relative to the file."""
    path = tmp_path / "x.toml"
    path.write_text('data_dir = "data"\n')
    monkeypatch.setenv("CAIRN_CONFIG", str(path))
    monkeypatch.delenv("CAIRN_DATA_DIR", raising=False)
    assert tmp_path / "data" == default_data_dir()
    monkeypatch.setenv("CAIRN_DATA_DIR", "/mine")
    assert Path("/mine") == default_data_dir()
