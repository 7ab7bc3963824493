"""
How clients of chat completions change a conversation when they send it back, each habit in a
generated conversation. The prompt is the one for a client that changes nothing, and earlier prompts
stay its beginning.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from mlx_lm.tokenizer_utils import load as load_tokenizer

from cairn.engine.prompt.template import Conversation, conversation_parts, render
from cairn.http.chat_completions.request import read_chat_request
from cairn.http.wire.parameters import Ignored
from tests.http.fake_service import FACTS

TURNS = 5
WORDS = ("stone", "path", "hill", "Öslo", "rain", "cairn", "river", "石")
BEGINNING = "<|im_start|>assistant\n"

Body = dict[str, Any]
Habit = Callable[[Body, int], None]


def calm(seed: int, *, thinks: bool = False) -> Iterator[Body]:
    """
    The requests of a client that sends messages back unchanged: text, calls, and results, followed
    by a user message or by the next answer.

    Args:
        thinks: whether there is reasoning before each answer.
    """
    draw = random.Random(seed)

    def words() -> str:
        return " ".join(draw.choices(WORDS, k=draw.randint(1, 9)))

    function = {"name": "look", "description": "Looks.", "parameters": {"type": "object"}}
    messages: list[Body] = [
        {"role": "system", "content": "You are a guide."},
        {"role": "user", "content": words()},
    ]
    for turn in range(TURNS):
        asked = {"tools": [{"type": "function", "function": function}], "messages": messages}
        yield json.loads(json.dumps(asked))
        calls = [f"call{turn}{index}" for index in range(draw.randint(0, 2))]
        answer: Body = {"role": "assistant", "content": words()}
        thought = words()
        if calls:
            said = words() if draw.random() < 0.5 else None
            given = [json.dumps({"city": words(), "days": 3, "near": []}) for _ in calls]
            answer = {"role": "assistant", "content": said, "tool_calls": []}
            for one, arguments in zip(calls, given, strict=True):
                made = {"name": "look", "arguments": arguments}
                answer["tool_calls"].append({"id": one, "type": "function", "function": made})
        if thinks:
            answer["reasoning_content"] = thought
        messages.append(answer)
        messages += [{"role": "tool", "tool_call_id": one, "content": words()} for one in calls]
        if not calls or draw.random() < 0.5:
            messages.append({"role": "user", "content": words()})


def answers(body: Body) -> Iterator[Body]:
    """The assistant's messages of a request."""
    return (message for message in body["messages"] if message["role"] == "assistant")


# --- habits ----------------------------------------------------------------------------------


def respaced(body: Body, turn: int) -> None:
    """Parses arguments and writes them again, without spaces and with other escapes."""
    for message in answers(body):
        for call in message.get("tool_calls", ()):
            given = json.loads(call["function"]["arguments"])
            text = json.dumps(given, separators=(",", ":"), ensure_ascii=bool(turn % 2))
            call["function"]["arguments"] = text


def as_objects(body: Body, turn: int) -> None:
    """Parses arguments and sends them as objects."""
    for message in answers(body):
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])


def unsaid(body: Body, turn: int) -> None:
    """Sends an empty text, or no content at all, where a call has no text."""
    for message in answers(body):
        if message["content"] is None:
            message["content"] = ""
            if turn % 2:
                del message["content"]


def in_parts(body: Body, turn: int) -> None:
    """Sends the content of some messages as a list of parts, and of different ones each time."""
    for index, message in enumerate(body["messages"]):
        if (index + turn) % 2 and message["content"]:
            hint = {"cache_control": {"type": "ephemeral"}} if index % 3 else {}
            message["content"] = [{"type": "text", "text": message["content"], **hint}]


def with_remains(body: Body, turn: int) -> None:
    """Sends fields of the answer back: empty ones, ids, and the index of a call."""
    for message in answers(body):
        message |= {"refusal": None, "annotations": [], "audio": None, "id": f"msg_{turn}"}
        if not message.get("tool_calls"):
            message |= {"tool_calls": [] if turn % 2 else None, "function_call": None}
        for index, call in enumerate(message["tool_calls"] or ()):
            call["index"] = index


