"""
OpenAI's older completions: a text that goes on, or token ids, without a conversation or a template.

What only models of that time could do is refused, not passed over: to leave ``suffix`` or ``echo``
out would be another answer than was asked for.
"""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from cairn.actors.requests.messages import (
    Accepted,
    Delta,
    Finished,
    Generate,
    Reply,
    ServerFacts,
    TokenInfo,
    Waiting,
)
from cairn.engine.answer.parts import AnswerPart, Said
from cairn.http.chat_completions.choices import LOGPROB_MIN, Choice, Choices, StreamedChoices
from cairn.http.chat_completions.request import StreamOptions, choices, sampling, stop_texts
from cairn.http.wire import parameters
from cairn.http.wire.errors import ClientError, ErrorAnswer, FormatPlaces, describe, missing
from cairn.http.wire.json import decode_object, to_struct
from cairn.http.wire.parameters import INT64_MAX, Ignored, ReuseFields, integer
from cairn.http.wire.suggestions import slip_for

PROTOCOL = "openai.completions"
ADDRESS = "/v1/completions"

_PLACES = FormatPlaces(prompt="prompt")

_LOGPROBS_MAX = 5


class _Request(ReuseFields):
    prompt: str | list[str | int | list[int]] | None = None
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    max_tokens: int | None = None
    stop: str | list[str] | None = None
    logprobs: int | None = None
    n: int | None = None
    best_of: int | None = None
    echo: bool | None = None
    suffix: str | None = None


@attrs.frozen(kw_only=True)
class TextRequest:
    """
    A command, and how its answer is to be sent.

    Attributes:
        ignored: parameters that were sent and not acted on, sorted.
    """

    command: Generate
    stream: bool
    include_usage: bool
    ignored: tuple[str, ...] = ()

    def whole(self) -> TextCompletion:
        """What builds the answer as one object."""
        return TextCompletion(self)

    def streamed(self) -> TextChunks:
        """What builds the answer as a stream."""
        return TextChunks(self)


def read_text_request(
    body: bytes, headers: Mapping[str, str], ignored: Ignored, facts: ServerFacts
) -> TextRequest:
    """
    The command that a request's body and headers ask for.

    Args:
        headers: looked up by names in lower case.
        facts: of the server, which has defaults for what a client does not say.

    Raises:
        ClientError: they cannot be used.
    """
    fields = decode_object(body)
    wire = to_struct(fields, _Request)
    known = _Request.__struct_fields__
    if wire.prompt is None:
        raise missing("prompt", slip_for("prompt", fields, known))
    _check_refused(wire)
    options = wire.stream_options
    command = Generate(
        protocol=PROTOCOL,
        conversation=None,
        prompt=_prompt(wire.prompt, facts.vocabulary_tokens),
        sampling=sampling(wire, facts),
        seed=parameters.seed(wire.seed),
        max_tokens=integer("max_tokens", wire.max_tokens, 1, INT64_MAX),
        stop=stop_texts(wire.stop),
        top_logprobs=integer("logprobs", wire.logprobs, 0, _LOGPROBS_MAX),
        group=parameters.group(headers),
        **parameters.reuse(wire),
        requested_model=parameters.model_name(wire.model),
        choices=choices(wire.n),
    )
    return TextRequest(
        command=command,
        stream=wire.stream is True,
        include_usage=options is not None and options.include_usage is True,
        ignored=ignored.told(parameters.unknown(fields, known), known),
    )


def _check_refused(wire: _Request) -> None:
    refused = {
        "echo": (wire.echo is True, "this server does not give the prompt back; put it in front"),
        "suffix": (bool(wire.suffix), "this model goes on with a text, and fills in none"),
        "best_of": (
            wire.best_of not in (None, wire.n or 1),
            "this server gives all answers that it writes; ask for them by n",
        ),
    }
    for name, (is_refused, why) in refused.items():
        if is_refused:
            raise ClientError(f"{name}: {why}", param=name, code="unsupported_value")


def _prompt(
    wire: str | Sequence[str | int | list[int]], vocabulary_tokens: int
) -> str | tuple[int, ...]:
    if isinstance(wire, str):
        return wire
    if not wire:
        raise ClientError("prompt is empty; there is nothing to go on with", param="prompt")
    if all(isinstance(one, int) for one in wire):
        return _token_ids(wire, vocabulary_tokens)
    if len(wire) > 1:
        raise ClientError(
            f"prompt has {len(wire)} prompts; this server takes one a request: send a request for "
            "each",
            param="prompt",
            code="unsupported_value",
        )
    (only,) = wire
    return only if isinstance(only, str) else _token_ids(only, vocabulary_tokens)  # type: ignore[arg-type]


