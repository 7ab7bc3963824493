"""
What the forms of OpenAI's answers have in common: several answers to one request, their usage, and
what is told while nothing comes. ``openai_answers.py`` and ``openai_texts.py`` build on it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs

from cairn.actors.requests.messages import Accepted, Delta, Finished, Reply, TokenInfo, Waiting
from cairn.engine.answer.parts import AnswerPart, Called
from cairn.http.wire.answers import UnfinishedAnswer, accepted_headers, cairn_object
from cairn.http.wire.errors import FormatPlaces, describe
from cairn.http.wire.json import encode

DONE = b"data: [DONE]\n\n"

#: What OpenAI gives for "very unlikely"; JSON has no infinity.
LOGPROB_MIN = -9999.0


@attrs.define
class Choice:
    """What has come of one answer."""

    accepted: Accepted | None = None
    finished: Finished | None = None
    parts: list[AnswerPart] = attrs.field(factory=list)
    tokens: list[TokenInfo] = attrs.field(factory=list)

    @property
    def has_calls(self) -> bool:
        """Whether there is a call among the parts."""
        return any(isinstance(part, Called) for part in self.parts)

    def end(self) -> Finished:
        """
        How it ended.

        Raises:
            UnfinishedAnswer: it has not.
        """
        if self.accepted is None or self.finished is None:
            raise UnfinishedAnswer("the replies ended before the answer did")
        return self.finished


class Choices:
    """All answers to a request; takes each reply once and in order."""

    def __init__(self, count: int) -> None:
        self.all = [Choice() for _ in range(count)]

    @property
    def first(self) -> Choice:
        """The one that has the request's own id."""
        return self.all[0]

    def take(self, reply: Reply, *, keep: bool = True) -> None:
        """
        Add a reply.

        Args:
            keep: whether what is said is wanted later.
        """
        match reply:
            case Accepted():
                self.all[reply.choice].accepted = reply
            case Delta() if keep:
                self.all[reply.choice].parts.extend(reply.parts)
                self.all[reply.choice].tokens.extend(reply.tokens)
            case Finished():
                self.all[reply.choice].finished = reply
            case _:
                pass

    def headers(self) -> dict[str, str]:
        """What is known of the request, for the response's headers."""
        return accepted_headers(self.first.accepted)

    def accepted(self) -> Accepted:
        """
        How the first answer was taken.

        Raises:
            UnfinishedAnswer: it was not.
        """
        if self.first.accepted is None:
            raise UnfinishedAnswer("the replies began without being accepted")
        return self.first.accepted

    def usage(self) -> dict[str, Any]:
        """
        The prompt, which all answers share, once, and what they wrote together.

        Raises:
            UnfinishedAnswer: one of them is not complete.
        """
        ends = [choice.end() for choice in self.all]
        prompt = ends[0].prompt_tokens
        written = sum(end.completion_tokens for end in ends)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": written,
            "total_tokens": prompt + written,
            "prompt_tokens_details": {"cached_tokens": ends[0].cached_tokens},
        }

    def cairn(self, ignored: tuple[str, ...]) -> dict[str, Any]:
        """How the answer came about; each of them, where there are several."""
        told = cairn_object(self.accepted(), ignored)
        if len(self.all) == 1:
            return told
        taken = [choice.accepted for choice in self.all if choice.accepted is not None]
        return {**told, "choices": [_choice_object(accepted) for accepted in taken]}

    def comment(self, waiting: Waiting) -> bytes:
        """A line for a client that waits."""
        if waiting.queued:
            return b": waiting\n\n"
        accepted = self.first.accepted
        if accepted is None:
            return b": prefill %d\n\n" % waiting.prefilled_tokens
        if waiting.prefilled_tokens >= accepted.prompt_tokens:
            return b": writing\n\n"
        return b": prefill %d/%d\n\n" % (waiting.prefilled_tokens, accepted.prompt_tokens)


class StreamedChoices:
    """
    All answers to a request as server-sent events; the last one is sent by ``done``. What an event
    tells of an answer is the form's.
    """

    def __init__(
        self,
        count: int,
        head: Callable[[Accepted], dict[str, Any]],
        *,
        include_usage: bool,
        ignored: tuple[str, ...],
        places: FormatPlaces,
    ) -> None:
        """
        Args:
            head: what each event begins with.
            ignored: what was sent and is not acted on.
            places: in the bodies of the form.
        """
        self._choices = Choices(count)
        self._left = count
        self._head = head
        self._include_usage = include_usage
        self._ignored = ignored
        self._places = places

    def done(self) -> bytes:
        """
        The end of a complete stream.

        Raises:
            UnfinishedAnswer: it is not complete.
        """
        if self._left:
            raise UnfinishedAnswer("the replies ended before the answer did")
        return DONE

    def headers(self, first: Reply) -> dict[str, str]:
        """What is known of the request with its first reply, for the response's headers."""
        return accepted_headers(first)

    def failed(self, error: Exception) -> bytes:
        """
        The end of a stream that broke off. Without it the client would take the rest for complete.
        """
        return event(describe(error, self._places).envelope())

    def _told(self, accepted: Accepted) -> dict[str, Any]:
        """How an answer came about: what was ignored, with the first of several alone."""
        if accepted.choice:
            return _choice_object(accepted)
        return cairn_object(accepted, self._ignored)

    def _event(self, choice: dict[str, Any], cairn: dict[str, Any] | None = None) -> bytes:
        """What an event tells of an answer, with what all events have."""
        chunk = {**self._head(self._choices.accepted()), "choices": [choice]}
        if self._include_usage:
            chunk["usage"] = None
        if cairn is not None:
            chunk["cairn"] = cairn
        return event(chunk)

    def _ended(self, last: bytes) -> bytes:
        """
        The last event of an answer; behind that of the last answer stands the usage. Changes how
        many are left.
        """
        self._left -= 1
        if self._left or not self._include_usage:
            return last
        head = self._head(self._choices.accepted())
        return last + event({**head, "choices": [], "usage": self._choices.usage()})


def _choice_object(accepted: Accepted) -> dict[str, Any]:
    """How one of several answers came about. It is a request of its own in the journal."""
    return {"request": accepted.request, **cairn_object(accepted, ())}


def event(value: dict[str, Any]) -> bytes:
    """A value as a server-sent event."""
    return b"data: " + encode(value) + b"\n\n"
