"""Ollama's requests: what becomes of their fields, and which are refused."""

from __future__ import annotations

import json
from typing import Any

import attrs
import pytest

from cairn.actors.requests.messages import Generate
from cairn.engine.answer.grammar import ANY_OBJECT
from cairn.engine.prompt.template import Message
from cairn.engine.ttl import MOST_S
from cairn.http.app import create_app
from cairn.http.ollama import errors
from cairn.http.wire.placeholders import IMAGE
from tests.http.fake_service import FACTS, FakeService

pytestmark = pytest.mark.trio

HELLO: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
INFILL = attrs.evolve(FACTS, infill=("<P>", "<S>", "<M>"))


async def post(path: str, service: FakeService | None = None, **fields: Any) -> tuple[int, Any]:
    """The status and the body of the answer to a request of these fields, as a whole."""
    client = create_app(service or FakeService()).test_client()
    body = json.dumps({"stream": False, **fields})
    response = await client.post(f"/api/{path}", data=body)
    return response.status_code, json.loads(await response.get_data(as_text=True))


async def command(path: str, facts: Any = FACTS, **fields: Any) -> tuple[Generate, list[str]]:
    """The command of a request, and what is ignored of it."""
    service = FakeService()
    service.facts = facts
    status, body = await post(path, service, **fields)
    assert 200 == status, body
    (found,) = service.commands
    return found, body["cairn"].get("ignored", [])


async def chat(facts: Any = FACTS, **fields: Any) -> tuple[Generate, list[str]]:
    """The same for a conversation."""
    return await command("chat", facts, **{"messages": HELLO, **fields})


async def test_options_under_our_names():
    """Each is read; negative numbers of tokens, and the seed -1, mean none."""
    options = {
        "num_predict": 9,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.05,
        "seed": 7,
        "stop": ["a", ""],
        "repeat_penalty": 1.1,
        "presence_penalty": 0.25,
        "frequency_penalty": 0.125,
    }
    found, ignored = await chat(options=options)
    assert [] == ignored
    assert (9, 7, ("a",)) == (found.max_tokens, found.seed, found.stop)
    asked = found.sampling
    assert (0.5, 0.9, 40, 0.05) == (asked.temperature, asked.top_p, asked.top_k, asked.min_p)
    assert (1.1, 0.25, 0.125) == (
        asked.repetition_penalty,
        asked.presence_penalty,
        asked.frequency_penalty,
    )
    none, _ = await chat(options={"num_predict": -2, "seed": -1, "top_k": -1, "stop": "b"})
    assert (None, None, 0, ("b",)) == (
        none.max_tokens,
        none.seed,
        none.sampling.top_k,
        none.stop,
    )
    bare, _ = await chat()
    assert (FACTS.defaults, ()) == (bare.sampling, bare.stop)


async def test_what_has_no_effect_is_reported():
    """Options of Ollama's runner, and fields beside the options where Ollama does not read them."""
    _, ignored = await chat(
        options={"num_ctx": 4096, "num_gpu": None}, temperature=0, max_tokens=3, keep_alive=0
    )
    assert [
        "keep_alive",
        "max_tokens (did you mean options.num_predict?)",
        "options.num_ctx",
        "temperature (did you mean options.temperature?)",
    ] == ignored


@pytest.mark.parametrize(
    ("keep_alive", "seconds"),
    [
        ("5m", 300),
        ("1h30m", 5400),
        ("1.5h", 5400),
        ("300ms", 1),
        ("60", 60),
        (90.5, 91),
        ("24h", 86_400),
        (-1, MOST_S),
        ("-1m", MOST_S),
        (1e30, MOST_S),
    ],
)
async def test_keep_alive_keeps_the_cache(keep_alive: Any, seconds: int):
    """It is the least time for which what was computed is kept; negative is no end."""
    found, ignored = await chat(keep_alive=keep_alive)
    assert (seconds, []) == (found.least_ttl_s, ignored)


async def test_messages():
    """They become those of chat completions; roles may be in capitals."""
    call = {"function": {"name": "look", "arguments": {"city": "Rom"}}}
    talk = [
        {"role": "System", "content": "Be brief."},
        {"role": "user", "content": "Look", "images": ["AAAA"]},
        {"role": "assistant", "content": "", "thinking": "Hm", "tool_calls": [call]},
        {"role": "tool", "content": "sunny", "tool_name": "look", "images": ["AAAA"]},
        {"role": "user", "content": "And?"},
    ]
    found, ignored = await chat(messages=talk, tools=[TOOL])
    assert found.conversation is not None
    made = {"id": "call00000", "type": "function", **call}
    assert (
        Message(role="system", content="Be brief."),
        Message(role="user", content=f"Look{IMAGE}"),
        Message(role="assistant", content="", reasoning="Hm", tool_calls=(made,)),
        Message(role="tool", content=f"sunny{IMAGE}", name="look", tool_call_id="call00000"),
        Message(role="user", content="And?"),
    ) == found.conversation.messages
    assert (("look",), False) == (
        tuple(tool["function"]["name"] for tool in found.conversation.tools),
        found.conversation.continued,
    )
    assert ["messages.images"] == ignored


