"""
Servers whose journal is on PostgreSQL: killed in mid-stream, cut off from the database, and started
twice.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cairn.journal import events as ev
from tests.e2e.operation.test_startup import refusal
from tests.support.journals import released
from tests.support.processes.postgres import Postgres
from tests.support.processes.subprocess_server import (
    Listener,
    ask,
    eventually,
    recorded,
    run_ops,
    started,
    user,
)


@pytest.fixture
def url(postgres: Postgres) -> str:
    """The URL of an empty database."""
    return postgres.new_database()


def events_of(url: str, home: Path) -> list[ev.Event]:
    """The events of a journal, which a server may be writing."""
    return [one.event for one in recorded(home, url)]


def assert_once(url: str, home: Path, clients: list[Listener]) -> None:
    """
    Assert that all that the clients received is in the journal as they received it, that each of
    its tokens is there once, and that the journal is valid.
    """
    events = events_of(url, home)
    for client in clients:
        own = [one for one in events if getattr(one, "request", None) == client.request]
        text, tokens = released(own, client.request)
        assert text.startswith(client.text)
        assert len(client.tokens) <= tokens
        for place, one in enumerate(own):
            if isinstance(one, ev.TokensEmitted):
                assert released(own[:place], client.request)[1] == one.first
    code, out, _ = run_ops("verify", "--data-dir", home, "--journal", url)
    assert (0, True) == (code, "broken: 0" in out.splitlines())


def test_killed_in_mid_stream_and_started_again(
    tmp_path: Path, model_directory: Path, url: str, lengthy: Any
):
    """
    No text that a client received is lost, or on record twice. The next server takes the lock that
    the killed one had, and gives the same answers.
    """
    where = (tmp_path / "home", "--model", model_directory, "--journal", url)
    with started(*where) as server:
        clients = [Listener(server, **lengthy[n % 2], max_tokens=250) for n in range(3)]
        for client in clients:
            client.decoding(10)
        server.kill()
        for client in clients:
            assert not client.end().done
    assert_once(url, tmp_path / "home", clients)
    with started(*where) as again:
        answer = ask(again, **lengthy[0], max_tokens=250)
        assert answer.tokens[: len(clients[0].tokens)] == clients[0].tokens
        again.wait_idle()
        assert 0 == again.stop()
        assert "Traceback" not in again.stderr()
    assert_once(url, tmp_path / "home", clients)
    events = events_of(url, tmp_path / "home")
    assert 1 == sum(isinstance(event, ev.ServerLost) for event in events)
    assert isinstance(events[-1], ev.ServerStopped)


@pytest.mark.long
def test_a_second_server_on_its_journal(tmp_path: Path, model_directory: Path, url: str):
    """It refuses to start, with who has the journal, and writes nothing; the first one goes on."""
    with started(tmp_path / "one", "--model", model_directory, "--journal", url) as server:
        first = ask(server, user("Hello"), max_tokens=4)
        server.wait_idle()
        sentence = refusal(
            "--data-dir", tmp_path / "two", "--model", model_directory, "--journal", url
        )
        assert "Another server or command uses postgresql" in sentence
        assert "of the database server" in sentence
        assert "choose another journal with --journal" in sentence
        assert 1 == sum(
            isinstance(event, ev.ServerStarted) for event in events_of(url, tmp_path / "one")
        )
        assert first.bits == ask(server, user("Hello"), max_tokens=4).bits
        server.wait_idle()
        assert 0 == server.stop()


def test_cut_off_in_mid_stream(
    tmp_path: Path, model_directory: Path, postgres: Postgres, url: str, lengthy: Any
):
    """
    A stream goes on when its connection to the database is replaced at once, and its tokens are on
    record once. If the database takes none, the stream ends with the reason, and the server goes on
    once it does.
    """
    name = url.partition("@/")[2].partition("?")[0]
    end = f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}'"
    with (
        started(tmp_path / "home", "--model", model_directory, "--journal", url) as server,
        postgres.connect("postgres") as database,
    ):
        running = Listener(server, **lengthy[0], max_tokens=400).decoding(10)
        database.execute(end)
        assert running.end().done
        assert 400 == len(running.tokens)
        assert_once(url, tmp_path / "home", [running])

        running = Listener(server, **lengthy[1], max_tokens=800).decoding(10)
        database.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS false")
        database.execute(end)
        error = running.end().error
        assert error is not None
        assert "journal_stalled" == error["code"]
        assert "lost the connection to the database" in error["message"]
        health = server.health()
        assert ("journal_stalled", "connection_lost") == (
            health["status"],
            health["journal_stall"],
        )
        database.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS true")
        hello = {"messages": [user("Hello")], "max_tokens": 4}
        eventually(lambda: 200 == server.post(**hello).status_code)
        server.wait_idle()
        assert 0 == server.stop()
        assert "Traceback" not in server.stderr()
        assert_once(url, tmp_path / "home", [running])
        (stalled,) = [
            one for one in events_of(url, tmp_path / "home") if isinstance(one, ev.JournalStalled)
        ]
        assert "connection_lost" == stalled.reason
