"""OpenAI's older completions, from replies to the wire. ``request.py`` is the way in."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from cairn.actors.requests.messages import Accepted, Delta, Finished, Reply, TokenInfo, Waiting
from cairn.engine.answer.parts import AnswerPart, Said
from cairn.http.chat_completions.choices import (
    LOGPROB_MIN,
    Choice,
    StreamedChoices,
    WholeChoices,
)
from cairn.http.completions.errors import PLACES
from cairn.http.completions.objects import (
    TextChoice,
    TextChunk,
    TextChunkChoice,
    TextCompletion,
    TextFinishReason,
    TextLogprobs,
)
from cairn.http.completions.request import TextRequest

_PREFIX = "cmpl-"


class TextAnswer(WholeChoices):
    """Builds an answer that is sent as a whole."""

    _prefix, _whole = _PREFIX, TextCompletion

    def __init__(self, read: TextRequest) -> None:
        super().__init__(read)
        self._read = read

    def _choice(self, index: int, choice: Choice) -> TextChoice:
        return TextChoice(
            index=index,
            text=_echo(self._read, index) + _text(choice.parts),
            logprobs=_text_logprobs(choice.tokens, _Offsets()) if self._logprobs else None,
            finish_reason=_finish_reason(choice.end()),
        )


class TextStream(StreamedChoices):
    """Builds an answer that is sent as server-sent events. ``done`` gives the last one."""

    _prefix, _chunk, _places = _PREFIX, TextChunk, PLACES

    def __init__(self, read: TextRequest) -> None:
        super().__init__(read)
        self._read = read
        self._offsets = [_Offsets() for _ in self._all]

    def take(self, reply: Reply) -> bytes:
        """What to send for a reply; may be nothing."""
        self._add(reply, keep=False)
        match reply:
            case Waiting():
                return self._comment(reply)
            case Accepted():
                return self._piece(reply.choice, _echo(self._read, reply.choice), accepted=reply)
            case Delta():
                text, tokens = _text(reply.parts), reply.tokens if self._logprobs else ()
                return self._piece(reply.choice, text, tokens) if text or tokens else b""
            case Finished():
                return self._piece(reply.choice, "", finish_reason=_finish_reason(reply))

    def _piece(
        self,
        index: int,
        text: str,
        tokens: Sequence[TokenInfo] = (),
        *,
        finish_reason: TextFinishReason | None = None,
        accepted: Accepted | None = None,
    ) -> bytes:
        choice = TextChunkChoice(
            index=index,
            text=text,
            logprobs=_text_logprobs(tokens, self._offsets[index]) if tokens else None,
            finish_reason=finish_reason,
        )
        return self._event(choice, accepted, ends=finish_reason is not None)


def _finish_reason(finished: Finished) -> TextFinishReason:
    return "length" if finished.is_cut else "stop"


def _echo(read: TextRequest, index: int) -> str:
    """What an answer begins with: its prompt, if that is to be repeated."""
    return (read.echoes[index // read.command.choices] or "") if read.echo else ""


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