def renamed(body: Body, turn: int) -> None:
    """Sometimes sends a system message as a developer message."""
    if turn % 2:
        body["messages"][0]["role"] = "developer"


def forgets_thoughts(body: Body, turn: int) -> None:
    """Drops the reasoning before the last user message, but keeps it within a loop of calls."""
    spoke = max(i for i, message in enumerate(body["messages"]) if message["role"] == "user")
    for message in body["messages"][:spoke]:
        message.pop("reasoning_content", None)


def renumbered(body: Body, turn: int) -> None:
    """A proxy replaces the ids of calls each time."""
    for message in body["messages"]:
        if "tool_call_id" in message:
            message["tool_call_id"] += f"_{turn}"
        for call in message.get("tool_calls", ()):
            call["id"] += f"_{turn}"


def switches_thinking(body: Body, turn: int) -> None:
    """Turns thinking on in one turn and off in the next."""
    body["enable_thinking"] = bool(turn % 2)


HABITS: list[Habit] = [respaced, as_objects, unsaid, in_parts, with_remains, renamed]


# --- what follows ----------------------------------------------------------------------------


@pytest.fixture(scope="module", name="tokenizer")
def tokenizer_(model_directory: Path) -> Any:
    """The tokenizer of the random model, with Pebble's template."""
    return load_tokenizer(model_directory)


def with_habits(seed: int, *habits: Habit, thinks: bool = False) -> list[Conversation]:
    """The conversation turn by turn, from a client with these habits."""
    found = []
    for turn, body in enumerate(calm(seed, thinks=thinks)):
        for habit in habits:
            habit(body, turn)
        sent = json.dumps(body).encode()
        command = read_chat_request(sent, {}, Ignored(), FACTS).command
        assert command.conversation is not None
        found.append(command.conversation)
    return found


def assert_grows(tokenizer: Any, turns: list[Conversation]) -> None:
    """Assert that each turn's parts and prompt are the beginning of the next turn's."""
    for one, other in itertools.pairwise(turns):
        parts = conversation_parts(one)
        assert parts == conversation_parts(other)[: len(parts)]
        before, begins, _ = render(tokenizer, one).rpartition(BEGINNING)
        assert begins
        assert render(tokenizer, other).startswith(before)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("habit", HABITS, ids=lambda habit: habit.__name__)
def test_a_habit_changes_nothing(tokenizer: Any, habit: Habit, seed: int):
    """Each turn has the same parts and prompt as with a client that changes nothing."""
    plain, moved = with_habits(seed), with_habits(seed, habit)
    assert TURNS == len(plain)
    assert_grows(tokenizer, plain)
    assert_grows(tokenizer, moved)
    assert [conversation_parts(one) for one in plain] == [conversation_parts(one) for one in moved]
    assert [render(tokenizer, one) for one in plain] == [render(tokenizer, one) for one in moved]


def test_all_habits_together_change_nothing(tokenizer: Any):
    """Clients have several habits."""
    plain, moved = with_habits(7), with_habits(7, respaced, unsaid, with_remains, renamed)
    assert [render(tokenizer, one) for one in plain] == [render(tokenizer, one) for one in moved]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("habit", [forgets_thoughts, renumbered, switches_thinking])
def test_each_habit_leaves_the_conversation_the_same(tokenizer: Any, habit: Habit, seed: int):
    """
    The conversation is the same if a client drops or changes reasoning, ids or thinking; its prompt
    is too, as far as the template renders it the same way.
    """
    plain = with_habits(seed, thinks=True)
    moved = with_habits(seed, habit, thinks=True)
    assert plain != moved
    assert [conversation_parts(one) for one in plain] == [conversation_parts(one) for one in moved]
    assert [said(tokenizer, one) for one in plain] == [said(tokenizer, one) for one in moved]


def said(tokenizer: Any, turn: Conversation) -> str:
    """The prompt, up to the beginning of the answer."""
    return render(tokenizer, turn).rpartition(BEGINNING)[0]
