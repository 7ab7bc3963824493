"""Agents over HTTP: which commands the service gets, what is answered, and what is refused."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cairn.actors.errors import AgentBusy, TooManyAgents
from cairn.actors.requests.messages import Generate
from cairn.engine.answer.parts import Called
from cairn.engine.prompt.template import Message
from cairn.http.access.keys import Keys
from cairn.http.agents.requests import read_fork, read_new_agent
from cairn.http.app import create_app
from cairn.http.wire.checks import ClientError
from cairn.http.wire.parameters import Ignored
from tests.http.agents.fake_agents import TURN
from tests.http.fake_service import FakeService
from tests.http.wire.bad_bodies import HELLO, say

pytestmark = pytest.mark.trio

LOOK = {"type": "function", "function": {"name": "look"}}


async def call(service: FakeService, method: str, path: str, body: Any = None, **more: Any) -> Any:
    """What an address answers: its status and its body."""
    client = create_app(service, **more.pop("app", {})).test_client()
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    response = await client.open(f"/v1/agents{path}", method=method, data=data, **more)
    text = await response.get_data(as_text=True)
    return response.status_code, json.loads(text) if text.startswith("{") else text


def refused(answer: Any) -> tuple[int, str, str | None]:
    """The status, code and parameter of a refusal."""
    status, body = answer
    assert {"message", "type", "param", "code"} == body["error"].keys()
    return status, body["error"]["code"], body["error"]["param"]


def asked(service: FakeService) -> Generate:
    """The only command that the service got."""
    (command,) = service.commands
    return command


async def test_an_agent_is_created_listed_and_deleted():
    """The agent has what it was created with; its times are plausible dates."""
    service = FakeService()
    new = {
        "agent_id": "notes",
        "model": "small",
        "system_prompt": "Be brief.",
        "tools": [LOOK],
        "max_context": 1000,
        "persist": False,
        "colour": "red",
    }
    status, made = await call(service, "POST", "", new)
    facts = {
        "object": "agent",
        "agent_id": "notes",
        "model": "small",
        "status": "warm",
        "turns": 0,
        "context_tokens": 0,
        "context_left": 955,
        "finish_reason": None,
        "max_context": 1000,
        "persist": False,
        "forked_from": None,
        "adopted_from": None,
        "created": "2023-11-14T22:13:20Z",
        "last_accessed": "2023-11-14T22:15:00Z",
    }
    assert (200, {**facts, "ignored": ["colour"]}) == (status, made)
    assert (200, {"object": "list", "agents": [facts]}) == await call(service, "GET", "")
    own = {"system_prompt": "Be brief.", "tools": [LOOK]}
    assert (200, {**facts, **own}) == await call(service, "GET", "/notes")
    gone = {"object": "agent", "agent_id": "notes", "deleted": True}
    assert (200, gone) == await call(service, "DELETE", "/notes")
    assert (404, "agent_not_found", None) == refused(await call(service, "DELETE", "/notes"))


async def test_an_agent_without_a_name_gets_one():
    """It also gets the served model, no system prompt, and no expiry."""
    service = FakeService()
    _, one = await call(service, "POST", "", {"system_prompt": ""})
    _, other = await call(service, "POST", "", {"agent_id": None})
    assert one["agent_id"] != other["agent_id"]
    assert (True, "cairn/small-1") == (one["persist"], one["model"])
    _, found = await call(service, "GET", f"/{one['agent_id']}")
    assert (None, []) == (found["system_prompt"], found["tools"])


async def test_only_what_is_new_is_sent():
    """The prompt begins with the agent's history, and the turn continues its session."""
    service = FakeService()
    service.agents.have(
        "notes", TURN, system="Be brief.", tools=(LOOK,), model="small", max_context=900
    )
    body = {"messages": HELLO, "temperature": 0, "tool_choice": "required", "colour": "red"}
    body["prompt_cache_key"] = "talk-1"
    status, answer = await call(service, "POST", "/notes/generate", body)
    assert (200, "chat.completion", ["colour", "prompt_cache_key"]) == (
        status,
        answer["object"],
        answer["cairn"]["ignored"],
    )
    command = asked(service)
    assert command.conversation is not None
    assert command.keep is not None
    assert (Message(role="user", content="Hello"),) == command.keep.asked
    assert [
        ("system", "Be brief."),
        ("user", "The stone lies on the path."),
        ("tool", "Rain."),
        ("assistant", "So it does."),
        ("user", "Hello"),
    ] == [(message.role, message.content) for message in command.conversation.messages]
    assert (LOOK,) == command.conversation.tools
    assert ("notes", "req-0", "agent/notes", 900, "small", "cairn.agents") == (
        command.keep.agent,
        command.keep.previous,
        command.session_name,
        command.context_max,
        command.requested_model,
        command.protocol,
    )
    assert command.constraint is not None
    assert command.group is None


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    "path", ["chat/completions", "responses", "messages", "agents/notes/generate"]
)
async def test_every_answer_has_the_context_that_is_left(path: str, stream: bool):
    """Every answer has a header with the context that is left after the prompt."""
    service = FakeService()
    service.agents.have("notes")
    client = create_app(service).test_client()
    fields = {"input": "Hello"} if path == "responses" else {"messages": HELLO, "max_tokens": 9}
    response = await client.post(f"/v1/{path}", data=json.dumps({**fields, "stream": stream}))
    assert (200, "2048") == (response.status_code, response.headers["x-cairn-context-left"])


