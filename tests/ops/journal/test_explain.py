"""`ops explain`: the sentences of requests and sessions, from a journal and from an export."""

from pathlib import Path

from tests.support.journals import Builder


def journal() -> Builder:
    """Two sessions: one that is continued, and one that begins like it."""
    built = Builder()
    built.start()
    built.turn("session-one", "request-1", ["Hello"], range(1, 9), (20, 21))
    built.turn("session-one", "request-2", ["Hello", "a", "b"], range(1, 13), (20, 21))
    built.turn("session-two", "request-3", ["Hello", "x"], range(1, 9), (20, 21))
    return built


def test_a_request_a_session_and_the_last(run, stored, tmp_path: Path):
    """Each request of a session is explained; without a target, the last request is."""
    stored(journal().rows)
    last = run("explain").stdout
    assert last == run("explain", "last").stdout == run("explain", "request-3").stdout
    assert last.startswith("request request-3 of session session-two, 2026-01-01 ")
    assert "A message differs from that of session session-one" in last
    both = run("explain", "session-one").stdout.split("\n\n")
    assert ["request-1", "request-2"] == [text.split()[1] for text in both]
    assert "It is a new conversation" in both[0]
    assert "It continues session session-one, of which 2 tokens are rendered" in both[1]
    exported = tmp_path / "journal.jsonl"
    exported.write_text(run("export").stdout)
    assert last == run("explain", "last", exported).stdout


def test_a_target_that_is_not_there(run, stored):
    """The command says where to look, and exits with 2."""
    stored(journal().rows)
    failed = run("explain", "nothing")
    assert 2 == failed.exit_code
    assert "No request or session nothing is in the journal" in failed.stderr
    assert "(give at least 6 characters)" in run("explain", "sess").stderr
    assert "Several ids begin with session-" in run("explain", "session-").stderr


def test_an_empty_journal(run, stored):
    """There is no last request."""
    built = Builder()
    built.start()
    stored(built.rows)
    assert "No request or session last is in the journal" in run("explain").stderr


def test_an_export_without_texts(run, stored, tmp_path: Path):
    """There is nothing to explain with, and the command says so."""
    stored(journal().rows)
    exported = tmp_path / "journal.jsonl"
    exported.write_text(run("export", "--no-private").stdout)
    failed = run("explain", "last", exported)
    assert 2 == failed.exit_code
    assert "left out" in failed.stderr
