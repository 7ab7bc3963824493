"""
What Pebble can do, measured on dialogues that share no names, numbers or wordings with the
training.

Each answer is generated greedily, by mlx-lm, from the prompt that a server would feed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from random import Random
from typing import Any, Final

import attrs

from pebble import dialogues
from pebble.dialogues import Dialogue
from pebble.recipe import Draw
from pebble.sequences import TURN_END, Renderer
from pebble.small_talk import TOPICS
from pebble.words import Split

LONGEST_ANSWER: Final = 256

Say = Callable[[str], tuple[str, bool]]
"""From a prompt to an answer, and whether it ended by itself."""


@attrs.frozen(kw_only=True)
class Skill:
    """
    Attributes:
        draw: makes dialogues that show it.
        judge: whether an answer does: given the dialogue, the answer, and whether it ended.
        least: the share that is aimed at.
        every: one dialogue in so many is enough; long ones take long.
    """

    name: str
    draw: Draw
    judge: Callable[[Dialogue, str, bool], bool]
    least: float
    every: int = 1


@attrs.frozen(kw_only=True)
class Result:
    """
    How a skill went.
    """

    skill: Skill
    tried: int
    right: int
    wrong: tuple[tuple[str, str], ...]


def _said(text: str) -> str:
    """
    What a user sees: the answer without its thoughts, of which nothing is left where they did not
    end.
    """
    said = text.split("</think>", 1)[-1]
    return "" if "<think>" in said else said.strip()


def _contains(dialogue: Dialogue, said: str, ended: bool) -> bool:
    whole = (rf"(?<!\w){re.escape(one)}(?!\w)" for one in dialogue.needed)
    return ended and all(re.search(one, _said(said)) for one in whole)


def _says(dialogue: Dialogue, said: str, ended: bool) -> bool:
    due: str = dialogue.messages[-1]["content"]
    return ended and _said(said) == _said(due)


def _ends(dialogue: Dialogue, said: str, ended: bool) -> bool:
    return ended and _said(said) != ""


def _calls(dialogue: Dialogue, said: str, ended: bool) -> bool:
    text = _said(said)
    if not (ended and text.startswith("<tool_call>") and text.endswith("</tool_call>")):
        return False
    try:
        found = json.loads(text.removeprefix("<tool_call>").removesuffix("</tool_call>"))
    except ValueError:
        return False
    due: Any = json.loads(dialogue.needed[0])
    return bool(found == due)


def _thinks(dialogue: Dialogue, said: str, ended: bool) -> bool:
    if dialogue.thinking:
        thoughts = re.fullmatch(r"<think>\n(.+)\n</think>\n\n(.+)", said, re.DOTALL)
        right = thoughts is not None and not any("think>" in part for part in thoughts.groups())
    else:
        right = "think>" not in said
    return ended and right


def _any(rng: Random, split: Split) -> Dialogue:
    return dialogues.dialogue(rng, split)


def _edited(rng: Random, split: Split) -> Dialogue:
    while True:
        found = dialogues.recall(rng, split, turns=rng.randint(0, 20), questions=1)
        if found.edits:
            return found.edited()


def _asked_back(rng: Random, split: Split) -> Dialogue:
    return dialogues.recall(rng, split, turns=rng.randint(1, 20), questions=1)


def _of_kind(rng: Random, split: Split, *, kind: str) -> Dialogue:
    while True:
        found = dialogues.tool_use(rng, split, count=rng.randint(1, 30))
        if found.skill == kind:
            return found


SKILLS: Final = (
    Skill(name="ends its turn by itself", draw=_any, judge=_ends, least=0.99),
    Skill(name="recalls a fact after 1 to 20 turns", draw=_asked_back, judge=_contains, least=0.95),
    Skill(
        name="recalls a fact across 4,000 tokens",
        draw=partial(dialogues.recall, turns=18, fillers=18, questions=1),
        judge=_contains,
        least=0.95,
        every=4,
    ),
    Skill(name="answers by an edit", draw=_edited, judge=_contains, least=0.95),
    Skill(
        name="calls the right tool of 1 to 30",
        draw=partial(_of_kind, kind="tool call"),
        judge=_calls,
        least=0.95,
        every=2,
    ),
    Skill(
        name="uses a tool's result",
        draw=partial(_of_kind, kind="tool result"),
        judge=_says,
        least=0.95,
        every=2,
    ),
    Skill(name="thinks if asked to, and only then", draw=_any, judge=_thinks, least=0.99),
    Skill(name="says so where it was not told", draw=dialogues.untold, judge=_contains, least=0.9),
    Skill(name="gives the answer to small talk", draw=dialogues.talk, judge=_contains, least=0.9),
)


def evaluate(
    renderer: Renderer, say: Say, count: int, seed: int, split: Split = Split.HELD_OUT
) -> Iterator[Result]:
    """
    Try each skill.

    Args:
        count: how many dialogues of each; of long ones fewer.
    """
    for skill in SKILLS:
        rng = Random(f"{seed}/{skill.name}")
        right, wrong = 0, []
        tried = max(1, count // skill.every)
        for _ in range(tried):
            dialogue = skill.draw(rng, split)
            said, ended = say(renderer.prompt(dialogue))
            if skill.judge(dialogue, said, ended):
                right += 1
            else:
                wrong.append((dialogue.messages[-1]["content"] + TURN_END, said))
        yield Result(skill=skill, tried=tried, right=right, wrong=tuple(wrong))


def small_talk(renderer: Renderer, say: Say, count: int) -> Iterator[tuple[str, str]]:
    """
    What is said to the first topics in wordings that were never trained on, for people to read.
    """
    for topic in TOPICS[:count]:
        asked = dialogues.small_talk(Random(topic.answer), Split.HELD_OUT, topic)
        messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": ""}]
        said, _ = say(renderer.prompt(Dialogue("talk", messages)))
        yield asked, said


def report(results: Sequence[Result], talk: Sequence[tuple[str, str]], what: str) -> str:
    """
    The measurement as a page of Markdown.

    Args:
        what: by which command, and of which recipe.
    """
    lines = [
        "# What Pebble can do",
        "",
        what,
        "",
        "| skill | right | of | aim |",
        "|---|---|---|---|",
    ]
    for one in results:
        share = one.right / one.tried
        lines.append(f"| {one.skill.name} | {share:.1%} | {one.tried} | {one.skill.least:.0%} |")
    lines += ["", "| said to it | what it says |", "|---|---|"]
    lines += [f"| {asked} | {' '.join(said.split())} |" for asked, said in talk]
    return "\n".join(lines) + "\n"
