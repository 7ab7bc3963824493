"""A server is stopped and started again: conversations continue from its files."""

from __future__ import annotations

import pytest

from cairn.journal import events as ev
from tests.e2e.conftest import Start
from tests.support.processes.subprocess_server import (
    Serving,
    ask,
    assistant,
    eventually,
    run_ops,
    user,
)

PATH = "The stone lies on the path, and the path goes over the hill. "


def test_a_conversation_continues_after_a_restart(start: Start, cold: Serving):
    """
    The same session continues on blocks from files, with the bits of a cold answer; all of it can
    be replayed on the model.
    """
    server = start()
    talk = [user(PATH * 20)]
    first = ask(server, *talk)
    assert 0 == server.stop()
    assert server.events(ev.BlockSpilled)

    assert 0o600 == (server.data_dir / "snapshot").stat().st_mode & 0o777

    again = start(data_dir=server.data_dir)
    assert "reading the journal" not in again.stderr()  # not a row of it is read
    blocks = again.health()["blocks"]
    assert 0 == blocks["count"] < blocks["disk_count"]
    talk += [assistant(first.text), user("And then?")]
    second = ask(again, *talk)
    assert (first.session, "continuation", None) == (second.session, second.path, second.reason)
    assert second.cached_tokens >= first.prompt_tokens // 64 * 64 > 0
    assert ask(cold, *talk, cache_prompt=False).bits == second.bits
    assert second.cached_tokens // 64 == len(again.events(ev.BlockLoaded))
    again.wait_idle()
    code, out, err = run_ops("replay", first.session, "--engine", "--data-dir", again.data_dir)
    assert 0 == code, out + err
    assert out.splitlines()[-1].startswith("same: ")


@pytest.mark.long
def test_a_damaged_file_is_reported_and_not_used(start: Start, cold: Serving):
    """A flipped bit in a file is a line in the log and an event, and clients are not affected."""
    server = start()
    talk = [user(PATH * 20)]
    first = ask(server, *talk)
    assert 0 == server.stop()
    spilled = server.events(ev.BlockSpilled)[1].key
    (path,) = (server.data_dir / "blocks").rglob(f"{spilled}.safetensors")
    whole = bytearray(path.read_bytes())
    whole[-7] ^= 16
    path.write_bytes(whole)

    again = start(data_dir=server.data_dir)
    second = ask(again, *talk)
    assert first.bits == second.bits == ask(cold, *talk, cache_prompt=False).bits
    assert 64 == second.cached_tokens
    (rejected,) = again.events(ev.BlockFileRejected)
    assert (spilled, "digest") == (rejected.key, rejected.reason)
    assert [path.name + ".rejected"] == [
        aside.name for aside in (server.data_dir / "blocks").rglob("*.rejected")
    ]
    eventually(lambda: "a block file was rejected" in again.stderr())
    assert 0 == again.health()["bugs"]


@pytest.mark.long
def test_without_a_disk_budget_there_are_no_files(start: Start):
    """`--disk-mb 0` is journaled, removes the existing files, and the next start is cold."""
    server = start()
    talk = [user(PATH * 20)]
    first = ask(server, *talk)
    assert 0 == server.stop()
    folder = server.data_dir / "blocks"
    assert list(folder.rglob("*.safetensors"))

    without = start("--disk-mb", 0, data_dir=server.data_dir)
    assert 0 == without.events(ev.ServerStarted)[-1].settings["disk_mb"]
    assert [] == list(folder.rglob("*.safetensors"))
    second = ask(without, *talk)
    assert (0, first.bits) == (second.cached_tokens, second.bits)
    assert 0 == without.stop()
    assert [] == list(folder.rglob("*.safetensors"))