async def test_an_answer_is_streamed():
    """The stream has the form of a chat completion; a named model overrides the agent's."""
    service = FakeService()
    service.agents.have("notes", model="small")
    body = {"messages": HELLO, "stream": True, "model": "large"}
    status, text = await call(
        service, "POST", "/notes/generate", body, headers={"x-session-id": "group"}
    )
    assert (200, True) == (status, text.endswith("data: [DONE]\n\n"))
    assert "chat.completion.chunk" in text
    assert ("large", None) == (asked(service).requested_model, asked(service).group)


async def test_the_history_is_listed_turn_by_turn():
    """Turns are listed as messages that could be sent again."""
    service = FakeService()
    service.agents.have("notes", TURN)
    status, turns = await call(service, "GET", "/notes/turns")
    function = {"name": "look", "arguments": '{"far":true}'}
    turn = {
        "turn": 1,
        "request": "req-0",
        "created": "2023-11-14T22:13:20Z",
        "messages": [
            {"role": "user", "content": "The stone lies on the path."},
            {"role": "tool", "content": "Rain.", "tool_call_id": "c1"},
        ],
        "answer": {
            "role": "assistant",
            "content": "So it does.",
            "reasoning_content": "Hm.",
            "tool_calls": [{"id": "c2", "type": "function", "function": function}],
        },
        "finish_reason": "stop",
        "context_tokens": 45,
    }
    assert (200, {"object": "list", "agent_id": "notes", "data": [turn]}) == (status, turns)
    _, agent = await call(service, "GET", "/notes")
    assert "stop" == agent["finish_reason"]


async def test_a_call_whose_arguments_are_no_object():
    """The history has the text that the model wrote."""
    service = FakeService()
    broken = Called(index=0, id="c1", name="look", arguments='{"far": ')
    service.agents.have("notes", attrs.evolve(TURN, parts=(broken,)))
    _, turns = await call(service, "GET", "/notes/turns")
    (sent,) = turns["data"][0]["answer"]["tool_calls"]
    assert '{"far": ' == sent["function"]["arguments"]


async def test_an_agent_is_forked():
    """After a named turn, or after the last one; the body may be left out."""
    service = FakeService()
    service.agents.have("notes", TURN)
    status, made = await call(service, "POST", "/notes/fork", {"agent_id": "aside", "turn": 0})
    assert (200, "aside", "notes", 0) == (
        status,
        made["agent_id"],
        made["forked_from"],
        made["turns"],
    )
    _, made = await call(service, "POST", "/notes/fork", b"")
    assert 1 == made["turns"]
    for body, due in (
        ({"turn": 2}, (400, "invalid_value", "turn")),
        ({"turn": -1}, (400, "invalid_value", "turn")),
        ({"agent_id": "aside"}, (409, "agent_exists", "agent_id")),
        ({"agent_id": "a/b"}, (400, "invalid_value", "agent_id")),
    ):
        assert due == refused(await call(service, "POST", "/notes/fork", body)), body
    assert (404, "agent_not_found", None) == refused(
        await call(service, "POST", "/unknown/fork", {})
    )


