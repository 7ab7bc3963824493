"""
How Anthropic's clients change a conversation from turn to turn, each habit in a generated
conversation. The prompt is the one for a client that changes nothing, and earlier prompts stay its
beginning.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
from mlx_lm.tokenizer_utils import load as load_tokenizer

from cairn.engine.prompt.template import Conversation, conversation_parts, render
from cairn.http.messages.request import read_messages_request
from cairn.http.wire import placeholders as placeholders
from cairn.http.wire.parameters import Ignored
from tests.http.fake_service import FACTS

TURNS = 6
WORDS = ("stone", "path", "hill", "Öslo", "rain", "cairn", "river", "石")
BEGINNING = "<|im_start|>assistant\n"

Body = dict[str, Any]
Habit = Callable[[Body, int], None]


def text(words: str) -> Body:
    """A block of text."""
    return {"type": "text", "text": words}


def tool(name: str) -> Body:
    """A tool."""
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    return {"name": name, "description": f"Asks {name}.", "input_schema": schema}


def calm(seed: int) -> Iterator[Body]:
    """
    The requests of a client that changes nothing: text, reasoning, calls, and results followed by
    text of the user; a system message follows the first turn.
    """
    draw = random.Random(seed)

    def words() -> str:
        return " ".join(draw.choices(WORDS, k=draw.randint(1, 9)))

    messages: list[Body] = [
        {"role": "user", "content": [text(words())]},
        {"role": "system", "content": [text("Today is a Sunday.")]},
    ]
    for turn in range(TURNS):
        yield json.loads(
            json.dumps(
                {
                    "model": "any",
                    "max_tokens": 100,
                    "system": [text("You are a guide."), text(" Be brief.")],
                    "tools": [tool("look"), tool("go")],
                    "messages": messages,
                }
            )
        )
        answer: list[Body] = [{"type": "thinking", "thinking": words(), "signature": "unsigned"}]
        if draw.random() < 0.7:
            answer.append(text(words()))
        calls = [f"toolu_{turn}{index}" for index in range(draw.randint(0, 2))]
        for one in calls:
            given = {"city": words()}
            answer.append({"type": "tool_use", "id": one, "name": "look", "input": given})
        results = [
            {"type": "tool_result", "tool_use_id": one, "content": [text(words())]} for one in calls
        ]
        if not results or draw.random() < 0.3:
            results.append(text(words()))
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": results}]


# --- habits ----------------------------------------------------------------------------------


def billing(body: Body, turn: int) -> None:
    """The first block of the system prompt is the billing header, different each time."""
    header = f"x-anthropic-billing-header: cc_version=2.1.{turn}; cch={turn * 7919:05x};"
    body["system"].insert(0, text(header))


def billing_in_a_string(body: Body, turn: int) -> None:
    """The first line of a system prompt in a string is the billing header."""
    words = "".join(block["text"] for block in body["system"])
    body["system"] = f"x-anthropic-billing-header: cc_version=2.1.{turn};\n{words}"


def hints(body: Body, turn: int) -> None:
    """The cache hint moves along with the last message, and moves in the system prompt as well."""
    kept = {"cache_control": {"type": "ephemeral", "ttl": "1h"} if turn % 2 else None}
    body["system"][-1].update(kept)
    body["tools"][turn % 2].update(kept)
    for message in body["messages"][-2:]:
        message["content"][-1].update({"cache_control": {"type": "ephemeral"}})
        for block in message["content"]:
            if block["type"] == "tool_result":
                block["content"][0].update(kept)
    body["cache_control"] = {"type": "ephemeral"}


def _string(blocks: Any) -> Any:
    """Joins blocks that are all text into a string."""
    is_text = all(block["type"] == "text" for block in blocks)
    return "".join(block["text"] for block in blocks) if is_text else blocks


def strings(body: Body, turn: int) -> None:
    """Sends content as a string or as a list of blocks, differently each time."""
    for index, message in enumerate(body["messages"]):
        for block in message["content"]:
            if block["type"] == "tool_result" and (index + turn) % 3 == 0:
                block["content"] = _string(block["content"])
        if (index + turn) % 2:
            message["content"] = _string(message["content"])
    if turn % 2:
        body["system"] = _string(body["system"])


def inserted(body: Body, turn: int) -> None:
    """Switches inserted system messages between a string and blocks as the hint moves."""
    message = body["messages"][1]
    assert "system" == message["role"]
    if turn % 2:
        message["content"] = _string(message["content"])
    else:
        message["content"][0]["cache_control"] = {"type": "ephemeral"}


def deferred(body: Body, turn: int) -> None:
    """Declares deferred tools one after the other, in the middle of the list."""
    for number in range(turn):
        body["tools"].insert(1, {**tool(f"later_{number}"), "defer_loading": True})


def forgets_thoughts(body: Body, turn: int) -> None:
    """Drops the reasoning before the last answer."""
    for message in body["messages"][:-2]:
        if message["role"] == "assistant":
            message["content"] = [one for one in message["content"] if one["type"] != "thinking"]


def switches_thinking(body: Body, turn: int) -> None:
    """Turns thinking on in one turn and off in the next."""
    body["thinking"] = {"type": "adaptive" if turn % 2 else "disabled"}


HABITS: list[Habit] = [billing, billing_in_a_string, hints, strings, inserted, deferred]


# --- what follows ----------------------------------------------------------------------------


@pytest.fixture(scope="module", name="tokenizer")
def tokenizer_(model_directory: Path) -> Any:
    """The tokenizer of the random model, with Pebble's template."""
    return load_tokenizer(model_directory)


def read(body: Body) -> Conversation:
    """The conversation of a request."""
    command = read_messages_request(json.dumps(body).encode(), {}, Ignored(), FACTS).command
    assert command.conversation is not None
    return command.conversation


