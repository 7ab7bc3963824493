"""Counts and compactions of OpenAI's responses, with the official client."""

from __future__ import annotations

import json
from typing import Any

import attrs
import pytest

from cairn.actors.requests.messages import Delta, StoredTurn
from cairn.engine.answer.parts import Said, Thought
from cairn.engine.prompt.template import Message
from cairn.http.app import create_app
from cairn.http.responses.conversation import read_input
from cairn.http.responses.form import Form
from cairn.http.responses.objects import Echo
from cairn.journal.tenants import LOCAL
from tests.http.chat_completions.test_client import ask
from tests.http.conftest import Serve
from tests.http.fake_service import ACCEPTED, FINISHED, FakeService

pytestmark = pytest.mark.trio

TALK: Any = [
    {"role": "user", "content": "I am Ada."},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "I have a stone."},
]
SCRIPT = (ACCEPTED, Delta(parts=(Thought("So."), Said("Ada "), Said("has a stone."))), FINISHED)


async def test_a_conversation_is_compacted(serve: Serve):
    """
    The model is asked for a summary, without a format and without storing it; the answer has the
    user's messages and the summary.
    """
    service = FakeService(SCRIPT)
    url = await serve(service)
    found = await ask(url, lambda api: api.responses.compact(model="any", input=TALK))
    assert ("resp_req-1", "response.compaction") == (found.id, found.object)
    output = [one.model_dump(exclude_unset=True, warnings=False) for one in found.output]
    assert ["message", "message", "compaction"] == [one["type"] for one in output]
    assert "cairn:Ada has a stone." == output[-1]["encrypted_content"]
    assert (2048, 3) == (found.usage.input_tokens, found.usage.output_tokens)
    (command,) = service.commands
    assert command.conversation is not None
    assert (None, None, False) == (command.keep, command.constraint, command.conversation.calls)
    assert ["user", "assistant", "user", "user"] == [
        one.role for one in command.conversation.messages
    ]
    assert "Summarise" in command.conversation.messages[-1].content

    messages, ignored = read_input([*map(json_of, output), TALK[-1]], {})
    assert set() == ignored
    assert ["user", "user", "assistant", "user"] == [one.role for one in messages]
    assert "Ada has a stone." == messages[2].content


def json_of(value: Any) -> Any:
    """A value as a client sends it back."""
    return json.loads(json.dumps(value))


async def test_a_compaction_of_another_server():
    """It cannot be read, and is left out."""
    items = [{"type": "compaction", "encrypted_content": "gAAAA"}, TALK[0]]
    messages, ignored = read_input(items, {})
    assert {"input.compaction"} == ignored
    assert (Message(role="user", content="I am Ada."),) == messages


async def test_a_stream_of_a_compaction():
    """It is sent as a whole, whatever the request says."""
    body = json.dumps({"input": TALK, "stream": True})
    client = create_app(FakeService(SCRIPT)).test_client()
    response = await client.post("/v1/responses/compact", data=body)
    assert "response.compaction" == json.loads(await response.get_data(as_text=True))["object"]


async def test_the_tokens_of_an_input(serve: Serve):
    """They are those of the whole conversation, with the stored turns that it continues."""
    service = FakeService()
    service.turns[LOCAL, "r1"] = StoredTurn(
        request="r1",
        previous=None,
        created_s=1,
        asked=(Message(role="user", content="Hello"),),
        parts=(Said("Hi"),),
        note=Form(echo=Echo(), model="cairn/small-1").note(),
        finished=attrs.evolve(FINISHED),
    )
    url = await serve(service)
    found = await ask(
        url,
        lambda api: api.responses.input_tokens.count(input="More", previous_response_id="resp_r1"),
    )
    assert ("response.input_tokens", 17) == (found.object, found.input_tokens)
    (command,) = service.commands
    assert command.conversation is not None
    assert ["Hello", "Hi", "More"] == [one.content for one in command.conversation.messages]