async def test_calls_and_results_without_ids():
    """Each call gets one, and each result that of the first call without a result."""
    function = {"name": "look", "arguments": {}}
    talk = [
        *HELLO,
        {
            "role": "assistant",
            "tool_calls": [
                {"function": function},
                {"id": "mine", "function": function},
                {"function": function},
            ],
        },
        {"role": "tool", "content": "b", "tool_call_id": "mine"},
        *({"role": "tool", "content": text} for text in ("a", "c", "of none")),
    ]
    found, _ = await chat(messages=talk)
    assert found.conversation is not None
    _, said, *results = found.conversation.messages
    assert ["call00000", "mine", "call00002"] == [call["id"] for call in said.tool_calls]
    assert ["mine", "call00000", "call00002", None] == [one.tool_call_id for one in results]


async def test_results_that_name_their_function():
    """In whichever order they come."""
    calls: list[Any] = [{"function": {"name": name, "arguments": {}}} for name in ("f", "g", "f")]
    results = [("g", "of g"), ("f", "first of f"), ("h", "of the call that is left")]
    talk = [
        *HELLO,
        {"role": "assistant", "tool_calls": calls},
        *({"role": "tool", "tool_name": name, "content": text} for name, text in results),
    ]
    found, _ = await chat(messages=talk)
    assert found.conversation is not None
    said = found.conversation.messages[2:]
    assert ["call00001", "call00000", "call00002"] == [one.tool_call_id for one in said]


async def test_an_answer_that_the_client_began():
    """The last message is continued if it is the assistant's."""
    found, _ = await chat(messages=[*HELLO, {"role": "assistant", "content": "Well,"}])
    assert found.conversation is not None
    assert found.conversation.continued


@pytest.mark.parametrize(
    ("think", "switches", "template", "ignored"),
    [
        (None, {"enable_thinking"}, {}, []),
        ("", {"enable_thinking"}, {}, []),
        (True, {"enable_thinking"}, {"enable_thinking": True}, []),
        (False, {"enable_thinking"}, {"enable_thinking": False}, []),
        ("low", {"enable_thinking"}, {"enable_thinking": True}, []),
        ("high", {"reasoning_effort"}, {"reasoning_effort": "high"}, []),
        (True, {"reasoning_effort"}, {}, ["think"]),
        (True, set(), {}, ["think"]),
        (False, set(), {}, ["think"]),
    ],
)
async def test_thinking(think: Any, switches: set[str], template: Any, ignored: list[str]):
    """It sets what the model's template has a switch for, and is reported if that is nothing."""
    facts = attrs.evolve(FACTS, switches=frozenset(switches))
    for path, fields in (("chat", {"messages": HELLO}), ("generate", {"prompt": "Hi"})):
        found, unread = await command(path, facts, think=think, **fields)
        assert found.conversation is not None
        assert (template, ignored) == (dict(found.conversation.template), unread)


async def test_formats():
    """Any object or a schema; empty is none."""
    for given, schema in (("json", ANY_OBJECT), (SCHEMA, SCHEMA)):
        for path, fields in (("chat", {"messages": HELLO}), ("generate", {"prompt": "Hi"})):
            found, _ = await command(path, format=given, **fields)
            assert found.constraint is not None
            assert (schema, False) == (found.constraint.schema, found.constraint.strict)
    assert None is (await chat(format=""))[0].constraint


async def test_a_prompt():
    """It is a user's message, after the system prompt if there is one; raw, it is a text."""
    found, _ = await command("generate", prompt="Hi", system="Be brief.")
    assert found.conversation is not None
    assert ["system", "user"] == [one.role for one in found.conversation.messages]
    assert "ollama.generate" == found.protocol
    alone, _ = await command("generate", prompt="Hi")
    assert alone.conversation is not None
    assert 1 == len(alone.conversation.messages)
    raw, ignored = await command("generate", prompt="Hi", raw=True, think=True, system="x")
    assert (None, "Hi", ["system", "think"]) == (raw.conversation, raw.prompt, ignored)


async def test_a_gap():
    """The model fills it if it has the tokens for it, also at the beginning of a text."""
    found, _ = await command("generate", INFILL, prompt="a", suffix="b")
    assert "<P>a<S>b<M>" == found.prompt
    first, _ = await command("generate", INFILL, suffix="b")
    assert "<P><S>b<M>" == first.prompt


async def test_extensions_and_groups():
    """Cairn's own fields are those of the other protocols, and so are headers of groups."""
    service = FakeService()
    client = create_app(service).test_client()
    body = json.dumps({"messages": HELLO, "session_id": "notes", "ttl": "1h"})
    await client.post("/api/chat", data=body, headers={"x-session-id": "g"})
    (found,) = service.commands
    assert ("notes", 3600, "g") == (found.session_name, found.ttl_s, found.group)


