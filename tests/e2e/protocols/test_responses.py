"""
OpenAI's responses against the whole server: Pebble, the official client, and a restart; and a model
with scripted answers, with reasoning and calls.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import openai
import pytest

from cairn.journal import events as ev
from tests.e2e.conftest import Start, servers
from tests.e2e.protocols.test_tools import CHUNK, SCRIPT
from tests.support.models.scripted_model import make_scripted_model
from tests.support.processes.subprocess_server import DEADLINE_S, Serving, assert_valid, run_ops

PATH = "The stone lies on the path, and the path goes over the hill. "
TOOLS: list[Any] = [
    {"type": "function", "name": name, "parameters": {"type": "object", "properties": {}}}
    for name in ("look", "go")
]


def client(server: Serving, key: str = "none") -> openai.OpenAI:
    """The official client of a server."""
    return openai.OpenAI(
        base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=DEADLINE_S
    )


def create(server: Serving, text: Any, **fields: Any) -> Any:
    """A response, short and reproducible."""
    fixed: dict[str, Any] = {"model": "any", "temperature": 0, "max_output_tokens": 40}
    return client(server).responses.create(input=text, **{**fixed, **fields})


def path_of(response: Any) -> Any:
    """The path of a response."""
    return response.model_extra["cairn"]


def test_a_named_response_continues_after_a_restart(start: Start):
    """
    With only its name, the conversation continues in its session, from blocks; the prompt is that
    of a client that sends everything. A look-up returns the same response, and a deleted one is
    gone.
    """
    server = start()
    first = create(server, PATH * 20, instructions="You are a guide.")
    assert first.output_text
    server.wait_idle()
    assert 0 == server.stop()

    again = start(data_dir=server.data_dir)
    found = client(again).responses.retrieve(first.id)
    assert (first.output, first.usage) == (found.output, found.usage)
    second = create(
        again, "And then?", instructions="You are a guide.", previous_response_id=first.id
    )
    session = path_of(first)["session"]
    assert (session, "continuation") == (path_of(second)["session"], path_of(second)["path"])
    cached = second.usage.input_tokens_details.cached_tokens
    assert cached >= first.usage.input_tokens // 64 * 64 > 0
    sent = [{"role": "user", "content": PATH * 20}, *(one.to_dict() for one in first.output)]
    whole = create(
        again,
        [*sent, {"role": "user", "content": "And then?"}],
        instructions="You are a guide.",
        store=False,
    )
    assert (second.output_text, second.usage.input_tokens) == (
        whole.output_text,
        whole.usage.input_tokens,
    )
    with pytest.raises(openai.NotFoundError):
        client(again).responses.retrieve(whole.id)

    client(again).responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client(again).responses.retrieve(first.id)
    with pytest.raises(openai.BadRequestError):
        create(again, "And then?", previous_response_id=second.id)
    stored = again.events(ev.TurnStored)
    assert [None, first.id.removeprefix("resp_")] == [one.previous for one in stored]
    (forgotten,) = again.events(ev.TurnForgotten)
    assert stored[0].request == forgotten.of_request


@pytest.mark.long
def test_a_prune_keeps_the_texts_of_later_responses(start: Start):
    """
    Texts that come with every turn are stored once per session. If the session of an earlier
    response is pruned, that response is gone, and later ones still have all their texts.
    """
    asked = {"tools": TOOLS, "instructions": "You are a guide. " * 10}
    server = start()
    first = create(server, "Hello", **asked, extra_body={"session_id": "one"})
    server.wait_idle()
    more = {**asked, "extra_body": {"session_id": "two"}}
    second = create(server, "And then?", previous_response_id=first.id, **more)
    third = create(server, "And now?", previous_response_id=second.id, **more)
    server.kill()
    assert [True, True, False] == [
        "tools" in stored.texts for stored in server.events(ev.TurnStored)
    ]
    (before,) = (
        datetime.fromtimestamp(place.time_us / 1e6, UTC).isoformat()
        for place in server.recorded()
        if isinstance(place.event, ev.SessionOpened) and place.event.session == "two"
    )
    where = ("--data-dir", server.data_dir)
    code, out, err = run_ops(
        "journal", "prune", *where, "--before", before, "--recent", "--close-idle"
    )
    assert 0 == code, err
    assert "1 session removed" in out
    assert_valid(server.data_dir)

    again = start(data_dir=server.data_dir)
    with pytest.raises(openai.NotFoundError):
        client(again).responses.retrieve(first.id)
    for earlier in (second, third):
        found = client(again).responses.retrieve(earlier.id)
        assert (earlier.tools, earlier.instructions) == (found.tools, found.instructions)
        assert earlier.output == found.output


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """A server with the scripted model and small chunks."""
    folder = tmp_path_factory.mktemp("scripted")
    model = make_scripted_model(folder / "model", SCRIPT)
    with servers(folder, model) as start_one:
        yield start_one("--block-tokens", CHUNK)


def test_thoughts_and_calls_continue(server: Serving):
    """
    A client that runs tools names the response or sends its items; either way the session continues
    with the same prompt. The stream has the items of the whole answer.
    """
    asked = {"tools": TOOLS, "reasoning": {"effort": "medium"}}
    first = create(server, "Tell me of Rome.", **asked)
    assert ["reasoning", "function_call", "function_call"] == [one.type for one in first.output]
    assert "I look up Rom." == first.output[0].content[0].text
    *_, last = create(server, "Tell me of Rome.", stream=True, store=False, **asked)
    assert "response.completed" == last.type
    assert [one.type for one in first.output] == [one.type for one in last.response.output]

    results = [
        {"type": "function_call_output", "call_id": one.call_id, "output": "Rain."}
        for one in first.output
        if one.type == "function_call"
    ]
    server.wait_idle()
    named = create(server, results, previous_response_id=first.id, **asked)
    assert "continuation" == path_of(named)["path"]
    user = {"role": "user", "content": "Tell me of Rome."}
    items = [user, *(one.to_dict() for one in first.output), *results]
    sent = create(server, items, store=False, **asked)
    assert named.usage.input_tokens == sent.usage.input_tokens
    assert named.usage.input_tokens_details.cached_tokens > 0
