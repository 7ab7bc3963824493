"""Facts that a user may state about people and things, and questions about them."""

from __future__ import annotations

import random
from typing import Final

import attrs

from cairn_pebble.texts import words
from cairn_pebble.texts.values import Value, of
from cairn_pebble.texts.words import Split, pick


@attrs.frozen
class Fact:
    """
    A fact that a user states.

    Attributes:
        value: the value of the fact.
        other: another possible value.
        clauses: the fact as a clause, with the value after its subject.
        questions: what a question about it asks for, as in "my name"; the first identifies the
            fact.
        answer: the fact as Pebble says it.
        thought: what it thinks before that.
        direct: whole questions.
        named: whether the clauses begin with a name, which keeps its capital.
    """

    value: str
    other: str
    clauses: tuple[str, ...]
    questions: tuple[str, ...]
    answer: str
    thought: str
    direct: tuple[str, ...] = ()
    named: bool = False


_RELATIVES: Final = (
    *("sister", "brother", "mother", "father", "friend", "boss", "neighbour", "teacher", "aunt"),
    *("wife", "husband", "son", "daughter", "uncle", "cousin", "doctor", "colleague", "baby"),
    *("cat", "dog", "horse", "fish", "company", "boat", "team", "project", "school"),
)
_OWNED: Final[tuple[tuple[str, Value], ...]] = (
    *((noun, words.name) for noun in ("name", "first name", "nickname", "full name") * 2),
    *((f"{who}'s name", words.name) for who in _RELATIVES),
    *((noun, words.place) for noun in ("home town", "birthplace", "next stop", "destination")),
    *((noun, words.place) for noun in ("favourite town", "street", "island", "village", "city")),
    *((noun, words.number) for noun in ("door code", "room number", "locker number", "PIN")),
    *((noun, words.number) for noun in ("ticket number", "favourite number", "house number")),
    *((noun, words.number) for noun in ("order number", "phone number", "seat number")),
    *((noun, words.number) for noun in ("lucky number", "bus number", "code")),
    *((noun, words.word) for noun in ("password", "code word", "user name", "secret word")),
    *((noun, words.word) for noun in ("wifi password", "safe word")),
    *((noun, words.number) for noun in ("flight number", "customer number", "account number")),
    *(
        (noun, of(*words.COLOURS))
        for noun in ("favourite colour", "favorite color", "car's colour")
    ),
    *((noun, of(*words.COLOURS)) for noun in ("coat's colour", "door's colour", "team colour")),
    *((noun, of(*words.FOODS)) for noun in ("favourite food", "favorite food", "breakfast")),
    *((noun, of(*words.JOBS)) for noun in ("job", "sister's job", "father's job", "friend's job")),
    *((noun, of(*words.MONTHS)) for noun in ("birth month", "favourite month", "holiday month")),
)


def _two(rng: random.Random, split: Split, draw: Value) -> tuple[str, str]:
    """Two different values, neither of which is part of the other."""
    value = draw(rng, split)
    while True:
        other = draw(rng, split)
        if other not in value and value not in other:
            return value, other


def _owned(rng: random.Random, split: Split) -> Fact:
    noun, draw = pick(rng, _OWNED)
    value, other = _two(rng, split, draw)
    clauses = [f"my {noun} is {value}"] * 3 + [f"the {noun} I have is {value}"]
    questions, direct = [f"my {noun}"] * 3, []
    who = noun.removesuffix("'s name")
    if who != noun:
        clauses += [f"my {who} is called {value}", f"I have a {who} called {value}"]
        clauses += [f"we have a {who} called {value}", f"my {who} is named {value}"]
        questions += [f"the name of my {who}"]
        direct += [
            f"What is my {who} called?",
            f"What is my {who}'s name?",
            f"How is my {who} called?",
        ]
    elif draw in (words.number, words.word):
        clauses += [f"the {noun} is {value}"] * 2
        questions += [f"the {noun}"]
        direct += [f"What is the {noun}?", f"Which {noun} do I have?"]
    elif noun.startswith("favo"):
        clauses += [f"my {noun} has always been {value}"]
    return Fact(
        value=value,
        other=other,
        clauses=tuple(clauses),
        questions=tuple(questions),
        answer=f"Your {noun} is {value}.",
        thought=f"It was told to me: the {noun} is {value}.",
        direct=tuple(direct),
    )


