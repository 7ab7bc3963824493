"""A server seals what it journals, and a session is forgotten between two of its runs."""

from pathlib import Path

from cairn.journal import events as ev
from tests.support.subprocess_server import ask, recorded, run_ops, started, user


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
        busy, _, words_of = run_ops("forget", session, "--data-dir", home, "--yes")
        assert 2 == busy
        assert "A server (process" in words_of
        again.wait_idle()
        assert 0 == again.stop()
    mine = [one for one in recorded(home) if getattr(one.event, "session", None) == session]
    assert any(one.unread is not None for one in mine)
    assert 4 == run_ops("verify", "--data-dir", home)[0]
