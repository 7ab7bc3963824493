"""A server seals what it journals; a session is forgotten between two of its runs, or in one."""

from pathlib import Path

import pytest

from cairn.journal import events as ev
from tests.support.processes.subprocess_server import (
    ask,
    eventually,
    recorded,
    run_ops,
    started,
    user,
)


def test_a_conversation_is_forgotten(tmp_path: Path, model_directory: Path):
    """
    No text of a conversation is in the journal as it is. After `ops forget` it cannot be read; the
    server starts again, answers as before, and the journal holds.
    """
    home = tmp_path / "home"
    words = "The stone of Zanport is blue. " * 20
    with started(home, "--model", model_directory) as server:
        first = ask(server, user(words), max_tokens=8)
        other = ask(server, user("Another thing."), max_tokens=8)
        server.wait_idle()
        assert 0 == server.stop()
    for name in ("journal.db", "journal.db-wal"):
        path = home / name
        assert not path.exists() or b"Zanport" not in path.read_bytes()
    events = recorded(home)
    assert all(one.unread is None for one in events)
    requests = [one.event for one in events if isinstance(one.event, ev.RequestReceived)]
    session = requests[0].session
    export = tmp_path / "before.jsonl"
    assert 0 == run_ops("export", "--data-dir", home, "-o", export)[0]
    assert 0 == run_ops("verify", export, "--data-dir", home)[0]
    assert 4 == run_ops("verify", export, "--data-dir", tmp_path / "elsewhere")[0]

    code, out, err = run_ops("forget", session, "--data-dir", home, "--yes")

    assert 0 == code, out + err
    code, out, err = run_ops("verify", "--data-dir", home)
    assert 4 == code, out + err
    assert "rows (forgotten), 0 rows (no key)" in out
    with started(home, "--model", model_directory) as again:
        answer = ask(again, user(words), max_tokens=8)
        assert first.bits == answer.bits
        assert other.bits == ask(again, user("Another thing."), max_tokens=8).bits
        code, out, _ = run_ops("forget", session, "--data-dir", home, "--yes")
        assert (0, True) == (code, "has no keys here" in out)
        again.wait_idle()
        assert 0 == again.stop()
    mine = [one for one in recorded(home) if getattr(one.event, "session", None) == session]
    assert any(one.unread is not None for one in mine)
    assert 4 == run_ops("verify", "--data-dir", home)[0]


KEY, ALICES = "operator-key-0123", "alices-key-456789"


@pytest.mark.long
def test_a_running_server_is_asked(tmp_path: Path, model_directory: Path):
    """
    `ops forget` has the running server forget a session, with the operator's key: its texts and its
    block files go at once, the server goes on, and computes the same answer again.
    """
    home = tmp_path / "home"
    words = "The stone of Zanport is blue. " * 20
    keys = ("--api-key", f"local={KEY}", "--api-key", f"alice={ALICES}")
    options = ("--model", model_directory, *keys)
    with started(home, *options) as server:
        server.use_key(ALICES)
        first = ask(server, user(words), max_tokens=8, session_id="mine")
        server.use_key(KEY)
        server.wait_idle()
        eventually(lambda: any((home / "blocks").rglob("*.safetensors")))
        session = "@alice/mine"
        asked = ("forget", session, "--data-dir", home, "--yes")
        code, out, err = run_ops(*asked)
        assert (2, True) == (code, "Give the API key" in err), out + err
        code, out, err = run_ops(*asked, env={"CAIRN_API_KEY": ALICES})
        assert (2, True) == (code, "(404)" in err), out + err
        code, out, err = run_ops("forget", "nowhere", *asked[2:], env={"CAIRN_API_KEY": KEY})
        assert (2, True) == (code, "No session nowhere" in err), out + err

        code, out, err = run_ops(*asked, env={"CAIRN_API_KEY": KEY})

        assert 0 == code, out + err
        assert f"Session {session} is forgotten." in out
        mine = [one for one in server.recorded() if getattr(one.event, "session", None) == session]
        assert {False} == {
            one.unread is None for one in mine if isinstance(one.event, ev.RequestReceived)
        }
        assert not any((home / "blocks").rglob("*.safetensors*"))
        (acted,) = server.events(ev.OperatorActed, action="forget")
        assert f"session {session}" == acted.detail
        server.use_key(ALICES)
        again = ask(server, user(words), max_tokens=8, session_id="mine")
        server.use_key(KEY)
        assert (first.bits, 0) == (again.bits, again.cached_tokens)
        code, out, _ = run_ops("sessions", "--data-dir", home)
        assert 0 == code
        server.wait_idle()
        assert 0 == server.stop()
    assert 4 == run_ops("verify", "--data-dir", home)[0]