@pytest.mark.parametrize("slip", ["turns", "Turn", "turn_number", "at_turn", "name"])
async def test_a_fork_with_a_field_that_there_is_not(slip: str):
    """An unknown field is refused, also next to a turn; no fork after the last turn is made."""
    service = FakeService()
    service.agents.have("notes", TURN)
    for more in ({}, {"turn": 1}):
        status, body = await call(service, "POST", "/notes/fork", {slip: 0, **more})
        assert (400, "invalid_value", slip) == refused((status, body))
        assert (
            f"unknown field {slip}: a fork accepts only agent_id and turn. Nothing was forked"
            == (body["error"]["message"])
        )
    assert ["notes"] == [one.name for one in service.for_tenant("local").agents.all()]
    status, made = await call(service, "POST", "/notes/fork", {slip: None, "turn": 1})
    assert (200, 1) == (status, made["turns"])


async def test_a_new_agent_with_other_names_for_its_fields():
    """
    Other names for fields are ignored, and the answer suggests the right ones if they are missing.
    """
    body = {"name": "bob", "system": "Be brief."}
    _, made = await call(FakeService(), "POST", "", body)
    assert [
        "name (did you mean agent_id?)",
        "system (did you mean system_prompt?)",
    ] == made["ignored"]
    _, made = await call(FakeService(), "POST", "", {"agent_id": "bob", "name": "Bob"})
    assert ["name"] == made["ignored"]


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        (b"", "invalid_json", None),
        (b"[]", "invalid_type", None),
        (b'{"agent_id": 7}', "invalid_type", "agent_id"),
        (b'{"agent_id": ""}', "invalid_value", "agent_id"),
        (b'{"agent_id": "../x"}', "invalid_value", "agent_id"),
        (b'{"agent_id": "notes\\n"}', "invalid_value", "agent_id"),
        (b'{"model": ["m"]}', "invalid_type", "model"),
        (b'{"model": "%s"}' % (b"m" * 201), "invalid_value", "model"),
        (b'{"system_prompt": {}}', "invalid_type", "system_prompt"),
        (b'{"tools": [{}]}', "unsupported_value", "tools[0]"),
        (b'{"max_context": 1}', "invalid_value", "max_context"),
        (b'{"max_context": 1.5}', "invalid_type", "max_context"),
        (b'{"persist": "yes"}', "invalid_type", "persist"),
        (b'{"persist": true', "invalid_json", None),
    ],
)
async def test_a_body_that_makes_no_agent(body: bytes, code: str, param: str | None):
    """Each is refused with its parameter, and no agent is created."""
    service = FakeService()
    assert (400, code, param) == refused(await call(service, "POST", "", body))
    assert {} == service.agents.held


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        (b"", "invalid_json", None),
        (b"{}", "missing_required_parameter", "messages"),
        (b'{"messages": []}', "invalid_value", "messages"),
        (say(tools=[LOOK]), "unsupported_value", "tools"),
        (say(session_id="mine"), "unsupported_value", "session_id"),
        (say(system_prompt="Be long."), "unsupported_value", "system_prompt"),
        (say(n=2), "unsupported_value", "n"),
        (say(tool_choice="required"), "invalid_value", "tool_choice"),
        (say(temperature=-1), "invalid_value", "temperature"),
    ],
)
async def test_a_body_that_cannot_be_used(body: bytes, code: str, param: str | None):
    """Each is refused with its parameter, and the service gets no command."""
    service = FakeService()
    service.agents.have("notes")
    found = refused(await call(service, "POST", "/notes/generate", body))
    assert (400, code, param) == found
    assert [] == service.commands


