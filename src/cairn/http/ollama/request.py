"""
Ollama's chat and generate, from the wire to a command. ``answers.py`` is the way back.

Unknown parameters and options are ignored, and named in the answer. A known one with a value that
cannot be used is a 400. A request without messages or a prompt asks for no answer: it has a model
loaded or, with a ``keep_alive`` of 0, unloaded.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, TypeVar

import attrs
import msgspec

from cairn.actors.requests.messages import Generate, ServerFacts
from cairn.engine.answer.grammar import ANY_OBJECT, Constraint
from cairn.engine.prompt.template import Conversation, Message
from cairn.engine.ttl import MOST_S
from cairn.http.chat_completions.conversation import read_tools
from cairn.http.completions.request import with_gap
from cairn.http.ollama.conversation import WireMessage, check_images, read_messages
from cairn.http.wire import parameters
from cairn.http.wire.checks import ClientError, JsonObject, check_json, missing
from cairn.http.wire.formats import Choice, constraint_of, ignored_strict
from cairn.http.wire.json import to_struct
from cairn.http.wire.parameters import (
    INT64_MAX,
    CairnFields,
    Common,
    CommonFields,
    Ignored,
    ReadRequest,
    integer,
)
from cairn.http.wire.suggestions import slip_for

CHAT_PROTOCOL = "ollama.chat"
GENERATE_PROTOCOL = "ollama.generate"

_STOPS_MAX = 64

_LEVELS = ("low", "medium", "high", "max")

#: Ollama's options, by Cairn's names of the same.
_OPTIONS: Final[Mapping[str, str]] = MappingProxyType(
    {
        **{name: name for name in ("temperature", "top_p", "top_k", "min_p", "seed")},
        **{name: name for name in ("presence_penalty", "frequency_penalty")},
        "repetition_penalty": "repeat_penalty",
    }
)

#: Clients of other servers send these beside the options, where Ollama does not read them either.
_ALIASES: Final[Mapping[str, str]] = MappingProxyType(
    {
        **{name: f"options.{name}" for name in (*_OPTIONS.values(), "num_predict", "stop")},
        "max_tokens": "options.num_predict",
        "repetition_penalty": "options.repeat_penalty",
    }
)

_NUMBER: Final = r"[0-9]{1,12}(?:\.[0-9]{0,9})?"
# Each number but a lone one has a unit: with several ways to split a text, a match takes for ever.
_DURATION: Final = re.compile(rf"(-?)((?:{_NUMBER}(?:ns|us|µs|ms|s|m|h))+|{_NUMBER})")
_DURATION_PART: Final = re.compile(r"([0-9.]+)(ns|us|µs|ms|s|m|h)?")
_UNITS_S: Final[Mapping[str, float]] = MappingProxyType(
    {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}
)


class Options(msgspec.Struct):
    """The options that have an effect."""

    num_predict: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None


class OllamaFields(CairnFields, kw_only=True):
    """The fields that chat and generate share."""

    options: Options | None = None
    format: str | JsonObject | None = None
    think: bool | str | None = None
    keep_alive: float | str | None = None


class ChatBody(OllamaFields):
    messages: list[WireMessage] | None = None
    tools: list[JsonObject] | None = None


class GenerateBody(OllamaFields):
    prompt: str | None = None
    system: str | None = None
    suffix: str | None = None
    raw: bool | None = None
    template: str | None = None
    context: list[int] | None = None
    images: list[str] | None = None


class ShowBody(msgspec.Struct):
    model: str | None = None
    name: str | None = None


class _Sampled(CommonFields):
    """The options under Cairn's names."""

    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None


@attrs.frozen(kw_only=True)
class Preload:
    """
    A request for no answer.

    Attributes:
        unload: whether the model is to leave the memory.
    """

    unload: bool


_B = TypeVar("_B", bound=OllamaFields)


