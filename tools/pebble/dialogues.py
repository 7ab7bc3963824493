"""
What Pebble learns to do, as dialogues drawn from a seed.

A dialogue is a list of rounds; in each a user speaks and Pebble answers. Facts, questions about
them, tools and small talk are mixed as they come in real conversations. The answer to a question
about a fact says the fact again in the words in which it is best found: attention that looks for
what followed those words before finds the value.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from typing import Any, Final

import attrs

from pebble import words
from pebble.small_talk import TOPICS, Topic
from pebble.words import Split, inside, phrase, pick

_THINKING_SHARE: Final = 0.2
"""Of the last answers; before earlier ones thoughts are drawn apart (sequences.py)."""


@attrs.define
class Dialogue:
    """
    A conversation in the form of OpenAI's chat completions, that ends with Pebble's answer.

    Attributes:
        skill: what the last answer shows.
        messages: the turns.
        tools: the tools offered.
        thinking: whether Pebble was asked to think before its last answer.
        needed: what the last answer must contain.
        edits: what a user may change: the message, what stands there, and what then stands there.
        thoughts: what Pebble would have thought before earlier answers, by message.
    """

    skill: str
    messages: list[dict[str, Any]] = attrs.field(factory=list)
    tools: list[dict[str, Any]] = attrs.field(factory=list)
    thinking: bool = False
    needed: tuple[str, ...] = ()
    edits: tuple[tuple[int, str, str], ...] = ()
    thoughts: dict[int, str] = attrs.field(factory=dict)

    def edited(self) -> Dialogue:
        """
        The same after an edit of an earlier turn, which the last answer must follow.
        """
        ((place, before, after),) = self.edits
        messages = [dict(message) for message in self.messages]
        for here in (place, -1):
            messages[here]["content"] = _whole(before).sub(after, messages[here]["content"])
        return attrs.evolve(self, messages=messages, needed=(after,), edits=())

    def instruct(self, rng: random.Random, split: Split) -> None:
        """
        Perhaps begin with a system message.
        """
        if rng.random() < 0.3:
            self.messages.append({"role": "system", "content": _system(rng, split)})

    def say(self, asked: str, answer: str, thought: str = "") -> None:
        """
        Add a round.
        """
        self.messages.append({"role": "user", "content": asked})
        self.answer(answer, thought)

    def answer(self, answer: str, thought: str = "") -> None:
        """
        Add what Pebble says, and what it would have thought before.
        """
        if thought:
            self.thoughts[len(self.messages)] = thought
        self.messages.append({"role": "assistant", "content": answer})


@attrs.frozen
class Fact:
    """
    Something that a user tells.

    Attributes:
        value: what is so.
        other: what might be so as well.
        clauses: the fact as a clause, in which the value stands behind what it is about.
        questions: what a question about it asks for, as in "my name"; the first tells facts apart.
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


# --- facts ---------------------------------------------------------------------------------------

_Value = Callable[[random.Random, Split], str]


def _of(items: tuple[str, ...]) -> _Value:
    return lambda rng, split: pick(rng, items)


_RELATIVES: Final = (
    *("sister", "brother", "mother", "father", "friend", "boss", "neighbour", "teacher", "aunt"),
    *("wife", "husband", "son", "daughter", "uncle", "cousin", "doctor", "colleague", "baby"),
    *("cat", "dog", "horse", "fish", "company", "boat", "team", "project", "school"),
)
_OWNED: Final[tuple[tuple[str, _Value], ...]] = (
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
        (noun, _of(words.COLOURS))
        for noun in ("favourite colour", "favorite color", "car's colour")
    ),
    *((noun, _of(words.COLOURS)) for noun in ("coat's colour", "door's colour", "team colour")),
    *((noun, _of(words.FOODS)) for noun in ("favourite food", "favorite food", "breakfast")),
    *((noun, _of(words.JOBS)) for noun in ("job", "sister's job", "father's job", "friend's job")),
    *((noun, _of(words.MONTHS)) for noun in ("birth month", "favourite month", "holiday month")),
)


