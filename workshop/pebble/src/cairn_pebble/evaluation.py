"""
Measure what Pebble can do.

The dialogues use names, numbers and combinations of sentence parts that were held out of the
training; some were written by hand. mlx-lm generates each answer greedily, from the prompt that a
server would feed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from random import Random
from textwrap import shorten
from typing import Final

import attrs

from cairn_pebble import dialogues, judges
from cairn_pebble.dialogues import Dialogue
from cairn_pebble.recipe import Draw
from cairn_pebble.sequences import TURN_END, Renderer
from cairn_pebble.texts import everyday, plain, plain_tools, words
from cairn_pebble.texts.by_hand import Called, Say, Spoken
from cairn_pebble.texts.first_messages import first_messages
from cairn_pebble.texts.small_talk import TOPICS
from cairn_pebble.texts.words import Split
from cairn_pebble.texts.written_tools import written_tools

LONGEST_ANSWER: Final = 256


@attrs.frozen(kw_only=True)
class Skill:
    """
    Attributes:
        draw: makes dialogues that test the skill.
        judge: whether an answer shows it, given the dialogue, the answer, and whether it ended.
        least: the share of right answers that is the goal.
        every: use one dialogue in this many, because long ones take long.
        looked_up: whether the expected answer is a value given earlier.
    """

    name: str
    draw: Draw
    judge: Callable[[Dialogue, str, bool], bool]
    least: float
    every: int = 1
    looked_up: bool = False


@attrs.frozen(kw_only=True)
class Result:
    """
    The result of one skill.

    Attributes:
        kinds: for each kind of expected value, how many were tried and how many were right.
        wrong: the expected text and the actual answer.
    """

    skill: Skill
    tried: int
    right: int
    kinds: dict[str, tuple[int, int]]
    wrong: tuple[tuple[str, str], ...]


def _any(rng: Random, split: Split) -> Dialogue:
    return plain.dialogue(rng, split)


def _edited(rng: Random, split: Split) -> Dialogue:
    while True:
        found = dialogues.recall(rng, split, turns=rng.randint(0, 20), questions=1)
        if found.edits:
            return found.edited()


def _asked_back(rng: Random, split: Split) -> Dialogue:
    return dialogues.recall(rng, split, turns=rng.randint(1, 20), questions=1)


def _of_kind(rng: Random, split: Split, *, kind: str) -> Dialogue:
    while True:
        found = plain_tools.tool_use(rng, split, count=rng.randint(1, 30))
        if found.skill == kind:
            return found


def _written(rng: Random, split: Split, *, kind: str) -> Dialogue:
    while True:
        found = written_tools(rng, split)
        if found.skill == kind:
            return found


SKILLS: Final = (
    Skill(name="ends its turn by itself", draw=_any, judge=judges.ends, least=0.99),
    Skill(
        name="recalls a fact after 1 to 20 turns",
        draw=_asked_back,
        judge=judges.says,
        least=0.95,
        looked_up=True,
    ),
    Skill(
        name="recalls a fact across 4,000 tokens",
        draw=partial(dialogues.recall, turns=18, fillers=18, questions=1),
        judge=judges.says,
        least=0.95,
        every=4,
        looked_up=True,
    ),
    Skill(name="answers by an edit", draw=_edited, judge=judges.says, least=0.95, looked_up=True),
    Skill(
        name="calls the right tool of 1 to 30",
        draw=partial(_of_kind, kind="tool call"),
        judge=judges.calls_exactly,
        least=0.95,
        every=2,
    ),
    Skill(
        name="uses a tool's result",
        draw=partial(_of_kind, kind="tool result"),
        judge=judges.says,
        least=0.95,
        every=2,
    ),
    Skill(name="thinks if asked to, and only then", draw=_any, judge=judges.thinks, least=0.99),
    Skill(
        name="says so where it was not told",
        draw=dialogues.untold,
        judge=judges.says,
        least=0.9,
    ),
    Skill(
        name="gives the answer to small talk",
        draw=dialogues.talk,
        judge=judges.says,
        least=0.9,
    ),
    # Kinds that were added later; the rows above are drawn as they always were.
    Skill(
        name="recalls a fact told in everyday words",
        draw=partial(everyday.everyday, questions=1),
        judge=judges.says,
        least=0.95,
    ),
    Skill(
        name="tells values apart that begin alike",
        draw=partial(everyday.everyday, questions=1, alike=True),
        judge=judges.says,
        least=0.95,
        every=2,
    ),
    Skill(
        name="answers by what was said last",
        draw=partial(everyday.everyday, questions=1, changed=True),
        judge=judges.says,
        least=0.95,
        every=2,
    ),
    Skill(
        name="says so where only something near was told",
        draw=everyday.near_miss,
        judge=judges.says,
        least=0.9,
    ),
    Skill(
        name="calls a tool as people write them",
        draw=partial(_written, kind="tool call"),
        judge=judges.calls_exactly,
        least=0.95,
        every=2,
    ),
    Skill(
        name="uses the result of such a tool",
        draw=partial(_written, kind="tool result"),
        judge=judges.says,
        least=0.95,
        every=2,
    ),
    Skill(
        name="gives the answer to an everyday opening",
        draw=partial(first_messages, most=2),
        judge=judges.says,
        least=0.9,
    ),
)


def evaluate(
    renderer: Renderer,
    say: Say,
    count: int,
    seed: int,
    expected: Callable[[Dialogue], Dialogue] = lambda dialogue: dialogue,
) -> Iterator[Result]:
    """
    Try each skill.

    Args:
        say: generates an answer to a prompt; called ``tries(count)`` times.
        count: how many dialogues for each skill; fewer for long ones.
        expected: changes a dialogue to what the model's recipe has.
    """
    for skill in SKILLS:
        rng = Random(f"{seed}/{skill.name}")
        tried, right, wrong = Counter[str](), Counter[str](), []
        for _ in range(_tried(skill, count)):
            dialogue = expected(skill.draw(rng, Split.HELD_OUT))
            kind = _kind(dialogue.needed[0]) if skill.looked_up else ""
            said, ended = say(renderer.prompt(dialogue))
            tried[kind] += 1
            if skill.judge(dialogue, said, ended):
                right[kind] += 1
            else:
                wrong.append((dialogue.messages[-1]["content"] + TURN_END, said))
        yield Result(
            skill=skill,
            tried=tried.total(),
            right=right.total(),
            kinds={kind: (tried[kind], right[kind]) for kind in tried if kind},
            wrong=tuple(wrong),
        )


def tries(count: int) -> int:
    """The number of answers that an evaluation takes."""
    return sum(_tried(skill, count) for skill in SKILLS)


def _tried(skill: Skill, count: int) -> int:
    return max(1, count // skill.every)


def _kind(value: str) -> str:
    """The kind of value that has to be looked up."""
    if value.isdigit():
        return "numbers"
    if value in _CHOSEN:
        return "colours, foods, jobs, months and places of things"
    if words.is_of_syllables(value):
        return "names, towns and passwords of known syllables"
    return "names and passwords of other letters"


_CHOSEN: Final = frozenset((*words.COLOURS, *words.FOODS, *words.JOBS, *words.MONTHS, *words.SPOTS))


def small_talk(renderer: Renderer, say: Say, count: int) -> Iterator[tuple[str, str]]:
    """Answers to the first topics in wordings that were never trained on, for human readers."""
    for topic in TOPICS[:count]:
        asked = dialogues.small_talk(Random(topic.answer), Split.HELD_OUT, topic)
        messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": ""}]
        said, _ = say(renderer.prompt(Dialogue("talk", messages)))
        yield asked, said


def report(
    results: Sequence[Result],
    by_hand: Sequence[Spoken],
    wishes: Sequence[Called],
    talk: Sequence[tuple[str, str]],
    what: str,
) -> str:
    """
    The measurement as a page of Markdown.

    Args:
        what: the command and the weights that were measured.
    """
    lines = ["# What Pebble can do", "", what, ""]
    lines += _table("skill", "right", "of", "share", "aim")
    for one in results:
        share = one.right / one.tried
        lines += _row(
            one.skill.name, one.right, one.tried, f"{share:.1%}", f"{one.skill.least:.0%}"
        )
    lines += ["", "What was looked up, over the three skills that look up a value:", ""]
    lines += _table("kind of value", "right", "of")
    tried, right = Counter[str](), Counter[str]()
    for one in results:
        for kind, (some, good) in one.kinds.items():
            tried[kind] += some
            right[kind] += good
    for kind in sorted(tried):
        lines += _row(kind, right[kind], tried[kind])
    good = sum(one.right for one in by_hand)
    lines += [
        "",
        f"Told and asked in words that were written by hand: {good} of {len(by_hand)}.",
        "",
    ]
    lines += _table("told", "asked", "what it says", "right")
    for told in by_hand:
        lines += _row(told.told, told.asked, told.said, "yes" if told.right else "no")
    good = sum(one.usable for one in wishes)
    lines += ["", f"Calls of tools that were written by hand: {good} of {len(wishes)} usable.", ""]
    lines += _table("wished", "tool that fits", "what it says", "usable")
    for wish in wishes:
        lines += _row(wish.asked, wish.tool, wish.said, "yes" if wish.usable else "no")
    lines += ["", *_table("said to it", "what it says")]
    for asked, said in talk:
        lines += _row(asked, said)
    return "\n".join(lines) + "\n"


def _table(*heads: str) -> list[str]:
    return [*_row(*heads), "|" + "---|" * len(heads)]


def _row(*cells: object) -> list[str]:
    # The beginning is enough to recognise an answer that repeats itself.
    short = (shorten(str(cell), 200, placeholder=" …") for cell in cells)
    plain = (cell.replace("|", "\\|") for cell in short)
    return [f"| {' | '.join(plain)} |"]
