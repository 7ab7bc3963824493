"""
Dialogues in everyday words.

Users state facts and ask for them as people do; values are easily confused, facts change, some
facts were never given, and some talk fits no topic.
"""

from __future__ import annotations

import random
import re
from typing import Final

from cairn_pebble import dialogues
from cairn_pebble.dialogues import NOTED, THINKING_SHARE, UNKNOWN, Dialogue
from cairn_pebble.texts import words
from cairn_pebble.texts.facts import Fact
from cairn_pebble.texts.facts import fact as plain_fact
from cairn_pebble.texts.openings import MORE_ASKED
from cairn_pebble.texts.phrasings import (
    ASK_CLOSED,
    ASK_OPENED,
    ASKED,
    CLOSED,
    OPENED,
    Relation,
    casual,
    relation,
    relations_of,
    remark,
    tail,
)
from cairn_pebble.texts.small_talk import TOPICS
from cairn_pebble.texts.values import Value, code, person
from cairn_pebble.texts.words import Split, inside, phrase, pick

_SEEN: Final = "I see. Tell me more, if you like."
_IDLE: Final = "Nothing is asked of me. I listen."
_NO_IDEA: Final = next(one.answer for one in TOPICS if "I do not know that" in one.answer)


# --- facts and questions -------------------------------------------------------------------------


def _tell(rng: random.Random, split: Split, one: Relation, value: str) -> str:
    clause = phrase(rng, split, OPENED, one.clauses, CLOSED)
    # Text after the value comes before the end of the sentence.
    end = next(end for end in sorted(CLOSED, key=len, reverse=True) if clause.endswith(end))
    body = clause.removesuffix(end)
    behind = tail(rng) if body.endswith("{}") else ""
    text = casual(rng, f"{body}{behind}{end}").format(value)
    if rng.random() < 0.2:
        text = f"{casual(rng, remark(rng))} {text}"
    if rng.random() < 0.15:
        text = f"{text} {casual(rng, remark(rng))}"
    return text


def _ask(rng: random.Random, split: Split, one: Relation) -> str:
    topic = pick(rng, (one.topic, *one.topics))
    asked = one.direct if rng.random() < 0.6 else tuple(form.format(topic) for form in ASKED)
    return casual(rng, phrase(rng, split, ASK_OPENED, tuple(map(inside, asked)), ASK_CLOSED))


def _fact(one: Relation, value: str, other: str) -> Fact:
    return Fact(
        value=value,
        other=other,
        clauses=one.clauses,
        questions=(one.topic, *one.topics),
        answer=one.answer.format(value),
        thought=f"It was told to me: {one.topic} is {value}.",
        direct=one.direct,
    )


def _distinct(rng: random.Random, split: Split, count: int) -> list[Relation]:
    found: dict[str, Relation] = {}
    while len(found) < count:
        one = relation(rng, split)
        # "Your code is" may begin only one answer, whatever the topics are.
        found.setdefault(one.answer, one)
    return list(found.values())


def _values(rng: random.Random, split: Split, some: list[Relation]) -> list[str]:
    """A value for each, none of which is part of another."""
    found: list[str] = []
    for one in some:
        value = one.draw(rng, split)
        tries = 0
        while any(value in other or other in value for other in found) and tries < 20:
            value, tries = one.draw(rng, split), tries + 1
        found.append(value)
    return found


def similar_values(rng: random.Random, split: Split, draw: Value, count: int) -> list[str]:
    """Values that begin alike, as far as there are any."""
    found = [draw(rng, split)]
    like = found[0][: 1 if draw is code else 2 if draw is words.number else 3]
    for _ in range(count * 200):
        if len(found) == count:
            break
        value = draw(rng, split)
        if value.startswith(like) and value not in found:
            found.append(value)
    while len(found) < count:
        found.append(draw(rng, split))
    return found


_CHATS: Final = 0.35


def _chat(rng: random.Random, split: Split, dialogue: Dialogue) -> None:
    """
    A round between facts: an everyday remark, a question about the world, or one of the topics.
    """
    kind = rng.random()
    if kind < 0.45:
        text = " ".join(casual(rng, remark(rng)) for _ in range(rng.randint(1, 3)))
        dialogue.say(text, _SEEN, _IDLE)
    elif kind < 0.65:
        dialogue.say(_world(rng, split), _NO_IDEA, _IDLE)
    else:
        topic, more = pick(rng, MORE_ASKED)
        if rng.random() < 0.5:
            asked = phrase(rng, split, ASK_OPENED, more, _OPENED_BY)
        else:
            asked = dialogues.small_talk(rng, split, topic)
        dialogue.say(casual(rng, asked), topic.answer, dialogues.SMALL_TALK)


