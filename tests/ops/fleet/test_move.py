"""``ops agents move``: what it asks, warns of and says, with nodes that answer what is scripted."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from click.testing import Result

from cairn.journal import events as ev
from cairn.journal.rows.codec import decode
from cairn.journal.rows.database.schema import migrate
from cairn.journal.rows.database.urls import node_url
from cairn.journal.rows.store_sql import SqlStore
from tests.ops.fleet.test_fingerprints import loaded
from tests.support.journals import Builder, agent_created
from tests.support.processes.postgres import Postgres

Run = Callable[..., Result]


@pytest.fixture
def fleet(postgres: Postgres) -> str:
    """The URL of a database with n1, which has an agent for each of two tenants, and n2."""
    url = postgres.new_database()
    for node, weights in (("n1", "a"), ("n2", "b")):
        made = Builder()
        began = ev.ServerStarted(boot=f"boot-{node}", cairn_version="0", settings={})
        made.propose(began, loaded(weights=weights))
        if node == "n1":
            for tenant in ("alice", "bob"):
                made.propose(agent_created("n1.notes", tenant=tenant))
            made.propose(agent_created("n1.short", tenant="bob", persist=False))
        assert made.bug is None
        migrate(node_url(url, node))
        with closing(SqlStore.open(node_url(url, node))) as store:
            store.append(made.rows)
    return url


@contextmanager
def answering(*answers: tuple[int, str]) -> Iterator[str]:
    """The address of a node that answers with these codes, or with an agent if it is 200."""
    left = list(answers)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            status, code = left.pop(0)
            error = {"error": {"message": "not now", "code": code}}
            body = json.dumps({"turns": 0} if status == 200 else error).encode()
            self.send_response(status)
            if code == "agent_not_released":
                self.send_header("x-cairn-tenant", "bob")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
    assert not left


def move(run: Run, fleet: str, *more: str, name: str = "n1.notes") -> Result:
    """The command, which is not asked whether it may."""
    return run("agents", "move", name, "--to", "n2", "--journal", fleet, *more, "--yes")


def released(fleet: str) -> list[ev.SessionReleased]:
    """What the journal of n1 has of releases."""
    with closing(SqlStore.open(node_url(fleet, "n1"), read_only=True)) as store:
        events = [decode(row).event for row in store.read()]
    return [event for event in events if isinstance(event, ev.SessionReleased)]


def test_the_tenant_of_the_key(run: Run, fleet: str):
    """
    Only its agent is released by the command, whatever other tenants have. Fingerprints that differ
    are named before.
    """
    with answering((409, "agent_not_released"), (200, "")) as url:
        done = move(run, fleet, "--server", url)
    assert 0 == done.exit_code, done.output
    assert ["bob"] == [one.tenant for one in released(fleet)]
    assert "may have other bits" in done.stderr
    assert "weights: n1 a, n2 b" in done.stderr


def test_an_agent_that_does_not_persist(run: Run, fleet: str):
    """It ends with its server, which is said, and nothing is changed."""
    with answering((409, "agent_not_released")) as url:
        done = move(run, fleet, "--server", url, name="n1.short")
    assert 2 == done.exit_code
    assert "ends with its server (persist: false)" in done.stderr
    assert [] == released(fleet)


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ([(409, "agent_exists")], "Nothing was changed."),
        ([(503, "journal_stalled")], "Run the same command again"),
        ([(409, "agent_not_released"), (503, "journal_stalled")], "another one (--as)"),
    ],
)
def test_a_refusal(run: Run, fleet: str, answers: list[tuple[int, str]], words: str):
    """It says what may have been changed, and what to do."""
    with answering(*answers) as url:
        done = move(run, fleet, "--server", url)
    assert 2 == done.exit_code
    assert words in done.stderr
    assert ("Nothing was changed." == words) == ("Nothing was changed." in done.stderr)


def test_an_address_of_one_node(run: Run, fleet: str):
    """Only a router reaches both nodes, so a refusal says what the address may be."""
    with answering((404, "agent_not_found")) as url:
        done = move(run, fleet, "--server", url)
        named = f"If {url} is a node and not the router, give each node's address: --server n2=URL"
        assert (2, True) == (done.exit_code, named in done.stderr)
    with answering((404, "agent_not_found")) as url:
        assert "not the router" not in move(run, fleet, "--server", f"n2={url}").stderr


def test_no_server_at_an_address(run: Run, fleet: str):
    """Before the first answer nothing was changed, and the message says so."""
    done = move(run, fleet, "--server", "http://127.0.0.1:1")
    assert 2 == done.exit_code
    assert "Nothing was changed. If it does not run, start it; then run the same" in done.stderr


def test_a_server_of_another_node(run: Run, fleet: str):
    """It is not asked, so it is refused."""
    done = move(run, fleet, "--server", "n3=http://127.0.0.1:1")
    assert 2 == done.exit_code
    assert "only n1 and n2 are asked" in done.stderr
