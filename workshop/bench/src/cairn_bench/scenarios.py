"""
What clients do: the timed conversations. Pure.

A scenario is a generator: it yields requests and is sent each answer, because a client continues
after it. All texts follow from the scenario's name and a salt, so two servers get the same
requests, and no run finds another run's cache.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator
from typing import Final, TypeAlias

import attrs

from cairn_conform.client_answers import Answer
from cairn_conform.client_texts import Message, assistant, listed, system, user


@attrs.frozen(kw_only=True)
class Request:
    """
    One request of a scenario.

    Attributes:
        messages: the whole conversation, as chat clients send it.
        warm: whether a part of it was sent before, so that its time counts.
        answer_tokens: the requested length of the answer.
        thinking: whether the model should think, if its template knows ``enable_thinking``.
        temperature: 0 for a greedy answer.
    """

    messages: tuple[Message, ...]
    warm: bool
    answer_tokens: int = 24
    thinking: bool = False
    temperature: float = 0.0


VARIED: Final = 0.7
"""A temperature at which a model with random weights repeats nothing, in plain words."""

Steps: TypeAlias = Generator[Request, Answer, None]


@attrs.frozen(kw_only=True)
class Scenario:
    """
    A workload.

    Attributes:
        name: for readers.
        told: what it represents, in a few words.
        play: makes the requests in their order, from the given random draws.
        in_mean: whether it counts for the mean.
    """

    name: str
    told: str
    play: Callable[[Drawn], Steps]
    in_mean: bool = True

    def steps(self, salt: str) -> Steps:
        """The requests in their order; the same for the same salt."""
        return self.play(Drawn(salt, self.name))


class Drawn:
    """
    Texts and random draws of one run of a scenario; no text is repeated.

    Attributes:
        chances: for all other draws.
    """

    def __init__(self, salt: str, name: str) -> None:
        self.chances = random.Random(f"{salt}/{name}")
        self._salt = salt
        self._name = name
        self._texts = 0

    def text(self, words: int) -> str:
        """The next text, of this many words and a sentence around them."""
        self._texts += 1
        return listed(self._salt, f"{self._name} {self._texts}", words)


class Talk:
    """A conversation as its client holds it."""

    def __init__(self, drawn: Drawn, *, system_words: int) -> None:
        self._drawn = drawn
        self._asked = False
        self.messages: list[Message] = [system(drawn.text(system_words))]

    def ask(self, words: int, *, answer_tokens: int = 24, thinking: bool = False) -> Request:
        """Add a message of this many words."""
        self.messages.append(user(self._drawn.text(words)))
        warm, self._asked = self._asked, True
        return Request(
            messages=tuple(self.messages),
            warm=warm,
            answer_tokens=answer_tokens,
            thinking=thinking,
        )

    def hear(self, text: str) -> None:
        """Add an answer."""
        self.messages.append(assistant(text))

    def take_back(self) -> None:
        """Remove the last turn."""
        del self.messages[-2:]


def _chat(drawn: Drawn, *, turns: int, system_words: int) -> Steps:
    talk = Talk(drawn, system_words=system_words)
    for _ in range(turns):
        answer = yield talk.ask(12)
        talk.hear(answer.text)


def _four_turns(drawn: Drawn) -> Steps:
    return _chat(drawn, turns=4, system_words=60)


def _thirty_turns(drawn: Drawn) -> Steps:
    return _chat(drawn, turns=30, system_words=30)


def _in_turn(drawn: Drawn) -> Steps:
    """Twenty conversations, each of which continues after all others have spoken."""
    talks = [Talk(drawn, system_words=75) for _ in range(20)]
    for _ in range(3):
        drawn.chances.shuffle(talks)
        for talk in talks:
            answer = yield talk.ask(10)
            talk.hear(answer.text)


def _edits(drawn: Drawn) -> Steps:
    """From the fourth on, every second turn replaces the last one with a different message."""
    talk = Talk(drawn, system_words=60)
    for place in range(12):
        if place % 2 and place > 1:
            talk.take_back()
        answer = yield talk.ask(16)
        talk.hear(answer.text)


def _documents(drawn: Drawn) -> Steps:
    """Questions about the same few documents, each in its own conversation."""
    documents = [drawn.text(250) for _ in range(3)]
    asked = [*range(3), *(drawn.chances.randrange(3) for _ in range(12))]
    for place, number in enumerate(asked):
        messages = (system(documents[number]), user(drawn.text(8)))
        yield Request(messages=messages, warm=place >= len(documents))


def _batch(drawn: Drawn) -> Steps:
    """Short inputs after one instruction."""
    instruction = drawn.text(160)
    for place in range(20):
        messages = (system(instruction), user(drawn.text(6)))
        yield Request(messages=messages, warm=place > 0, answer_tokens=8)


def _repeats(drawn: Drawn) -> Steps:
    """The very same request again."""
    messages = (system(drawn.text(120)), user(drawn.text(16)))
    for place in range(6):
        yield Request(messages=messages, warm=place > 0)


def _thinking_dropped(drawn: Drawn) -> Steps:
    """
    Thoughts are not sent back.

    A model that does not think stands in for one that does: half of its words count as thoughts,
    and no server can know which.
    """
    talk = Talk(drawn, system_words=60)
    for _ in range(8):
        answer = yield talk.ask(12, answer_tokens=64, thinking=True)
        words = answer.text.split()
        talk.hear(answer.text if answer.reasoning else " ".join(words[len(words) // 2 :]))


def _branches(drawn: Drawn) -> Steps:
    """One conversation continues in many ways from the same turn."""
    talk = Talk(drawn, system_words=80)
    for _ in range(3):
        answer = yield talk.ask(16)
        talk.hear(answer.text)
    trunk = tuple(talk.messages)
    for _ in range(8):
        yield Request(messages=(*trunk, user(drawn.text(8))), warm=True)


SCENARIOS: Final = (
    Scenario(name="4 turns", told="a short chat", play=_four_turns),
    Scenario(name="30 turns", told="a long chat", play=_thirty_turns),
    Scenario(name="20 in turn", told="twenty chats that take turns", play=_in_turn),
    Scenario(name="edits", told="every other turn is taken back", play=_edits),
    Scenario(name="documents", told="questions about the same documents", play=_documents),
    Scenario(name="repeats", told="the same request again", play=_repeats),
    Scenario(name="thinking dropped", told="less of an answer comes back", play=_thinking_dropped),
    Scenario(
        name="batch",
        told="short inputs after one instruction",
        play=_batch,
        in_mean=False,
    ),
    Scenario(name="branches", told="many ways on from one turn", play=_branches, in_mean=False),
)
"""In the order in which they are measured."""
