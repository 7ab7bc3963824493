"""
OpenAI's chat completions: from the wire to a command. ``openai_answers.py`` is the way back; no
type of OpenAI's goes past the modules of this name.

Tolerant of what may be missing here: an unknown parameter is ignored, named in the answer and once
in the log.
Strict about what is understood: a value that cannot be used is a 400 that says where it stands and
what to send instead. Nothing is clamped or guessed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import attrs
import msgspec
import structlog

from cairn.actors.messages import Generate, ServerFacts
from cairn.engine.prompt import Conversation
from cairn.engine.sampling import Sampling

from .errors import ClientError
from .openai_conversation import WireMessage, read_messages, read_template, read_tools
from .wire import decode_object, to_struct

log = structlog.get_logger(__name__)

PROTOCOL = "openai.chat"
#: Until there are keys, all clients are one tenant.
TENANT = "local"

#: Clients that send one of these name a group of conversations, not one conversation.
GROUP_HEADERS = ("x-claude-code-session-id", "x-session-id", "session-id")

_STOPS_MAX = 4
_TOP_LOGPROBS_MAX = 20
_NAME_MAX = 200
_INT64_MAX = 2**63 - 1
#: A client may make up any number of names; the answer has so many, cut to so many characters.
_IGNORED_MAX = 64
_IGNORED_NAME_MAX = 100

_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Request(msgspec.Struct):
    messages: list[WireMessage]
    model: str | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
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
    max_completion_tokens: int | None = None
    stop: str | list[str] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    n: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    cache_prompt: bool | None = None
    session_id: str | None = None


@attrs.frozen(kw_only=True)
class ChatRequest:
    """
    A command, and how its answer is to be sent.

    Attributes:
        ignored: parameters that were sent and not acted on, sorted.
    """

    command: Generate
    stream: bool
    include_usage: bool
    ignored: tuple[str, ...] = ()


class Ignored:
    """
    What was asked for and ignored, each name told to the log once.
    """

    def __init__(self, names_max: int = 256) -> None:
        self._names: set[str] = set()
        self._names_max = names_max

    def add(self, name: str) -> None:
        """
        Log the name, if it is new.
        """
        # A client that makes up names must not fill the memory or the log.
        if name in self._names or len(self._names) >= self._names_max:
            return
        self._names.add(name)
        log.warning("parameter ignored", parameter=name)


def read_chat_request(
    body: bytes, headers: Mapping[str, str], ignored: Ignored, facts: ServerFacts
) -> ChatRequest:
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
    if wire.n not in (None, 1):
        raise ClientError(
            f"n is {wire.n}: this server gives one choice a request; leave n out or send 1",
            param="n",
            code="unsupported_value",
        )
    if (wire.response_format or {}).get("type", "text") != "text":
        # To answer in free text what was promised as JSON would break the client later on.
        raise ClientError(
            "response_format: this server cannot hold an answer to a format yet; leave it out",
            param="response_format",
            code="unsupported_value",
        )
    model = wire.model or ""
    if len(model) > _NAME_MAX:
        raise ClientError(f"model is longer than {_NAME_MAX} characters", param="model")
    options = wire.stream_options
    command = Generate(
        protocol=PROTOCOL,
        tenant=TENANT,
        conversation=Conversation(
            messages=read_messages(wire.messages),
            tools=read_tools(wire.tools or (), wire.tool_choice),
            template=read_template(
                wire.chat_template_kwargs or {}, wire.enable_thinking, facts.template
            ),
        ),
        prompt=None,
        sampling=_sampling(wire, facts),
        seed=_integer("seed", wire.seed, -(2**63), 2**64 - 1),
        max_tokens=_max_tokens(wire),
        stop=_stop(wire.stop),
        top_logprobs=_top_logprobs(wire),
        session_name=_session_name(wire.session_id),
        group=_group(headers),
        cache_prompt=wire.cache_prompt is not False,
        asked_model=model,
    )
    names = _ignored(fields)
    for name in names:
        ignored.add(name)
    return ChatRequest(
        command=command,
        stream=wire.stream is True,
        include_usage=options is not None and options.include_usage is True,
        ignored=names,
    )


# --- parameters --------------------------------------------------------------------------------


def _ignored(fields: Mapping[str, Any]) -> tuple[str, ...]:
    names = sorted(
        name[:_IGNORED_NAME_MAX]
        for name in fields.keys() - set(_Request.__struct_fields__)
        if fields[name] is not None
    )
    return tuple(names[:_IGNORED_MAX])


def _sampling(wire: _Request, facts: ServerFacts) -> Sampling:
    names = (field.name for field in attrs.fields(Sampling))
    given = {name: value for name in names if (value := getattr(wire, name)) is not None}
    _integer("top_k", wire.top_k, 0, _INT64_MAX)
    if wire.logit_bias is not None:
        given["logit_bias"] = _biases(wire.logit_bias, facts.vocabulary_tokens)
    try:
        return attrs.evolve(facts.defaults, **given)
    except ValueError as error:  # its message begins with the parameter's name
        raise ClientError(str(error), param=str(error).split()[0]) from error


def _biases(wire: Mapping[str, float], vocabulary_tokens: int) -> dict[int, float]:
    for token in wire:
        # A row of logits has no place for another one, and the device would not ask.
        if not _TOKEN_ID.fullmatch(token) or int(token) >= vocabulary_tokens:
            raise ClientError(
                f"logit_bias names {token[:_NAME_MAX]!r}, which is no token of this model: its ids "
                f"are 0 to {vocabulary_tokens - 1}",
                param="logit_bias",
            )
    return {int(token): bias for token, bias in wire.items()}


def _max_tokens(wire: _Request) -> int | None:
    older = _integer("max_tokens", wire.max_tokens, 1, _INT64_MAX)
    newer = _integer("max_completion_tokens", wire.max_completion_tokens, 1, _INT64_MAX)
    return newer if newer is not None else older


def _integer(name: str, value: int | None, low: int, high: int) -> int | None:
    if value is None or low <= value <= high:
        return value
    limits = f"between {low} and {high}"
    if high == _INT64_MAX:  # nobody comes near it, and it would hide the limit that counts
        limits = f"at least {low}" if value < low else f"at most {high}"
    raise ClientError(f"{name} must be {limits}", param=name)


def _stop(wire: str | list[str] | None) -> tuple[str, ...]:
    texts = (wire,) if isinstance(wire, str) else tuple(wire or ())
    if len(texts) > _STOPS_MAX:
        raise ClientError(f"stop has {len(texts)} texts; at most {_STOPS_MAX}", param="stop")
    if "" in texts:
        raise ClientError(
            "stop has an empty text, which ends any answer; leave it out", param="stop"
        )
    return texts


def _top_logprobs(wire: _Request) -> int | None:
    count = _integer("top_logprobs", wire.top_logprobs, 0, _TOP_LOGPROBS_MAX)
    if wire.logprobs is True:
        return count or 0
    if count:
        raise ClientError("top_logprobs needs logprobs: true beside it", param="top_logprobs")
    return None


def _session_name(wire: str | None) -> str | None:
    if wire is not None and not (1 <= len(wire) <= _NAME_MAX and wire.isprintable()):
        raise ClientError(
            f"session_id must be 1 to {_NAME_MAX} printable characters", param="session_id"
        )
    return wire


def _group(headers: Mapping[str, str]) -> str | None:
    for name in GROUP_HEADERS:
        value = headers.get(name, "").strip()
        # A hint about where to look first: one that cannot be a name is no reason to refuse.
        if 1 <= len(value) <= _NAME_MAX and value.isprintable():
            return value
    return None