async def test_an_agent_that_is_not_there():
    """Every endpoint answers 404 for an agent that does not exist or is another tenant's."""
    service = FakeService()
    service.agents.have("notes", tenant="bob")
    for method, path, body in (
        ("GET", "/notes", None),
        ("GET", "/notes/turns", None),
        ("DELETE", "/notes", None),
        ("POST", "/notes/fork", {}),
        ("POST", "/notes/generate", {"messages": HELLO}),
    ):
        found = refused(await call(service, method, path, body))
        assert (404, "agent_not_found", None) == found, (method, path)
    keys = {"keys": Keys([("alice", "a"), ("bob", "b")])}
    for key, due in (("a", 404), ("b", 200)):
        more: Any = {"app": keys, "headers": {"x-api-key": key}}
        assert due == (await call(service, "GET", "/notes", **more))[0]
    assert (405, "method_not_allowed", None) == refused(await call(service, "PUT", "/notes"))


async def test_a_busy_agent():
    """A busy agent and one agent too many are both 409; only the first is worth a retry."""
    service = FakeService(refusal=AgentBusy("notes", "is answering another request"))
    service.agents.have("notes")
    service.agents.busy.add("notes")
    client = create_app(service).test_client()
    for method, path, body in (
        ("POST", "/generate", say()),
        ("DELETE", "", b""),
    ):
        ask = client.post if method == "POST" else client.delete
        response = await ask(f"/v1/agents/notes{path}", data=body)
        found = json.loads(await response.get_data(as_text=True))
        assert (409, "1", "agent_busy") == (
            response.status_code,
            response.headers["retry-after"],
            found["error"]["code"],
        )
    refusal = refused(await call(service, "POST", "", {"agent_id": "notes"}))
    assert (409, "agent_exists", "agent_id") == refusal
    service.refusal = TooManyAgents(1000)
    refusal = refused(await call(service, "POST", "/notes/generate", say()))
    assert (409, "too_many_agents", None) == refusal


async def test_an_answer_that_the_client_began():
    """An agent stores each answer as a message of its own, so it cannot continue one."""
    service = FakeService()
    service.agents.have("notes")
    begun = [*HELLO, {"role": "assistant", "content": "It", "prefix": True}]
    found = refused(await call(service, "POST", "/notes/generate", {"messages": begun}))
    assert (400, "unsupported_value", "messages") == found


async def test_a_model_that_is_not_served():
    """
    With strict names it is refused, for a new agent and for one whose model is no longer served.
    """
    service = FakeService()
    service.agents.have("notes", model="other")
    strict = {"app": {"strict_model_names": True}}
    for path, body in (("", {"model": "other"}), ("/notes/generate", {"messages": HELLO})):
        found = refused(await call(service, "POST", path, body, **strict))
        assert (404, "model_not_found", "model") == found
    named = {"messages": HELLO, "model": "cairn/small-1"}
    assert 200 == (await call(service, "POST", "/notes/generate", named, **strict))[0]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
async def test_names_of_agents_sessions_are_reserved(path: str):
    """A client cannot use an agent's session by its name."""
    service = FakeService()
    client = create_app(service).test_client()
    body = {"messages": HELLO, "input": "x", "max_tokens": 9, "session_id": "agent/notes"}
    response = await client.post(path, data=json.dumps(body))
    found = json.loads(await response.get_data(as_text=True))
    assert 400 == response.status_code
    assert "session_id must not begin with 'agent/'" in found["error"]["message"]
    assert [] == service.commands


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=6,
)


async def test_an_agent_of_a_node():
    """On a node of a fleet, the name of the node comes before that of the agent."""
    service = FakeService()
    service.facts = attrs.evolve(service.facts, node="n1")
    named, body = await call(service, "POST", "", {"agent_id": "notes"})
    assert (200, "n1.notes") == (named, body["agent_id"])
    forked, body = await call(service, "POST", "/n1.notes/fork", {"agent_id": "n1.other"})
    assert (200, "n1.other") == (forked, body["agent_id"])
    _, body = await call(service, "POST", "", {})
    assert body["agent_id"].startswith("n1.agent-")
    for name, names in (("notes", True), ("n1.none", False)):
        status, body = await call(service, "GET", f"/{name}")
        assert (404, "agent_not_found") == (status, body["error"]["code"])
        assert names == ("(ids here are like n1.NAME)" in body["error"]["message"])
    for name in ("a" * 62, "."):
        status, body = await call(service, "POST", "", {"agent_id": name})
        assert (400, "agent_id") == (status, body["error"]["param"])
        assert "1 to 61 letters" in body["error"]["message"]


