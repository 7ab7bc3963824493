"""
The content of answers, and not only that there are answers: conversations with Pebble, warm and
cold alike.

Pebble was never trained on these names, numbers, towns and tools.
"""

from __future__ import annotations

import json
from functools import partial
from random import Random
from typing import Any

import pytest

from cairn.journal import events as ev
from cairn_pebble import dialogues
from cairn_pebble.dialogues import Dialogue
from cairn_pebble.texts import plain_tools, words
from cairn_pebble.texts.words import Split
from tests.e2e.conftest import Start
from tests.support.processes.subprocess_server import (
    Answer,
    Serving,
    ask,
    assistant,
    together,
    user,
)

WHOLE = {"max_tokens": 200}
CHAT = (
    "How are you?",
    "What is Cairn?",
    "Tell me a joke",
    "What can you do?",
    "What is the journal?",
    "Thank you",
    "Good morning!",
    "What is a KV cache?",
    "Are you human?",
    "Tell me a story",
)


def say(server: Serving, talk: list[dict[str, str]], text: str, **body: Any) -> Answer:
    """One turn of a conversation; appends the message and its answer."""
    talk.append(user(text))
    answer = ask(server, *talk, **WHOLE, **body)
    assert "stop" == answer.finish_reason
    talk.append(assistant(answer.text))
    return answer


@pytest.mark.long
def test_a_name_is_recalled_after_twenty_turns(shared: Serving, cold: Serving):
    """
    The conversation is one session whose KV is reused turn by turn. The name is recalled after
    twenty turns about other things, with the same bits as from a server that computes everything
    again.
    """
    talk: list[dict[str, str]] = []
    answers = [say(shared, talk, "Just so you know: my name is Jordis.")]
    answers += [say(shared, talk, CHAT[turn % len(CHAT)]) for turn in range(20)]
    asked = [*talk, user("Do you remember my name?")]
    answers.append(ask(shared, *asked, **WHOLE))

    assert "Jordis" in answers[-1].text
    assert ["continuation"] * 21 == [answer.path for answer in answers[1:]]
    assert answers[-1].cached_tokens > answers[-1].prompt_tokens - 128
    missed = ask(cold, *asked, **WHOLE, cache_prompt=False)
    assert (0, answers[-1].bits) == (missed.cached_tokens, missed.bits)


def test_an_edit_is_answered(shared: Serving, cold: Serving):
    """
    After an earlier turn was edited, the answer follows the edit, with the KV before it reused.
    """
    system = {"role": "system", "content": "You are a helpful assistant. " * 12}
    note = "Please remember that my sister's name is {}."
    talk = [system, user(note.format("Merlin")), assistant("Noted.")]
    before = ask(shared, *talk, user("What is my sister's name?"), **WHOLE)
    talk[1] = user(note.format("Torvo"))
    asked = [*talk, user("What is my sister's name?")]
    after = ask(shared, *asked, **WHOLE)

    assert "Merlin" in before.text
    assert "Torvo" in after.text
    assert after.cached_tokens >= 64
    assert ask(cold, *asked, **WHOLE, cache_prompt=False).bits == after.bits


def test_clients_hear_their_own_name_alone(shared: Serving):
    """Four clients at the same time each hear their own name."""
    names = ("Jordis", "Merlin", "Torvo", "Wilna")

    def recall(name: str) -> Answer:
        talk: list[dict[str, str]] = []
        say(shared, talk, f"Please remember that my name is {name}.")
        say(shared, talk, "Tell me a story")
        return say(shared, talk, "What is my name?")

    answers = together([partial(recall, name) for name in names])
    for name, answer in zip(names, answers, strict=True):
        assert {name} == {one for one in names if one in answer.text}


