"""
What Pebble learns to do, as dialogues drawn from a seed.

A dialogue is a list of rounds; in each a user speaks and Pebble answers. Facts, questions about
them, tools and small talk are mixed as in real conversations. The answer to a question about a fact
repeats the fact in the words that are easiest to look up: attention that searches for what followed
those words before finds the value.
"""

from __future__ import annotations

import random
import re
from typing import Any, Final

import attrs

from cairn_pebble.texts import words
from cairn_pebble.texts.facts import Fact, fact
from cairn_pebble.texts.small_talk import TOPICS, Topic
from cairn_pebble.texts.words import Split, inside, phrase, pick

THINKING_SHARE: Final = 0.2
"""For the last answer; thoughts before earlier answers are drawn separately (sequences.py)."""


@attrs.define
class Dialogue:
    """
    A conversation in the form of OpenAI's chat completions that ends with Pebble's answer.

    Attributes:
        skill: what the last answer shows.
        messages: the turns.
        tools: the tools offered.
        thinking: whether Pebble was asked to think before its last answer.
        needed: what the last answer must contain.
        edits: what a user may change: the message, its current text, and its new text.
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
        """The same after an edit of an earlier turn, which the last answer must follow."""
        ((place, before, after),) = self.edits
        messages = [dict(message) for message in self.messages]
        for here in (place, -1):
            messages[here]["content"] = _whole(before).sub(after, messages[here]["content"])
        return attrs.evolve(self, messages=messages, needed=(after,), edits=())

    def instruct(self, rng: random.Random, split: Split) -> None:
        """With some probability, begin with a system message."""
        if rng.random() < 0.3:
            self.messages.append({"role": "system", "content": _system(rng, split)})

    def say(self, asked: str, answer: str, thought: str = "") -> None:
        """Add a round."""
        self.messages.append({"role": "user", "content": asked})
        self.answer(answer, thought)

    def answer(self, answer: str, thought: str = "") -> None:
        """Add Pebble's answer, and what it would have thought before it."""
        if thought:
            self.thoughts[len(self.messages)] = thought
        self.messages.append({"role": "assistant", "content": answer})


# --- facts ---------------------------------------------------------------------------------------

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
NOTED: Final = ("I will remember that.", "Noted.", "Thank you, I will keep that in mind.")
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
UNKNOWN: Final = "You have not told me that yet."


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


def capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def tell(rng: random.Random, split: Split, facts: list[Fact]) -> str:
    """One or more facts in one message."""
    parts = []
    for one in facts:
        told = phrase(rng, split, *_TOLD)
        clause = pick(rng, one.clauses)
        at_start = told.startswith("{}") or told[: told.index("{}")].endswith("! ")
        parts.append(capital(told.format(capital(clause) if at_start else clause)))
    text = " ".join(parts)
    return text if facts[0].named else _sloppy(rng, text)


def ask(rng: random.Random, split: Split, one: Fact) -> str:
    """A question about a fact."""
    topic = pick(rng, one.questions)
    direct = one.direct and rng.random() < 0.6
    asked = one.direct if direct else tuple(form.format(topic) for form in _ASKED)
    text = capital(phrase(rng, split, _OPENINGS, tuple(map(inside, asked)), _ENDINGS))
    return _sloppy(rng, text)


def chat(rng: random.Random, split: Split, dialogue: Dialogue, *, long: bool = False) -> None:
    """A round about nothing that matters later."""
    kind = rng.random()
    if long or kind < 0.25:
        read_text(rng, split, dialogue, *((14, 18) if long else (1, 6)))
        return
    topic = pick(rng, TOPICS)
    dialogue.say(_sloppy(rng, small_talk(rng, split, topic)), topic.answer, SMALL_TALK)


def read_text(
    rng: random.Random, split: Split, dialogue: Dialogue, least: int = 14, most: int = 18
) -> None:
    """A round with a distracting text of the given number of sentences."""
    text = words.prose(rng, rng.randint(least, most))
    frame = phrase(rng, split, *_PROSE)
    dialogue.say(capital(frame.format(text)), "Thank you, I have read it.")


SMALL_TALK: Final = "This is small talk. I can answer at once."


def small_talk(rng: random.Random, split: Split, topic: Topic) -> str:
    """A wording that leads to a topic."""
    if pick(rng, topic.asked) in topic.questions:
        return capital(phrase(rng, split, _OPENINGS, tuple(map(inside, topic.questions)), _AFTER))
    return capital(phrase(rng, split, _BEFORE, tuple(map(inside, topic.sayings)), _CALLED))


_AFTER: Final = ("", "", "", " Please.", " I want to know.")
_BEFORE: Final = ("", "", "", "", "Well, ", "Oh, ", "So, ", "Hey, ")
_CALLED: Final = ("", "", "", ", Pebble", ", my friend", ", dear Pebble", " again", " then")


_PROSE: Final = (
    ("", "", "Hello! ", "Now ", "So, ", "Please ", "Well, "),
    ("read this: {}", "here is a text. {}", "look at this text: {}", "{}", "this is a story. {}"),
    ("", "", "", " That is all.", " Thank you.", " What do you say?"),
)


def _sloppy(rng: random.Random, text: str) -> str:
    """Vary the text as users type it: with or without the capital and the final punctuation."""
    if rng.random() < 0.15:
        text = text.rstrip("?.!")
    if rng.random() < 0.15:
        text = text[:1].lower() + text[1:]
    return text


