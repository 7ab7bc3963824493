"""Another program locks the journal of a running server, as a database browser does."""

from __future__ import annotations

import sqlite3
from contextlib import closing

from cairn.journal import events as ev
from tests.e2e.conftest import Start
from tests.support.processes.subprocess_server import Listener, Serving, ask, eventually, user


def refused(server: Serving) -> str | None:
    """The message of a request that was refused because the journal takes no rows."""
    answer = server.post(messages=[user("Is it locked?")], max_tokens=4)
    if answer.status_code != 503:
        return None
    assert "journal_stalled" == answer.json()["error"]["code"]
    message: str = answer.json()["error"]["message"]
    return message


def test_a_lock_of_another_program_is_waited_for(start: Start, lengthy):
    """
    A running stream ends with the error, new requests are refused with the reason, and the server
    goes on by itself once the lock is released. The stall is on record.
    """
    server = start()
    before = ask(server, user("Hello"))
    client = Listener(server, **lengthy[0], max_tokens=250).decoding(3)
    with closing(sqlite3.connect(server.data_dir / "journal.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        error = client.end().error
        assert error is not None
        assert "journal_stalled" == error["code"]
        message = eventually(lambda: refused(server))
        assert "another program has locked the server's journal" in message
        health = server.health()
        assert ("journal_stalled", "locked") == (health["status"], health["journal_stall"])
        assert 'cairn_journal_stalled{reason="locked"} 1.0' in server.metrics()
        other.execute("ROLLBACK")
    eventually(lambda: server.health()["status"] == "ok")
    assert server.running
    (stalled,) = eventually(lambda: server.events(ev.JournalStalled))
    assert ("locked", 1) == (stalled.reason, stalled.requests_refused)
    assert before.bits == ask(server, user("Hello")).bits