def _person(rng: random.Random, split: Split) -> Fact:
    who = words.name(rng, split)
    verb, base, draw, asked = pick(rng, _PERSONAL)
    value, other = _two(rng, split, draw)
    known = rng.random() < 0.4
    clause = f"{who} {verb} {value}"
    return Fact(
        value=value,
        other=other,
        clauses=(f"my {pick(rng, _RELATIVES[:18])} {clause}" if known else clause,),
        questions=(f"{base} {who}",),
        answer=f"{clause}.",
        thought=f"It was told to me: {clause}.",
        direct=tuple(form.format(who) for form in asked),
        named=not known,
    )


def _self(rng: random.Random, split: Split) -> Fact:
    told = pick(rng, _SELVES)
    value, other = _two(rng, split, told.draw)
    return Fact(
        value=value,
        other=other,
        clauses=tuple(clause.format(value) for clause in told.clauses),
        questions=(f"my {told.topic}",),
        answer=told.answer.format(value),
        thought=f"It was told to me: the {told.topic} is {value}.",
        direct=told.direct,
    )


@attrs.frozen
class _OfOneself:
    topic: str
    draw: Value
    clauses: tuple[str, ...]
    direct: tuple[str, ...]
    answer: str


_SELVES: Final = (
    _OfOneself(
        "name",
        words.name,
        ("I am {}", "I'm {}", "people call me {}", "you can call me {}", "my name is {}"),
        ("Who am I?", "What's my name?", "What am I called?", "Do you know who I am?"),
        "Your name is {}.",
    ),
    _OfOneself(
        "home",
        words.place,
        ("I live in {}", "my home is in {}", "I am at home in {}"),
        (
            "Where do I live?",
            "Where is my home?",
            "Which town is mine?",
            "Where am I at home?",
        ),
        "You live in {}.",
    ),
    _OfOneself(
        "age",
        words.age,
        ("I am {} years old", "I'm {} years old", "my age is {}"),
        (
            "How old am I?",
            "What's my age?",
            "What age am I?",
            "Do you know how old I am?",
        ),
        "You are {} years old.",
    ),
    _OfOneself(
        "work",
        of(*words.JOBS),
        ("I work as a {}", "I am a {}", "I earn my bread as a {}"),
        ("What do I do for work?", "What do I work as?", "Which work do I do?", "What's my work?"),
        "You work as a {}.",
    ),
    _OfOneself(
        "origin",
        words.place,
        ("I was born in {}", "I come from {}", "I am from {}"),
        ("Where was I born?", "Where do I come from?", "Where am I from?"),
        "You come from {}.",
    ),
    _OfOneself(
        "birthday",
        of(*words.MONTHS),
        ("I was born in {}", "my birthday is in {}"),
        ("In which month was I born?", "When was I born?", "When is my birthday?"),
        "You were born in {}.",
    ),
)
_PERSONAL: Final[tuple[tuple[str, str, Value, tuple[str, ...]], ...]] = (
    ("lives in", "the home of", words.place, ("Where does {} live?", "Where is {} at home?")),
    ("comes from", "the origin of", words.place, ("Where does {} come from?", "Where is {} from?")),
    ("was born in", "the birthplace of", words.place, ("Where was {} born?",)),
    ("likes", "the favourite of", of(*words.FOODS), ("What does {} like?", "What does {} enjoy?")),
    (
        "works as a",
        "the job of",
        of(*words.JOBS),
        ("What does {} do?", "What does {} work as?", "What is {} by trade?"),
    ),
    ("is a", "the trade of", of(*words.JOBS), ("What is {}?", "What does {} do for work?")),
    ("has the number", "the number of", words.number, ("Which number does {} have?",)),
    ("wears the colour", "the colour of", of(*words.COLOURS), ("Which colour does {} wear?",)),
    (
        "is married to",
        "the partner of",
        words.name,
        ("Who is {} married to?", "Whom did {} marry?"),
    ),
)


_WHERE: Final = ("Where is the {}?", "Where did I put the {}?", "Where can I find the {}?")


def _thing(rng: random.Random, split: Split) -> Fact:
    thing = pick(rng, words.THINGS)
    spot, other = _two(rng, split, of(*words.SPOTS))
    return Fact(
        value=spot,
        other=other,
        clauses=(f"the {thing} is in the {spot}", f"I put the {thing} in the {spot}"),
        questions=(f"the place of the {thing}",),
        direct=tuple(form.format(thing) for form in _WHERE),
        answer=f"The {thing} is in the {spot}.",
        thought=f"It was told to me: the {thing} is in the {spot}.",
    )


def fact(rng: random.Random, split: Split) -> Fact:
    """A fact that a user may state."""
    return rng.choices((_owned, _self, _person, _thing), (6, 2, 3, 2))[0](rng, split)