@pytest.mark.long
def test_a_name_is_recalled_after_a_restart(start: Start):
    """A name from before a restart is recalled after it, from block files."""
    talk: list[dict[str, str]] = []
    server = start()
    say(server, talk, "Please remember that my name is Jordis.")
    for asked in CHAT[:3]:
        say(server, talk, asked)
    assert 0 == server.stop()
    again = start(data_dir=server.data_dir)
    answer = say(again, talk, "What is my name?")

    assert "Jordis" in answer.text
    assert answer.cached_tokens >= 64
    assert again.events(ev.BlockLoaded)


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {
                "type": "object",
                "properties": {key: {"type": kind} for key, kind in properties.items()},
                "required": list(properties),
            },
        },
    }
    for name, description, properties in (
        ("find_weather", "Find the weather.", {"city": "string"}),
        ("check_timer", "Check a timer.", {"minutes": "integer"}),
        ("delete_letter", "Delete a letter.", {"name": "string"}),
    )
]


def test_a_tool_is_called_and_its_result_is_in_the_answer(shared: Serving, cold: Serving):
    """
    The right one of three tools is called with valid arguments, and the answer contains its result.
    """
    talk: list[dict[str, Any]] = [user("Please find the weather in Zanport.")]
    call = ask(shared, *talk, tools=TOOLS, **WHOLE)
    ((name, arguments),) = call.calls
    assert ("find_weather", {"city": "Zanport"}) == (name, json.loads(arguments))
    assert ("tool_calls", "") == (call.finish_reason, call.text)

    result = {"role": "tool", "tool_call_id": call.message["tool_calls"][0]["id"]}
    talk += [call.message, {**result, "content": '{"number": "3414"}'}]
    answer = ask(shared, *talk, tools=TOOLS, **WHOLE)
    assert "3414" in answer.text
    assert answer.cached_tokens >= call.prompt_tokens - 128
    assert ask(cold, *talk, tools=TOOLS, **WHOLE, cache_prompt=False).bits == answer.bits


@pytest.mark.parametrize("count", [1, 8, 30])
def test_the_right_tool_of_many_is_called(shared: Serving, cold: Serving, count: int):
    """From a list of unseen tools, the requested one is called, as JSON."""
    drawn = tool_call(count)
    answer = ask(shared, *drawn.messages[:-1], tools=drawn.tools, **WHOLE)
    ((name, arguments),) = answer.calls
    called = {"name": name, "arguments": json.loads(arguments)}
    assert json.loads(drawn.needed[0]) == called
    asked = {"tools": drawn.tools, "cache_prompt": False}
    assert ask(cold, *drawn.messages[:-1], **asked, **WHOLE).bits == answer.bits


def tool_call(count: int) -> Dialogue:
    """A request for one of many tools, held out of the training."""
    rng = Random(count)
    while True:
        found = plain_tools.tool_use(rng, Split.HELD_OUT, count=count, rounds=1)
        if found.skill == "tool call" and not found.thinking:
            return found


@pytest.mark.long
def test_a_fact_is_recalled_across_four_thousand_tokens(shared: Serving, cold: Serving):
    """Warm, where everything but the last question was served before, and cold."""
    drawn = dialogues.recall(Random(9), Split.HELD_OUT, turns=18, fillers=18, questions=1)
    ask(shared, *drawn.messages[:-3], max_tokens=1)
    warm = ask(shared, *drawn.messages[:-1], enable_thinking=drawn.thinking, **WHOLE)
    assert warm.prompt_tokens > 4000
    assert warm.cached_tokens > 4000
    assert drawn.needed[0] in warm.text
    how = {"enable_thinking": drawn.thinking, "cache_prompt": False}
    assert ask(cold, *drawn.messages[:-1], **how, **WHOLE).bits == warm.bits


@pytest.mark.parametrize("thinking", [True, False, None])
def test_it_thinks_if_thinking_is_enabled(shared: Serving, thinking: bool | None):
    """With `enable_thinking` there is reasoning before the answer, and without it there is none."""
    talk = [user("Please remember that my name is Jordis."), assistant("Noted.")]
    asked = {} if thinking is None else {"enable_thinking": thinking}
    answer = ask(shared, *talk, user("What is my name?"), **asked, **WHOLE)
    assert bool(thinking) == bool(answer.thoughts)
    assert "Jordis" in answer.text


def test_the_names_were_never_trained_on():
    """So the answers here are recalled from the conversation, and not from the training."""
    for name in ("Jordis", "Merlin", "Torvo", "Wilna", "Zanport", "3414"):
        assert words.is_held_out(name)
