"""
OpenAI's responses, from the wire to a command. ``answers.py`` is the way back.

Unknown parameters are ignored and named in the answer. A known parameter with a value that cannot
be used is a 400, and so is one that refers to a conversation or a prompt on OpenAI's servers,
because without it the answer would be to a different question.

A request may continue from a stored response (``previous_response_id``) and refer to items of one.
Both are looked up between reading the body (``Draft``) and making a command of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import msgspec

from cairn.actors.requests.messages import Generate, Keep, ServerFacts, StoredTurn
from cairn.engine.prompt.template import Conversation, Message
from cairn.engine.sampling import Sampling
from cairn.http.responses.conversation import (
    read_input,
    read_tools,
    referred_to,
)
from cairn.http.responses.form import Form, ResponsesRequest, request_of
from cairn.http.responses.objects import Echo
from cairn.http.wire import parameters
from cairn.http.wire.checks import MESSAGES_MAX, ClientError, JsonObject, check_count, missing
from cairn.http.wire.formats import ToolChoiceForm, read_constraint
from cairn.http.wire.json import decode_object, to_struct
from cairn.http.wire.parameters import CommonFields, Ignored
from cairn.http.wire.suggestions import slip_for

PROTOCOL = "openai.responses"

_SEALED = "reasoning.encrypted_content"
_TOOL_CHOICE = ToolChoiceForm(nested=False, named='{"type": "function", "name": ...}')


class _Text(msgspec.Struct):
    format: JsonObject | None = None


class _Reasoning(msgspec.Struct):
    effort: str | None = None
    summary: str | None = None


class RequestBody(CommonFields):
    input: str | list[JsonObject] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    max_output_tokens: int | None = None
    tools: list[JsonObject] | None = None
    tool_choice: str | JsonObject | None = None
    parallel_tool_calls: bool | None = None
    text: _Text | None = None
    reasoning: _Reasoning | None = None
    include: list[str] | None = None
    metadata: dict[str, str] | None = None
    prompt_cache_key: str | None = None
    truncation: str | None = None
    background: bool | None = None
    conversation: Any = None
    prompt: Any = None


@attrs.frozen(kw_only=True)
class Draft:
    """
    A request before the responses that it refers to are looked up.

    Attributes:
        command: without the messages of its conversation.
        previous: the request whose answer it continues.
        referred: the requests to whose answers its items refer.
    """

    command: Generate
    previous: str | None
    referred: frozenset[str]
    form: Form
    _wire: RequestBody
    _ignored: frozenset[str]
    _reporter: Ignored

    @property
    def named(self) -> str:
        """The response that the request continues, as the client named it."""
        return self._wire.previous_response_id or ""

    def complete(
        self, history: tuple[StoredTurn, ...], turns: Mapping[str, StoredTurn]
    ) -> ResponsesRequest:
        """
        The request with everything that it refers to.

        Args:
            history: the turns up to and including ``previous``.
            turns: the stored ones of ``referred``.

        Raises:
            ClientError: its input cannot be used.
        """
        wire, conversation = self._wire, self.command.conversation
        assert conversation is not None
        asked, ignored_items = read_input(wire.input, turns)
        if not asked and not history:
            raise ClientError(
                "Missing required field `input`: send a string, or a list of at least one item",
                param="input",
                code="missing_required_parameter",
            )
        before = [message for turn in history for message in turn.messages]
        instructions = [Message(role="system", content=wire.instructions or "")]
        messages = (*(instructions if wire.instructions else ()), *before, *asked)
        check_count(messages, "input", MESSAGES_MAX)
        keep = Keep(
            previous=self.previous, asked=asked, note=self.form.note(), texts=self.form.texts()
        )
        command = attrs.evolve(
            self.command,
            conversation=attrs.evolve(conversation, messages=messages),
            keep=None if wire.store is False else keep,
        )
        return ResponsesRequest(
            command=command,
            stream=wire.stream is True,
            form=self.form,
            ignored=self._reporter.report(
                self._ignored | ignored_items, RequestBody.__struct_fields__
            ),
        )


def read_responses_request(
    body: bytes, headers: Mapping[str, str], ignored: Ignored, facts: ServerFacts
) -> Draft:
    """
    A request's body and headers, before what they refer to is looked up.

    Args:
        headers: looked up by names in lower case.
        facts: of the server, with defaults for what the client leaves out.

    Raises:
        ClientError: they cannot be used.
    """
    fields = decode_object(body)
    wire = to_struct(fields, RequestBody)
    _refuse_elsewhere(wire)
    if wire.input is None:
        _refuse_slip(fields)
    tools, ignored_tools = read_tools(wire.tools or ())
    calls = wire.tool_choice != "none"
    constraint, ignored_constraints = read_constraint(
        wire.text.format if wire.text is not None else None,
        wire.tool_choice,
        wire.parallel_tool_calls,
        tools if calls else (),
        _TOOL_CHOICE,
        format_at="text.format",
    )
    reasoning = wire.reasoning
    effort = reasoning.effort if reasoning is not None else None
    template, ignored_effort = parameters.thinking(effort, "reasoning.effort", facts)
    command = Generate(
        protocol=PROTOCOL,
        conversation=Conversation(
            messages=(), tools=tools, calls=calls, template={**facts.template, **template}
        ),
        prompt=None,
        **parameters.common(wire, facts),
        max_tokens=parameters.longest("max_output_tokens", wire.max_output_tokens),
        group=parameters.group(headers) or parameters.group_name(wire.prompt_cache_key),
        constraint=constraint,
    )
    form = Form(
        echo=_echo(wire, command.sampling),
        model=facts.model,
        summarised=reasoning is not None and reasoning.summary is not None,
        sealed=_SEALED in (wire.include or ()),
    )
    previous = wire.previous_response_id
    return Draft(
        command=command,
        previous=None if previous is None else request_of(previous),
        referred=referred_to(wire.input),
        form=form,
        wire=wire,
        ignored=frozenset(
            _ignored(wire, fields) | ignored_tools | ignored_constraints | ignored_effort
        ),
        reporter=ignored,
    )


# --- parameters --------------------------------------------------------------------------------


def _refuse_elsewhere(wire: RequestBody) -> None:
    """Refuse what is stored, or would have to run, on OpenAI's servers."""
    for name, hint in (
        ("conversation", "send the conversation as input, or use previous_response_id"),
        ("prompt", "send its text as instructions or input"),
    ):
        if getattr(wire, name) is not None:
            raise ClientError(
                f"{name} is not supported; {hint}",
                param=name,
                code="unsupported_value",
            )
    if wire.background:
        raise ClientError(
            "background is not supported; leave it out",
            param="background",
            code="unsupported_value",
        )