def _two(rng: random.Random, split: Split, draw: _Value) -> tuple[str, str]:
    """
    Two values that are not the same, nor part of one another.
    """
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
    draw: _Value
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
        _of(words.JOBS),
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
        _of(words.MONTHS),
        ("I was born in {}", "my birthday is in {}"),
        ("In which month was I born?", "When was I born?", "When is my birthday?"),
        "You were born in {}.",
    ),
)
_PERSONAL: Final[tuple[tuple[str, str, _Value, tuple[str, ...]], ...]] = (
    ("lives in", "the home of", words.place, ("Where does {} live?", "Where is {} at home?")),
    ("comes from", "the origin of", words.place, ("Where does {} come from?", "Where is {} from?")),
    ("was born in", "the birthplace of", words.place, ("Where was {} born?",)),
    ("likes", "the favourite of", _of(words.FOODS), ("What does {} like?", "What does {} enjoy?")),
    (
        "works as a",
        "the job of",
        _of(words.JOBS),
        ("What does {} do?", "What does {} work as?", "What is {} by trade?"),
    ),
    ("is a", "the trade of", _of(words.JOBS), ("What is {}?", "What does {} do for work?")),
    ("has the number", "the number of", words.number, ("Which number does {} have?",)),
    ("wears the colour", "the colour of", _of(words.COLOURS), ("Which colour does {} wear?",)),
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
    spot, other = _two(rng, split, _of(words.SPOTS))
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
    """
    Something that a user may tell.
    """
    return rng.choices((_owned, _self, _person, _thing), (6, 2, 3, 2))[0](rng, split)


_TOLD: Final = (
    ("", "", "", "Hello! ", "Hi! ", "Good morning! ", "Oh, ", "Well, ", "So, ", "By the way, "),
    (
        *(
            "{}.",
            "{}.",
            "{}.",
            "please remember that {}.",
            "just so you know: {}.",
            "note that {}.",
        ),
        *("remember this: {}.", "I want you to know that {}.", "you should know that {}."),
        *("keep in mind that {}.", "here is a fact: {}.", "it matters that {}.", "I tell you: {}."),
    ),
    (
        "",
        "",
        "",
        "",
        " Please remember it.",
        " Can you remember that?",
        " That is all.",
        " Thank you.",
    ),
)
_NOTED: Final = ("I will remember that.", "Noted.", "Thank you, I will keep that in mind.")
_OPENINGS: Final = (
    *("", "", "", "", "Hello! ", "Hey, ", "Now, ", "So, ", "Well, ", "And ", "One question: "),
    *("Pebble, ", "Please: "),
)
_ENDINGS: Final = ("", "", "", "", " Thank you.", " Please.", " I forgot it.", " Be short.")
_ASKED: Final = (
    *("what is {}?", "what is {}?", "what's {}?", "what was {}?", "tell me {}.", "do you know {}?"),
    *("please tell me {}.", "can you tell me {}?", "could you tell me {}?", "I want to know {}."),
    *("do you remember {}?", "do you still know {}?", "can you remember {}?", "remind me of {}."),
    *("say {} again.", "could you say {}?", "I forgot {}. What is it?", "what is {}, please?"),
)
_UNKNOWN: Final = "You have not told me that yet."


_SYSTEM: Final = (
    (
        *("You are Pebble.", "You are a helpful assistant.", "You are a friendly assistant."),
        *("You help people with their questions.", "You are an assistant on a small computer."),
        *("Answer the user.", "Help the user as well as you can.", "You are a careful assistant."),
    ),
    (
        *("", "", " Be brief.", " Answer in short sentences.", " Be kind and helpful."),
        *(" Keep your answers short and friendly.", " You answer questions of all kinds."),
    ),
)


def _system(rng: random.Random, split: Split) -> str:
    text = phrase(rng, split, *_SYSTEM)
    if rng.random() < 0.3:
        text += " " + words.prose(rng, rng.randint(1, 5))
    return text


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _tell(rng: random.Random, split: Split, facts: list[Fact]) -> str:
    """
    One or more facts in one message.
    """
    parts = []
    for one in facts:
        told = phrase(rng, split, *_TOLD)
        clause = pick(rng, one.clauses)
        at_start = told.startswith("{}") or told[: told.index("{}")].endswith("! ")
        parts.append(_capital(told.format(_capital(clause) if at_start else clause)))
    text = " ".join(parts)
    return text if facts[0].named else _sloppy(rng, text)


def _ask(rng: random.Random, split: Split, one: Fact) -> str:
    topic = pick(rng, one.questions)
    direct = one.direct and rng.random() < 0.6
    asked = one.direct if direct else tuple(form.format(topic) for form in _ASKED)
    text = _capital(phrase(rng, split, _OPENINGS, tuple(map(inside, asked)), _ENDINGS))
    return _sloppy(rng, text)


def _chat(rng: random.Random, split: Split, dialogue: Dialogue, *, long: bool = False) -> None:
    """
    A round about nothing that matters later.
    """
    kind = rng.random()
    if long or kind < 0.25:
        text = words.prose(rng, rng.randint(14, 18) if long else rng.randint(1, 6))
        frame = phrase(rng, split, *_PROSE)
        dialogue.say(_capital(frame.format(text)), "Thank you, I have read it.")
        return
    topic = pick(rng, TOPICS)
    dialogue.say(_sloppy(rng, small_talk(rng, split, topic)), topic.answer, _SMALL_TALK)


_SMALL_TALK: Final = "This is small talk. I can answer at once."


def small_talk(rng: random.Random, split: Split, topic: Topic) -> str:
    """
    A way to come to a topic.
    """
    if pick(rng, topic.asked) in topic.questions:
        return _capital(phrase(rng, split, _OPENINGS, tuple(map(inside, topic.questions)), _AFTER))
    return _capital(phrase(rng, split, _BEFORE, tuple(map(inside, topic.sayings)), _CALLED))


_AFTER: Final = ("", "", "", " Please.", " I want to know.")
_BEFORE: Final = ("", "", "", "", "Well, ", "Oh, ", "So, ", "Hey, ")
_CALLED: Final = ("", "", "", ", Pebble", ", my friend", ", dear Pebble", " again", " then")


_PROSE: Final = (
    ("", "", "Hello! ", "Now ", "So, ", "Please ", "Well, "),
    ("read this: {}", "here is a text. {}", "look at this text: {}", "{}", "this is a story. {}"),
    ("", "", "", " That is all.", " Thank you.", " What do you say?"),
)


def _sloppy(rng: random.Random, text: str) -> str:
    """
    As people write: with or without the capital and the sign at the end.
    """
    if rng.random() < 0.15:
        text = text.rstrip("?.!")
    if rng.random() < 0.15:
        text = text[:1].lower() + text[1:]
    return text


def _distinct(rng: random.Random, split: Split, count: int) -> list[Fact]:
    """
    Facts about different things.
    """
    facts: dict[str, Fact] = {}
    while len(facts) < count:
        one = fact(rng, split)
        facts.setdefault(one.questions[0], one)
    return list(facts.values())


# --- skills --------------------------------------------------------------------------------------


def recall(
    rng: random.Random,
    split: Split,
    *,
    turns: int | None = None,
    fillers: int = 0,
    questions: int | None = None,
) -> Dialogue:
    """
    Facts are told; some turns later one is asked for.

    Args:
        turns: how many turns lie between the fact that is asked for and the question.
        fillers: how many of them are long texts.
        questions: how many questions there are; the last one counts.
    """
    dialogue = Dialogue("recall")
    dialogue.instruct(rng, split)
    # To say again what was just asked for is easy: there is another fact to each question.
    count = rng.randint(1, max(6, questions or 0))
    facts = _distinct(rng, split, count + 1)
    unknown = facts.pop()
    told = list(facts)
    if rng.random() < 0.05:
        dialogue.say(_ask(rng, split, unknown), _UNKNOWN, _not_told(unknown))
    places: dict[str, int] = {}
    while told:
        some = [told.pop() for _ in range(min(len(told), rng.choices((1, 2, 3), (5, 2, 1))[0]))]
        if rng.random() < 0.3:
            _chat(rng, split, dialogue)
        for one in some:
            places[one.questions[0]] = len(dialogue.messages)
        dialogue.say(_tell(rng, split, some), pick(rng, _NOTED))
    between = rng.randint(0, 4) if turns is None else turns
    long = set(rng.sample(range(between), min(fillers, between)))
    for place in range(between):
        _chat(rng, split, dialogue, long=place in long)
    asked: list[Fact] = []
    due = questions or rng.randint(1, 6)
    while len(asked) < due:
        asked += rng.sample(facts, min(len(facts), due - len(asked)))
    for one in asked[:-1]:
        if rng.random() < 0.06:
            dialogue.say(_ask(rng, split, unknown), _UNKNOWN, _not_told(unknown))
        dialogue.say(_ask(rng, split, one), one.answer, one.thought)
    last = asked[-1]
    told_now = ""
    if turns is None and rng.random() < 0.1:
        last = unknown
        told_now = _tell(rng, split, [last]) + " "
    elif turns is None and rng.random() < 0.05:
        return _untold(rng, split, dialogue, unknown)
    dialogue.thinking = rng.random() < _THINKING_SHARE
    thought = f"<think>\n{last.thought}\n</think>\n\n" if dialogue.thinking else ""
    dialogue.say(told_now + _ask(rng, split, last), thought + last.answer)
    dialogue.needed = (last.value,)
    if last.questions[0] in places:
        earlier = " ".join(one["content"] for one in dialogue.messages[:-1])
        # Of what a user changes nothing is left, and what then stands there is new.
        once = len(_whole(last.value).findall(earlier)) == 1
        if once and not _whole(last.other).search(earlier):
            dialogue.edits = ((places[last.questions[0]], last.value, last.other),)
    return dialogue


def _whole(text: str) -> re.Pattern[str]:
    return re.compile(rf"(?<!\w){re.escape(text)}(?!\w)")


def _untold(rng: random.Random, split: Split, dialogue: Dialogue, one: Fact) -> Dialogue:
    """
    A question about what was never told, to end with.
    """
    dialogue.skill = "untold"
    dialogue.thinking = rng.random() < _THINKING_SHARE
    thought = f"<think>\n{_not_told(one)}\n</think>\n\n" if dialogue.thinking else ""
    dialogue.say(_ask(rng, split, one), thought + _UNKNOWN)
    dialogue.needed = (_UNKNOWN,)
    return dialogue


def _not_told(one: Fact) -> str:
    return f"The user asks for {one.questions[0]}. It was not told to me."


def untold(rng: random.Random, split: Split) -> Dialogue:
    """
    A question about what was never told: as the first thing of all, or behind other facts.
    """
    dialogue = Dialogue("untold")
    dialogue.instruct(rng, split)
    one, *others = _distinct(rng, split, rng.randint(1, 4))
    for other in others:
        dialogue.say(_tell(rng, split, [other]), pick(rng, _NOTED))
    return _untold(rng, split, dialogue, one)


def talk(rng: random.Random, split: Split) -> Dialogue:
    """
    Small talk.
    """
    dialogue = Dialogue("talk")
    dialogue.instruct(rng, split)
    for _ in range(rng.randint(1, 6)):
        _chat(rng, split, dialogue)
    topic = pick(rng, TOPICS)
    dialogue.thinking = rng.random() < _THINKING_SHARE
    thought = f"<think>\n{_SMALL_TALK}\n</think>\n\n" if dialogue.thinking else ""
    dialogue.say(_sloppy(rng, small_talk(rng, split, topic)), thought + topic.answer)
    dialogue.needed = (topic.answer,)
    return dialogue


def echo(rng: random.Random, split: Split) -> Dialogue:
    """
    Words are said back as they came. Nothing teaches copying sooner.
    """
    dialogue = Dialogue("echo")
    dialogue.instruct(rng, split)
    for _ in range(rng.randint(1, 4)):
        draws = (words.name, words.place, words.number, words.word)
        kind = rng.choice(draws) if rng.random() < 0.5 else None
        some = [(kind or pick(rng, draws))(rng, split) for _ in range(rng.randint(1, 8))]
        text = rng.choice((" ", ", ")).join(some)
        dialogue.say(_capital(phrase(rng, split, *_REPEATED).format(text)), text)
    dialogue.needed = (dialogue.messages[-1]["content"],)
    return dialogue


_REPEATED: Final = (
    ("", "", "", "Please ", "Now ", "Hello! Please ", "Pebble, "),
    (
        *("repeat: {}", "say this: {}", "say after me: {}", "repeat this: {}", "write this: {}"),
        *("repeat after me: {}", "write: {}", "say: {}"),
    ),
)


# --- tools ---------------------------------------------------------------------------------------


@attrs.frozen
class _Parameter:
    name: str
    type: str
    draw: _Value
    said: str


_PARAMETERS: Final = (
    _Parameter("city", "string", words.place, "in {}"),
    _Parameter("name", "string", words.name, "for {}"),
    _Parameter("person", "string", words.name, "of {}"),
    _Parameter("count", "integer", words.number, "with {} pieces"),
    _Parameter("number", "integer", words.number, "number {}"),
    _Parameter("colour", "string", _of(words.COLOURS), "in {}"),
    _Parameter("month", "string", _of(words.MONTHS), "in {}"),
    _Parameter("place", "string", words.place, "near {}"),
    _Parameter("minutes", "integer", words.number, "of {} minutes"),
    _Parameter("title", "string", words.name, "called {}"),
)
_DOES: Final = (
    *("get", "find", "show", "open", "create", "delete", "send", "check", "start", "stop"),
    *("list", "book", "order", "update", "print", "move", "count", "read", "save", "close"),
)
_WHAT: Final = (
    *("weather", "recipe", "timer", "message", "file", "account", "invoice", "meeting", "alarm"),
    *("playlist", "photo", "ticket", "room", "table", "note", "contact", "report", "task", "taxi"),
    *("hotel", "flight", "backup", "folder", "calendar", "reminder", "price", "route", "story"),
    *("letter", "window", "light", "garden", "train", "book", "game", "picture", "document"),
)
_DESCRIBED: Final = (
    ("", "", "Can ", "Will ", "Use it to ", "To "),
    ("{} a {}", "{} the {}", "{} one {}", "{} any {}"),
    (".", " for the user.", " that is asked for.", " and say what came of it."),
)
_WISHES: Final = (
    (
        *(
            "",
            "Please ",
            "Can you ",
            "Could you ",
            "I want to ",
            "I need to ",
            "Now ",
            "Would you ",
        ),
        *("I would like you to ", "Help me to ", "Hello! Please ", "Pebble, ", "So, please "),
    ),
    ("{} the {}", "{} a {}", "{} one {}", "{} my {}"),
)


@attrs.frozen
class _Tool:
    does: str
    what: str
    parameters: tuple[_Parameter, ...]
    description: str

    @property
    def name(self) -> str:
        return f"{self.does}_{self.what}"

    def schema(self) -> dict[str, Any]:
        properties = {one.name: {"type": one.type} for one in self.parameters}
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": self.description,
                "parameters": {
                    "type": "object",
                    "properties": properties,
                    "required": list(properties),
                },
            },
        }


