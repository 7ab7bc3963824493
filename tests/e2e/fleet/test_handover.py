"""Agents that an operator hands over from one node of a fleet to another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from cairn.journal import events as ev
from tests.e2e.fleet.test_fleet import call
from tests.support.processes.fleet import Fleet
from tests.support.processes.postgres import Postgres
from tests.support.processes.subprocess_server import Serving, run_ops, user

ALICES, BOBS = "a" * 32, "b" * 32


@pytest.fixture
def fleet(postgres: Postgres, tmp_path: Path, model_directory: Path) -> Fleet:
    """A fleet with an empty database, of which no node runs."""
    return Fleet(postgres.new_database(), tmp_path, ("--model", model_directory))


def say(server: Serving, agent: str, words: str, key: str | None = None) -> tuple[Any, Any]:
    """A turn of an agent: what its client gets, and how many tokens were reused."""
    asked = {"messages": [user(words)], "max_tokens": 8, "temperature": 0, "logprobs": True}
    answer = httpx.post(
        f"{server.url}/v1/agents/{agent}/generate",
        json=asked,
        headers={"authorization": f"Bearer {key}"} if key else {},
        timeout=60,
    )
    assert 200 == answer.status_code, answer.text
    (choice,) = answer.json()["choices"]
    return (choice["message"]["content"], choice["logprobs"]), answer.json()["cairn"]


def move(
    fleet: Fleet, name: str, to: str, servers: dict[str, Serving], *more: str
) -> tuple[int, str]:
    """The exit code of `ops agents move`, and what it says."""
    places = [word for node, one in servers.items() for word in ("--server", f"{node}={one.url}")]
    where = ("--to", to, "--journal", fleet.url, *places, *more, "--yes")
    code, out, err = run_ops("agents", "move", name, *where)
    return code, out + err


def turns(server: Serving, agent: str) -> list[Any]:
    """The messages and answers of an agent."""
    found = call(server, "GET", f"/v1/agents/{agent}/turns")
    assert 200 == found.status_code, found.text
    return [(turn["messages"], turn["answer"]) for turn in found.json()["data"]]


def keys(fleet: Fleet, postgres: Postgres, node: str, subject: str) -> int:
    """How many keys a node has of a session."""
    query = f"SELECT count(*) FROM node_{node}.keys WHERE subject = '{subject}'"
    with postgres.connect(fleet.name) as connection:
        ((found,),) = connection.execute(query).fetchall()
    return int(found)


def test_an_agent_is_handed_over(fleet: Fleet, postgres: Postgres):
    """
    Its next turn is a cold start with the bits that its old node would have given. That answers 410
    with the new name, for good. The same command again says that it is done, and the agent can be
    handed back under another name. Forgetting it on the new node removes its key there, and the old
    node's copy can be forgotten, too.
    """
    with fleet.node("n1") as one, fleet.node("n2") as two:
        nodes = {"n1": one, "n2": two}
        call(
            one, "POST", "/v1/agents", agent_id="notes", system_prompt="Be brief.", max_context=900
        )
        for words in ("Hello! My name is Jordis.", "Tell me a story"):
            say(one, "n1.notes", words)
        call(one, "POST", "/v1/agents/n1.notes/fork", agent_id="copy")
        known = turns(one, "n1.notes")
        before = call(one, "GET", "/v1/agents/n1.notes").json()

        code, out = move(fleet, "n1.notes", "n2", nodes)
        assert (0, True) == (code, "it is n2.notes now, with 2 turns" in out), out
        for method, path, body in (
            ("GET", "/v1/agents/n1.notes", {}),
            ("GET", "/v1/agents/n1.notes/turns", {}),
            ("POST", "/v1/agents/n1.notes/generate", {"messages": [user("Hello")]}),
            ("POST", "/v1/agents/n1.notes/fork", {"agent_id": "more"}),
            ("POST", "/v1/agents", {"agent_id": "notes"}),
        ):
            gone = call(one, method, path, **body)
            assert (410, "n2.notes") == (gone.status_code, gone.headers["x-cairn-agent"])
            assert "it is 'n2.notes'" in gone.json()["error"]["message"]
        after = call(two, "GET", "/v1/agents/n2.notes").json()
        assert ("n1.notes", 900, "Be brief.") == (
            after["adopted_from"],
            after["max_context"],
            after["system_prompt"],
        )
        assert before["created"] == after["created"]
        assert known == turns(two, "n2.notes")
        due, _ = say(one, "n1.copy", "What is my name?")
        found, _ = say(two, "n2.notes", "What is my name?")
        assert due == found
        more, _ = say(two, "n2.notes", "And yours?")
        assert more == say(one, "n1.copy", "And yours?")[0]

        assert (0, True) == (
            (again := move(fleet, "n1.notes", "n2", nodes))[0],
            "was released before: it is n2.notes now, with 4 turns" in again[1],
        )
        code, out = move(fleet, "n2.notes", "n1", nodes)
        assert (2, True) == (code, "it is 'n2.notes'" in out), out
        code, out = move(fleet, "n2.notes", "n1", nodes, "--as", "back")
        assert (0, True) == (code, "it is n1.back now, with 4 turns" in out), out
        assert 4 == len(turns(one, "n1.back"))
        assert say(one, "n1.back", "Bye")[0] == say(one, "n1.copy", "Bye")[0]
        code, out, _ = run_ops("agents", "show", "n1.back", *fleet.where("n1"))
        assert (0, True) == (code, "Jordis" in out and "n2.notes" in out)
        code, out, _ = run_ops("agents", *fleet.where("n2"))
        assert (0, True) == (code, "n1.back" in out)

        for node, name in ((two, "n2.notes"), (one, "n1.back")):
            assert 1 == keys(fleet, postgres, name[:2], f"agent/{name}")
            forget = f"/v1/sessions/agent/{name}/forget"
            assert 409 == call(node, "POST", forget).status_code
            assert 200 == call(node, "POST", f"{forget}?agent=true").status_code
            assert 0 == keys(fleet, postgres, name[:2], f"agent/{name}")
        assert 410 == call(two, "GET", "/v1/agents/n2.notes").status_code
        assert 404 == call(one, "GET", "/v1/agents/n1.back").status_code
        code, out = move(fleet, "n2.notes", "n1", nodes, "--as", "back")
        assert (2, True) == (code, "not found on n2" in out), out
        forget = "/v1/sessions/agent/n1.notes/forget?agent=true"
        code, out = move(fleet, "n1.copy", "n2", nodes)
        assert 0 == code, out
        assert "n1.copy" in call(one, "POST", forget).text  # which begins with its turns
        gone = call(one, "DELETE", "/v1/agents/n1.copy")
        assert (200, "n2.copy") == (gone.status_code, gone.json()["released_to"])
        assert 410 == call(one, "DELETE", "/v1/agents/n1.copy").status_code
        assert 200 == call(two, "GET", "/v1/agents/n2.copy").status_code
        assert 200 == call(one, "POST", forget).status_code
        assert 410 == call(one, "GET", "/v1/agents/n1.notes").status_code
        for node in (one, two):
            node.wait_idle()
            assert 0 == node.stop()
    paths = fleet.of_kind("n2", ev.PathSelected)
    assert "cold_start" == paths[0].reason
    adopted = fleet.of_kind("n2", ev.SessionAdopted)[0]
    assert ("n1.notes", "n1", 2) == (adopted.of_agent, adopted.node, adopted.turns)
    code, verdict = fleet.audit()
    assert 0 == verdict["broken"], verdict
    assert verdict["named_rows"]["present"] >= 2 + 2 * 6
    with fleet.node("n1") as one:
        assert 410 == call(one, "GET", "/v1/agents/n1.notes").status_code
        assert 410 == call(one, "POST", "/v1/agents", agent_id="notes").status_code
        assert 0 == one.stop()


def test_a_turn_in_progress_is_not_cut(fleet: Fleet, lengthy: Any):
    """The agent is not released while it answers; nothing was changed, and the turn is kept."""
    with fleet.node("n1") as one, fleet.node("n2") as two:
        call(one, "POST", "/v1/agents", agent_id="notes")
        body = {"messages": [lengthy[0]["messages"][0]], "max_tokens": 400, "stream": True}
        body = {**lengthy[0], **body}
        where = f"{one.url}/v1/agents/n1.notes/generate"
        with httpx.stream("POST", where, json=body, timeout=60) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith("data: ")
            code, out = move(fleet, "n1.notes", "n2", {"n1": one, "n2": two})
            assert (2, True) == (code, "is answering another request" in out), out
            assert "Nothing was changed." in out
            assert "data: [DONE]" in [*lines]
        code, out = move(fleet, "n1.notes", "n2", {"n1": one, "n2": two})
        assert (0, True) == (code, "with 1 turn" in out), out
        one.wait_idle()
        two.wait_idle()
        assert (0, 0) == (one.stop(), two.stop())
    fleet.assert_valid("n1", "n2")


def test_a_node_that_is_dead(fleet: Fleet):
    """
    The command releases its agent in its journal. When it starts again, it does not serve the
    agent.
    """
    with fleet.node("n1") as one, fleet.node("n2") as two:
        call(one, "POST", "/v1/agents", agent_id="notes")
        call(one, "POST", "/v1/agents", agent_id="short", persist=False)
        say(one, "n1.notes", "Hello! My name is Jordis.")
        one.kill()
        code, out = move(fleet, "n1.short", "n2", {"n2": two})
        assert (2, True) == (code, "(persist: false), and n1 does not run" in out), out
        code, out = move(fleet, "n1.notes", "n2", {"n2": two})
        assert (0, True) == (code, "it is n2.notes now, with 1 turn" in out), out
        code, out = move(fleet, "n1.short", "n2", {"n2": two, "n3": two})
        assert (2, True) == (code, "only n1 and n2 are asked" in out), out
        with fleet.node("n1") as again:
            assert 410 == call(again, "GET", "/v1/agents/n1.notes").status_code
            call(again, "POST", "/v1/agents", agent_id="copy")
            say(again, "n1.copy", "Hello! My name is Jordis.")
            due, _ = say(again, "n1.copy", "What is my name?")
            assert due == say(two, "n2.notes", "What is my name?")[0]
            again.wait_idle()
            assert 0 == again.stop()
        two.wait_idle()
        assert 0 == two.stop()
    fleet.assert_valid("n1", "n2")
    assert 0 == fleet.audit()[0]


def test_a_handover_that_was_cut_short(fleet: Fleet):
    """
    Between the two rows no node serves the agent, also after both were killed. The same command
    finishes it. Other tenants can neither release nor adopt it.
    """
    options = ("--api-key", f"alice={ALICES}", "--api-key", f"bob={BOBS}")
    alice, bob = ({"authorization": f"Bearer {key}"} for key in (ALICES, BOBS))
    with fleet.node("n1", *options) as one, fleet.node("n2", *options) as two:
        agents = {node: f"{node.url}/v1/agents" for node in (one, two)}
        httpx.post(agents[one], json={"agent_id": "notes"}, headers=alice, timeout=60)
        say(one, "n1.notes", "Hello! My name is Jordis.", ALICES)
        release = (f"{agents[one]}/n1.notes/release", {"to": "n2.notes"})
        adopt = (f"{agents[two]}/n2.notes/adopt", {"source": "n1.notes"})

        def sent(call: tuple[str, Any], headers: Any, **body: str) -> tuple[int, str]:
            answer = httpx.post(call[0], json={**call[1], **body}, headers=headers, timeout=60)
            return answer.status_code, answer.text

        code, text = sent(adopt, alice)
        assert (409, True) == (code, "agent_not_released" in text)
        assert 404 == sent(release, bob)[0]
        assert 404 == sent(adopt, bob)[0]
        for to in ("n9.notes", "n1.other"):
            code, text = sent(release, alice, to=to)
            assert (409, True) == (code, "there is no other node" in text), text
        for to in ("notes", "", "N2.notes"):
            assert 400 == sent(release, alice, to=to)[0]
        assert 200 == sent(release, alice)[0]
        assert 200 == sent(release, alice)[0]  # done before
        assert 410 == sent(release, alice, to="n2.other")[0]
        assert 404 == sent(adopt, bob)[0]
        one.kill()
        two.kill()
    with fleet.node("n1", *options) as one, fleet.node("n2", *options) as two:
        for node, name, due in ((one, "n1.notes", 410), (two, "n2.notes", 404)):
            found = httpx.get(f"{node.url}/v1/agents/{name}", headers=alice, timeout=60)
            assert due == found.status_code
        nodes = {"n1": one, "n2": two}
        code, out = move(fleet, "n1.notes", "n2", nodes, "--api-key", BOBS)
        assert (2, True) == (code, "not found on n1" in out), out
        code, out = move(fleet, "n1.notes", "n2", nodes)
        assert (2, True) == (code, "--api-key" in out), out
        code, out = move(fleet, "n1.notes", "n2", nodes, "--api-key", ALICES)
        assert (0, True) == (code, "it is n2.notes now, with 1 turn" in out), out
        say(two, "n2.notes", "What is my name?", ALICES)
        gone = httpx.delete(f"{two.url}/v1/agents/n2.notes", headers=alice, timeout=60)
        assert 200 == gone.status_code
        code, out = move(fleet, "n1.notes", "n2", nodes, "--api-key", ALICES)
        assert (2, True) == (code, "was adopted before, and deleted since" in out), out
        assert (0, 0) == (one.stop(), two.stop())
    fleet.assert_valid("n1", "n2")
    assert 0 == fleet.audit()[0]


def test_only_the_agent_of_the_key_is_released(fleet: Fleet):
    """On a node that is dead, too: two tenants have agents of one name."""
    options = ("--api-key", f"alice={ALICES}", "--api-key", f"bob={BOBS}")
    with fleet.node("n1", *options) as one, fleet.node("n2", *options) as two:
        for key in (ALICES, BOBS):
            named = {"authorization": f"Bearer {key}"}
            httpx.post(
                f"{one.url}/v1/agents", json={"agent_id": "notes"}, headers=named, timeout=60
            )
        one.kill()
        code, out = move(fleet, "n1.notes", "n2", {"n2": two}, "--api-key", BOBS)
        assert (0, True) == (code, "it is n2.notes now" in out), out
        assert 0 == two.stop()
    (released,) = fleet.of_kind("n1", ev.SessionReleased)
    (adopted,) = fleet.of_kind("n2", ev.SessionAdopted)
    assert ("bob", "bob") == (released.tenant, adopted.tenant)


def prune(fleet: Fleet, node: str) -> None:
    """Prune the journal of a node that does not run, whatever its age."""
    how = ("--before", "0s", "--recent", "--close-idle")
    code, out, err = run_ops("journal", "prune", *fleet.where(node), *how)
    assert 0 == code, out + err


@pytest.mark.long
def test_along_three_nodes_with_prunes(fleet: Fleet):
    """
    The source is pruned before and after the release, and the target after the adoption. The agent
    has tools, its answers have the same bits on each node, and it may get another name than that of
    its release, if that is taken.
    """
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    with fleet.node("n1") as one:
        call(one, "POST", "/v1/agents", agent_id="notes", tools=[tool], max_context=900)
        say(one, "n1.notes", "Hello! My name is Jordis.")
        call(one, "POST", "/v1/agents/n1.notes/fork", agent_id="copy")
        one.wait_idle()
        assert 0 == one.stop()
    prune(fleet, "n1")
    with fleet.node("n1") as one, fleet.node("n2") as two:
        known = turns(one, "n1.notes")
        taken = call(two, "POST", "/v1/agents", agent_id="taken")
        assert 200 == taken.status_code
        release = call(one, "POST", "/v1/agents/n1.notes/release", to="n2.taken")
        assert 200 == release.status_code
        one.wait_idle()
        assert 0 == one.stop()
        prune(fleet, "n1")
        code, out = move(fleet, "n1.notes", "n2", {"n2": two}, "--as", "taken")
        assert (2, True) == (code, "taken" in out), out
        code, out = move(fleet, "n1.notes", "n2", {"n2": two})
        assert (0, True) == (code, "it is n2.notes now, with 1 turn" in out), out
        code, out = move(fleet, "n1.notes", "n2", {"n2": two}, "--as", "more")
        assert (2, True) == (code, "it is 'n2.notes' here" in out), out
        two.wait_idle()
        assert 0 == two.stop()
    prune(fleet, "n2")
    with fleet.node("n1") as one, fleet.node("n2") as two, fleet.node("n3") as three:
        assert known == turns(two, "n2.notes")
        assert say(one, "n1.copy", "And then?")[0] == say(two, "n2.notes", "And then?")[0]
        nodes = {"n2": two, "n3": three}
        code, out = move(fleet, "n2.notes", "n3", nodes)
        assert (0, True) == (code, "it is n3.notes now, with 2 turns" in out), out
        assert say(one, "n1.copy", "Bye")[0] == say(three, "n3.notes", "Bye")[0]
        made = call(three, "GET", "/v1/agents/n3.notes").json()
        assert ([tool], 900) == (made["tools"], made["max_context"])
        for node in (one, two, three):
            node.wait_idle()
            assert 0 == node.stop()
    fleet.assert_valid("n1", "n2", "n3")
    code, verdict = fleet.audit()
    assert 0 == verdict["broken"], verdict
