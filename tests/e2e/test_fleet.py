"""Nodes of a fleet: each has a journal of its own in one database, and is taken over on purpose."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from cairn.journal import events as ev
from tests.e2e.test_startup import refusal
from tests.support.fleet import Fleet
from tests.support.postgres import Postgres
from tests.support.subprocess_server import Serving, ask, run_ops, user


@pytest.fixture
def fleet(postgres: Postgres, tmp_path: Path, model_directory: Path) -> Fleet:
    """A fleet with an empty database, of which no node runs."""
    return Fleet(postgres.new_database(), tmp_path, ("--model", model_directory))


def call(server: Serving, method: str, path: str, **body: object) -> httpx.Response:
    """Call a server, and return its answer."""
    return httpx.request(method, f"{server.url}{path}", json=body or None, timeout=60)


# --- names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", "N1", "1n", "n-1", "n1;", "a" * 17, "nö"])
def test_a_name_that_no_node_may_have(name: str, tmp_path: Path):
    """It is refused by the server and by other commands, with an example of one that it may."""
    code, _, err = run_ops("serve", "--data-dir", tmp_path / "home", "--node", name)
    assert (2, True) == (code, "lower-case letters and digits" in err), err
    code, _, err = run_ops("verify", "--data-dir", tmp_path / "home", "--node", name)
    assert (2, True) == (code, "lower-case letters and digits" in err), err
    assert not (tmp_path / "home").exists()


def test_a_node_needs_the_database_of_a_fleet(tmp_path: Path, fleet: Fleet):
    """A node without one, on SQLite, or with a schema in the URL, is refused, and makes nothing."""
    home = ("--data-dir", tmp_path / "home", "--node", "n1")
    assert "add --journal postgresql://user@host/name" in refusal(*home)
    assert "needs the PostgreSQL database" in refusal(*home, "--journal", tmp_path / "file.db")
    sqlite = f"sqlite:///{tmp_path / 'file.db'}"
    assert "share a PostgreSQL database" in refusal(*home, "--journal", sqlite)
    schema = f"{fleet.url}&options=-csearch_path%3Dmine"
    assert "names a schema, and so does --node n1" in refusal(*home, "--journal", schema)
    assert not (tmp_path / "home").exists()
    assert not (tmp_path / "file.db").exists()


def test_two_nodes_in_one_database(fleet: Fleet):
    """
    Each has its own journal, which names it. What they answer has equal bits, and its ids carry the
    name of the node.
    """
    with fleet.node("n1") as one, fleet.node("n2") as two:
        hello = {"messages": [user("Hello")], "max_tokens": 4}
        first, second = one.post(**hello).json(), two.post(**hello).json()
        assert first["choices"] == second["choices"]
        assert first["id"].startswith("chatcmpl-n1.")
        assert second["id"].startswith("chatcmpl-n2.")
        assert ("n1", "n2") == (one.health()["node"], two.health()["node"])

        stored = call(one, "POST", "/v1/responses", model="any", input="Hello").json()
        assert stored["id"].startswith("resp_n1.")
        more = {"model": "any", "input": "Hello", "previous_response_id": stored["id"]}
        assert 200 == call(one, "POST", "/v1/responses", **more).status_code
        assert 404 == call(two, "POST", "/v1/responses", **more).status_code

        made = [
            call(two, "POST", "/v1/agents", **body).json()["agent_id"]
            for body in ({"persist": True}, {"agent_id": "notes"}, {"agent_id": "n2.more"})
        ]
        assert made[0].startswith("n2.agent-")
        assert ["n2.notes", "n2.more"] == made[1:]
        fork = call(two, "POST", "/v1/agents/n2.notes/fork", agent_id="other").json()
        assert "n2.other" == fork["agent_id"]
        long = call(two, "POST", "/v1/agents", agent_id="a" * 62)
        assert (400, True) == (long.status_code, "1 to 61 letters" in long.text)
        one.wait_idle()
        two.wait_idle()
        assert (0, 0) == (one.stop(), two.stop())
    for node in ("n1", "n2"):
        (begun,) = (one for one in fleet.events(node) if isinstance(one, ev.ServerStarted))
        assert node == begun.settings["node"]
    fleet.assert_valid("n1", "n2")


def test_a_second_server_of_a_node(fleet: Fleet):
    """It is refused, and the first one goes on."""
    with fleet.node("n1") as server:
        before = ask(server, user("Hello"), max_tokens=4)
        sentence = refusal(
            *("--data-dir", fleet.home("n2"), "--journal", fleet.url, "--node", "n1")
        )
        assert "Another server or command uses postgresql" in sentence
        assert before.bits == ask(server, user("Hello"), max_tokens=4).bits
        server.wait_idle()
        assert 0 == server.stop()
    fleet.assert_valid("n1")
