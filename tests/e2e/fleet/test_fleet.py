"""Nodes of a fleet: each has a journal of its own in one database, and is taken over on purpose."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from cairn.journal import events as ev
from cairn.journal.rows.database.urls import node_url
from cairn.ops.common.heads import HeadFiles
from tests.e2e.operation.test_startup import refusal
from tests.support.processes.fleet import Fleet
from tests.support.processes.haproxy import installed, running_haproxy
from tests.support.processes.postgres import Postgres, running_postgres
from tests.support.processes.subprocess_server import (
    Listener,
    Serving,
    ask,
    assistant,
    eventually,
    run_ops,
    started,
    user,
)


@pytest.fixture
def fleet(postgres: Postgres, tmp_path: Path, model_directory: Path) -> Fleet:
    """A fleet with an empty database, of which no node runs."""
    return Fleet(postgres.new_database(), tmp_path, ("--model", model_directory))


def call(server: Serving, method: str, path: str, **body: object) -> httpx.Response:
    """Call a server, and return its answer."""
    return httpx.request(method, f"{server.url}{path}", json=body or None, timeout=60)


# --- names ----------------------------------------------------------------------------------------


@pytest.mark.long_but("", "n\\xf6")
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
        assert "previous_response_not_found" in call(two, "POST", "/v1/responses", **more).text

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
        assert "Another server or command uses postgresql://" in sentence
        assert "if it does not answer, take the node over: `ops takeover n1`." in sentence
        assert "--journal" not in sentence
        sentence = refusal(*fleet.where("n1"))
        assert "Stop it, or, if it does not answer, kill its process." in sentence
        assert before.bits == ask(server, user("Hello"), max_tokens=4).bits
        server.wait_idle()
        assert 0 == server.stop()
    fleet.assert_valid("n1")


# --- takeover -------------------------------------------------------------------------------------


def test_a_server_that_hangs_is_taken_over(fleet: Fleet, tmp_path: Path, lengthy: Any):
    """
    A start is refused as long as the server that hangs has the journal. After a takeover, the node
    goes on elsewhere with its agents; the server wakes up, sends no token more, and stops with a
    sentence.
    """
    with fleet.node("n1") as old:
        call(old, "POST", "/v1/agents", agent_id="notes")
        question = {"messages": [user("Hello! My name is Jordis.")], "max_tokens": 8}
        assert 200 == call(old, "POST", "/v1/agents/n1.notes/generate", **question).status_code
        running = Listener(old, **lengthy[0], max_tokens=800).decoding(10)
        old.signal(signal.SIGSTOP)
        elsewhere = tmp_path / "elsewhere"
        shutil.copytree(fleet.home("n1"), elsewhere)
        where = ("--data-dir", elsewhere, "--journal", fleet.url, "--node", "n1")
        assert "Another server or command uses postgresql" in refusal(*where)

        code, out, err = run_ops("takeover", "n1", "--journal", fleet.url, "--by", "jo", "--yes")
        assert (0, True) == (code, "n1 is taken over: lease 2" in out), out + err
        assert "ended 1 connection of the server of n1" in out
        with started(elsewhere, *where[2:], *fleet.options) as new:
            turns = call(new, "GET", "/v1/agents/n1.notes/turns").json()["data"]
            assert 1 == len(turns)
            more = {"messages": [user("What is my name?")], "max_tokens": 8}
            assert 200 == call(new, "POST", "/v1/agents/n1.notes/generate", **more).status_code

            sent = len(running.tokens)
            old.signal(signal.SIGCONT)
            assert not running.end().done
            assert 1 == old.wait()
            assert "was taken over by" in old.stderr()
            new.wait_idle()
            assert 0 == new.stop()
    events = fleet.events("n1")
    lost, taken = (
        next(place for place, one in enumerate(events) if isinstance(one, kind))
        for kind in (ev.ServerLost, ev.NodeTakenOver)
    )
    assert lost + 1 == taken
    assert ev.NodeTakenOver(token=2, by="jo") == events[taken]
    released = [one for one in events[:lost] if getattr(one, "request", None) == running.request]
    assert sent <= sum(getattr(one, "emitted", 0) for one in released)
    fleet.assert_valid("n1")


def test_a_node_goes_on_without_its_data_directory(fleet: Fleet, tmp_path: Path):
    """
    The keys of its texts are in the database, so a machine that has the fleet's secret and journal
    key serves its agents. Another journal key is refused. Forgetting removes the keys there.
    """
    with fleet.node("n1") as old:
        call(old, "POST", "/v1/agents", agent_id="notes")
        hello = user("Hello! My name is Jordis.")
        first = say(old, hello)
        old.kill()
    assert not list(fleet.home("n1").glob("keys.db*"))
    code, out, err = run_ops("takeover", "n1", "--journal", fleet.url, "--by", "jo", "--yes")
    assert 0 == code, out + err

    elsewhere, wrong = tmp_path / "elsewhere", tmp_path / "wrong"
    elsewhere.mkdir(mode=0o700)
    shutil.copy(fleet.home("n1") / "secret", elsewhere)
    (tmp_path / "fleets").write_bytes((fleet.home("n1") / "journal-key").read_bytes())
    wrong.write_bytes(b"w" * 32)
    where = ("--data-dir", elsewhere, "--journal", fleet.url, "--node", "n1")
    assert f"{wrong} is not the journal key of the journal postgresql" in refusal(
        *where, "--journal-key", wrong
    )
    assert "The journal key" in refusal(*where)
    assert not (elsewhere / "journal-key").exists()
    named = ("--journal-key", tmp_path / "fleets")
    with started(elsewhere, *where[2:], *fleet.options, *named) as new:
        (turn,) = call(new, "GET", "/v1/agents/n1.notes/turns").json()["data"]
        assert "Jordis" in str(turn)
        more = user("What is my name?")
        second = say(new, more)
        (alone,) = cold(new, hello, assistant(first["message"]["content"]), more)
        assert (alone["message"]["content"], alone["logprobs"]) == (
            second["message"]["content"],
            second["logprobs"],
        )
        new.wait_idle()
        assert (0, True) == verified("--data-dir", elsewhere, *where[2:])
        forgotten = call(new, "POST", "/v1/sessions/agent/n1.notes/forget?agent=true").json()
        assert any("write-ahead log" in place for place in forgotten["still_readable"])
        assert 0 == new.stop()
    assert (4, True) == verified("--data-dir", elsewhere, *where[2:])
    with started(elsewhere, *where[2:], *fleet.options) as again:
        assert 404 == call(again, "GET", "/v1/agents/n1.notes").status_code
        assert 0 == again.stop()


def test_the_journal_key_of_a_fleet(fleet: Fleet, tmp_path: Path):
    """A node whose journal key differs is refused at its first start, and so is one without."""
    with fleet.node("n1") as server:
        assert 0 == server.stop()
    home = tmp_path / "n2"
    home.mkdir(mode=0o700)
    where = ("--data-dir", home, "--journal", fleet.url, "--node", "n2")
    assert "copy that of node n1 to there" in refusal(*where)
    assert not (home / "journal-key").exists()
    (home / "journal-key").write_bytes(b"w" * 32)
    assert "is not the journal key of node n1" in refusal(*where)


def test_a_file_of_keys_from_before(fleet: Fleet):
    """The keys of a node were in its data directory once; a start says what to do."""
    with fleet.node("n1") as server:
        assert 0 == server.stop()
    where = fleet.where("n1")
    file = HeadFiles.of(fleet.home("n1"), node_url(fleet.url, "n1")).keys
    file.touch()
    assert f"{file} has the keys of node n1 from a development version" in refusal(*where)


def say(server: Serving, message: Any) -> Any:
    """A turn of agent ``n1.notes``; what its client gets."""
    asked = {"messages": [message], "max_tokens": 8, "temperature": 0, "logprobs": True}
    answer = call(server, "POST", "/v1/agents/n1.notes/generate", **asked)
    assert 200 == answer.status_code, answer.text
    (choice,) = answer.json()["choices"]
    return choice


def verified(*where: object) -> tuple[int, bool]:
    """The exit code of `ops verify`, and whether it found no violation."""
    code, out, _ = run_ops("verify", *where)
    return code, "broken: 0" in out.splitlines()


# --- audit ----------------------------------------------------------------------------------------


def test_rows_that_are_cut_off(fleet: Fleet, postgres: Postgres):
    """
    Nodes append each other's heads. Rows that are then removed from the end of one journal, which
    stays valid in itself, are found. Once an operator has accepted that, nodes see each other
    again.
    """
    often = ("--see-heads", "0.1")
    with fleet.node("n1", *often) as one, fleet.node("n2", *often) as two:
        assert 200 == two.post(messages=[user("Hello")], max_tokens=4).status_code
        two.wait_idle()
        position = two.position()
        eventually(lambda: position <= _seen(fleet, "n1", "n2"))
        eventually(lambda: _seen(fleet, "n2", "n1") > 0)
        one.wait_idle()
        two.wait_idle()
        assert (0, 0) == (one.stop(), two.stop())
    code, verdict = fleet.audit()
    assert (0, 0) == (code, verdict["broken"])
    assert verdict["named_rows"]["present"] >= 2
    with postgres.connect(fleet.name) as connection:
        connection.execute(f"DELETE FROM node_n2.events WHERE position >= {position}")
    shutil.rmtree(fleet.home("n2"))  # the recorded head, too
    fleet.assert_valid("n1")
    code, verdict = fleet.audit()
    assert 1 == code
    assert {"INV-8"} == {finding["invariant"] for finding in verdict["findings"]}
    assert "the journal of n2 ends before it" in verdict["findings"][0]["message"]
    # Its home has no record of the head, so only the other node knows.
    assert "does not contain what node n1 saw of it" in refusal(*fleet.where("n2"))
    accepting = ("--accept-lost-rows", *often)
    with fleet.node("n1", *often) as one, fleet.node("n2", *accepting) as two:
        eventually(lambda: len(fleet.of_kind("n1", ev.LossSeen)) == 1)
        assert 200 == two.post(messages=[user("Hello")], max_tokens=4).status_code
        two.wait_idle()
        position = two.position()
        eventually(lambda: position <= _seen(fleet, "n1", "n2"))
        assert (0, 0) == (one.stop(), two.stop())
    code, verdict = fleet.audit()
    assert (0, 0) == (code, verdict["broken"]), verdict
    assert verdict["named_rows"]["accepted_as_lost"] >= 1
    with fleet.node("n2") as two:  # it is not asked again
        assert 0 == two.stop()


def _seen(fleet: Fleet, by: str, node: str) -> int:
    """The last row of a node that another one saw."""
    heads = (one.heads for one in fleet.events(by) if isinstance(one, ev.HeadsSeen))
    return max((at for seen in heads for name, at, _ in seen if name == node), default=0)


# --- the database ---------------------------------------------------------------------------------


def test_a_database_that_is_stopped(
    postgres: Postgres, tmp_path: Path, model_directory: Path, lengthy: Any
):
    """
    No client gets a token that is not committed. The node refuses requests with 503, and goes on
    once the database is back, without being started again.
    """
    with running_postgres() as own:
        fleet = Fleet(own.new_database(), tmp_path, ("--model", model_directory))
        with fleet.node("n1") as server:
            running = Listener(server, **lengthy[0], max_tokens=4000).decoding(10)
            own.stop()
            error = running.end().error
            assert error is not None
            assert "journal_stalled" == error["code"]
            refused = server.post(messages=[user("Hello")], max_tokens=4)
            assert (503, True) == (refused.status_code, "retry-after" in refused.headers)
            assert "connection_lost" == server.health()["journal_stall"]
            own.start()
            hello = {"messages": [user("Hello")], "max_tokens": 4}
            eventually(lambda: 200 == server.post(**hello).status_code)
            server.wait_idle()
            assert 0 == server.stop()
        events = fleet.events("n1")
        of_it = [one for one in events if getattr(one, "request", None) == running.request]
        assert len(running.tokens) <= sum(getattr(one, "emitted", 0) for one in of_it)
        assert 1 == sum(isinstance(one, ev.JournalStalled) for one in events)
        fleet.assert_valid("n1")


# --- behind a router ------------------------------------------------------------------------------


def turn(server: Serving, key: str, *messages: Any) -> tuple[str, Any]:
    """A turn of a conversation: the node that answered, and what the client got."""
    answer = server.post(
        messages=list(messages), session_id=key, max_tokens=8, temperature=0, logprobs=True
    )
    assert 200 == answer.status_code, answer.text
    body = answer.json()
    return body["id"].removeprefix("chatcmpl-").partition(".")[0], body["choices"]


def cold(server: Serving, *messages: Any) -> Any:
    """What a client gets if nothing is reused."""
    asked = {"max_tokens": 8, "temperature": 0, "logprobs": True, "cache_prompt": False}
    return server.post(messages=list(messages), **asked).json()["choices"]


@pytest.mark.skipif(not installed(), reason="HAProxy is not installed")
def test_a_node_that_is_killed(fleet: Fleet, tmp_path: Path, lengthy: Any):
    """
    A stream ends without its end; the request again, and the next turns of other conversations, are
    answered by another node, with the bits of an answer that reuses nothing. A node that is stopped
    for a moment does no harm after that.
    """
    with fleet.node("n1") as one, fleet.node("n2") as two:
        nodes = {"n1": one, "n2": two}
        places = {name: "{}:{}".format(*node.address) for name, node in nodes.items()}
        with running_haproxy(tmp_path, places, check_s=20) as router:
            hello = user("Hello! My name is Jordis.")
            first = {key: turn(router, key, hello) for key in ("a", "b", "c", "d")}
            assert set(nodes) == {node for node, _ in first.values()}
            more = (hello, assistant(first["a"][1][0]["message"]["content"]), user("And mine?"))
            for key in ("a", "b"):
                assert first[key][0] == turn(router, key, *more)[0]

            running = Listener(router, **lengthy[0], max_tokens=400).decoding(10)
            gone = running.request.partition(".")[0]
            nodes[gone].kill()
            assert not running.end().done
            (left,) = {*nodes} - {gone}
            again = Listener(router, **lengthy[0], max_tokens=400).decoding(30)
            assert left == again.request.partition(".")[0]
            both = min(len(running.tokens), len(again.tokens))
            assert running.tokens[:both] == again.tokens[:both]
            again.leave()
            for key in first:
                assert (left, cold(nodes[left], *more)) == turn(router, key, *more)

            own = f"{router.url}/v1/agents/{gone}.notes"
            eventually(lambda: 503 == httpx.get(own, timeout=60).status_code)
            nodes[left].signal(signal.SIGSTOP)
            nodes[left].signal(signal.SIGCONT)
            eventually(lambda: 200 == httpx.get(f"{router.url}/health", timeout=60).status_code)
            assert left == turn(router, "a", *more)[0]
            nodes[left].wait_idle()
            assert 0 == nodes[left].stop()
    fleet.assert_valid("n1", "n2")


@pytest.mark.long
@pytest.mark.skipif(not installed(), reason="HAProxy is not installed")
def test_a_node_that_is_stopped(fleet: Fleet, tmp_path: Path, lengthy: Any):
    """
    Once a node that hangs misses two health checks, its stream ends without its end, and the turn
    that waits for it is answered by another node, with the bits of an answer that reuses nothing.
    When it wakes up it does no harm: it cancels what it was at, and serves again.
    """
    with fleet.node("n1") as one, fleet.node("n2") as two:
        nodes = {"n1": one, "n2": two}
        places = {name: "{}:{}".format(*node.address) for name, node in nodes.items()}
        with running_haproxy(tmp_path, places, check_s=5) as router:
            hello = user("Hello! My name is Jordis.")
            hung, said = turn(router, "a", hello)
            (left,) = {*nodes} - {hung}
            more = (hello, assistant(said[0]["message"]["content"]), user("And mine?"))
            # On the same node, because any field that names a key gives the same one.
            long = {**lengthy[0], "max_tokens": 4000, "prompt_cache_key": "a"}
            running = Listener(router, **long).decoding(10)
            assert hung == running.request.partition(".")[0]

            nodes[hung].signal(signal.SIGSTOP)
            assert (left, cold(nodes[left], *more)) == turn(router, "a", *more)
            assert not running.end().done
            own = f"{router.url}/v1/agents/{hung}.notes"
            eventually(lambda: 503 == httpx.get(own, timeout=60).status_code)

            nodes[hung].signal(signal.SIGCONT)
            eventually(lambda: 404 == httpx.get(own, timeout=60).status_code)
            nodes[hung].wait_idle()
            assert cold(nodes[hung], *more) == cold(nodes[left], *more)
            for node in nodes.values():
                node.wait_idle()
                assert 0 == node.stop()
    cancelled = [one for one in fleet.events(hung) if isinstance(one, ev.RequestCancelled)]
    assert running.request in {one.request for one in cancelled}
    fleet.assert_valid("n1", "n2")


# --- two fingerprints -----------------------------------------------------------------------------


@pytest.mark.long
def test_two_fingerprints(fleet: Fleet):
    """
    Nodes on different fingerprints have no block in common, and `ops doctor` names the field. With
    the same one they have, with one digest each.
    """
    for node, options in (("n1", ()), ("n2", ("--block-tokens", 32)), ("n3", ())):
        with fleet.node(node, *options) as server:
            question = user("Hello! My name is Jordis. " * 20)
            assert 200 == server.post(messages=[question], max_tokens=4).status_code
            server.wait_idle()
            assert 0 == server.stop()
        if node == "n2":
            code, verdict = fleet.audit()
            assert (0, 0, 0) == (code, verdict["broken"], verdict["shared_blocks"])
            code, out, _ = run_ops("doctor", "--journal", fleet.url, "--port", 1024)
            (line,) = [one for one in out.splitlines() if " fleet " in one]
            assert (0, "warn") == (code, line[:4])  # neither runs
            assert ": block_tokens: n1 64, n2 32" in line
            assert "start the nodes with the same options" in line
    _, verdict = fleet.audit()
    assert (0, True) == (verdict["broken"], verdict["shared_blocks"] > 0)