def with_habits(seed: int, *habits: Habit) -> list[Conversation]:
    """The conversation turn by turn, from a client with these habits."""
    found = []
    for turn, body in enumerate(calm(seed)):
        for habit in habits:
            habit(body, turn)
        found.append(read(body))
    return found


def assert_grows(tokenizer: Any, turns: list[Conversation]) -> None:
    """Assert that each turn's parts and prompt are the beginning of the next turn's."""
    for one, other in itertools.pairwise(turns):
        parts = conversation_parts(one)
        assert parts == conversation_parts(other)[: len(parts)]
        # The template drops the reasoning of earlier turns as soon as the user sends a message,
        # which no adapter can change: such turns are compared by their parts only.
        said = [render(tokenizer, _without_thoughts(turn)) for turn in (one, other)]
        before, begins, _ = said[0].rpartition(BEGINNING)
        assert begins
        assert said[1].startswith(before)


def _without_thoughts(turn: Conversation) -> Conversation:
    messages = tuple(attrs.evolve(message, reasoning=None) for message in turn.messages)
    return attrs.evolve(turn, messages=messages)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("habit", HABITS, ids=lambda habit: habit.__name__)
def test_a_habit_changes_nothing(tokenizer: Any, habit: Habit, seed: int):
    """Each turn has the same parts and prompt as with a client that changes nothing."""
    plain, moved = with_habits(seed), with_habits(seed, habit)
    assert TURNS == len(plain)
    assert_grows(tokenizer, plain)
    assert_grows(tokenizer, moved)
    assert plain == moved
    assert [conversation_parts(one) for one in plain] == [conversation_parts(one) for one in moved]
    assert [render(tokenizer, one) for one in plain] == [render(tokenizer, one) for one in moved]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("habit", [forgets_thoughts, switches_thinking])
def test_each_habit_leaves_the_conversation_the_same(tokenizer: Any, habit: Habit, seed: int):
    """
    The conversation is the same if a client drops or changes reasoning or thinking; the rest of its
    content is unchanged.
    """
    plain, moved = with_habits(seed), with_habits(seed, habit)
    assert plain != moved
    assert [conversation_parts(one) for one in plain] == [conversation_parts(one) for one in moved]
    heads = [
        [render(tokenizer, _without_thoughts(turn)).rpartition(BEGINNING)[0] for turn in turns]
        for turns in (plain, moved)
    ]
    assert heads[0] == heads[1]


def test_all_habits_together_change_nothing():
    """Clients have several habits."""
    assert with_habits(7) == with_habits(7, hints, inserted, billing, deferred)


def searching() -> Iterator[Body]:
    """The requests of a client that searches for a tool, is offered it, and calls it."""
    found = {**tool("weather"), "defer_loading": True}
    lists = [
        [tool("search"), tool("look")],
        [tool("search"), found, tool("look")],
        [tool("search"), {**tool("other"), "defer_loading": True}, tool("look"), found],
    ]
    turns: list[Body] = [
        {"role": "user", "content": "How is the weather?"},
        call("search", "toolu_1"),
        result("toolu_1", [{"type": "tool_reference", "tool_name": "weather"}]),
        call("weather", "toolu_2"),
        result("toolu_2", "Rain."),
    ]
    for turn, tools in enumerate(lists):
        yield {"max_tokens": 100, "tools": tools, "messages": turns[: 2 * turn + 1]}


def reading() -> Iterator[Body]:
    """
    The requests of a client whose tools read PDFs and images: the pages come after the result, in
    the same user message or in the next one.
    """
    pages = {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="}
    image = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    turns: list[list[Body]] = [
        [{"role": "user", "content": "What is in it?"}],
        [
            call("look", "toolu_1"),
            result("toolu_1", "PDF file read"),
            {"role": "user", "content": [{"type": "document", "source": pages}]},
        ],
        [call("look", "toolu_2"), result("toolu_2", [text("Page 1"), text(" of 1")])],
        [{"role": "assistant", "content": "A map."}, {"role": "user", "content": "Of what?"}],
    ]
    turns[2][-1]["content"].append({"type": "image", "source": image})
    for count in range(1, len(turns) + 1):
        messages = [message for turn in turns[:count] for message in turn]
        yield {"max_tokens": 100, "tools": [tool("look")], "messages": messages}


def call(name: str, call_id: str) -> Body:
    """An assistant's message that calls a tool."""
    block = {"type": "tool_use", "id": call_id, "name": name, "input": {"city": "Öslo"}}
    return {"role": "assistant", "content": [block]}


def result(call_id: str, content: Any) -> Body:
    """A user's message with a result."""
    block = {"type": "tool_result", "tool_use_id": call_id, "content": content}
    return {"role": "user", "content": [block]}


def test_a_deferred_tool_that_is_named_leaves_what_came_before(tokenizer: Any):
    """The text that offers it stays in its place while the list of tools changes."""
    found = [read(body) for body in searching()]
    assert_grows(tokenizer, found)
    assert [[], ["weather"], ["weather"]] == [
        [one["function"]["name"] for one in turn.loaded_tools] for turn in found
    ]
    head, _, rest = render(tokenizer, found[-1]).partition("How is the weather?")
    assert ('"weather"' in head, '"description": "Asks weather."' in rest) == (False, True)
    assert '"other"' not in head + rest


def test_pages_that_come_along_with_a_result_leave_what_came_before(tokenizer: Any):
    """A constant text replaces them, in this turn and in later ones."""
    found = [read(body) for body in reading()]
    assert_grows(tokenizer, found)
    assert [placeholders.DOCUMENT, placeholders.IMAGE] == [
        message.content
        for message in found[-1].messages
        if message.role == "user" and message.content.startswith("[")
    ]