def _refuse_slip(fields: JsonObject) -> None:
    """
    Refuse a request without input if another field may be a misspelt ``input``: after an earlier
    response, it would be answered without the new messages.
    """
    slip = slip_for("input", fields, RequestBody.__struct_fields__)
    if slip is not None:
        raise missing("input", slip)


def _ignored(wire: RequestBody, fields: JsonObject) -> set[str]:
    names = parameters.unknown(
        fields,
        RequestBody.__struct_fields__,
        text=_Text.__struct_fields__,
        reasoning=_Reasoning.__struct_fields__,
    )
    names |= {f"include.{name}" for name in wire.include or () if name != _SEALED}
    if wire.truncation not in (None, "disabled"):
        names.add("truncation")
    return names


def _echo(wire: RequestBody, sampling: Sampling) -> Echo:
    reasoning = wire.reasoning or _Reasoning()
    text = wire.text or _Text()
    return Echo(
        instructions=wire.instructions,
        max_output_tokens=wire.max_output_tokens,
        metadata=wire.metadata or {},
        parallel_tool_calls=wire.parallel_tool_calls is not False,
        previous_response_id=wire.previous_response_id,
        prompt_cache_key=wire.prompt_cache_key,
        reasoning={"effort": reasoning.effort, "summary": reasoning.summary},
        store=wire.store is not False,
        temperature=sampling.temperature,
        text={"format": text.format or {"type": "text"}},
        tool_choice=wire.tool_choice or "auto",
        tools=wire.tools or [],
        top_p=sampling.top_p if wire.top_p is None else wire.top_p,
    )
