"""
What clients of chat completions make of a conversation when they send it back, each habit in a
generated one: the prompt is that of a client that sends back what it was given, and what was sent
before stays its beginning.
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
    The requests of a conversation whose client sends messages back as they came: words, calls,
    and results, after which the user speaks or the next answer follows.

    Args:
        thinks: whether something was thought before each answer.
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
    """Arguments are read, and written again without spaces and with other escapes."""
    for message in answers(body):
        for call in message.get("tool_calls", ()):
            given = json.loads(call["function"]["arguments"])
            text = json.dumps(given, separators=(",", ":"), ensure_ascii=bool(turn % 2))
            call["function"]["arguments"] = text


def as_objects(body: Body, turn: int) -> None:
    """Arguments are read, and left as they were read."""
    for message in answers(body):
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])


def unsaid(body: Body, turn: int) -> None:
    """Where nothing was said beside a call there is an empty text, or no content at all."""
    for message in answers(body):
        if message["content"] is None:
            message["content"] = ""
            if turn % 2:
                del message["content"]


def in_parts(body: Body, turn: int) -> None:
    """Content is a list of parts, but not of all messages, and not of the same the next time."""
    for index, message in enumerate(body["messages"]):
        if (index + turn) % 2 and message["content"]:
            hint = {"cache_control": {"type": "ephemeral"}} if index % 3 else {}
            message["content"] = [{"type": "text", "text": message["content"], **hint}]


def with_remains(body: Body, turn: int) -> None:
    """Fields of the answer come along: empty ones, ids, and the place among the calls."""
    for message in answers(body):
        message |= {"refusal": None, "annotations": [], "audio": None, "id": f"msg_{turn}"}
        if not message.get("tool_calls"):
            message |= {"tool_calls": [] if turn % 2 else None, "function_call": None}
        for index, call in enumerate(message["tool_calls"] or ()):
            call["index"] = index


def renamed(body: Body, turn: int) -> None:
    """What the system says is the developer's now and then."""
    if turn % 2:
        body["messages"][0]["role"] = "developer"


def forgets_thoughts(body: Body, turn: int) -> None:
    """What was thought before a user spoke is dropped; within a loop of calls it is kept."""
    spoke = max(i for i, message in enumerate(body["messages"]) if message["role"] == "user")
    for message in body["messages"][:spoke]:
        message.pop("reasoning_content", None)


def renumbered(body: Body, turn: int) -> None:
    """Somebody in between gives calls other ids each time."""
    for message in body["messages"]:
        if "tool_call_id" in message:
            message["tool_call_id"] += f"_{turn}"
        for call in message.get("tool_calls", ()):
            call["id"] += f"_{turn}"


def switches_thinking(body: Body, turn: int) -> None:
    """Thinking is on in one turn and off in the next."""
    body["enable_thinking"] = bool(turn % 2)


HABITS: list[Habit] = [respaced, as_objects, unsaid, in_parts, with_remains, renamed]


# --- what follows ----------------------------------------------------------------------------


@pytest.fixture(scope="module", name="tokenizer")
def tokenizer_(model_directory: Path) -> Any:
    """The random model's, with Pebble's template."""
    return load_tokenizer(model_directory)


def with_habits(seed: int, *habits: Habit, thinks: bool = False) -> list[Conversation]:
    """The conversation turn by turn, by a client with these habits."""
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
    """Each turn's parts and prompt are the beginning of the next one's."""
    for one, other in itertools.pairwise(turns):
        parts = conversation_parts(one)
        assert parts == conversation_parts(other)[: len(parts)]
        before, begins, _ = render(tokenizer, one).rpartition(BEGINNING)
        assert begins
        assert render(tokenizer, other).startswith(before)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("habit", HABITS, ids=lambda habit: habit.__name__)
def test_a_habit_changes_nothing(tokenizer: Any, habit: Habit, seed: int):
    """Parts and prompt of every turn are those of the client that sends back what it was given."""
    plain, moved = with_habits(seed), with_habits(seed, habit)
    assert TURNS == len(plain)
    assert_grows(tokenizer, plain)
    assert_grows(tokenizer, moved)
    assert [conversation_parts(one) for one in plain] == [conversation_parts(one) for one in moved]
    assert [render(tokenizer, one) for one in plain] == [render(tokenizer, one) for one in moved]


def test_all_habits_together_change_nothing(tokenizer: Any):
    """Clients have several."""
    plain, moved = with_habits(7), with_habits(7, respaced, unsaid, with_remains, renamed)
    assert [render(tokenizer, one) for one in plain] == [render(tokenizer, one) for one in moved]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("habit", [forgets_thoughts, renumbered, switches_thinking])
def test_it_is_the_same_conversation_all_the_same(tokenizer: Any, habit: Habit, seed: int):
    """
    What a client drops or changes of thoughts, of ids and of thinking leaves the conversation what
    it was; as far as the template renders it alike, its prompt too.
    """
    plain = with_habits(seed, thinks=True)
    moved = with_habits(seed, habit, thinks=True)
    assert plain != moved
    assert [conversation_parts(one) for one in plain] == [conversation_parts(one) for one in moved]
    assert [said(tokenizer, one) for one in plain] == [said(tokenizer, one) for one in moved]


def said(tokenizer: Any, turn: Conversation) -> str:
    """The prompt, up to where the answer begins."""
    return render(tokenizer, turn).rpartition(BEGINNING)[0]
