"""
What OpenAI's chat completions and completions share: several answers to one request, their usage,
and the comments that keep a stream alive.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

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
from cairn.http.chat_completions.objects import CachedTokens, Timings, Usage
from cairn.http.chat_completions.request import ChatRequest
from cairn.http.wire.answers import UnfinishedAnswer, accepted_headers, cairn_object
from cairn.http.wire.errors import FormatPlaces, describe
from cairn.http.wire.json import encode
from cairn.http.wire.sent import CairnObject, Sent
from cairn.journal.summaries import TurnCounts
from cairn.journal.timelines import tokens_a_second

DONE = b"data: [DONE]\n\n"

#: What OpenAI gives for "very unlikely"; JSON has no infinity.
LOGPROB_MIN = -9999.0


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
    """All answers to a request, from replies that are taken once and in order."""

    #: Of the answer's id.
    _prefix: ClassVar[str]

    def __init__(self, read: ChatRequest) -> None:
        self._ignored = read.ignored
        self._logprobs = read.command.top_logprobs is not None
        # A request of completions may have several prompts, each with as many answers.
        self._each = read.command.choices
        self._all = [Choice() for _ in range(self._each * (1 + len(read.more)))]

    def _add(self, reply: Reply, *, keep: bool) -> None:
        """
        Args:
            keep: whether its text and tokens are needed later.
        """
        match reply:
            case Accepted():
                self._all[reply.choice].accepted = reply
            case Delta() if keep:
                self._all[reply.choice].parts.extend(reply.parts)
                self._all[reply.choice].tokens.extend(reply.tokens)
            case Finished():
                self._all[reply.choice].finished = reply
            case _:
                pass

    def _accepted(self) -> Accepted:
        """The first reply to the first answer, which has the request's own id."""
        accepted = self._all[0].accepted
        if accepted is None:
            raise UnfinishedAnswer("the replies began without being accepted")
        return accepted

    def _fields(self) -> dict[str, object]:
        """The fields that identify an answer, in every answer and event."""
        accepted = self._accepted()
        return {
            "id": f"{self._prefix}{accepted.request}",
            "created": accepted.created_s,
            "model": accepted.model,
            "system_fingerprint": accepted.fingerprint,
        }

    def _usage(self) -> Usage:
        """Each prompt once, and the tokens of all answers together."""
        ends = [choice.end() for choice in self._all]
        prompt = sum(end.prompt_tokens for end in ends[:: self._each])
        written = sum(end.completion_tokens for end in ends)
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=written,
            total_tokens=prompt + written,
            prompt_tokens_details=CachedTokens(
                sum(end.cached_tokens for end in ends[:: self._each])
            ),
        )

    def _timings(self) -> Timings | UnsetType:
        """How long the first answer took; ``UNSET`` if the journal no longer has that."""
        end = self._all[0].end()
        return UNSET if end.turn is None else timings_of(end, end.turn)


def timings_of(end: Finished, turn: TurnCounts) -> Timings:
    """
    How long an answer took, by its rows: the times that the log and the explorer have.

    Args:
        turn: of the answer.
    """
    first_us = turn.first_us or turn.ended_us
    prompt_ms = max(0, first_us - turn.received_us) / 1000
    answer_ms = max(0, turn.ended_us - first_us) / 1000
    computed = end.prompt_tokens - end.cached_tokens
    rate = tokens_a_second(end.completion_tokens, turn.first_us, turn.ended_us)
    return Timings(
        cache_n=end.cached_tokens,
        prompt_n=computed,
        prompt_ms=prompt_ms,
        prompt_per_token_ms=prompt_ms / computed if computed else 0.0,
        prompt_per_second=computed * 1000 / prompt_ms if prompt_ms else 0.0,
        predicted_n=end.completion_tokens,
        predicted_ms=answer_ms,
        predicted_per_token_ms=1000 / rate if rate else 0.0,
        predicted_per_second=rate or 0.0,
    )


