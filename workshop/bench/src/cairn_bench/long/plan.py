"""
What the two clients of a long session say, and how fast. Pure.

The first is like an agent: under one system prompt it holds a conversation whose turns contain a
user's words and, mostly, a tool's result. When the conversation reaches its length the next one
begins, so history lengths form a sawtooth: otherwise late turns would be slower than early ones
because of their history alone. In one of three conversations the model thinks. Thinking is not
switched within a conversation, because for Cairn a prompt with different template arguments begins
a new one.

The second client interrupts: at every fifth turn it sends a short request in the middle of the
first one's, and every third time it disconnects before its answer is complete.
"""

from __future__ import annotations

from typing import Any, Final

import attrs

from cairn_conform.client_texts import Message, assistant, listed, system, user

AGENT: Final = "agent"
SECOND: Final = "second"

_QUESTIONS: Final = (
    "Tell me about Cairn.",
    "Tell me what a KV cache is.",
    "Explain the journal.",
    "What is the promise of Cairn?",
    "How do I check the journal?",
    "What are you good at?",
    "How was the model trained?",
)
_SYSTEM_WORDS: Final = 60
_ASKED_WORDS: Final = 5
_RESULT_WORDS: Final = 80
_THINKS_EACH: Final = 3
_ASKS_ONLY_EACH: Final = 3
_ANSWER_TOKENS: Final = 32
_THINKING_TOKENS: Final = 64
_SECOND_TURNS: Final = 4
_LEAVES_EACH: Final = 3
_GIVES_UP_AFTER: Final = 3
_HOUR_S: Final = 3600.0
_TURNS: Final = 192
_FASTEST_S: Final = 1.0
_SLOWEST_S: Final = 20.0
_LOOKS: Final = 20
_LOOK_S: Final = 60.0


@attrs.frozen(kw_only=True)
class Plan:
    """
    The settings of a long session.

    Attributes:
        salt: the beginning of its texts.
        seconds: its duration.
        every_s: from the beginning of a turn to that of the next, if it is over by then.
        pause_s: the shortest pause after a turn, so that there is idle time.
        look_s: from one look at the server to the next.
        history_tokens: the length that a conversation reaches.
        interrupts_each: the second client speaks at one of this many turns.
    """

    salt: str
    seconds: float
    every_s: float
    pause_s: float = 0.25
    look_s: float
    history_tokens: int = 6000
    interrupts_each: int = 5

    @classmethod
    def of(cls, hours: float, salt: str) -> Plan:
        """
        A plan for this many hours.

        Turns are close enough that a run of minutes has several conversations too, and far enough
        apart that one of hours has idle time.
        """
        seconds = hours * _HOUR_S
        return cls(
            salt=salt,
            seconds=seconds,
            every_s=min(_SLOWEST_S, max(_FASTEST_S, seconds / _TURNS)),
            look_s=min(_LOOK_S, seconds / _LOOKS),
        )


@attrs.frozen(kw_only=True)
class Asked:
    """
    The next turn to hold.

    Attributes:
        conversation, turn: which one, counted from 0.
        leaves: whether the client disconnects before the answer is complete.
    """

    client: str
    conversation: int
    turn: int
    messages: tuple[Message, ...]
    answer_tokens: int
    thinking: bool = False
    leaves: bool = False

    @property
    def continues(self) -> bool:
        """Whether a part of this conversation was sent before."""
        return self.turn > 0

    @property
    def body(self) -> dict[str, Any]:
        """The request as it goes over the wire."""
        body: dict[str, Any] = {
            "messages": list(self.messages),
            "max_tokens": self.answer_tokens,
            "temperature": 0,
            "seed": 1,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.thinking:
            body["chat_template_kwargs"] = {"enable_thinking": True}
        return body


class Talker:
    """
    A client: what it says next follows from the salt, and from the answers it got.

    Args:
        history_tokens: the length that its conversations reach.
        turns_max: the most turns they have; None for as many as fit.
        leaves_each: it disconnects from one of this many requests; 0 for none.
    """

    def __init__(
        self,
        name: str,
        salt: str,
        *,
        history_tokens: int,
        turns_max: int | None = None,
        leaves_each: int = 0,
    ) -> None:
        self.name = name
        self._salt = salt
        self._history_tokens = history_tokens
        self._turns_max = turns_max
        self._leaves_each = leaves_each
        self._conversation = 0
        self._turn = 0
        self._asked = 0
        self._unanswered = 0
        self._heard: list[Message] = []

    def ask(self) -> Asked:
        """The next turn; the same one until it is answered."""
        place = self._conversation % _THINKS_EACH
        thinking = self._turns_max is None and place == _THINKS_EACH - 1
        return Asked(
            client=self.name,
            conversation=self._conversation,
            turn=self._turn,
            messages=(self._system(), *self._heard, user(self._text(self._turn))),
            answer_tokens=_THINKING_TOKENS if thinking else _ANSWER_TOKENS,
            thinking=thinking,
            leaves=bool(self._leaves_each) and self._asked % self._leaves_each == 2,
        )

    def hear(self, text: str, tokens: int) -> None:
        """
        Take an answer, and begin a new conversation if this one is long enough.

        Args:
            tokens: how long the conversation is with it.
        """
        self._asked += 1
        self._unanswered = 0
        self._heard += [user(self._text(self._turn)), assistant(text)]
        self._turn += 1
        if tokens >= self._history_tokens or self._turn == self._turns_max:
            self._begin()

    def hear_nothing(self) -> None:
        """
        There was no answer. The same request is sent again a few times; after that a new
        conversation begins.
        """
        self._asked += 1
        self._unanswered += 1
        if self._unanswered == _GIVES_UP_AFTER:
            self._begin()

    def _begin(self) -> None:
        self._conversation += 1
        self._turn = self._unanswered = 0
        self._heard = []

    def _system(self) -> Message:
        return system(listed(self._salt, self.name, _SYSTEM_WORDS))

    def _text(self, turn: int) -> str:
        name = f"{self.name} {self._conversation}.{turn}"
        asked = f"{listed(self._salt, name, _ASKED_WORDS)} {_QUESTIONS[turn % len(_QUESTIONS)]}"
        if self._turns_max is not None or turn % _ASKS_ONLY_EACH == _ASKS_ONLY_EACH - 1:
            return asked
        return f"The tool gave this. {listed(self._salt, f'{name} gave', _RESULT_WORDS)} {asked}"


def agent(plan: Plan) -> Talker:
    """The first client."""
    return Talker(AGENT, plan.salt, history_tokens=plan.history_tokens)


def second(plan: Plan) -> Talker:
    """The client that interrupts."""
    return Talker(
        SECOND,
        plan.salt,
        history_tokens=plan.history_tokens,
        turns_max=_SECOND_TURNS,
        leaves_each=_LEAVES_EACH,
    )