@pytest.mark.parametrize(
    ("name", "expected"), [("other:latest", "other"), ("other:4b", "other:4b"), ("tag:latest",) * 2]
)
async def test_the_tag_that_clients_add(name: str, expected: str):
    """It is no part of a name, unless a model is called so."""
    service = FakeService()
    service.others = {one: attrs.evolve(FACTS, model=one) for one in ("other", "tag:latest")}
    await post("chat", service, messages=HELLO, model=name)
    assert [expected] == [one.requested_model for one in service.commands]


@pytest.mark.parametrize(
    ("path", "fields", "param", "words"),
    [
        ("chat", {"messages": [{"content": "x"}]}, "messages[0].role", "Missing"),
        ("chat", {"messages": [{"role": "bard"}]}, "messages[0].role", "'bard'"),
        ("chat", {"mesages": HELLO}, "messages", "Did you mean"),
        ("chat", {"model": 5, "messages": HELLO}, "model", "a string"),
        ("chat", {"messages": [{**HELLO[0], "images": ["A"]}]}, "messages[0].images", "only text"),
        (
            "chat",
            {
                "messages": [
                    *HELLO,
                    {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]},
                ]
            },
            "messages[1].tool_calls",
            "no text continues",
        ),
        ("chat", {"messages": HELLO, "tools": [{}]}, "tools[0]", "not a function"),
        ("chat", {"messages": HELLO, "format": "xml"}, "format", "'xml'"),
        ("chat", {"messages": HELLO, "think": "hard"}, "think", "'hard'"),
        ("chat", {"messages": HELLO, "keep_alive": "soon"}, "keep_alive", "'soon'"),
        # A text that can be split in many ways takes no longer.
        ("chat", {"messages": HELLO, "keep_alive": "1" * 60 + "x"}, "keep_alive", "'1111"),
        ("chat", {"messages": HELLO, "session_id": ""}, "session_id", "printable"),
        (
            "chat",
            {"messages": HELLO, "options": {"repeat_penalty": 0}},
            "options.repeat_penalty",
            "options.repeat_penalty must be",
        ),
        (
            "chat",
            {"messages": HELLO, "options": {"temperature": -1}},
            "options.temperature",
            "options.temperature must be",
        ),
        (
            "chat",
            {"messages": HELLO, "options": {"num_predict": 2**63}},
            "options.num_predict",
            "at most",
        ),
        (
            "chat",
            {"messages": HELLO, "options": {"top_k": 1.5}},
            "options.top_k",
            "options.top_k must be an integer",
        ),
        ("generate", {"promt": "x"}, "prompt", "Did you mean"),
        ("generate", {"prompt": "x", "images": ["A"]}, "images", "only text"),
        ("generate", {"prompt": "x", "template": "y"}, "template", "raw: true"),
        ("generate", {"prompt": "x", "context": [1]}, "context", "/api/chat"),
        ("generate", {"prompt": "x", "suffix": "y"}, "suffix", "not supported by"),
        ("generate", {"prompt": "x", "raw": True, "format": "json"}, "format", "raw or suffix"),
        ("show", {}, "model", "Missing"),
        ("show", {"model": 1}, "model", "a string"),
    ],
)
async def test_what_cannot_be_used(path: str, fields: Any, param: str, words: str):
    """Each is refused in Ollama's form, and says what is wrong."""
    status, body = await post(path, **fields)
    assert (400, param) == (status, body["param"])
    assert {"error", "code", "param"} == body.keys()
    assert words in body["error"]


@pytest.mark.parametrize("name", errors.INSTEAD)
async def test_an_address_of_ollamas_that_is_not_here(name: str):
    """The error says what to do instead."""
    status, body = await post(name)
    assert (404, "not_found") == (status, body["code"])
    assert f"/api/{name} is not supported: " in body["error"]


async def test_other_addresses():
    """An unknown one, and a wrong method, are errors in Ollama's form, too."""
    assert "nothing found at '/api/x'" in (await post("x"))[1]["error"]
    status, body = await post("tags")
    assert (405, "method_not_allowed") == (status, body["code"])


async def test_a_name_that_is_not_served():
    """It is refused where the operator wants that, and where only that model could be meant."""
    client = create_app(FakeService(), strict_model_names=True).test_client()
    for path, fields in (
        ("chat", {"messages": HELLO}),
        ("generate", {"prompt": "x"}),
        ("show", {}),
        ("chat", {}),
    ):
        body = json.dumps({"model": "none", **fields})
        response = await client.post(f"/api/{path}", data=body)
        assert 404 == response.status_code
        error = json.loads(await response.get_data(as_text=True))["error"]
        assert "'none' is not served here" in error
