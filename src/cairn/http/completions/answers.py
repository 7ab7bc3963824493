"""OpenAI's older completions, from replies to the wire. ``request.py`` is the way in."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Literal

from msgspec import UNSET, UnsetType

from cairn.actors.requests.messages import Accepted, Delta, Finished, Reply, TokenInfo, Waiting
from cairn.engine.answer.parts import AnswerPart, Said
from cairn.http.chat_completions.choices import (
    LOGPROB_MIN,
    Choice,
    Choices,
    StreamedChoices,
    answer_fields,
)
from cairn.http.chat_completions.objects import Usage
from cairn.http.completions.errors import PLACES
from cairn.http.wire.answers import CairnObject
from cairn.http.wire.sent import Sent
from cairn.journal.events import FinishReason

_PREFIX = "cmpl-"


class TextLogprobs(Sent):
    """The tokens of a text, and where in the text each begins."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class TextChoice(Sent):
    """One of the texts."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: FinishReason


class TextCompletion(Sent, kw_only=True):
    """The continuation of a text."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[TextChoice]
    usage: Usage
    cairn: CairnObject


class TextChunkChoice(Sent):
    """More of one of the texts."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: FinishReason | None


class TextChunk(Sent, kw_only=True):
    """An event of a streamed text."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[TextChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    cairn: CairnObject | UnsetType = UNSET


class TextAnswer:
    """Builds an answer that is sent as a whole."""

    def __init__(self, *, logprobs: bool, choices: int, ignored: tuple[str, ...]) -> None:
        self._logprobs = logprobs
        self._ignored = ignored
        self._choices = Choices(choices)

    def take(self, reply: Reply) -> None:
        """Add a reply."""
        self._choices.take(reply)

    def headers(self) -> dict[str, str]:
        """The response headers that describe the request."""
        return self._choices.headers()

    def body(self) -> TextCompletion:
        """
        The whole answer.

        Raises:
            UnfinishedAnswer: the replies were not complete.
        """
        usage = self._choices.usage()
        return TextCompletion(
            **answer_fields(_PREFIX, self._choices.accepted()),
            choices=[self._choice(*found) for found in enumerate(self._choices.all)],
            usage=usage,
            cairn=self._choices.cairn(self._ignored),
        )

    def _choice(self, index: int, choice: Choice) -> TextChoice:
        return TextChoice(
            index=index,
            text=_text(choice.parts),
            logprobs=_text_logprobs(choice.tokens, _Offsets()) if self._logprobs else None,
            finish_reason=choice.end().finish_reason,
        )


class TextStream(StreamedChoices[TextChunkChoice]):
    """Builds an answer that is sent as server-sent events. ``done`` gives the last one."""

    def __init__(
        self, *, logprobs: bool, include_usage: bool, choices: int, ignored: tuple[str, ...]
    ) -> None:
        super().__init__(choices, include_usage=include_usage, ignored=ignored, places=PLACES)
        self._logprobs = logprobs
        self._offsets = [_Offsets() for _ in range(choices)]

    def take(self, reply: Reply) -> bytes:
        """What to send for a reply; may be nothing."""
        self._choices.take(reply, keep=False)
        match reply:
            case Waiting():
                return self._choices.comment(reply)
            case Accepted():
                return self._chunk(reply.choice, "", cairn=self._cairn(reply))
            case Delta():
                text, tokens = _text(reply.parts), reply.tokens if self._logprobs else ()
                return self._chunk(reply.choice, text, tokens) if text or tokens else b""
            case Finished():
                last = self._chunk(reply.choice, "", finish_reason=reply.finish_reason)
                return self._ended(last)

    def _chunk(
        self,
        index: int,
        text: str,
        tokens: Sequence[TokenInfo] = (),
        *,
        finish_reason: FinishReason | None = None,
        cairn: CairnObject | UnsetType = UNSET,
    ) -> bytes:
        choice = TextChunkChoice(
            index=index,
            text=text,
            logprobs=_text_logprobs(tokens, self._offsets[index]) if tokens else None,
            finish_reason=finish_reason,
        )
        return self._event(choice, cairn)

    def _object(
        self,
        choices: list[TextChunkChoice],
        usage: Usage | UnsetType | None,
        cairn: CairnObject | UnsetType,
    ) -> TextChunk:
        fields = answer_fields(_PREFIX, self._choices.accepted())
        return TextChunk(**fields, choices=choices, usage=usage, cairn=cairn)


def _text(parts: Sequence[AnswerPart]) -> str:
    return "".join(part.text for part in parts if isinstance(part, Said))


class _Offsets:
    """Where tokens begin in an answer's text, in characters."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._characters = 0

    def next(self, token: TokenInfo) -> int:
        """
        Where a token begins; for one that continues a character, where that character begins.
        Changes the state.
        """
        offset = self._characters
        raw = token.text.encode() if token.raw is None else token.raw
        self._characters += len(self._decoder.decode(raw))
        return offset


def _text_logprobs(tokens: Sequence[TokenInfo], offsets: _Offsets) -> TextLogprobs:
    """
    Args:
        offsets: after the tokens before these. Changed.
    """
    return TextLogprobs(
        tokens=[_token_name(token.text, token.raw) for token in tokens],
        token_logprobs=[max(token.logprob, LOGPROB_MIN) for token in tokens],
        top_logprobs=[
            {_token_name(text, raw): max(value, LOGPROB_MIN) for _, text, raw, value in token.top}
            for token in tokens
        ],
        text_offset=[offsets.next(token) for token in tokens],
    )


def _token_name(text: str, raw: bytes | None) -> str:
    # Tokens that are part of a character all have the same text, U+FFFD, so their bytes are used as
    # names, as OpenAI does.
    try:
        (raw or b"").decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw or b"")
    return text