def read_chat_request(
    fields: JsonObject, headers: Mapping[str, str], ignored: Ignored, facts: ServerFacts
) -> ReadRequest | Preload:
    """
    The command of a request's fields and headers.

    Args:
        headers: looked up by names in lower case.
        facts: of the server, with defaults for what the client leaves out.

    Raises:
        ClientError: they cannot be used.
    """
    wire = to_struct(fields, ChatBody)
    known = ChatBody.__struct_fields__
    if not wire.messages:
        if (slip := slip_for("messages", fields, known)) is not None:
            raise missing("messages", slip)
        return _preload(wire)
    tools = read_tools(wire.tools or ())
    messages, continued, names = read_messages(wire.messages)
    template, ignored_thinking = _thinking(wire.think, facts)
    constraint = _constraint(wire.format, tools)
    common, ignored_fields = _common(fields, wire, headers, facts)
    names |= ignored_thinking | ignored_fields | ignored_strict(tools, constraint)
    command = Generate(
        protocol=CHAT_PROTOCOL,
        conversation=Conversation(
            messages=messages, tools=tools, template=template, continued=continued
        ),
        prompt=None,
        constraint=constraint,
        **common,
    )
    return _read(command, wire, names, ignored, known)


def read_generate_request(
    fields: JsonObject, headers: Mapping[str, str], ignored: Ignored, facts: ServerFacts
) -> ReadRequest | Preload:
    """As ``read_chat_request``."""
    wire = to_struct(fields, GenerateBody)
    known = GenerateBody.__struct_fields__
    _check_refused(wire)
    prompt = wire.prompt or ""
    if not prompt and not wire.suffix:
        if (slip := slip_for("prompt", fields, known)) is not None:
            raise missing("prompt", slip)
        return _preload(wire)
    common, names = _common(fields, wire, headers, facts)
    if wire.raw or wire.suffix:
        if wire.suffix:
            prompt = with_gap(prompt, wire.suffix, facts)
        unread = {"think": wire.think, "system": wire.system}
        names |= {name for name, value in unread.items() if value}
        command = Generate(protocol=GENERATE_PROTOCOL, conversation=None, prompt=prompt, **common)
        return _read(command, wire, names, ignored, known)
    system = [Message(role="system", content=wire.system)] if wire.system else []
    template, ignored_thinking = _thinking(wire.think, facts)
    command = Generate(
        protocol=GENERATE_PROTOCOL,
        conversation=Conversation(
            messages=(*system, Message(role="user", content=prompt)), template=template
        ),
        prompt=None,
        constraint=_constraint(wire.format, ()),
        **common,
    )
    return _read(command, wire, names | ignored_thinking, ignored, known)


def _read(
    command: Generate,
    wire: OllamaFields,
    names: set[str],
    ignored: Ignored,
    known: tuple[str, ...],
) -> ReadRequest:
    return ReadRequest(
        command=command,
        stream=wire.stream is not False,
        ignored=ignored.report(names, known, _ALIASES),
    )


def _preload(wire: OllamaFields) -> Preload:
    return Preload(unload=wire.keep_alive is not None and _seconds(wire.keep_alive) == 0)


# --- parameters --------------------------------------------------------------------------------


class _OfCommand(Common):
    """The fields of a command that both have."""

    max_tokens: int | None
    stop: tuple[str, ...]
    group: str | None
    least_ttl_s: int


def _common(
    fields: JsonObject, wire: OllamaFields, headers: Mapping[str, str], facts: ServerFacts
) -> tuple[_OfCommand, set[str]]:
    """The fields of a command that both have, and what is ignored."""
    options = wire.options or Options()
    names = parameters.unknown(
        fields, type(wire).__struct_fields__, options=Options.__struct_fields__
    )
    least_ttl_s = 0
    if wire.keep_alive is not None:
        least_ttl_s = _seconds(wire.keep_alive)
        # The model stays in memory.
        names |= set() if least_ttl_s else {"keep_alive"}
    found = _OfCommand(
        **_sampled(wire, options, facts),
        max_tokens=_max_tokens(options.num_predict),
        stop=_stop_texts(options.stop),
        group=parameters.group(headers),
        least_ttl_s=least_ttl_s,
    )
    return found, names


