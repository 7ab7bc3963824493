"""How Pebble is evaluated: the judges, and what is counted."""

from __future__ import annotations

import hashlib
import json
import re
from random import Random
from typing import Any

import pytest

from cairn_pebble.dialogues import Dialogue
from cairn_pebble.evaluation import SKILLS, Skill, evaluate, tries
from cairn_pebble.sequences import Renderer
from cairn_pebble.texts import everyday, words
from cairn_pebble.texts.by_hand import SPOKEN, WISHES, allows, called, is_usable, spoken
from cairn_pebble.texts.words import Split
from workshop.pebble.tests.pebble_parts import DRAWS, pebble_renderer

DIGEST = "0f77111a3122ed16a7de4fedc3534bf41b8bb81af4ce62e343cb0091b4806680"
"""Of the dialogues of seed 1, by the function that drew them when the figures were measured."""


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    """What turns dialogues into tokens."""
    return pebble_renderer()


@pytest.mark.parametrize("skill", SKILLS, ids=lambda skill: skill.name)
def test_a_judge_knows_right_from_wrong(skill: Skill):
    """
    The expected answer passes; one with other words does not, and neither does an unfinished one.
    """
    rng = Random(3)
    for _ in range(20):
        dialogue = skill.draw(rng, Split.HELD_OUT)
        due = dialogue.messages[-1]["content"]
        assert skill.judge(dialogue, due, True)
        assert not skill.judge(dialogue, due, False)
        if skill.name == "ends its turn by itself":
            continue
        turned = "<think>" not in due
        wrong = f"<think>\nHm.\n</think>\n\n{due}" if turned else due.split("</think>")[1]
        wrong = wrong if "thinks" in skill.name else "I do not know."
        assert not skill.judge(dialogue, wrong, True)


@pytest.mark.parametrize(
    ("skill", "said"),
    [
        ("recalls a fact after 1 to 20 turns", "Your code is 4117."),  # one more digit
        ("recalls a fact after 1 to 20 turns", "<think>\nIt is 411."),  # only in the thoughts
        ("recalls a fact after 1 to 20 turns", "<think>\n\n</think>\n\n<think>\n411."),
        ("uses a tool's result", "The task: the total is 411 and the number is 17."),  # swapped
        ("ends its turn by itself", ""),
        ("thinks if asked to, and only then", "<think>\n\n</think>\n\nYour code is 411."),
        ("thinks if asked to, and only then", "<think>\nI know it.\n</think>\n\n"),
        ("thinks if asked to, and only then", "Your code is 411."),
    ],
)
def test_a_near_miss_is_wrong(skill: str, said: str):
    """A call that only looks right is wrong."""
    due = "The task: the total is 17 and the number is 411."
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": due}]
    dialogue = Dialogue("recall", messages, thinking=True, needed=("411",))
    assert not judge_of(skill)(dialogue, said, True)


@pytest.mark.parametrize(
    "said",
    [
        "Your name is not Jordis.",
        "Your name is Torvo. Your name is Jordis.",
        "Your sister's name is Jordis.",
        "Your name is Jordi.",
        "Jordis",
    ],
)
def test_only_the_answer_that_is_due_recalls(said: str):
    """A value that is in the text, but not as the answer to the question, was not recalled."""
    messages = [
        {"role": "user", "content": "What is my name?"},
        {"role": "assistant", "content": "Your name is Jordis."},
    ]
    dialogue = Dialogue("recall", messages, needed=("Jordis",))
    for skill in (one for one in SKILLS if one.looked_up):
        assert skill.judge(dialogue, "Your name is Jordis.", True)
        assert not skill.judge(dialogue, said, True)