def _token_ids(ids: Sequence[Any], vocabulary_tokens: int) -> tuple[int, ...]:
    if not ids:
        raise ClientError("prompt is empty; there is nothing to go on with", param="prompt")
    for one in ids:
        # A row of embeddings has no place for another one, and the device would not ask.
        if not 0 <= one < vocabulary_tokens:
            raise ClientError(
                f"prompt names the token {one}; this model's are 0 to {vocabulary_tokens - 1}",
                param="prompt",
            )
    return tuple(ids)


def texts_error(error: Exception) -> ErrorAnswer:
    """What to tell a client of an error."""
    return describe(error, _PLACES)


class TextCompletion:
    """An answer that is sent as a whole."""

    def __init__(self, asked: TextRequest) -> None:
        self._asked = asked
        self._choices = Choices(asked.command.choices)

    def take(self, reply: Reply) -> None:
        """Add a reply."""
        self._choices.take(reply)

    def headers(self) -> dict[str, str]:
        """What is known of the request, for the response's headers."""
        return self._choices.headers()

    def body(self) -> dict[str, Any]:
        """
        The ``text_completion`` object.

        Raises:
            UnfinishedAnswer: the replies were not complete.
        """
        usage = self._choices.usage()
        return {
            **_head(self._choices.accepted()),
            "choices": [self._choice(*found) for found in enumerate(self._choices.all)],
            "usage": usage,
            "cairn": self._choices.cairn(self._asked.ignored),
        }

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        wants = self._asked.command.top_logprobs is not None
        return {
            "index": index,
            "text": _text(choice.parts),
            "logprobs": _logprobs(choice.tokens, _Offsets()) if wants else None,
            "finish_reason": choice.end().finish_reason,
        }


class TextChunks(StreamedChoices):
    """An answer that is sent as server-sent events. The last one is sent by ``done``."""

    def __init__(self, asked: TextRequest) -> None:
        count = asked.command.choices
        super().__init__(
            count,
            _head,
            include_usage=asked.include_usage,
            ignored=asked.ignored,
            places=_PLACES,
        )
        self._logprobs = asked.command.top_logprobs is not None
        self._offsets = [_Offsets() for _ in range(count)]

    def take(self, reply: Reply) -> bytes:
        """What to send for a reply; may be nothing."""
        self._choices.take(reply, keep=False)
        match reply:
            case Waiting():
                return self._choices.comment(reply)
            case Accepted():
                return self._chunk(reply.choice, "", cairn=self._told(reply))
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
        finish_reason: str | None = None,
        cairn: dict[str, Any] | None = None,
    ) -> bytes:
        logprobs = _logprobs(tokens, self._offsets[index]) if tokens else None
        choice = {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }
        return self._event(choice, cairn)


def _head(accepted: Accepted) -> dict[str, Any]:
    return {
        "id": f"cmpl-{accepted.request}",
        "object": "text_completion",
        "created": accepted.created_s,
        "model": accepted.model,
        "system_fingerprint": accepted.fingerprint,
    }


def _text(parts: Sequence[AnswerPart]) -> str:
    return "".join(part.text for part in parts if isinstance(part, Said))


class _Offsets:
    """Where tokens begin in an answer's text, in characters."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._characters = 0

    def next(self, token: TokenInfo) -> int:
        """
        Where a token begins; one that goes on with a character, where that begins. Changes the
        state.
        """
        offset = self._characters
        raw = token.text.encode() if token.raw is None else token.raw
        self._characters += len(self._decoder.decode(raw))
        return offset


def _logprobs(tokens: Sequence[TokenInfo], offsets: _Offsets) -> dict[str, Any]:
    """
    Args:
        offsets: of the tokens before these.
    """
    return {
        "tokens": [_name(token.text, token.raw) for token in tokens],
        "token_logprobs": [max(token.logprob, LOGPROB_MIN) for token in tokens],
        "top_logprobs": [
            {_name(text, raw): max(value, LOGPROB_MIN) for _, text, raw, value in token.top}
            for token in tokens
        ],
        "text_offset": [offsets.next(token) for token in tokens],
    }


def _name(text: str, raw: bytes | None) -> str:
    """
    What a token is called where there is only its text. Those that are part of a character have the
    same, so they are called by their bytes, as OpenAI does.
    """
    try:
        (raw or b"").decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw or b"")
    return text