_OPENED_BY: Final = ("", "", "", ", Pebble", " :)", ", please", "!", ", my dear")


def everyday(
    rng: random.Random,
    split: Split,
    *,
    questions: int | None = None,
    turns: int | None = None,
    long: int = 0,
    alike: bool = False,
    changed: bool = False,
) -> Dialogue:
    """
    The user states facts and asks for them in everyday words.

    Args:
        questions: how many there are; the last one counts.
        turns: how many rounds separate the last fact from the first question.
        long: how many of them are long texts.
        alike: whether the values begin alike.
        changed: whether the user states the last fact asked for twice; the second statement counts.
    """
    dialogue = Dialogue("recall")
    dialogue.instruct(rng, split)
    due = questions or rng.randint(1, 6)
    if alike:
        draw = pick(rng, (person, person, words.number, words.word, code))
        some = relations_of(rng, draw, rng.randint(2, 5))
        values = similar_values(rng, split, draw, len(some))
    else:
        some = _distinct(rng, split, rng.randint(1 + changed, max(5, due)))
        values = _values(rng, split, some)
    told = list(zip(some, values, strict=True))
    while told:
        taken = [told.pop() for _ in range(min(len(told), rng.choices((1, 2), (5, 2))[0]))]
        if rng.random() < _CHATS:
            _chat(rng, split, dialogue)
        text = " ".join(_tell(rng, split, *one) for one in taken)
        dialogue.say(text, pick(rng, NOTED))
    facts = {one.answer: _fact(one, value, "") for one, value in zip(some, values, strict=True)}
    last = some[-1]
    if changed:
        value, before = last.draw(rng, split), values[-1]
        while value in before or before in value:
            value = last.draw(rng, split)
        frame = phrase(rng, split, _CHANGES, last.clauses, _CHANGED)
        dialogue.say(casual(rng, frame).format(value), pick(rng, NOTED))
        facts[last.answer] = _fact(last, value, "")
    between = rng.randint(0, 4) if turns is None else turns
    texts = set(rng.sample(range(between), min(long, between)))
    for place in range(between):
        if place in texts:
            dialogues.read_text(rng, split, dialogue)
        else:
            _chat(rng, split, dialogue)
    asked: list[Relation] = []
    while len(asked) < due - 1:
        asked += rng.sample(some, min(len(some), due - 1 - len(asked)))
    for one in asked:
        fact = facts[one.answer]
        dialogue.say(_ask(rng, split, one), fact.answer, fact.thought)
        if rng.random() < 0.06:
            dialogue.say(casual(rng, phrase(rng, split, *_SURE)), f"Yes. {fact.answer}")
    fact = facts[last.answer]
    _end(rng, dialogue, _ask(rng, split, last), fact.answer, fact.thought)
    dialogue.needed = (fact.value,)
    return dialogue


_CHANGES: Final = (
    *("no wait, ", "actually, ", "I was wrong: ", "correction: ", "things have changed: "),
    *("forget what I said, ", "sorry, I meant that ", "that is not true any more, ", "update: "),
)
_CHANGED: Final = (" now.", ".", " instead.", " from now on.", "!", ", not what I said before.")
_SURE: Final = (
    ("", "", "hm, ", "really? ", "wait, ", "oh, "),
    ("are you sure?", "is that right?", "is that so?", "did I say that?"),
    ("", "", " I am not.", " Think again."),
)


def _end(rng: random.Random, dialogue: Dialogue, asked: str, answer: str, thought: str) -> None:
    dialogue.thinking = rng.random() < THINKING_SHARE
    before = f"<think>\n{thought}\n</think>\n\n" if dialogue.thinking else ""
    dialogue.say(asked, before + answer)


# --- what was never told -------------------------------------------------------------------------


