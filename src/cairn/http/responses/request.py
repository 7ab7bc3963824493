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
from cairn.http.responses.answers import (
    PREFIX,
    Form,
    ResponsesAnswer,
    ResponsesStream,
    stored_response,
)
from cairn.http.responses.conversation import (
    ignored_items,
    items_of,
    read_input,
    read_tools,
    referred_to,
)
from cairn.http.responses.objects import DeletedResponse, Echo, ItemPage, Response
from cairn.http.service import Service
from cairn.http.wire import parameters
from cairn.http.wire.checks import MESSAGES_MAX, ClientError, check_count, missing
from cairn.http.wire.formats import ToolChoiceForm, read_constraint
from cairn.http.wire.json import decode_object, to_struct
from cairn.http.wire.parameters import INT64_MAX, CommonFields, Ignored, integer
from cairn.http.wire.suggestions import slip_for

PROTOCOL = "openai.responses"

_SEALED = "reasoning.encrypted_content"
_PAGE = 20
_TOOL_CHOICE = ToolChoiceForm(nested=False, named='{"type": "function", "name": ...}')
_PAGE_MAX = 100


class _Text(msgspec.Struct):
    format: dict[str, Any] | None = None


class _Reasoning(msgspec.Struct):
    effort: str | None = None
    summary: str | None = None


class _Request(CommonFields):
    input: str | list[dict[str, Any]] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    max_output_tokens: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
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
class ResponsesRequest:
    """
    A command, and how to send its answer.

    Attributes:
        ignored: the parameters that were sent and are ignored, sorted.
    """

    command: Generate
    stream: bool
    form: Form
    ignored: tuple[str, ...] = ()

    def whole(self) -> ResponsesAnswer:
        """A builder of the answer as one object."""
        return ResponsesAnswer(self.form, ignored=self.ignored)

    def streamed(self) -> ResponsesStream:
        """A builder of the answer as a stream."""
        return ResponsesStream(self.form, ignored=self.ignored)


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
    ignored: tuple[str, ...]
    _wire: _Request

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
        asked = read_input(wire.input, turns)
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
            command=command, stream=wire.stream is True, form=self.form, ignored=self.ignored
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
    wire = to_struct(fields, _Request)
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
    sampling = parameters.sampling(wire, facts)
    command = Generate(
        protocol=PROTOCOL,
        conversation=Conversation(
            messages=(), tools=tools, calls=calls, template={**facts.template, **template}
        ),
        prompt=None,
        sampling=sampling,
        seed=parameters.seed(wire.seed),
        max_tokens=integer("max_output_tokens", wire.max_output_tokens, 1, INT64_MAX),
        group=parameters.group(headers) or parameters.group_name(wire.prompt_cache_key),
        **parameters.reuse(wire),
        requested_model=parameters.model_name(wire.model),
        constraint=constraint,
    )
    form = Form(
        echo=_echo(wire, sampling.temperature, sampling.top_p),
        model=facts.model,
        summarised=reasoning is not None and reasoning.summary is not None,
        sealed=_SEALED in (wire.include or ()),
    )
    return Draft(
        command=command,
        previous=_request_of(wire.previous_response_id),
        referred=referred_to(wire.input),
        form=form,
        ignored=ignored.report(
            _ignored(wire, fields) | ignored_tools | ignored_constraints | ignored_effort,
            _Request.__struct_fields__,
        ),
        wire=wire,
    )


