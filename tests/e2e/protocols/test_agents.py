"""
Agents against the whole server: Pebble, a restart, a fork, and a prune of all their rows.
"""

from __future__ import annotations

from typing import Any

import httpx

from cairn.journal import events as ev
from tests.e2e.conftest import Start
from tests.support.processes.subprocess_server import (
    DEADLINE_S,
    Serving,
    ask,
    assert_valid,
    run_ops,
    user,
)

PATH = "The stone lies on the path, and the path goes over the hill. "


def call(server: Serving, method: str, path: str = "", **body: Any) -> httpx.Response:
    """The answer of an agent endpoint."""
    return httpx.request(
        method, f"{server.url}/v1/agents{path}", json=body or None, timeout=DEADLINE_S
    )


def generate(server: Serving, name: str, text: str, **fields: Any) -> Any:
    """An agent's answer."""
    asked = {"messages": [user(text)], "temperature": 0, "max_tokens": 30, **fields}
    response = call(server, "POST", f"/{name}/generate", **asked)
    assert 200 == response.status_code, response.text
    assert 0 < int(response.headers["x-cairn-context-left"]) < 4000
    return response.json()


def test_an_agent_outlives_a_restart_and_a_prune(start: Start):
    """
    Only new messages are sent, and the answers are those of a client that sends everything; a fork
    reuses the existing blocks. After all rows were pruned, the base has the histories.
    """
    server = start()
    ask(server, user("This was before there were agents."))
    new = call(
        server, "POST", agent_id="notes", system_prompt="You are a guide.", max_context=4000
    ).json()
    assert ("notes", "cold", 4000) == (new["agent_id"], new["status"], new["context_left"])
    first = generate(server, "notes", PATH * 20)
    server.wait_idle()
    assert 0 == server.stop()

    again = start(data_dir=server.data_dir)
    (held,) = call(again, "GET").json()["agents"]
    assert ("warm", 1, first["usage"]["total_tokens"]) == (
        held["status"],
        held["turns"],
        held["context_tokens"],
    )
    second = generate(again, "notes", "And then?")
    assert ("agent/notes", "continuation") == (
        second["cairn"]["session"],
        second["cairn"]["path"],
    )
    reused = second["cairn"]["reused_tokens"]
    assert reused >= first["usage"]["prompt_tokens"] // 64 * 64 > 0
    said = first["choices"][0]["message"]["content"]
    system = {"role": "system", "content": "You are a guide."}
    whole = [system, user(PATH * 20), {"role": "assistant", "content": said}, user("And then?")]
    plain = ask(again, *whole, temperature=0, max_tokens=30, cache_prompt=False)
    assert second["choices"][0]["message"]["content"] == plain.text

    forked = call(again, "POST", "/notes/fork", agent_id="aside", turn=1).json()
    assert ("notes", 1) == (forked["forked_from"], forked["turns"])
    aside = generate(again, "aside", "And then?")
    assert second["choices"] == aside["choices"]
    assert aside["cairn"]["reused_tokens"] >= reused
    assert {"agent/aside", "agent/notes"} <= {one["session"] for one in again.health()["contexts"]}
    streamed = call(
        again, "POST", "/notes/generate", messages=[user("Who?")], max_tokens=5, stream=True
    )
    assert streamed.text.endswith("data: [DONE]\n\n")
    (_, *turns) = call(again, "GET", "/notes/turns").json()["data"]
    assert ["And then?", "Who?"] == [turn["messages"][0]["content"] for turn in turns]
    refused = again.post(messages=[user("x")], session_id="agent/notes")
    assert 400 == refused.status_code
    code, out, _ = run_ops("agents", "--data-dir", again.data_dir)
    assert (0, ["notes", "aside"]) == (code, [line.split("\t")[0] for line in out.splitlines()[1:]])
    assert 200 == call(again, "DELETE", "/notes").status_code
    assert 404 == call(again, "GET", "/notes").status_code
    again.wait_idle()
    assert 0 == again.stop()

    where = ("--data-dir", again.data_dir)
    code, out, _ = run_ops("journal", "prune", *where, "--before", "0s", "--recent", "--close-idle")
    assert (0, True) == (code, "; 0 rows stay\n" in out), out
    assert_valid(again.data_dir)
    code, out, _ = run_ops("agents", "show", "aside", *where)
    assert (0, True) == (code, "You are a guide." in out)
    assert "And then?" in out
    third = start(data_dir=again.data_dir)
    last = generate(third, "aside", "Who?")
    assert last["usage"]["prompt_tokens"] > aside["usage"]["total_tokens"]
    turns = call(third, "GET", "/aside/turns").json()["data"]
    assert [1, 2, 3] == [turn["turn"] for turn in turns]
    assert [] == third.events(ev.AgentCreated)
    third.wait_idle()
    assert 0 == third.stop()
    assert_valid(again.data_dir)
