"""What the stored parts of an answer must have of the text that was released."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cairn.engine.answer.markers import Markers
from cairn.engine.answer.parts import AnswerForm, AnswerPart, AnswerParts
from cairn.engine.answer.tool_calls import is_json
from cairn.engine.prompt.turns import parts_text
from cairn.journal.shown import PIECES_MAX, shown_fault

THINK = ("<think>", "</think>")
CALL = ("<call>", "</call>")
ALL = (*THINK, *CALL)
TOOLS = ({"type": "function", "function": {"name": "weather"}},)


def said(text: str) -> dict[str, Any]:
    return {"said": {"text": text}}


def thought(text: str) -> dict[str, Any]:
    return {"thought": {"text": text}}


def called(index: int = 0, **fields: Any) -> dict[str, Any]:
    call = {"id": "c", "name": "weather", "arguments": "{}", "cut": None, **fields}
    return {"called": {"index": index, **call}}


WRITTEN = 'Well\n<call>{"name": "weather", "arguments": {"place": "Grü", "n": 1}}</call>'
HOLDS: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "nothing": ("", []),
    "words": ("Hello there", [said("Hello there")]),
    "spaces around": (" Hello\n", [said("Hello")]),
    "a thought": ("<think>\nHm\n</think>\n\nYes", [thought("Hm"), said("Yes")]),
    "a thought that is left open": ("<think>Hm", [thought("Hm")]),
    "a marker that is a word": ("a <think> b", [said("a <think> b")]),
    "a dropped marker": ("a</think>b", [said("a\nb")]),
    "a call": (WRITTEN, [said("Well"), called(arguments='{"place": "Grü", "n": 1}')]),
    "a call with other spaces": (WRITTEN, [said("Well"), called(arguments='{"place":"Grü"}')]),
    "nested": (WRITTEN, [said("Well"), called(arguments='{"place":[{"n":"Grü"},2]}')]),
    "a call that was cut": (
        'a<call>\n{"name": "weather", "arguments": {"pl',
        [said("a"), called(arguments='{"pl', cut='<call>\n{"name": "weather", "arguments": {"pl')],
    ),
    "an escape": (
        '<call>{"name": "weather", "arguments": "{\\"a\\": \\"b\\\\nc\\"}"}</call>',
        [called(arguments='{"a":"b\\nc"}')],
    ),
    "escapes of all kinds": (
        r'<call>weather(a="K\u00f6ln", b="\ud83d\ude00", c="K\x41", d="x\by\tz")</call>',
        [called(arguments='{"a":"Köln","b":"😀","c":"KA","d":"x\\by\\tz"}')],
    ),
    "Python's names": (
        '<call>weather(a={True: 1, None: "x"})</call>',
        [called(arguments='{"a":{"true":1,"null":"x"}}')],
    ),
    "a list that became a text": (
        '<call>{"name": "weather", "arguments": {"place": ["Grü", true, 1e3]}}</call>',
        [called(arguments='{"place":"[\'Grü\', True, 1000.0]"}')],
    ),
}
FAILS: dict[str, tuple[str, str, list[dict[str, Any]] | str]] = {
    "another word": ("words", "Hello there", [said("Hello here")]),
    "a word left out": ("words", "I will not do it", [said("I will do it")]),
    "a word more": ("words", "Hello", [said("Hello you")]),
    "no words": ("words", "Hello", []),
    "a thought cut": ("words", "<think>Hm, no</think>Yes", [thought("Hm"), said("Yes")]),
    "another order": ("words", "<think>Hm</think>Yes", [said("Yes"), thought("Hm")]),
    "another name": ("call 0", WRITTEN, [said("Well"), called(name="bomb")]),
    "another argument": ("call 0", WRITTEN, [said("Well"), called(arguments='{"place":"Rom"}')]),
    "another field": ("call 0", WRITTEN, [said("Well"), called(arguments='{"city":"Grü"}')]),
    "another escape": (
        "call 0",
        r'<call>weather(a="K\u00f6ln")</call>',
        [called(arguments='{"a":"Kaln"}')],
    ),
    "a list that became another text": (
        "call 0",
        WRITTEN,
        [said("Well"), called(arguments='{"place":"[\'Rom\']"}')],
    ),
    "a number that became another text": (
        "call 0",
        WRITTEN,
        [said("Well"), called(arguments='{"place":"77"}')],
    ),
    "not JSON": ("call 0", WRITTEN, [said("Well"), called(arguments="{,")]),
    "another cut": ("call 0", WRITTEN, [said("Well"), called(arguments="{", cut="<call>no")]),
    "two first calls": ("calls in another order", WRITTEN, [said("Well"), called(), called()]),
    "two kinds": ("a part that is not of one kind", "a", [said("a") | thought("a")]),
    "no kind": ("a part that is not of one kind", "a", [{}]),
    "another kind": ("parts of an unknown form", "a", [{"sung": {"text": "a"}}]),
    "not a list": ("parts of an unknown form", "a", "a"),
}


@pytest.mark.parametrize("name", HOLDS)
def test_what_the_text_says(name: str) -> None:
    """Words, thoughts and calls that are in the text, however they were divided."""
    text, parts = HOLDS[name]
    assert shown_fault(json.dumps(parts), text, (*ALL, "")) is None


@pytest.mark.parametrize("name", FAILS)
def test_what_the_text_does_not_say(name: str) -> None:
    """Words that were changed, left out or added, and calls of something else."""
    fault, text, parts = FAILS[name]
    assert fault == shown_fault(json.dumps(parts), text, ALL)


def test_many_pieces() -> None:
    """Of very many pieces the order of characters is compared."""
    text = "a<think>" * PIECES_MAX
    assert shown_fault(json.dumps([said("a" * 9)]), text, ALL) is None
    assert "words" == shown_fault(json.dumps([said("b")]), text, ALL)


TEXTS = (
    "Hello",
    "<think>\nHm\n</think>\n\nYes\n",
    "a <think> b </think> c",
    f"{WRITTEN}\n and <call>no JSON</call> more <call>",
    f"<think>Hm{WRITTEN}{WRITTEN}\n",
    "  <call> </call>\n\n<think></think>x",
)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("begins", ["normal", "reasoning"])
def test_what_is_made_of_an_answer_holds(text: str, size: int, begins: str) -> None:
    """The parts that the engine makes of a text are what the text says, and no other parts are."""
    markers = Markers(thinking=THINK, calling=CALL, parse=lambda words, tools: json.loads(words))
    form = AnswerForm(markers=markers, begins=begins, tools=TOOLS, may_think=True)
    answer = AnswerParts(form, name="a")
    parts: list[AnswerPart] = []
    for start in range(0, len(text), size):
        parts.extend(answer.add(text[start : start + size]).parts)
    parts.extend(answer.finish(complete=True).parts)
    stored = parts_text(parts)
    assert shown_fault(stored, text, markers.all_texts) is None
    assert is_json(stored)
    if parts:
        assert shown_fault(stored, text.upper(), markers.all_texts) is not None
