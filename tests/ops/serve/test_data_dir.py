"""A data directory and a journal are held by one server at a time."""

import fcntl
import os
import stat
from pathlib import Path

import pytest

from cairn.journal.rows.database.urls import journal_url, sqlite_url
from cairn.ops.cli import Unreadable
from cairn.ops.serve.data_dir import (
    Holder,
    hold,
    hold_directory,
    hold_journal,
    make_home,
    server_at,
)


@pytest.fixture
def homes(tmp_path: Path) -> tuple[Path, Path]:
    """Two data directories."""
    both = (tmp_path / "one", tmp_path / "two")
    for one in both:
        make_home(one)
    return both


def test_a_directory_is_held_once(homes: tuple[Path, Path], tmp_path: Path) -> None:
    """Not even a different journal lets a second server in; the sentence names the first one."""
    one, _ = homes
    with (
        hold(one, journal_url(one)),
        pytest.raises(Unreadable) as refused,
        hold(one, sqlite_url(tmp_path / "other.db")),
    ):
        pass
    assert f"Another server (process {os.getpid()}) uses {one}. " in str(refused.value)
    assert 2 == refused.value.exit_code


def test_locks_are_the_owners_alone(homes: tuple[Path, Path]) -> None:
    """New ones, and those that an earlier version made."""
    one, _ = homes
    (one / "lock").touch(mode=0o644)
    with hold(one, journal_url(one)):
        modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in one.iterdir()}
    assert {"lock": 0o600, "journal.db.lock": 0o600} == modes


def test_a_server_that_holds_a_directory_can_be_found(homes: tuple[Path, Path]) -> None:
    """Its lock has its address, for readers and for servers that are refused."""
    one, two = homes
    with hold(one, journal_url(one)) as held:
        assert Holder(str(os.getpid()), "serve", None) == server_at(one)
        held.record_address("http://127.0.0.1:8123")
        assert Holder(str(os.getpid()), "serve", "http://127.0.0.1:8123") == server_at(one)
        with pytest.raises(Unreadable) as refused, hold(one, journal_url(one)):
            pass
    assert f"uses {one} and answers at http://127.0.0.1:8123. Stop it" in str(refused.value)
    with hold_directory(two, "or wait", who="journal prune"):
        assert server_at(two) is None
    assert [None, None] == [server_at(one), server_at(two / "none")]


@pytest.mark.parametrize("linked", [False, True])
def test_a_journal_is_held_once(homes: tuple[Path, Path], tmp_path: Path, linked: bool) -> None:
    """Two data directories and one journal: the second server is refused, whatever its path."""
    one, two = homes
    path = one / "journal.db"
    if linked:
        path = tmp_path / "link.db"
        path.symlink_to(one / "journal.db")
    with (
        hold(one, journal_url(one)),
        pytest.raises(Unreadable) as refused,
        hold(two, sqlite_url(path)),
    ):
        pass
    held = (one / "journal.db").resolve()
    assert f"Another server (process {os.getpid()}) uses {held}. " in str(refused.value)
    assert "--journal" in str(refused.value)


def test_a_journal_with_two_names(homes: tuple[Path, Path], tmp_path: Path) -> None:
    """
    A file with a second name (a hard link) is refused by each, because a lock beside one of them
    would not keep out a server that uses the other.
    """
    one, two = homes
    (one / "journal.db").write_bytes(b"rows")
    with hold(one, journal_url(one)):
        os.link(one / "journal.db", two / "journal.db")
        with pytest.raises(Unreadable, match="has 2 names"), hold(two, journal_url(two)):
            pass
    with pytest.raises(Unreadable, match="remove the other links"), hold(one, journal_url(one)):
        pass
    (two / "journal.db").unlink()
    with hold(one, journal_url(one)):
        pass


def test_a_command_holds_a_journal(homes: tuple[Path, Path]) -> None:
    """The holder is named: a prune is waited for, not stopped."""
    one, _ = homes
    with (
        hold_journal(journal_url(one), who="journal prune"),
        pytest.raises(Unreadable) as refused,
        hold(one, journal_url(one)),
    ):
        pass
    message = str(refused.value)
    assert message.startswith(f"`ops journal prune` (process {os.getpid()}) works on ")
    assert "Wait until it ends, or choose another journal" in message


def test_no_pause_after_the_last_try(
    homes: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is a pause between two tries, and none after the last."""
    one, _ = homes
    waited: list[float] = []
    monkeypatch.setattr("cairn.ops.serve.data_dir.time.sleep", waited.append)
    with hold(one, journal_url(one)), pytest.raises(Unreadable), hold(one, journal_url(one)):
        pass
    assert 9 == len(waited)


def test_a_check_for_a_running_server(
    homes: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes the lock for a moment, and a server that starts waits for its end."""
    one, _ = homes
    (one / "lock").touch()
    with (one / "lock").open() as looking:
        fcntl.flock(looking, fcntl.LOCK_SH)
        waited = []

        def wait(seconds: float) -> None:
            waited.append(seconds)
            fcntl.flock(looking, fcntl.LOCK_UN)

        monkeypatch.setattr("cairn.ops.serve.data_dir.time.sleep", wait)
        with hold(one, journal_url(one)):
            assert 1 == len(waited)


def test_a_released_lock_is_free(homes: tuple[Path, Path]) -> None:
    """Another process may take it; a refused server has no lock."""
    one, two = homes
    with hold(one, journal_url(one)), pytest.raises(Unreadable), hold(two, journal_url(one)):
        pass
    with hold(two, journal_url(one)):
        pass
    with hold(one, journal_url(one)), hold(two, journal_url(two)):
        pass


def test_postgresql_is_not_locked(homes: tuple[Path, Path]) -> None:
    """For PostgreSQL the directories alone are held."""
    one, two = homes
    with hold(one, "postgresql://h/d"), hold(two, "postgresql://h/d"):
        assert ["lock"] == [path.name for path in one.iterdir()]


def test_a_lock_that_cannot_be_written(homes: tuple[Path, Path]) -> None:
    """A sentence, no traceback."""
    one, _ = homes
    (one / "file").write_text("")
    with pytest.raises(Unreadable, match="cannot be written"):
        hold(one, sqlite_url(one / "file" / "journal.db")).__enter__()
