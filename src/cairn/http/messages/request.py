"""
Anthropic's messages, from the wire to a command. ``answers.py`` is the way back.

Unknown parameters are ignored and named in the answer. A known parameter with a value that cannot
be used is a 400.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import msgspec

from cairn.actors.requests.messages import Generate, ServerFacts
from cairn.engine.answer.grammar import Constraint
from cairn.engine.prompt.template import Conversation
from cairn.http.messages.conversation import (
    WireBlock,
    WireMessage,
    WireTool,
    check_last,
    continues_last,
    read_talk,
    read_tools,
    ttls,
)
from cairn.http.messages.formats import WireToolChoice, offers_tools, read_constraint
from cairn.http.wire import parameters
from cairn.http.wire.checks import JsonObject, check_known, missing
from cairn.http.wire.clients import client_name
from cairn.http.wire.formats import ignored_format, ignored_strict
from cairn.http.wire.json import decode_object, to_struct
from cairn.http.wire.parameters import INT64_MAX, CommonFields, Ignored, ReadRequest, integer
from cairn.http.wire.suggestions import slip_for

PROTOCOL = "anthropic.messages"

#: Anthropic documents no maximum; each is searched for in every piece of the answer.
_STOPS_MAX = 64

#: Whether the template lets the model think, by ``thinking.type``. A client that leaves it out does
#: not expect reasoning before the answer's text.
_THINKS = {"adaptive": True, "enabled": True, "disabled": False}


#: The TTLs that a cache hint may ask for, in seconds.
_HINTED = {"5m": 300, "1h": 3600}


class _Thinking(msgspec.Struct):
    type: str
    budget_tokens: int | None = None
    display: str | None = None


class _OutputConfig(msgspec.Struct):
    format: JsonObject | None = None


class RequestBody(CommonFields):
    messages: list[WireMessage]
    max_tokens: int | None = None
    system: str | list[WireBlock] | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    thinking: _Thinking | None = None
    tools: list[WireTool] | None = None
    tool_choice: WireToolChoice | None = None
    output_config: _OutputConfig | None = None
    output_format: JsonObject | None = None
    cache_control: JsonObject | None = None

    @property
    def answer_format(self) -> JsonObject | None:
        return self.output_config.format if self.output_config is not None else None


def read_messages_request(
    body: bytes, headers: Mapping[str, str], ignored: Ignored, facts: ServerFacts
) -> ReadRequest:
    """As ``chat_completions.request.read_chat_request``."""
    fields = decode_object(body)
    wire = to_struct(fields, RequestBody)
    if wire.max_tokens is None:
        known = RequestBody.__struct_fields__
        raise missing("max_tokens", slip_for("max_tokens", fields, known))
    asked = _read(fields, wire, headers, ignored, facts)
    assert asked.command.conversation is not None
    check_last(asked.command.conversation.messages, wire.messages)
    client = client_name(headers.get("user-agent", ""))
    return attrs.evolve(asked, command=attrs.evolve(asked.command, client=client))


def read_count_request(
    body: bytes, headers: Mapping[str, str], ignored: Ignored, facts: ServerFacts
) -> ReadRequest:
    """
    As ``read_messages_request``, for counting tokens: the body may leave out ``max_tokens``.
    """
    fields = decode_object(body)
    return _read(fields, to_struct(fields, RequestBody), headers, ignored, facts)


def _read(
    fields: JsonObject,
    wire: RequestBody,
    headers: Mapping[str, str],
    ignored: Ignored,
    facts: ServerFacts,
) -> ReadRequest:
    calls = offers_tools(wire.tool_choice)
    tools, ignored_tools = read_tools(wire.tools or ())
    talk, ignored_blocks = read_talk(wire.system, wire.messages, tools)
    offered = [
        tool
        for tool in (*tools.offered, *talk.loaded)
        if calls and tool["function"]["name"] not in talk.withdrawn
    ]
    constraint = read_constraint(
        wire.answer_format,
        wire.output_format,
        wire.tool_choice,
        offered,
    )
    thinks, ignored_thinking = _thinks(wire.thinking, facts)
    least_ttl_s, ignored_ttl = _least_ttl(wire)
    command = Generate(
        protocol=PROTOCOL,
        conversation=Conversation(
            messages=talk.messages,
            tools=tools.offered,
            loaded_tools=talk.loaded,
            calls=calls,
            template={**facts.template, "enable_thinking": thinks},
            continued=continues_last(talk.messages),
        ),
        prompt=None,
        **parameters.common(wire, facts),
        max_tokens=integer("max_tokens", wire.max_tokens, 0, INT64_MAX),
        stop=parameters.stop_texts("stop_sequences", tuple(wire.stop_sequences or ()), _STOPS_MAX),
        group=parameters.group(headers),
        least_ttl_s=least_ttl_s,
        constraint=constraint,
    )
    return ReadRequest(
        command=command,
        stream=wire.stream is True,
        ignored=ignored.report(
            _ignored(wire, fields, offered, constraint)
            | ignored_tools
            | ignored_blocks
            | ignored_thinking
            | ignored_ttl,
            RequestBody.__struct_fields__,
        ),
    )


# --- parameters --------------------------------------------------------------------------------


def _ignored(
    wire: RequestBody,
    fields: JsonObject,
    offered: Sequence[JsonObject],
    constraint: Constraint | None,
) -> set[str]:
    """
    The parameters that are ignored, except those that their own readers return.

    Args:
        offered: the tools that may be called.
    """
    names = parameters.unknown(fields, RequestBody.__struct_fields__, output_config=("format",))
    choice = wire.tool_choice
    if choice is not None and choice.disable_parallel_tool_use and constraint is None:
        names.add("tool_choice.disable_parallel_tool_use")
    names |= ignored_strict(offered, constraint)
    names |= ignored_format(wire.answer_format, constraint, "output_config.format")
    return names | ignored_format(wire.output_format, constraint, "output_format")


def _least_ttl(wire: RequestBody) -> tuple[int, set[str]]:
    """
    The longest TTL of the client's cache hints, five minutes for one without a TTL; and whether one
    of them is ignored, because it is not one of Anthropic's two values.
    """
    least_s, ignored = 0, set()
    for ttl in ttls(wire.cache_control, wire.system, wire.messages, wire.tools or ()):
        hinted = _HINTED.get(ttl) if isinstance(ttl, str) else None
        if ttl is not None and hinted is None:
            ignored.add("cache_control.ttl")
        least_s = max(least_s, hinted or _HINTED["5m"])
    return least_s, ignored


def _thinks(wire: _Thinking | None, facts: ServerFacts) -> tuple[bool, set[str]]:
    """
    Whether the model may think, and what of ``thinking`` is ignored: all of it, if the model's
    template has no switch for it.
    """
    if wire is None:
        return False, set()
    check_known(wire.type, _THINKS, "thinking.type")
    ignored = {
        "thinking": "enable_thinking" not in facts.switches,
        "thinking.budget_tokens": wire.budget_tokens is not None,
        "thinking.display": wire.display == "omitted",
    }
    return _THINKS[wire.type], {name for name, is_ignored in ignored.items() if is_ignored}