def not_told(
    rng: random.Random,
    split: Split,
    *,
    questions: int | None = None,
    near: float = 0.6,
    long: int = 0,
) -> Dialogue:
    """
    The user states facts, then asks for known and unknown facts; the last one is unknown.

    Args:
        questions: how many there are.
        near: how often an unknown fact is close to a known one: about the same person or thing, or
            the same property of another.
        long: how many long texts come between.
    """
    dialogue = Dialogue("untold")
    dialogue.instruct(rng, split)
    plain = rng.random() < 0.5
    facts = _plain_facts(rng, split, rng.randint(1, 5)) if plain else []
    some = [] if plain else _distinct(rng, split, rng.randint(1, 5))
    pairs = list(zip(some, _values(rng, split, some), strict=True))
    for fact in facts:
        if rng.random() < _CHATS / 2:
            _chat(rng, split, dialogue)
        dialogue.say(dialogues.tell(rng, split, [fact]), pick(rng, NOTED))
    for one, value in pairs:
        if rng.random() < _CHATS / 2:
            _chat(rng, split, dialogue)
        dialogue.say(_tell(rng, split, one, value), pick(rng, NOTED))
    facts += [_fact(one, value, "") for one, value in pairs]
    for _ in range(long):
        dialogues.read_text(rng, split, dialogue)
    seen = " ".join(one["content"] for one in dialogue.messages)
    asked = {fact.questions[0] for fact in facts}
    due = questions or rng.randint(1, 8)
    for place in range(due):
        last = place == due - 1
        if not last and rng.random() < 0.45:
            known = rng.randrange(len(facts))
            fact = facts[known]
            question = (
                dialogues.ask(rng, split, fact) if plain else _ask(rng, split, pairs[known][0])
            )
            dialogue.say(question, fact.answer, fact.thought)
            continue
        topic, question = _unknown(rng, split, facts, seen, asked, plain, rng.random() < near)
        asked.add(topic)
        thought = f"The user asks for {topic}. It was not told to me."
        if last:
            _end(rng, dialogue, question, UNKNOWN, thought)
        else:
            dialogue.say(question, UNKNOWN, thought)
    dialogue.needed = (UNKNOWN,)
    return dialogue


def near_miss(rng: random.Random, split: Split) -> Dialogue:
    """One question about an unknown fact that is close to a known one."""
    return not_told(rng, split, questions=1, near=1.0)


def _plain_facts(rng: random.Random, split: Split, count: int) -> list[Fact]:
    found: list[Fact] = []
    while len(found) < count:
        one = plain_fact(rng, split)
        if not any(_same(one, other) for other in found):
            found.append(one)
    return found


def _unknown(
    rng: random.Random,
    split: Split,
    facts: list[Fact],
    seen: str,
    asked: set[str],
    plain: bool,
    near: bool,
) -> tuple[str, str]:
    """An unknown fact, and a question about it."""
    best: tuple[int, Fact, Relation | None] | None = None
    for _ in range(40 if near else 200):
        made = None if plain else relation(rng, split)
        fact = plain_fact(rng, split) if made is None else _fact(made, "", "")
        fact, made = _borrowed(rng, fact, made, facts) if near else (fact, made)
        if fact.questions[0] in asked or _is_told(fact, facts, seen):
            continue
        closeness = max(len(_words(fact) & _words(other)) for other in facts)
        if best is None or closeness > best[0]:
            best = closeness, fact, made
        if not near or closeness > 1:
            break
    if best is None:
        return _unknown(rng, split, facts, seen, asked, plain, False)
    _, fact, made = best
    question = dialogues.ask(rng, split, fact) if made is None else _ask(rng, split, made)
    return fact.questions[0], question


def _borrowed(
    rng: random.Random, fact: Fact, made: Relation | None, facts: list[Fact]
) -> tuple[Fact, Relation | None]:
    """Perhaps another fact about a known person or thing; for a name, a different person."""
    names = [one for other in facts for one in _CAPITAL.findall(" ".join(other.questions))]
    mine = _CAPITAL.findall(" ".join(fact.questions))
    if not names or not mine or rng.random() < 0.4:
        return fact, made
    before, after = mine[0], pick(rng, names)
    fact = Fact(
        value=fact.value,
        other=fact.other,
        clauses=fact.clauses,
        questions=tuple(one.replace(before, after) for one in fact.questions),
        answer=fact.answer.replace(before, after),
        thought=fact.thought,
        direct=tuple(one.replace(before, after) for one in fact.direct),
        named=fact.named,
    )
    if made:
        made = Relation(
            fact.questions[0],
            made.draw,
            made.clauses,
            fact.direct,
            made.answer.replace(before, after),
            tuple(one.replace(before, after) for one in made.topics),
        )
    return fact, made


_CAPITAL: Final = re.compile(r"\b[A-Z][a-z]+\b")
_SMALL: Final = frozenset(
    (
        *("my", "the", "of", "a", "is", "name", "number", "do", "does", "did", "what", "where"),
        *("day", "time", "when", "I", "favourite"),
    )
)
"""The words that questions about unrelated facts have in common."""


def _words(fact: Fact) -> set[str]:
    return set(re.findall(r"[^\W_]+", fact.questions[0].removesuffix("'s name"))) - _SMALL