@pytest.mark.parametrize(
    "called",
    [
        '{"name": "find_task", "arguments": {"number": 17.0, "place": "Halden"}}',
        '{"name": "find_task", "arguments": {"number": "17", "place": "Halden"}}',
        '{"name": "find_task", "arguments": {"number": 17}}',
        '{"name": "find_tasks", "arguments": {"number": 17, "place": "Halden"}}',
        '{"name": "x", "name": "find_task", "arguments": {"number": 17, "place": "Halden"}}',
        '{"name": "find_task", "arguments": {"number": 17, "place": "Halden"}',
    ],
)
def test_a_call_is_exact(called: str):
    """Types and names of arguments count, each key occurs once, and the order of keys is free."""
    due = '{"name": "find_task", "arguments": {"number": 17, "place": "Halden"}}'
    other_order = '{"arguments": {"place": "Halden", "number": 17}, "name": "find_task"}'
    dialogue = Dialogue("tool call", needed=(due,))
    judge = judge_of("calls the right tool of 1 to 30")
    for right in (due, other_order):
        assert judge(dialogue, f"<tool_call>\n{right}\n</tool_call>", True)
    assert not judge(dialogue, f"<tool_call>\n{called}\n</tool_call>", True)


def judge_of(skill: str) -> Any:
    """By name."""
    (judge,) = (one.judge for one in SKILLS if one.name == skill)
    return judge


def test_lookups_are_reported_by_kind(renderer: Renderer):
    """
    An evaluation shows how many values of each kind were right; the kinds add up to the whole, and
    each occurs.
    """
    results = list(evaluate(renderer, lambda prompt: ("", True), 60, 0))
    kinds: set[str] = set()
    for one in results:
        if one.skill.looked_up:
            assert one.tried == sum(tried for tried, _ in one.kinds.values())
            kinds |= one.kinds.keys()
        else:
            assert {} == one.kinds
    assert 4 == len(kinds)
    assert tries(60) == sum(one.tried for one in results)


def test_handwritten_dialogues_are_not_trained_on(renderer: Renderer):
    """
    No training dialogue has such a message, ignoring case, nor such a tool; the right value passes,
    and a different one does not.
    """
    rng, said, tools = Random(8), set(), set()
    for draw in DRAWS:
        for _ in range(60):
            drawn = draw(rng, Split.TRAIN)
            said |= {one["content"].casefold() for one in drawn.messages}
            tools |= {plain_name(one["function"]["name"]) for one in drawn.tools}
    for told, asked, _ in SPOKEN:
        assert told.casefold() not in said, told
        assert f"{told.casefold()} {asked.casefold()}" not in said
    for wish in WISHES:
        assert wish.asked.casefold() not in said, wish.asked
        assert plain_name(wish.name) not in tools, wish.name
    values = iter([value for _, _, value in SPOKEN])
    assert all(one.right for one in spoken(renderer, lambda _: (f"It is {next(values)}.", True)))
    assert not any(one.right for one in spoken(renderer, lambda _: ("It is Nobody.", True)))


def plain_name(name: str) -> str:
    """A tool's name in small letters, without the server's prefix."""
    return re.sub(r"[^a-z]", "", re.sub(r"^mcp__[^_]+__", "", name).casefold())


def test_no_wording_comes_from_handwritten_dialogues(monkeypatch: pytest.MonkeyPatch):
    """No clause and no question in everyday words is a hand-written one, whatever the value."""
    wordings: set[str] = set()
    phrase = words.phrase

    def phrased(rng: Random, split: Split, *parts: Any) -> str:
        wordings.update(one.strip(" ?.!").casefold() for part in parts for one in part)
        return phrase(rng, split, *parts)

    monkeypatch.setattr(everyday, "phrase", phrased)
    rng = Random(8)
    for _ in range(600):
        everyday.everyday(rng, Split.TRAIN)
    assert len(wordings) > 500
    for told, asked, value in SPOKEN:
        text = told.replace(value, "{}").strip(" ?.!").casefold()
        assert text not in wordings, told
        assert asked.strip(" ?.!").casefold() not in wordings, asked


