"""API keys as operators give them, and the messages for invalid ones."""

from __future__ import annotations

from pathlib import Path

import click
import pytest

from cairn.ops.cli import Unreadable
from cairn.ops.serve.api_keys import KEYS_VARIABLE, read_key, read_keys

ONE, TWO, THREE = "0123456789abcdef", "sk-fedcba9876543210", "AAECAwQFBgcICQoLDA0ODw=="


@pytest.fixture(autouse=True)
def no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of the test run does not affect the tests."""
    monkeypatch.delenv(KEYS_VARIABLE, raising=False)


def written(folder: Path, text: str, mode: int = 0o600) -> Path:
    """A file of keys."""
    file = folder / "keys"
    file.write_text(text, encoding="utf-8")
    file.chmod(mode)
    return file


def test_no_keys():
    """None given is not the same as an empty list: the server stays on this machine."""
    assert read_keys([], None) is None


def test_names_are_tenants(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """All three places count together; a key may have equals signs, a tenant several keys."""
    file = written(tmp_path, f"# ours\n\n  alice={ONE}\nbob={THREE}\n")
    monkeypatch.setenv(KEYS_VARIABLE, f"carol={ONE[::-1]}\n  alice={TWO[::-1]} ")
    expected = (
        ("dave", TWO),
        ("alice", ONE),
        ("bob", THREE),
        ("carol", ONE[::-1]),
        ("alice", TWO[::-1]),
    )
    assert expected == read_keys([f"dave={TWO}"], file)


def test_a_key_without_a_name():
    """It belongs to the tenant of a server without keys, so that a first key loses nothing."""
    assert (("local", ONE),) == read_keys([ONE], None)
    assert (("local", ONE), ("local", TWO)) == read_keys([ONE, f"local={TWO}"], None)
    assert (("local", ONE), ("local", ONE)) == read_keys([ONE, ONE], None)


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        (["short"], "--api-key number 1 cannot be used"),
        ([f"alice={ONE}", "bob=short"], "--api-key number 2 cannot be used"),
        ([f"alice={ONE} "], "no spaces"),
        ([f"alice={ONE}ü"], "ASCII"),
        ([f"alice={ONE * 20}"], "16 to 200 ASCII characters"),
        ([THREE], "needs NAME= before it"),
        (["alice short"], "write NAME=KEY"),
        ([f"={ONE}"], "a name that cannot be used"),
        ([f"al/ice={ONE}"], "a name that cannot be used"),
        ([f"@alice={ONE}"], "a name that cannot be used"),
        ([f"{'a' * 33}={ONE}"], "1 to 32 letters"),
        ([f"alice={ONE}", f"bob={ONE}"], "the same as the key of alice"),
        ([ONE, TWO], "--api-key number 2 has no name"),
    ],
)
def test_keys_that_cannot_be_used(keys: list[str], text: str):
    """The sentence says which one and why, and shows no key."""
    with pytest.raises(Unreadable) as refused:
        read_keys(keys, None)
    message = refused.value.format_message()
    assert text in message
    for key in keys:
        assert key.partition("=")[2] in ("", "=") or key.partition("=")[2] not in message
        assert key not in message


@pytest.mark.parametrize("value", ["", "  \n"])
def test_a_variable_without_a_key(value: str, monkeypatch: pytest.MonkeyPatch):
    """The operator meant to set keys: the server does not start open."""
    monkeypatch.setenv(KEYS_VARIABLE, value)
    with pytest.raises(Unreadable, match="has no API key"):
        read_keys([], None)


def test_files_without_a_key(tmp_path: Path):
    """A file that is empty, missing or no text stops the server, too; a bad line is named."""
    for text in ("", "\n# alice=...\n"):
        with pytest.raises(Unreadable, match="has no API key"):
            read_keys([], written(tmp_path, text))
    with pytest.raises(Unreadable, match="No such file"):
        read_keys([], tmp_path / "none")
    (tmp_path / "keys").write_bytes(b"\xff\xfe")
    with pytest.raises(Unreadable, match="not UTF-8"):
        read_keys([], tmp_path / "keys")
    with pytest.raises(Unreadable, match=r"Line 3 of .*keys cannot be used"):
        read_keys([], written(tmp_path, f"\nalice={ONE}\nbob=x\n"))


@pytest.mark.parametrize(("mode", "warned"), [(0o600, False), (0o640, False), (0o644, True)])
def test_a_file_that_others_can_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], mode: int, warned: bool
):
    """It is used, and its owner is warned; a group may be meant to read it."""
    assert (("alice", ONE),) == read_keys([], written(tmp_path, f"alice={ONE}", mode))
    assert warned == ("other users can read or write" in capsys.readouterr().err)


def test_a_clients_key():
    """
    An empty key counts as none; blanks around a key are ignored; invalid characters are refused.
    """
    assert [None, None, None] == [read_key(None), read_key(""), read_key(" ")]
    assert "anykey" == read_key("anykey") == read_key(" anykey\n")
    for key in ("two words", "größe", "a\x00b"):
        with pytest.raises(click.BadParameter) as refused:
            read_key(key)
        assert key not in str(refused.value)
