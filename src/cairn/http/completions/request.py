"""
OpenAI's older completions: continues a text or token ids, without a conversation or a template.

What cannot be done is refused rather than ignored, because an answer without it would be a
different answer: ``best_of``, ``echo`` with log-probabilities, and a ``suffix`` for models that
fill no gaps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from cairn.actors.requests.messages import Generate, ServerFacts
from cairn.engine.prompt.infill import infill_prompt
from cairn.http.chat_completions.request import ChatRequest, CompletionFields
from cairn.http.wire import parameters
from cairn.http.wire.checks import ClientError, check_count, missing
from cairn.http.wire.json import decode_object, to_struct
from cairn.http.wire.parameters import Ignored, integer
from cairn.http.wire.suggestions import slip_for

PROTOCOL = "openai.completions"

_LOGPROBS_MAX = 5

PROMPTS_MAX = 128
"""The most prompts of a request. They are answered one after the other."""

Prompt = str | tuple[int, ...]


class RequestBody(CompletionFields):
    prompt: str | list[str | int | list[int]] | None = None
    logprobs: int | None = None
    best_of: int | None = None
    echo: bool | None = None
    suffix: str | None = None


@attrs.frozen(kw_only=True)
class TextRequest(ChatRequest):
    """
    A request of completions.

    Attributes:
        echo: whether each answer begins with its prompt.
        echoes: the text of each prompt; None for one of token ids, until it is decoded.
    """

    echo: bool = False
    echoes: tuple[str | None, ...] = ()


def read_text_request(
    body: bytes, headers: Mapping[str, str], ignored: Ignored, facts: ServerFacts
) -> TextRequest:
    """As ``chat_completions.request.read_chat_request``."""
    fields = decode_object(body)
    wire = to_struct(fields, RequestBody)
    known = RequestBody.__struct_fields__
    if wire.prompt is None:
        raise missing("prompt", slip_for("prompt", fields, known))
    _check_refused(wire)
    prompts = _prompts(wire.prompt, facts.vocabulary_tokens)
    command = Generate(
        protocol=PROTOCOL,
        conversation=None,
        prompt=None,
        **parameters.common(wire, facts),
        max_tokens=parameters.longest("max_tokens", wire.max_tokens, 0),
        stop=wire.stop_texts,
        top_logprobs=integer("logprobs", wire.logprobs, 0, _LOGPROBS_MAX),
        group=parameters.group(headers),
        choices=wire.choices,
    )
    asked = prompts if not wire.suffix else _with_gap(prompts, wire.suffix, facts)
    first, *more = (attrs.evolve(command, prompt=one) for one in asked)
    return TextRequest(
        command=first,
        more=tuple(more),
        echo=wire.echo is True,
        echoes=tuple(one if isinstance(one, str) else None for one in prompts),
        stream=wire.stream is True,
        include_usage=wire.include_usage,
        ignored=ignored.report(parameters.unknown(fields, known), known),
    )


def _check_refused(wire: RequestBody) -> None:
    if wire.best_of not in (None, wire.n or 1):
        raise ClientError(
            "best_of is not supported: the server returns every answer that it writes; use n",
            param="best_of",
            code="unsupported_value",
        )
    if wire.echo and wire.logprobs is not None:
        raise ClientError(
            "echo with logprobs is not supported: the server computes no log-probabilities of "
            "prompts; leave one of them out",
            param="echo",
            code="unsupported_value",
        )


def _with_gap(prompts: Sequence[Prompt], after: str, facts: ServerFacts) -> Sequence[Prompt]:
    """The prompts whose answers are what belongs between each of these and a text after it."""
    found = []
    for one in prompts:
        if not isinstance(one, str):
            raise ClientError(
                "suffix needs prompts of text, not of token ids",
                param="prompt",
                code="unsupported_value",
            )
        found.append(with_gap(one, after, facts))
    return found


def with_gap(before: str, after: str, facts: ServerFacts) -> str:
    """
    The prompt whose answer is what belongs between two texts.

    Raises:
        ClientError: the model fills no gaps.
    """
    if facts.infill is None:
        raise ClientError(
            f"suffix is not supported by {facts.model}: its tokenizer has no known tokens for "
            "filling a gap; use a model for code that has them",
            param="suffix",
            code="unsupported_value",
        )
    return infill_prompt(facts.infill, before, after)


def _prompts(
    wire: str | Sequence[str | int | list[int]], vocabulary_tokens: int
) -> Sequence[Prompt]:
    if isinstance(wire, str):
        return [wire]
    if not wire:
        raise ClientError("prompt is empty; send a text or token ids", param="prompt")
    if all(isinstance(one, int) for one in wire):
        return [read_token_ids(wire, vocabulary_tokens)]
    check_count(wire, "prompt", PROMPTS_MAX)
    found: list[Prompt] = []
    for one in wire:
        if isinstance(one, int):
            raise ClientError(
                "prompt has a token id beside other prompts; send texts, or lists of token ids",
                param="prompt",
                code="invalid_type",
            )
        found.append(one if isinstance(one, str) else read_token_ids(one, vocabulary_tokens))
    return found


def read_token_ids(
    ids: Sequence[Any], vocabulary_tokens: int, where: str = "prompt"
) -> tuple[int, ...]:
    """
    The token ids at a path of the body.

    Raises:
        ClientError: there are none, or the model does not have one of them.
    """
    if not ids:
        raise ClientError(f"{where} is empty; send a text or token ids", param=where)
    for one in ids:
        # The embeddings have no row for another id, and the device does not check.
        if not 0 <= one < vocabulary_tokens:
            raise ClientError(
                f"{where} has the token id {one}; this model's are 0 to {vocabulary_tokens - 1}",
                param=where,
            )
    return tuple(ids)