def test_a_usable_call_is_known():
    """
    A call of the right tool that its schema allows and that has the user's values passes: in any
    order and case, with or without optional arguments. Any other call fails.
    """
    wish = next(one for one in WISHES if one.name == "createCalendarEvent")
    start = {"date": "2026-12-03", "time": "09:30"}

    def usable(said: str, ended: bool = True) -> bool:
        return is_usable(wish, said, ended)

    def call(arguments: Any, name: str = wish.name) -> str:
        text = json.dumps({"name": name, "arguments": arguments})
        return f"<tool_call>\n{text}\n</tool_call>"

    right = {"start": start, "title": "The Dentist"}
    assert usable(call(right))
    assert usable(f"<think>\nHm.\n</think>\n\n{call(right)}")
    assert usable(call(right | {"attendees": []}))
    assert not usable(call(right), ended=False)
    assert not usable(f"Sure. {call(right)}")
    assert not usable(f"{call(right)}\n{call(right)}")
    cases: tuple[Any, ...] = (
        {"title": "Dentist"},
        {"title": "Dentist", "start": "2026-12-03 09:30"},
        {"title": "Dentist", "start": start | {"zone": "UTC"}},
        {"title": "Dentist", "start": start | {"time": "19:30"}},
        {"title": "Dentists", "start": start},
        {"title": 5, "start": start},
        right | {"attendees": "all"},
        right | {"attendees": [5]},
        right | {"place": "here"},
        [],
        None,
    )
    for wrong in cases:
        assert not usable(call(wrong)), wrong
    assert not usable(call(right, name="create_calendar_event"))
    assert not usable("<tool_call>\n{}\n</tool_call>")


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"type": "integer"}, 5, 5.0),
        ({"type": "integer"}, 0, True),
        ({"type": "number"}, 5.5, "5.5"),
        ({"type": "number"}, 5, False),
        ({"type": "boolean"}, False, 0),
        ({"type": "string", "enum": ["a", "b"]}, "a", "c"),
        ({"type": "array", "items": {"type": "string"}}, ["a"], [1]),
        ({"type": "object", "properties": {}}, {}, {"a": 1}),
    ],
)
def test_a_schema_distinguishes_values(schema: dict[str, Any], right: Any, wrong: Any):
    """Each kind of schema allows one thing and refuses a different one."""
    assert allows(schema, right)
    assert not allows(schema, wrong)


def test_wishes_can_be_granted(renderer: Renderer):
    """
    Each wish has its tool in the prompt, among its neighbours' tools, and the expected call counts.
    """
    prompts: list[str] = []

    def say(prompt: str) -> tuple[str, bool]:
        wish = WISHES[len(prompts)]
        prompts.append(prompt)
        arguments: dict[str, Any] = {}
        for path, value in wish.due:
            inside, schema = arguments, wish.parameters
            *outer, last = path.split(".")
            for key in outer:
                inside, schema = inside.setdefault(key, {}), schema["properties"][key]
            kind = schema["properties"][last]["type"]
            inside[last] = {"array": [value], "number": value.isdigit() and int(value)}.get(
                kind, value
            )
        call = json.dumps({"name": wish.name, "arguments": arguments})
        return f"<tool_call>\n{call}\n</tool_call>", True

    found = list(called(renderer, say))
    assert all(one.usable for one in found), [one for one in found if not one.usable]
    assert len(WISHES) == len({wish.name for wish in WISHES}) == len(found)
    for wish, prompt in zip(WISHES, prompts, strict=True):
        assert f'"name": "{wish.name}"' in prompt
        assert 3 == prompt.count('"type": "function"')
    assert not any(one.usable for one in called(renderer, lambda _: ("No.", True)))


def test_the_figures_that_stand_are_of_these_dialogues():
    """
    The nine skills that were measured first are drawn as they were then, so that their figures
    remain valid and later ones can be compared with them.
    """
    digest = hashlib.sha256()
    for skill in SKILLS[:9]:
        rng = Random(f"1/{skill.name}")
        for _ in range(max(1, 12 // skill.every)):
            one = skill.draw(rng, Split.HELD_OUT)
            told = [one.skill, one.messages, one.tools, one.thinking, one.needed]
            digest.update(json.dumps(told, sort_keys=True).encode())
    assert DIGEST == digest.hexdigest()


def test_the_evaluation_counts(renderer: Renderer):
    """A model that always says the same ends each turn, never thinks, and recalls nothing."""
    results = {
        one.skill.name: (one.right, one.tried)
        for one in evaluate(renderer, lambda prompt: ("Hm.", True), 8, seed=1)
    }
    assert (8, 8) == results["ends its turn by itself"]
    assert (0, 8) == results["recalls a fact after 1 to 20 turns"]
    assert (0, 2) == results["recalls a fact across 4,000 tokens"]