def distinct(rng: random.Random, split: Split, count: int) -> list[Fact]:
    """Facts about different things."""
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
    The user gives facts, and some turns later asks for one of them.

    Args:
        turns: how many turns separate the requested fact from the question.
        fillers: how many of those turns are long texts.
        questions: how many questions there are; the last one counts.
    """
    dialogue = Dialogue("recall")
    dialogue.instruct(rng, split)
    # To repeat what was just asked for is easy, so each question is about a different fact.
    count = rng.randint(1, max(6, questions or 0))
    facts = distinct(rng, split, count + 1)
    unknown = facts.pop()
    told = list(facts)
    if rng.random() < 0.05:
        dialogue.say(ask(rng, split, unknown), UNKNOWN, _not_told(unknown))
    places: dict[str, int] = {}
    while told:
        some = [told.pop() for _ in range(min(len(told), rng.choices((1, 2, 3), (5, 2, 1))[0]))]
        if rng.random() < 0.3:
            chat(rng, split, dialogue)
        for one in some:
            places[one.questions[0]] = len(dialogue.messages)
        dialogue.say(tell(rng, split, some), pick(rng, NOTED))
    between = rng.randint(0, 4) if turns is None else turns
    long = set(rng.sample(range(between), min(fillers, between)))
    for place in range(between):
        chat(rng, split, dialogue, long=place in long)
    asked: list[Fact] = []
    due = questions or rng.randint(1, 6)
    while len(asked) < due:
        asked += rng.sample(facts, min(len(facts), due - len(asked)))
    for one in asked[:-1]:
        if rng.random() < 0.06:
            dialogue.say(ask(rng, split, unknown), UNKNOWN, _not_told(unknown))
        dialogue.say(ask(rng, split, one), one.answer, one.thought)
    last = asked[-1]
    told_now = ""
    if turns is None and rng.random() < 0.1:
        last = unknown
        told_now = tell(rng, split, [last]) + " "
    elif turns is None and rng.random() < 0.05:
        return _untold(rng, split, dialogue, unknown)
    dialogue.thinking = rng.random() < THINKING_SHARE
    thought = f"<think>\n{last.thought}\n</think>\n\n" if dialogue.thinking else ""
    dialogue.say(told_now + ask(rng, split, last), thought + last.answer)
    dialogue.needed = (last.value,)
    if last.questions[0] in places:
        earlier = " ".join(one["content"] for one in dialogue.messages[:-1])
        # Nothing remains of what a user changes, and the new text is new to the dialogue.
        once = len(_whole(last.value).findall(earlier)) == 1
        if once and not _whole(last.other).search(earlier):
            dialogue.edits = ((places[last.questions[0]], last.value, last.other),)
    return dialogue


def _whole(text: str) -> re.Pattern[str]:
    return re.compile(rf"(?<!\w){re.escape(text)}(?!\w)")


def _untold(rng: random.Random, split: Split, dialogue: Dialogue, one: Fact) -> Dialogue:
    """End with a question about a fact that was never given."""
    dialogue.skill = "untold"
    dialogue.thinking = rng.random() < THINKING_SHARE
    thought = f"<think>\n{_not_told(one)}\n</think>\n\n" if dialogue.thinking else ""
    dialogue.say(ask(rng, split, one), thought + UNKNOWN)
    dialogue.needed = (UNKNOWN,)
    return dialogue


def _not_told(one: Fact) -> str:
    return f"The user asks for {one.questions[0]}. It was not told to me."


def untold(rng: random.Random, split: Split) -> Dialogue:
    """A question about a fact that was never given, as the first message or after other facts."""
    dialogue = Dialogue("untold")
    dialogue.instruct(rng, split)
    one, *others = distinct(rng, split, rng.randint(1, 4))
    for other in others:
        dialogue.say(tell(rng, split, [other]), pick(rng, NOTED))
    return _untold(rng, split, dialogue, one)


def talk(rng: random.Random, split: Split) -> Dialogue:
    """Small talk."""
    dialogue = Dialogue("talk")
    dialogue.instruct(rng, split)
    for _ in range(rng.randint(1, 6)):
        chat(rng, split, dialogue)
    topic = pick(rng, TOPICS)
    dialogue.thinking = rng.random() < THINKING_SHARE
    thought = f"<think>\n{SMALL_TALK}\n</think>\n\n" if dialogue.thinking else ""
    dialogue.say(_sloppy(rng, small_talk(rng, split, topic)), thought + topic.answer)
    dialogue.needed = (topic.answer,)
    return dialogue


def echo(rng: random.Random, split: Split) -> Dialogue:
    """Pebble repeats words exactly. Nothing teaches copying faster."""
    dialogue = Dialogue("echo")
    dialogue.instruct(rng, split)
    for _ in range(rng.randint(1, 4)):
        draws = (words.name, words.place, words.number, words.word)
        kind = rng.choice(draws) if rng.random() < 0.5 else None
        some = [(kind or pick(rng, draws))(rng, split) for _ in range(rng.randint(1, 8))]
        text = rng.choice((" ", ", ")).join(some)
        dialogue.say(capital(phrase(rng, split, *_REPEATED).format(text)), text)
    dialogue.needed = (dialogue.messages[-1]["content"],)
    return dialogue


_REPEATED: Final = (
    ("", "", "", "Please ", "Now ", "Hello! Please ", "Pebble, "),
    (
        *("repeat: {}", "say this: {}", "say after me: {}", "repeat this: {}", "write this: {}"),
        *("repeat after me: {}", "write: {}", "say: {}"),
    ),
)
