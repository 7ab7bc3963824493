"""
What a client sends back after an answer: from a model's text to the wire, and from there to the
next prompt. It is what settling expected.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import trio
from mlx_lm.tokenizer_utils import load as load_tokenizer

from cairn.actors.requests.messages import Delta, Generate, Reply
from cairn.actors.sessions.next_prompt import Ids, NextPrompt, Step
from cairn.actors.threads.prompts import PromptThreads
from cairn.engine.answer.markers import markers_of
from cairn.engine.answer.parts import AnswerForm, AnswerParts
from cairn.engine.prompt.encoder import Encoder
from cairn.engine.prompt.template import message_of, prompt_ids, render
from cairn.http.chat_completions.answers import ChatAnswer
from cairn.http.chat_completions.request import ChatRequest, read_chat_request
from cairn.http.messages.answers import MessagesStream
from cairn.http.messages.request import read_messages_request
from cairn.http.wire.json import encode
from cairn.http.wire.parameters import Ignored, ReadRequest
from tests.http.fake_service import ACCEPTED, FACTS, FINISHED

TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("look", "go")
]
ASKED: list[dict[str, Any]] = [
    {"role": "system", "content": "You know cities."},
    {"role": "user", "content": "Tell me of Öslo."},
]
# A call that is not spaced as the template would space it.
CALLS = (
    '<tool_call>\n{"name":"look","arguments":{"city":"\\u00d6slo","days":3.0}}\n</tool_call>\n'
    '<tool_call>{"arguments": {}, "name": "go"}</tool_call>'
)
THOUGHTS = "<think>\nI look it up.\n\nThen I go.\n</think>\n\n"
RESULTS = ("Rain.", "7 km")


@pytest.fixture(scope="module", name="tokenizer")
def tokenizer_(model_directory: Path) -> Any:
    """The tokenizer of the random model, with Pebble's template."""
    return load_tokenizer(model_directory)


class Chat:
    """A client of chat completions."""

    def _request(self, *more: dict[str, Any]) -> ChatRequest:
        body = {"messages": [*ASKED, *more], "tools": TOOLS, "enable_thinking": True}
        return read_chat_request(json.dumps(body).encode(), {}, Ignored(), FACTS)

    def read(self, *more: dict[str, Any]) -> Generate:
        """The command of its request."""
        return self._request(*more).command

    def sent_back(self, replies: Iterable[Reply]) -> list[dict[str, Any]]:
        """What it sends back after an answer: the answer, and the results of its calls."""
        completion = ChatAnswer(self._request())
        for reply in replies:
            completion.take(reply)
        message = json.loads(encode(completion.body()))["choices"][0]["message"]
        calls = [call["id"] for call in message["tool_calls"]]
        return [
            message,
            *(
                {"role": "tool", "content": result, "tool_call_id": call}
                for call, result in zip(calls, RESULTS, strict=True)
            ),
        ]


class Messages:
    """A client of Anthropic's messages, which adds up a stream."""

    def _request(self, *more: dict[str, Any]) -> ReadRequest:
        system, *messages = ASKED
        body = {
            "max_tokens": 100,
            "system": system["content"],
            "messages": [*messages, *more],
            "tools": [
                {"name": tool["function"]["name"], "input_schema": {"type": "object"}}
                for tool in TOOLS
            ],
            "thinking": {"type": "adaptive"},
        }
        return read_messages_request(json.dumps(body).encode(), {}, Ignored(), FACTS)

    def read(self, *more: dict[str, Any]) -> Generate:
        """The command of its request."""
        return self._request(*more).command

    def sent_back(self, replies: Iterable[Reply]) -> list[dict[str, Any]]:
        """What it sends back after an answer: the answer, and the results of its calls."""
        chunks = MessagesStream(self._request())
        blocks: list[dict[str, Any]] = []
        inputs = ""
        for event in b"".join(map(chunks.take, replies)).decode().split("\n\n")[:-1]:
            said = json.loads(event.partition("\ndata: ")[2])
            match said["type"]:
                case "content_block_start":
                    blocks.append(said["content_block"])
                    inputs = ""
                case "content_block_delta":
                    delta = {key: text for key, text in said["delta"].items() if key != "type"}
                    inputs += delta.pop("partial_json", "")
                    blocks[-1].update({key: blocks[-1][key] + text for key, text in delta.items()})
                case "content_block_stop" if inputs:
                    blocks[-1]["input"] = json.loads(inputs)
                case _:
                    pass
        calls = [block["id"] for block in blocks if block["type"] == "tool_use"]
        results = [
            {"type": "tool_result", "tool_use_id": call, "content": result}
            for call, result in zip(calls, RESULTS, strict=True)
        ]
        return [{"role": "assistant", "content": blocks}, {"role": "user", "content": results}]


@pytest.mark.parametrize("client", [Chat(), Messages()], ids=["openai", "anthropic"])
@pytest.mark.parametrize(
    "text", [THOUGHTS + CALLS, f"{THOUGHTS}I look.\n{CALLS}", f"I look.\n{CALLS}", CALLS]
)
def test_a_tools_turn_begins_with_what_was_prewarmed(
    tokenizer: Any, client: Chat | Messages, text: str
) -> None:
    """
    Reasoning, text and two calls: all of it, and the beginning of the result, are known in advance.
    """
    asked = client.read().conversation
    assert asked is not None
    markers = markers_of(tokenizer)
    begins = markers.begins(render(tokenizer, asked))
    parts = AnswerParts(AnswerForm(markers=markers, begins=begins, tools=asked.tools), name="one")
    answer_parts = (*parts.add(text).parts, *parts.finish(complete=True).parts)

    async def at_once(step: Step) -> Ids | None:
        return await step(lambda: True)

    next_prompt = NextPrompt(Encoder(tokenizer), PromptThreads())
    found = trio.run(next_prompt.beginning, asked, message_of(answer_parts), "local", at_once)
    assert found is not None

    onward = client.read(
        *client.sent_back((ACCEPTED, Delta(parts=answer_parts), FINISHED))
    ).conversation
    assert onward is not None
    said = onward.messages[len(ASKED)]
    assert message_of(answer_parts) == said
    assert ["look", "go"] == [call["function"]["name"] for call in said.tool_calls]
    prompt = prompt_ids(tokenizer, onward)
    assert found.ids == prompt[: len(found.ids)]
    known = tokenizer.decode(list(found.ids)).rstrip("\n")
    assert known.endswith("</tool_call><|im_end|>\n<|im_start|>user\n<tool_response>")
