"""
OpenAI's chat completions, from the wire to a command. ``answers.py`` is the way back.

Unknown parameters are ignored, and named in the answer and once in the log. A known parameter with
a value that cannot be used is a 400 that names it and says what to send instead. Nothing is clamped
or guessed.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import msgspec

from cairn.actors.requests.messages import Generate, ServerFacts
from cairn.engine.prompt.template import Conversation
from cairn.http.chat_completions.conversation import (
    WireMessage,
    continues_last,
    read_messages,
    read_template,
    read_tools,
)
from cairn.http.wire import parameters
from cairn.http.wire.checks import ClientError, JsonObject
from cairn.http.wire.formats import ToolChoiceForm, read_constraint
from cairn.http.wire.json import decode_object, to_struct
from cairn.http.wire.parameters import CommonFields, Ignored, ReadRequest, integer

PROTOCOL = "openai.chat"

#: Each answer needs a slab while it is written, and the pool has 16 by default. If it has fewer,
#: the answers are written one after another.
CHOICES_MAX = 16

_STOPS_MAX = 4
_TOP_LOGPROBS_MAX = 20

_TOOL_CHOICE = ToolChoiceForm(nested=True, named='{"type": "function", "function": {"name": ...}}')


class StreamOptions(msgspec.Struct):
    """Options of a streamed answer."""

    include_usage: bool | None = None


class CompletionFields(CommonFields, kw_only=True):
    """The fields that chat completions and completions share."""

    stream_options: StreamOptions | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    max_tokens: int | None = None
    stop: str | list[str] | None = None
    n: int | None = None

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the token counts."""
        return self.stream_options is not None and self.stream_options.include_usage is True

    @property
    def choices(self) -> int:
        """
        The number of answers.

        Raises:
            ClientError: it is out of range.
        """
        return integer("n", self.n, 1, CHOICES_MAX) or 1

    @property
    def stop_texts(self) -> tuple[str, ...]:
        """
        The texts that end an answer.

        Raises:
            ClientError: there are too many.
        """
        texts = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        # A form's empty field: other servers read it as no text.
        return parameters.stop_texts("stop", tuple(filter(None, texts)), _STOPS_MAX)


class RequestBody(CompletionFields):
    messages: list[WireMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[JsonObject] | None = None
    tool_choice: str | JsonObject | None = None
    parallel_tool_calls: bool | None = None
    response_format: JsonObject | None = None
    chat_template_kwargs: JsonObject | None = None
    enable_thinking: bool | None = None
    reasoning_effort: str | None = None
    prompt_cache_key: str | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None


@attrs.frozen(kw_only=True)
class ChatRequest(ReadRequest):
    """
    A request of chat completions or completions.

    Attributes:
        include_usage: whether a stream ends with the token counts.
    """

    include_usage: bool


def read_chat_request(
    body: bytes, headers: Mapping[str, str], ignored: Ignored, facts: ServerFacts
) -> ChatRequest:
    """
    The command of a request's body and headers.

    Args:
        headers: looked up by names in lower case.
        facts: of the server, with defaults for what the client leaves out.

    Raises:
        ClientError: they cannot be used.
    """
    return chat_request(decode_object(body), headers, ignored, facts)


def chat_request(
    fields: JsonObject, headers: Mapping[str, str], ignored: Ignored, facts: ServerFacts
) -> ChatRequest:
    """As ``read_chat_request``, for the fields of a body."""
    wire = to_struct(fields, RequestBody)
    tools = read_tools(wire.tools or ())
    offered = () if wire.tool_choice == "none" else tools
    effort, ignored_effort = parameters.thinking(wire.reasoning_effort, "reasoning_effort", facts)
    constraint, ignored_constraints = read_constraint(
        wire.response_format,
        wire.tool_choice,
        wire.parallel_tool_calls,
        offered,
        _TOOL_CHOICE,
        format_at="response_format",
        schema_within="json_schema",
    )
    messages, ignored_parts = read_messages(wire.messages)
    continued = continues_last(wire.messages, wire.continue_final_message)
    command = Generate(
        protocol=PROTOCOL,
        conversation=Conversation(
            messages=messages,
            tools=tools,
            calls=wire.tool_choice != "none",
            template=read_template(
                wire.chat_template_kwargs or {}, wire.enable_thinking, effort, facts.template
            ),
            continued=continued,
        ),
        prompt=None,
        **parameters.common(wire, facts),
        max_tokens=_max_tokens(wire),
        stop=wire.stop_texts,
        top_logprobs=_top_logprobs(wire),
        group=parameters.group(headers) or parameters.group_name(wire.prompt_cache_key),
        constraint=constraint,
        choices=wire.choices,
    )
    names = parameters.unknown(fields, RequestBody.__struct_fields__)
    names |= ignored_effort | ignored_constraints | ignored_parts
    if wire.add_generation_prompt is False and not continued:
        names.add("add_generation_prompt")
    return ChatRequest(
        command=command,
        stream=wire.stream is True,
        include_usage=wire.include_usage,
        ignored=ignored.report(names, RequestBody.__struct_fields__),
    )


# --- parameters --------------------------------------------------------------------------------


def _max_tokens(wire: RequestBody) -> int | None:
    older = parameters.longest("max_tokens", wire.max_tokens)
    newer = parameters.longest("max_completion_tokens", wire.max_completion_tokens)
    return older if wire.max_completion_tokens is None else newer


def _top_logprobs(wire: RequestBody) -> int | None:
    count = integer("top_logprobs", wire.top_logprobs, 0, _TOP_LOGPROBS_MAX)
    if wire.logprobs is True:
        return count or 0
    if count:
        raise ClientError("top_logprobs requires logprobs: true", param="top_logprobs")
    return None