async def completed(draft: Draft, service: Service) -> ResponsesRequest:
    """
    A request with everything that it refers to, from the journal.

    Raises:
        ClientError: a response is not stored, or the input cannot be used.
        RefusalError: the journal cannot be read now.
    """
    history: tuple[StoredTurn, ...] = ()
    if draft.previous is not None:
        found = await service.history(draft.previous)
        if found is None:
            raise ClientError(
                f"the response {draft.named[:100]!r}, or one before it, is not stored: it was sent "
                "with store: false, did not complete, was deleted, or was pruned from the journal; "
                "send the whole conversation as input",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        history = found
    turns = {}
    for request in sorted(draft.referred):
        turn = await service.turn(request)
        if turn is not None:
            turns[request] = turn
    return draft.complete(history, turns)


# --- stored responses---------------------------------------------------------------------------


async def look_up(name: str, service: Service, query: Mapping[str, str]) -> Response:
    """
    A stored response.

    Args:
        query: of the address.

    Raises:
        ClientError: it is not stored, or a stream is requested.
    """
    if query.get("stream", "false").lower() not in ("false", "0", ""):
        raise ClientError(
            "stream is not supported for stored responses; leave it out",
            param="stream",
            code="unsupported_value",
        )
    return stored_response(await _turn(name, service))


async def look_up_input(name: str, service: Service, query: Mapping[str, str]) -> ItemPage:
    """
    A page of the input items of a stored response.

    Args:
        query: ``limit``, ``order`` and ``after`` of the address.

    Raises:
        ClientError: it is not stored, or the query is invalid.
    """
    limit, order = _page(query.get("limit", str(_PAGE))), query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise ClientError("order must be asc or desc", param="order")
    after = query.get("after")
    turn = await _turn(name, service)
    items = list(items_of(turn.asked, turn.request))
    if order == "desc":
        items.reverse()
    if after is not None:
        places = [index for index, item in enumerate(items) if item["id"] == after]
        if not places:
            raise ClientError(
                f"after is {after[:100]!r}, which is not an item of this response", param="after"
            )
        items = items[places[0] + 1 :]
    page = items[:limit]
    return ItemPage(
        data=page,
        first_id=page[0]["id"] if page else None,
        last_id=page[-1]["id"] if page else None,
        has_more=len(items) > len(page),
    )


def _page(limit: str) -> int:
    digits = limit.lstrip("0")
    # Python refuses to parse numbers with thousands of digits.
    is_number = digits.isascii() and digits.isdigit() and len(digits) <= len(str(_PAGE_MAX))
    found = int(digits) if is_number else 0
    if not 1 <= found <= _PAGE_MAX:
        raise ClientError(f"limit must be between 1 and {_PAGE_MAX}", param="limit")
    return found


async def delete(name: str, service: Service) -> DeletedResponse:
    """
    Delete a stored response.

    Raises:
        ClientError: it is not stored.
    """
    if not await service.forget(_request_of(name) or ""):
        raise _not_found(name)
    return DeletedResponse(id=name)


async def _turn(name: str, service: Service) -> StoredTurn:
    turn = await service.turn(_request_of(name) or "")
    if turn is None:
        raise _not_found(name)
    return turn


def _not_found(name: str) -> ClientError:
    return ClientError(
        f"response {name[:100]!r} not found: it was sent with store: false, did not complete, was "
        "deleted, or was pruned from the journal",
        code="response_not_found",
        status=404,
    )


def _request_of(name: str | None) -> str | None:
    return name.removeprefix(PREFIX) if name is not None else None


# --- parameters --------------------------------------------------------------------------------


def _refuse_elsewhere(wire: _Request) -> None:
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


def _refuse_slip(fields: Mapping[str, Any]) -> None:
    """
    Refuse a request without input if another field may be a misspelt ``input``: after an earlier
    response, it would be answered without the new messages.
    """
    slip = slip_for("input", fields, _Request.__struct_fields__)
    if slip is not None:
        raise missing("input", slip)


def _ignored(wire: _Request, fields: Mapping[str, Any]) -> set[str]:
    names = parameters.unknown(fields, _Request.__struct_fields__)
    names |= ignored_items(wire.input)
    names |= {f"include.{name}" for name in wire.include or () if name != _SEALED}
    if wire.truncation not in (None, "disabled"):
        names.add("truncation")
    for name, known in (("text", _Text), ("reasoning", _Reasoning)):
        if isinstance(fields.get(name), dict):
            inner = parameters.unknown(fields[name], known.__struct_fields__)
            names |= {f"{name}.{one}" for one in inner}
    return names


def _echo(wire: _Request, temperature: float, top_p: float) -> Echo:
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
        temperature=temperature,
        text={"format": text.format or {"type": "text"}},
        tool_choice=wire.tool_choice or "auto",
        tools=wire.tools or [],
        top_p=top_p,
    )