def _sampled(wire: OllamaFields, options: Options, facts: ServerFacts) -> Common:
    shared: dict[str, Any] = {name: getattr(wire, name) for name in CairnFields.__struct_fields__}
    given = {ours: getattr(options, theirs) for ours, theirs in _OPTIONS.items()}
    if given["seed"] == -1:  # Ollama's for one that is drawn
        given["seed"] = None
    try:
        return parameters.common(_Sampled(**shared, **given), facts)
    except ClientError as error:
        if error.param is None or error.param not in _OPTIONS:
            raise
        where = f"options.{_OPTIONS[error.param]}"
        message = f"{where}{error.message.removeprefix(error.param)}"
        raise ClientError(message, param=where, code=error.code) from error


def _max_tokens(num_predict: int | None) -> int | None:
    # Negative numbers mean that the client sets no limit.
    if num_predict is None or num_predict < 0:
        return None
    return integer("options.num_predict", num_predict, 0, INT64_MAX)


def _stop_texts(stop: str | list[str] | None) -> tuple[str, ...]:
    texts = (stop,) if isinstance(stop, str) else tuple(stop or ())
    return parameters.stop_texts("options.stop", tuple(filter(None, texts)), _STOPS_MAX)


def _thinking(think: bool | str | None, facts: ServerFacts) -> tuple[JsonObject, frozenset[str]]:
    """The template settings of ``think``, and what of it is ignored."""
    if think is None or think == "":
        return facts.template, frozenset()
    if think is True:
        has = "enable_thinking" in facts.switches
        settings: JsonObject = {"enable_thinking": True} if has else {}
        return {**facts.template, **settings}, frozenset(() if has else {"think"})
    if isinstance(think, str) and think not in _LEVELS:
        raise ClientError(
            f"think is {think[:40]!r}; it must be true, false, or one of {', '.join(_LEVELS)}",
            param="think",
        )
    settings, unread = parameters.thinking(think or "none", "think", facts)
    return {**facts.template, **settings}, unread


def _constraint(given: str | JsonObject | None, tools: tuple[JsonObject, ...]) -> Constraint | None:
    if given in (None, ""):
        return None
    if isinstance(given, str):
        if given != "json":
            raise ClientError(
                f'format is {given[:40]!r}; it must be "json" or a JSON schema', param="format"
            )
        given = ANY_OBJECT
    check_json(given, "format")
    return constraint_of(given, Choice(), tools, strict=False)


def _check_refused(wire: GenerateBody) -> None:
    """Refuse what would give a different answer if it were ignored."""
    if wire.template:
        raise ClientError(
            "template is not supported: the model's own is used; leave it out, or send the whole "
            "prompt with raw: true",
            param="template",
            code="unsupported_value",
        )
    if wire.context:
        raise ClientError(
            "context is not supported; send the conversation to /api/chat, which reuses what was "
            "computed for it",
            param="context",
            code="unsupported_value",
        )
    check_images(wire.images, "images")
    if (wire.raw or wire.suffix) and wire.format not in (None, ""):
        raise ClientError(
            "format is not supported with raw or suffix; leave one of them out",
            param="format",
            code="unsupported_value",
        )


def _seconds(keep_alive: float | str) -> int:
    """
    A duration in whole seconds, at most the longest TTL, which also stands for negative ones.

    Raises:
        ClientError: it is not a duration.
    """
    if isinstance(keep_alive, str):
        found = _DURATION.fullmatch(keep_alive.strip())
        if found is None:
            raise ClientError(
                f"keep_alive is {keep_alive[:40]!r}; it must be a number of seconds, or a duration "
                'such as "30s", "5m" or "24h"; negative for no end',
                param="keep_alive",
            )
        parts = _DURATION_PART.findall(found[2])
        keep_alive = sum(float(count) * _UNITS_S[unit] for count, unit in parts)
        keep_alive = -keep_alive if found[1] else keep_alive
    if keep_alive < 0:
        return MOST_S
    return math.ceil(min(keep_alive, MOST_S))
