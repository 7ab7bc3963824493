"""``/tokenize``, ``/detokenize`` and ``/props``: what is asked, and what is answered."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import attrs
import msgspec

from cairn.actors.requests.messages import Generate, PromptTokens, ServerFacts
from cairn.engine.sampling import Sampling
from cairn.http.chat_completions.request import RequestBody as ChatBody
from cairn.http.chat_completions.request import chat_request
from cairn.http.completions.request import PROTOCOL, read_token_ids
from cairn.http.tokens.objects import (
    GenerationSettings,
    Modalities,
    Props,
    PropsParams,
    TokenList,
)
from cairn.http.wire import parameters
from cairn.http.wire.checks import missing
from cairn.http.wire.json import decode_object, to_struct
from cairn.http.wire.parameters import Ignored, ReadRequest, model_name


class TokenizeBody(msgspec.Struct):
    """A text, under either name, or a conversation as in chat completions."""

    model: str | None = None
    content: str | None = None
    prompt: str | None = None
    messages: list[Any] | None = None


class DetokenizeBody(msgspec.Struct):
    """Token ids."""

    tokens: list[int] | None = None
    model: str | None = None


def read_tokenize_request(
    body: bytes, headers: Mapping[str, str], ignored: Ignored, facts: ServerFacts
) -> ReadRequest:
    """As ``chat_completions.request.read_chat_request``."""
    fields = decode_object(body)
    wire = to_struct(fields, TokenizeBody)
    if wire.messages is not None:
        return chat_request(fields, headers, ignored, facts)
    text = wire.prompt if wire.content is None else wire.content
    if text is None:
        raise missing("content")
    known = {*TokenizeBody.__struct_fields__, *ChatBody.__struct_fields__}
    return ReadRequest(
        command=_raw(text, wire.model),
        stream=False,
        ignored=ignored.report(parameters.unknown(fields, TokenizeBody.__struct_fields__), known),
    )


def read_detokenize_request(
    body: bytes, headers: Mapping[str, str], ignored: Ignored, facts: ServerFacts
) -> ReadRequest:
    """As ``chat_completions.request.read_chat_request``. No tokens are no text."""
    wire = to_struct(decode_object(body), DetokenizeBody)
    if wire.tokens is None:
        raise missing("tokens")
    ids = read_token_ids(wire.tokens, facts.vocabulary_tokens, "tokens") if wire.tokens else ()
    return ReadRequest(command=_raw(ids, wire.model), stream=False)


def _raw(prompt: str | tuple[int, ...], model: str | None) -> Generate:
    return Generate(
        protocol=PROTOCOL,
        conversation=None,
        prompt=prompt,
        sampling=Sampling(),
        seed=None,
        max_tokens=None,
        requested_model=model_name(model),
    )


def token_list(found: PromptTokens, read: ReadRequest, facts: ServerFacts) -> TokenList:
    """The tokens of a prompt, as they are sent."""
    return TokenList(
        tokens=list(found.ids),
        count=len(found.ids),
        max_model_len=facts.context_tokens,
        ignored=list(read.ignored) or msgspec.UNSET,
    )


def props_of(facts: ServerFacts) -> Props:
    """What the server says about itself to clients of llama.cpp's."""
    sampling = attrs.asdict(facts.defaults)
    names = ("temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty")
    params = PropsParams(
        repeat_penalty=facts.defaults.repetition_penalty,
        n_predict=facts.default_max_tokens,
        **{name: sampling[name] for name in names},
    )
    return Props(
        default_generation_settings=GenerationSettings(facts.context_tokens, params),
        total_slots=facts.decode_rows,
        model_alias=facts.model,
        model_path=facts.model,
        modalities=Modalities(),
        build_info=f"cairn {version('cairn-server')}",
    )