class WholeChoices(Choices, ABC):
    """Builds an answer that is sent as a whole."""

    #: The struct of the answer.
    _whole: ClassVar[Callable[..., Sent]]

    def take(self, reply: Reply) -> None:
        """Add a reply."""
        self._add(reply, keep=True)

    def headers(self) -> dict[str, str]:
        """The response headers that describe the request."""
        return accepted_headers(self._all[0].accepted)

    def body(self) -> Sent:
        """
        The whole answer.

        Raises:
            UnfinishedAnswer: the replies were not complete.
        """
        return self._whole(
            **self._fields(),
            choices=[self._choice(*found) for found in enumerate(self._all)],
            usage=self._usage(),
            timings=self._timings(),
            cairn=self._cairn(),
        )

    @abstractmethod
    def _choice(self, index: int, choice: Choice) -> Sent: ...

    def _cairn(self) -> CairnObject:
        """The ``cairn`` object of the request; with several answers, it lists each of them."""
        cairn = cairn_object(self._accepted(), self._ignored)
        if len(self._all) > 1:
            accepted = [choice.accepted for choice in self._all if choice.accepted is not None]
            cairn.choices = [_choice_object(one) for one in accepted]
        return cairn


class StreamedChoices(Choices):
    """Builds an answer that is sent as server-sent events; ``done`` gives the last one."""

    #: The struct of an event.
    _chunk: ClassVar[Callable[..., Sent]]
    #: Where things are in the bodies of the protocol.
    _places = FormatPlaces()

    def __init__(self, read: ChatRequest) -> None:
        super().__init__(read)
        self._left = len(self._all)
        self._include_usage = read.include_usage

    def headers(self, first: Reply) -> dict[str, str]:
        """The response headers that describe the request, by its first reply."""
        return accepted_headers(first)

    def done(self) -> bytes:
        """
        The end of a complete stream.

        Raises:
            UnfinishedAnswer: the stream is not complete.
        """
        if self._left:
            raise UnfinishedAnswer("the replies ended before the answer did")
        return DONE

    def failed(self, error: Exception) -> bytes:
        """The end of a stream that broke off, so that the client sees it is incomplete."""
        return event(describe(error, self._places).envelope())

    def _comment(self, waiting: Waiting) -> bytes:
        """A comment that shows a waiting client how far its request is."""
        if waiting.queued:
            return b": waiting\n\n"
        accepted = self._all[0].accepted
        if accepted is None:
            return b": prefill %d\n\n" % waiting.prefilled_tokens
        if waiting.prefilled_tokens >= accepted.prompt_tokens:
            return b": writing\n\n"
        return b": prefill %d/%d\n\n" % (waiting.prefilled_tokens, accepted.prompt_tokens)

    def _event(
        self, choice: Sent, accepted: Accepted | None = None, *, ends: bool = False
    ) -> bytes:
        """
        An event of one answer; after the last event of the last answer, also that of the usage. The
        last event of a stream has the timings.

        Args:
            accepted: the answer's first reply, if the event is its first one.
            ends: whether it is the answer's last event. Changes how many answers are left.
        """
        cairn: CairnObject | UnsetType = UNSET
        if accepted is not None:
            # Only the first answer lists what was ignored.
            is_first = accepted.choice == 0
            cairn = cairn_object(accepted, self._ignored) if is_first else _choice_object(accepted)
        self._left -= ends
        is_last = ends and not self._left
        timings = self._timings() if is_last else UNSET
        if not self._include_usage:
            return self._chunk_of([choice], timings=timings, cairn=cairn)
        sent = self._chunk_of([choice], usage=None, cairn=cairn)
        if is_last:
            sent += self._chunk_of([], usage=self._usage(), timings=timings)
        return sent

    def _chunk_of(self, choices: list[Sent], **fields: object) -> bytes:
        return event(self._chunk(**self._fields(), choices=choices, **fields))


def _choice_object(accepted: Accepted) -> CairnObject:
    """The ``cairn`` object of one of several answers, each of which is a request in the journal."""
    cairn = cairn_object(accepted)
    cairn.request = accepted.request
    return cairn


def event(value: Sent) -> bytes:
    """A server-sent event."""
    return b"data: " + encode(value) + b"\n\n"