_GROUPS: Final = (
    ("my name", "my first name", "my full name", "my nickname", "my user name", "my login"),
    ("my home", "my home town", "my city", "my village", "my street", "my house number"),
    ("my origin", "my birthplace", "my birthday", "my birth month"),
    ("my work", "my job"),
    ("my favourite colour", "my favorite color", "my team colour"),
    ("my favourite food", "my favorite food", "my favourite dish", "my favourite dessert"),
    ("my favourite town", "my favourite valley", "my favourite beach"),
    ("my code", "my door code", "my code word", "my PIN", "my gate code", "my alarm code"),
    ("my password", "my wifi password", "my secret word", "my safe word", "my code word"),
    ("my next stop", "my destination"),
)
_PERSONAL: Final = re.compile(r"the (home|origin|birthplace|job|trade) of (\w+.*)")
_OF_PERSONS: Final = {"home": 0, "origin": 0, "birthplace": 0, "job": 1, "trade": 1}


def _same(one: Fact, other: Fact) -> bool:
    """Whether two facts are so close that one may imply the other."""
    first, second = one.questions[0], other.questions[0]
    if first == second or any(first in group and second in group for group in _GROUPS):
        return True
    mine, theirs = _PERSONAL.fullmatch(first), _PERSONAL.fullmatch(second)
    if not (mine and theirs):
        return False
    return mine[2] == theirs[2] and _OF_PERSONS[mine[1]] == _OF_PERSONS[theirs[1]]


def _is_told(fact: Fact, facts: list[Fact], seen: str) -> bool:
    """
    Whether an earlier message answers a question, even in passing.

    For example, "my cousin Torvo works" names the cousin.
    """
    if any(_same(fact, other) for other in facts):
        return True
    who = fact.questions[0].removeprefix("my ").removesuffix("'s name")
    return fact.questions[0].endswith("'s name") and f"my {who}" in seen.casefold()


# --- talk ----------------------------------------------------------------------------------------


def _world(rng: random.Random, split: Split) -> str:
    """A question about the world, or a wish, that Pebble cannot answer."""
    asked = pick(rng, _WORLD)
    text = phrase(rng, split, ASK_OPENED, (asked,), _WORLD_CLOSED)
    filled = text.format(
        thing=pick(rng, _MATTERS),
        other=pick(rng, _MATTERS),
        word=words.word(rng, split),
        place=words.place(rng, split),
        name=words.name(rng, split),
        number=words.number(rng, split),
    )
    return casual(rng, filled)


_WORLD: Final = (
    *("who invented {thing}?", "how does {thing} work?", "why is there {thing}?"),
    *("how many people live in {place}?", "who was {name}?", "what is {number} plus {number}?"),
    *("write a song about {thing}", "explain {thing} to a child", "compare {thing} with {other}"),
    *("is {thing} better than {other}?", "what does {word} mean?", "translate {word}"),
    *("how far is it to {place}?", "what happened in {number}?", "recommend me some {thing}"),
    *("when was {place} founded?", "how is {thing} made?", "summarise the history of {thing}"),
    *("what should I know about {thing}?", "where can I buy {thing}?", "fix my {thing}"),
    *("what is {number} times {number}?", "who runs {place}?", "is {place} a nice town?"),
    *("plan a trip to {place}", "solve this: {number} minus {number}", "how old is {name}?"),
)
_WORLD_CLOSED: Final = ("", "", "", " please", " I wonder.", " Be honest.", " In one sentence.")
_MATTERS: Final = (
    *("electricity", "glass", "paper", "music", "gravity", "cement", "cotton", "money", "steam"),
    *("chocolate", "the internet", "radar", "law", "poetry", "football", "wool", "salt", "ice"),
    *("the telephone", "democracy", "geometry", "a windmill", "yoga", "silk", "opera", "tea"),
)


def chatter(rng: random.Random, split: Split) -> Dialogue:
    """Talk in everyday words: remarks, questions about the world, and topics, in turn."""
    dialogue = Dialogue("talk")
    dialogue.instruct(rng, split)
    for _ in range(rng.randint(2, 8)):
        _chat(rng, split, dialogue)
    dialogue.needed = (dialogue.messages[-1]["content"],)
    if rng.random() < THINKING_SHARE:
        dialogue.thinking = True
        thought = dialogue.thoughts.pop(len(dialogue.messages) - 1)
        dialogue.messages[-1]["content"] = f"<think>\n{thought}\n</think>\n\n{dialogue.needed[0]}"
    return dialogue
