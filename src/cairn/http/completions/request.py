"""
OpenAI's older completions: continues a text or token ids, without a conversation or a template.

``suffix``, ``echo`` and ``best_of`` are refused rather than ignored, because an answer without them
would be a different answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cairn.actors.requests.messages import Generate, ServerFacts
from cairn.http.chat_completions.request import ChatRequest, CompletionFields
from cairn.http.wire import parameters
from cairn.http.wire.checks import ClientError, missing
from cairn.http.wire.json import decode_object, to_struct
from cairn.http.wire.parameters import Ignored, integer
from cairn.http.wire.suggestions import slip_for

PROTOCOL = "openai.completions"

_LOGPROBS_MAX = 5


class RequestBody(CompletionFields):
    prompt: str | list[str | int | list[int]] | None = None
    logprobs: int | None = None
    best_of: int | None = None
    echo: bool | None = None
    suffix: str | None = None


def read_text_request(
    body: bytes, headers: Mapping[str, str], ignored: Ignored, facts: ServerFacts
) -> ChatRequest:
    """As ``chat_completions.request.read_chat_request``."""
    fields = decode_object(body)
    wire = to_struct(fields, RequestBody)
    known = RequestBody.__struct_fields__
    if wire.prompt is None:
        raise missing("prompt", slip_for("prompt", fields, known))
    _check_refused(wire)
    command = Generate(
        protocol=PROTOCOL,
        conversation=None,
        prompt=_prompt(wire.prompt, facts.vocabulary_tokens),
        **parameters.common(wire, facts),
        max_tokens=parameters.longest("max_tokens", wire.max_tokens),
        stop=wire.stop_texts,
        top_logprobs=integer("logprobs", wire.logprobs, 0, _LOGPROBS_MAX),
        group=parameters.group(headers),
        choices=wire.choices,
    )
    return ChatRequest(
        command=command,
        stream=wire.stream is True,
        include_usage=wire.include_usage,
        ignored=ignored.report(parameters.unknown(fields, known), known),
    )


def _check_refused(wire: RequestBody) -> None:
    refused = {
        "echo": (wire.echo is True, "put the prompt in front of the answer yourself"),
        "suffix": (bool(wire.suffix), "the model can continue a text, but not fill a gap"),
        "best_of": (
            wire.best_of not in (None, wire.n or 1),
            "the server returns every answer that it writes; use n",
        ),
    }
    for name, (is_refused, why) in refused.items():
        if is_refused:
            raise ClientError(
                f"{name} is not supported: {why}", param=name, code="unsupported_value"
            )


def _prompt(
    wire: str | Sequence[str | int | list[int]], vocabulary_tokens: int
) -> str | tuple[int, ...]:
    if isinstance(wire, str):
        return wire
    if not wire:
        raise ClientError("prompt is empty; send a text or token ids", param="prompt")
    if all(isinstance(one, int) for one in wire):
        return _token_ids(wire, vocabulary_tokens)
    if len(wire) > 1:
        raise ClientError(
            f"prompt has {len(wire)} prompts; send a request for each",
            param="prompt",
            code="unsupported_value",
        )
    (only,) = wire
    return only if isinstance(only, str) else _token_ids(only, vocabulary_tokens)  # type: ignore[arg-type]


def _token_ids(ids: Sequence[Any], vocabulary_tokens: int) -> tuple[int, ...]:
    if not ids:
        raise ClientError("prompt is empty; send a text or token ids", param="prompt")
    for one in ids:
        # The embeddings have no row for another id, and the device does not check.
        if not 0 <= one < vocabulary_tokens:
            raise ClientError(
                f"prompt has the token id {one}; this model's are 0 to {vocabulary_tokens - 1}",
                param="prompt",
            )
    return tuple(ids)