FIELDS = st.sampled_from(
    ["agent_id", "model", "system_prompt", "tools", "max_context", "persist", "turn", "x"]
)


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(st.dictionaries(FIELDS, JSON) | JSON | st.binary(max_size=40))
async def test_any_body_makes_an_agent_or_a_refusal(body: Any):
    """Any body creates an agent or is refused; there is no other outcome."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    with contextlib.suppress(ClientError):
        read_new_agent(data, Ignored())
    with contextlib.suppress(ClientError):
        read_fork(data)


async def test_an_agent_is_handed_over():
    """Its old name answers 410 with the new one, whatever is asked; that is done once."""
    service = FakeService()
    service.agents.have("n1.notes", TURN)
    service.agents.elsewhere["local", "n2.come"] = service.agents.held["local", "n1.notes"]
    service.facts = attrs.evolve(service.facts, node="n1")
    due = {"object": "agent", "agent_id": "n1.notes", "released_to": "n2.notes"}
    for _ in range(2):
        assert (200, due) == await call(service, "POST", "/n1.notes/release", {"to": "n2.notes"})
    for method, path, body in (
        ("GET", "/n1.notes", None),
        ("GET", "/n1.notes/turns", None),
        ("DELETE", "/n1.notes", None),
        ("POST", "/n1.notes/fork", {}),
        ("POST", "/n1.notes/generate", {"messages": HELLO}),
        ("POST", "/n1.notes/release", {"to": "n3.notes"}),
    ):
        found = await call(service, method, path, body)
        assert (410, "agent_released", None) == refused(found), (method, path)
        assert "'n2.notes'; use that name" in found[1]["error"]["message"]
    answer = await create_app(service).test_client().get("/v1/agents/n1.notes")
    assert "n2.notes" == answer.headers["x-cairn-agent"]

    status, made = await call(service, "POST", "/n1.here/adopt", {"source": "n2.come"})
    assert (200, "n1.here", "n2.come", 1) == (
        status,
        made["agent_id"],
        made["adopted_from"],
        made["turns"],
    )
    found = refused(await call(service, "POST", "/n1.more/adopt", {"source": "n2.none"}))
    assert (404, "agent_not_found", "source") == found
    assert 404 == (await call(service, "POST", "/n1.none/release", {"to": "n2.notes"}))[0]
    service.agents.not_released.add("n2.held")
    answer = (
        await create_app(service)
        .test_client()
        .post("/v1/agents/n1.more/adopt", json={"source": "n2.held"})
    )
    assert (409, "local") == (answer.status_code, answer.headers["x-cairn-tenant"])


async def test_a_deletion_says_where_the_agent_is():
    """Of one that was handed over, only what its old node has is deleted."""
    service = FakeService()
    service.agents.have("n1.notes", TURN)
    service.agents.released["local", "n1.notes"] = "n2.notes"
    due = {"object": "agent", "agent_id": "n1.notes", "deleted": True, "released_to": "n2.notes"}
    assert (200, due) == await call(service, "DELETE", "/n1.notes")
    assert 410 == (await call(service, "DELETE", "/n1.notes"))[0]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("n1.notes/release", {}),
        ("n1.notes/release", {"to": "notes"}),
        ("n1.notes/release", {"to": "N2.notes"}),
        ("n1.notes/release", {"to": "n2."}),
        ("n1.notes/release", {"to": "n2.a b"}),
        ("n1.notes/release", {"to": "n2.notes", "turn": 1}),
        ("n1.notes/adopt", {"source": 1}),
        ("n1.notes/adopt", {"source": "n2.notes", "to": "n1.notes"}),
        ("notes/adopt", {"source": "n2.notes"}),
    ],
)
async def test_a_body_that_hands_nothing_over(path: str, body: Any):
    """It is refused, and nothing is changed."""
    service = FakeService()
    service.agents.have("n1.notes", TURN)
    service.facts = attrs.evolve(service.facts, node="n1")
    assert 400 == (await call(service, "POST", f"/{path}", body))[0]
    assert [("local", "n1.notes")] == list(service.agents.held)
