"""
What OpenAI's chat completions and completions share: several answers to one request, their usage,
and the comments that keep a stream alive.
"""

from __future__ import annotations

from typing import Generic, TypedDict, TypeVar

import attrs
from msgspec import UNSET, UnsetType

from cairn.actors.requests.messages import (
    Accepted,
    Delta,
    Finished,
    Reply,
    TokenInfo,
    Waiting,
)
from cairn.engine.answer.parts import AnswerPart, Called
from cairn.http.chat_completions.objects import CachedTokens, Usage
from cairn.http.wire.answers import CairnObject, UnfinishedAnswer, accepted_headers, cairn_object
from cairn.http.wire.errors import FormatPlaces, describe
from cairn.http.wire.json import encode
from cairn.http.wire.sent import Sent

C = TypeVar("C", bound=Sent)

DONE = b"data: [DONE]\n\n"

#: What OpenAI gives for "very unlikely"; JSON has no infinity.
LOGPROB_MIN = -9999.0


class AnswerFields(TypedDict):
    """The fields that identify an answer, in every answer and event."""

    id: str
    created: int
    model: str
    system_fingerprint: str


def answer_fields(prefix: str, accepted: Accepted) -> AnswerFields:
    """
    Args:
        prefix: of the answer's id.
    """
    return AnswerFields(
        id=f"{prefix}{accepted.request}",
        created=accepted.created_s,
        model=accepted.model,
        system_fingerprint=accepted.fingerprint,
    )


@attrs.define
class Choice:
    """The replies to one of the answers so far."""

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
        The last reply.

        Raises:
            UnfinishedAnswer: it did not come.
        """
        if self.accepted is None or self.finished is None:
            raise UnfinishedAnswer("the replies ended before the answer did")
        return self.finished


class Choices:
    """All answers to a request. Takes each reply once and in order."""

    def __init__(self, count: int) -> None:
        self.all = [Choice() for _ in range(count)]

    @property
    def first(self) -> Choice:
        """The answer that has the request's own id."""
        return self.all[0]

    def take(self, reply: Reply, *, keep: bool = True) -> None:
        """
        Add a reply.

        Args:
            keep: whether its text and tokens are needed later.
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
        """The response headers that describe the request."""
        return accepted_headers(self.first.accepted)

    def accepted(self) -> Accepted:
        """
        The first reply to the first answer.

        Raises:
            UnfinishedAnswer: it did not come.
        """
        if self.first.accepted is None:
            raise UnfinishedAnswer("the replies began without being accepted")
        return self.first.accepted

    def usage(self) -> Usage:
        """
        Token counts: the shared prompt once, and the tokens of all answers together.

        Raises:
            UnfinishedAnswer: an answer is not complete.
        """
        ends = [choice.end() for choice in self.all]
        prompt = ends[0].prompt_tokens
        written = sum(end.completion_tokens for end in ends)
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=written,
            total_tokens=prompt + written,
            prompt_tokens_details=CachedTokens(ends[0].cached_tokens),
        )

    def cairn(self, ignored: tuple[str, ...]) -> CairnObject:
        """The ``cairn`` object of the request; with several answers, it lists each of them."""
        cairn = cairn_object(self.accepted(), ignored)
        if len(self.all) > 1:
            accepted = [choice.accepted for choice in self.all if choice.accepted is not None]
            cairn.choices = [_choice_object(one) for one in accepted]
        return cairn

    def comment(self, waiting: Waiting) -> bytes:
        """A comment that shows a waiting client how far its request is."""
        if waiting.queued:
            return b": waiting\n\n"
        accepted = self.first.accepted
        if accepted is None:
            return b": prefill %d\n\n" % waiting.prefilled_tokens
        if waiting.prefilled_tokens >= accepted.prompt_tokens:
            return b": writing\n\n"
        return b": prefill %d/%d\n\n" % (waiting.prefilled_tokens, accepted.prompt_tokens)


class StreamedChoices(Generic[C]):
    """
    All answers to a request as server-sent events; ``done`` gives the last one. Subclasses build
    the object of an event from its choices.
    """

    def __init__(
        self,
        count: int,
        *,
        include_usage: bool,
        ignored: tuple[str, ...],
        places: FormatPlaces,
    ) -> None:
        """
        Args:
            ignored: the parameters that were sent and are not acted on.
            places: where things are in the bodies of the protocol.
        """
        self._choices = Choices(count)
        self._left = count
        self._include_usage = include_usage
        self._ignored = ignored
        self._places = places

    def done(self) -> bytes:
        """
        The end of a complete stream.

        Raises:
            UnfinishedAnswer: the stream is not complete.
        """
        if self._left:
            raise UnfinishedAnswer("the replies ended before the answer did")
        return DONE

    def headers(self, first: Reply) -> dict[str, str]:
        """The response headers that describe the request, by its first reply."""
        return accepted_headers(first)

    def failed(self, error: Exception) -> bytes:
        """The end of a stream that broke off, so that the client sees it is incomplete."""
        return event(describe(error, self._places).envelope())

    def _object(
        self, choices: list[C], usage: Usage | UnsetType | None, cairn: CairnObject | UnsetType
    ) -> Sent:
        """The object of an event."""
        raise NotImplementedError  # pragma: no cover (each protocol has its own)

    def _cairn(self, accepted: Accepted) -> CairnObject:
        """The ``cairn`` object of an answer. Only the first one lists what was ignored."""
        if accepted.choice:
            return _choice_object(accepted)
        return cairn_object(accepted, self._ignored)

    def _event(self, choice: C, cairn: CairnObject | UnsetType = UNSET) -> bytes:
        return event(self._object([choice], None if self._include_usage else UNSET, cairn))

    def _ended(self, last: bytes) -> bytes:
        """
        The last event of an answer; after the last answer, also the usage. Changes how many answers
        are left.
        """
        self._left -= 1
        if self._left or not self._include_usage:
            return last
        return last + event(self._object([], self._choices.usage(), UNSET))


def _choice_object(accepted: Accepted) -> CairnObject:
    """The ``cairn`` object of one of several answers, each of which is a request in the journal."""
    cairn = cairn_object(accepted)
    cairn.request = accepted.request
    return cairn


def event(value: Sent) -> bytes:
    """A server-sent event."""
    return b"data: " + encode(value) + b"\n\n"
