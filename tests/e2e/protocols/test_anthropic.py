"""
Anthropic's messages against the whole server: a model with scripted answers, and a client with the
habits of real ones.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from cairn.journal import events as ev
from tests.e2e.conftest import servers
from tests.e2e.protocols.test_tools import CALLS, CHUNK, SCRIPT
from tests.support.models.scripted_model import make_scripted_model
from tests.support.processes.subprocess_server import DEADLINE_S, Serving

Body = dict[str, Any]

LOOK = {"type": "tool_use", "name": "look", "input": {"city": "Rom", "days": 3}}
GO = {"type": "tool_use", "name": "go", "input": {}}
TOOLS: list[Body] = [
    {"name": name, "input_schema": {"type": "object", "properties": {}}} for name in ("look", "go")
]
ASKED: Body = {
    "max_tokens": 40,
    "temperature": 0,
    "messages": [{"role": "user", "content": "Tell me of Rome."}],
    "tools": TOOLS,
    "thinking": {"type": "adaptive"},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """A server with the scripted model and small chunks."""
    folder = tmp_path_factory.mktemp("scripted")
    model = make_scripted_model(folder / "model", SCRIPT)
    with servers(folder, model) as start:
        yield start("--block-tokens", CHUNK)


def post(server: Serving, path: str = "", **fields: Any) -> httpx.Response:
    """The response to a request from a client that sends a key and a version."""
    headers = {"x-api-key": "sk-any", "anthropic-version": "2023-06-01"}
    url = f"{server.url}/v1/messages{path}"
    return httpx.post(url, json={**ASKED, **fields}, headers=headers, timeout=DEADLINE_S)


def message(server: Serving, **fields: Any) -> Body:
    """An answer as a whole."""
    response = post(server, **fields)
    assert 200 == response.status_code, response.text
    found: Body = response.json()
    return found


def events(server: Serving, **fields: Any) -> list[Body]:
    """An answer as a stream, without the pings."""
    text = post(server, stream=True, **fields).text
    found = [json.loads(one.partition("\ndata: ")[2]) for one in text.split("\n\n")[:-1]]
    return [one for one in found if one["type"] != "ping"]


def anonymous(content: list[Body]) -> list[Body]:
    """Blocks without their ids, which differ between answers."""
    return [{key: value for key, value in one.items() if key != "id"} for one in content]


def prompt_tokens(usage: Body) -> int:
    """The length of the whole prompt."""
    names = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
    return sum(usage[name] for name in names)


def test_thoughts_and_calls(server: Serving):
    """
    Each is a block, and the answer ended because of its calls; the id is the one in the journal.
    """
    found = message(server)
    thought = {"type": "thinking", "thinking": "I look up Rom.", "signature": "unsigned"}
    assert ("tool_use", [thought, LOOK, GO]) == (
        found["stop_reason"],
        anonymous(found["content"]),
    )
    (finished,) = server.events(ev.RequestFinished, request=found["id"].removeprefix("msg_"))
    assert (finished.prompt_tokens, finished.cached_tokens, finished.completion_tokens) == (
        prompt_tokens(found["usage"]),
        found["usage"]["cache_read_input_tokens"],
        found["usage"]["output_tokens"],
    )


def test_a_stream_adds_up(server: Serving):
    """It has the blocks, the stop reason and the token count of the whole answer."""
    whole, stream = message(server), events(server)
    assert "message_stop" == stream[-1]["type"]
    blocks: list[Body] = []
    for one in stream:
        if one["type"] == "content_block_start":
            assert len(blocks) == one["index"]
            blocks.append(one["content_block"])
        if one["type"] == "content_block_delta":
            block, delta = blocks[one["index"]], one["delta"]
            match delta["type"]:
                case "input_json_delta":
                    block["input"] = json.loads(delta["partial_json"])
                case kind:
                    field = kind.removesuffix("_delta")
                    block[field] += delta[field]
    assert anonymous(whole["content"]) == anonymous(blocks)
    last = stream[-2]
    assert whole["stop_reason"] == last["delta"]["stop_reason"]
    assert prompt_tokens(whole["usage"]) == prompt_tokens(last["usage"])
    assert whole["usage"]["output_tokens"] == last["usage"]["output_tokens"]


def test_blocks_written_and_read_are_reported(server: Serving):
    """A new prompt is computed, its full chunks become blocks, and a second request reads them."""
    words = [{"role": "user", "content": "A way that nobody went before, stone by stone. " * 3}]
    first, again = (message(server, messages=words, max_tokens=1)["usage"] for _ in range(2))
    whole = prompt_tokens(first)
    assert whole == prompt_tokens(again)
    full = whole // CHUNK * CHUNK
    assert full == first["cache_read_input_tokens"] + first["cache_creation_input_tokens"]
    assert whole - 1 == again["cache_read_input_tokens"]


def test_why_an_answer_ended(server: Serving):
    """Because of a stop text, the limit, or by itself."""
    found = message(server, stop_sequences=["no such text", '"go"'])
    assert ("stop_sequence", '"go"') == (found["stop_reason"], found["stop_sequence"])
    assert ("max_tokens", None) == (
        (short := message(server, max_tokens=2))["stop_reason"],
        short["stop_sequence"],
    )
    words = message(server, tools=[], thinking={"type": "disabled"})
    assert ("end_turn", [{"type": "text", "text": f"<tool_call>{CALLS}</tool_call>"}]) == (
        words["stop_reason"],
        words["content"],
    )


def test_a_count_equals_the_message(server: Serving):
    """With tools, system and thinking; nothing is journaled."""
    system = [{"type": "text", "text": "You know cities."}]
    for thinking in ({"type": "adaptive"}, {"type": "disabled"}):
        usage = message(server, system=system, thinking=thinking)["usage"]
        server.wait_idle()
        before = server.position()
        counted = post(server, "/count_tokens", system=system, thinking=thinking).json()
        assert {"input_tokens": prompt_tokens(usage)} == counted
        assert [] == server.requests(after=before)


def test_a_prompt_without_an_answer(server: Serving):
    """With a limit of zero, nothing is generated; the same prompt finds its chunks afterwards."""
    talk = [{"role": "user", "content": "Tell me of Rome, and of what lies under it."}]
    read = message(server, messages=talk, max_tokens=0)
    assert ([], "max_tokens", 0) == (
        read["content"],
        read["stop_reason"],
        read["usage"]["output_tokens"],
    )
    server.wait_idle()
    kinds = [one["type"] for one in events(server, messages=talk, max_tokens=0)]
    assert ["message_start", "message_delta", "message_stop"] == kinds
    server.wait_idle()
    usage = message(server, messages=talk)["usage"]
    assert prompt_tokens(read["usage"]) == prompt_tokens(usage)
    assert prompt_tokens(usage) - 1 == usage["cache_read_input_tokens"]


def test_longer_than_the_context(server: Serving):
    """The error has both numbers in the wording that clients look for; a count still works."""
    words = [{"role": "user", "content": "path " * 60_000}]
    refused = post(server, messages=words)
    body = refused.json()
    tokens = post(server, "/count_tokens", messages=words).json()["input_tokens"]
    assert (400, "invalid_request_error") == (refused.status_code, body["error"]["type"])
    context = server.health()["context_tokens"]
    expected = f"prompt is too long: {tokens} tokens > {context - 1} maximum"
    assert body["error"]["message"].startswith(expected)
    assert refused.headers["request-id"] == body["request_id"]


def test_habits_of_a_client_do_not_change_the_prefix(server: Serving):
    """
    Over four turns the billing header changes, hints move, texts become blocks and back, a system
    message follows the first user message, and deferred tools are declared. Each turn continues
    where the last one ended, and all chunks that prompt and answer fill are reused.
    """
    talk: list[Body] = [
        {"role": "user", "content": "Tell me of Rome, with all your habits."},
        {"role": "system", "content": "Today is a Sunday."},
    ]
    known = 0
    for turn in range(4):
        billing = f"x-anthropic-billing-header: cc_version=2.1.{turn};"
        hint = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
        later = [
            {**TOOLS[0], "name": f"later_{number}", "defer_loading": True} for number in range(turn)
        ]
        said: Any = "Today is a Sunday."
        talk[1]["content"] = said if turn % 2 else [{"type": "text", "text": said, **hint}]
        answer = message(
            server,
            system=[
                {"type": "text", "text": billing},
                {"type": "text", "text": "You know cities.", **(hint if turn % 2 else {})},
            ],
            messages=talk,
            tools=[TOOLS[0], *later, {**TOOLS[1], **hint}],
        )
        usage, cairn = answer["usage"], answer["cairn"]
        assert "ignored" not in cairn
        if turn:
            assert ("continuation", None) == (cairn["path"], cairn["reason"])
            # More, if the beginning of a result was known too and filled a chunk.
            assert known // CHUNK * CHUNK <= usage["cache_read_input_tokens"]
        known = prompt_tokens(usage) + usage["output_tokens"]
        talk.append({"role": "assistant", "content": answer["content"]})
        calls = [one["id"] for one in answer["content"] if one["type"] == "tool_use"]
        assert 2 == len(calls)
        talk.append(
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": one, "content": f"{turn}: sunny"}
                    for one in calls
                ],
            }
        )
        server.wait_idle()