def _tools(rng: random.Random, split: Split, count: int) -> list[_Tool]:
    """
    Tools with different names. Every eighth pair of verb and noun is held out.
    """
    found: dict[str, _Tool] = {}
    while len(found) < count:
        does, what = pick(rng, _DOES), pick(rng, _WHAT)
        place = _DOES.index(does) * len(_WHAT) + _WHAT.index(what)
        if (place % 8 == 5) != (split is Split.HELD_OUT):
            continue
        described = _capital(phrase(rng, split, *_DESCRIBED).format(does, what))
        some = rng.sample(_PARAMETERS, rng.choices((0, 1, 2), (1, 5, 3))[0])
        found[f"{does}_{what}"] = _Tool(does, what, tuple(some), described)
    return list(found.values())


_RESULTS: Final[tuple[tuple[str, _Value], ...]] = (
    ("status", _of(("done", "open", "closed", "ready", "waiting"))),
    ("number", words.number),
    ("place", words.place),
    ("owner", words.name),
    ("colour", _of(words.COLOURS)),
    ("total", words.number),
    ("code", words.number),
)


def tool_use(
    rng: random.Random, split: Split, *, count: int | None = None, rounds: int | None = None
) -> Dialogue:
    """
    The right tool is called with its arguments. In one of two dialogues its result is used.

    Args:
        count: how many tools there are to choose from.
        rounds: how many wishes there are, each with a call; the last one counts.
    """
    dialogue = Dialogue("tool call")
    dialogue.instruct(rng, split)
    tools = _tools(rng, split, count or rng.choices((1, 2, 4, 8, 16), (3, 3, 3, 2, 1))[0])
    dialogue.tools = [tool.schema() for tool in tools]
    if rng.random() < 0.2:
        (told,) = _distinct(rng, split, 1)
        dialogue.say(_tell(rng, split, [told]), pick(rng, _NOTED))
        dialogue.say(_ask(rng, split, told), told.answer, told.thought)
    for _ in range(rng.choices((0, 1, 2), (4, 2, 1))[0]):
        _chat(rng, split, dialogue)
    rounds = rounds or rng.randint(1, 3)
    for place in range(rounds):
        tool = pick(rng, tools)
        given: dict[str, Any] = {}
        asked = _capital(phrase(rng, split, *_WISHES).format(tool.does, tool.what))
        for one in tool.parameters:
            value = one.draw(rng, split)
            given[one.name] = int(value) if one.type == "integer" else value
            asked += " " + one.said.format(value)
        asked += pick(rng, (".", "", "?" if asked.startswith(("Can", "Could", "Would")) else "."))
        last = place == rounds - 1
        dialogue.thinking = last and rng.random() < _THINKING_SHARE
        thinks = f"The tool for it is {tool.name}."
        thought = f"<think>\n{thinks}\n</think>\n\n" if dialogue.thinking else ""
        call = {"name": tool.name, "arguments": given}
        text = f"{thought}<tool_call>\n{json.dumps(call)}\n</tool_call>"
        dialogue.say(asked, text, thinks)
        if last and rng.random() < 0.5:
            dialogue.needed = (json.dumps(call),)
            return dialogue
        pairs = rng.sample(_RESULTS, rng.randint(1, 3))
        result = {key: draw(rng, split) for key, draw in pairs}
        dialogue.messages.append({"role": "tool", "content": json.dumps(result)})
        said = " and ".join(f"the {key} is {value}" for key, value in result.items())
        if last:
            dialogue.thinking = rng.random() < _THINKING_SHARE
            dialogue.skill = "tool result"
            dialogue.needed = tuple(result.values())
        thinks = f"The tool {tool.name} has answered. I tell what it says."
        thought = f"<think>\n{thinks}\n</think>\n\n" if dialogue.thinking else ""
        dialogue.answer(f"{thought}The {tool.what}: {said}.", thinks)
    return dialogue


def dialogue(rng: random.Random, split: Split) -> Dialogue:
    """
    A dialogue of any skill.
    """
    skill: Callable[[random.Random, Split], Dialogue]
    skill = rng.choices((recall, talk, tool_use, echo), (5, 1, 3, 1))[0]
    return skill(rng, split)


def units() -> str:
    """
    What is copied, each by itself as the tokenizer cuts texts. Each becomes a token, so that a
    value is copied in two or three steps.
    """
    return words.units() + "".join(f" {word}1{word}" for word in (*_DOES, *_WHAT))
