"""
The server's description of itself: OpenAPI 3.1, served at ``/openapi.json``.

Bodies are described by the structs that read them, answers by the shapes against which tests hold
them, and a test ties the table of operations to the routes. What a struct cannot say, such as the
range of a number, is in docs/reference/http.md; a value out of range is a 400.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

import attrs
import msgspec

from cairn.http.agents import requests as agents
from cairn.http.chat_completions import objects as chat
from cairn.http.chat_completions import request as openai
from cairn.http.completions import answers as completions_answers
from cairn.http.completions import errors as completions_errors
from cairn.http.completions import request as completions_request
from cairn.http.messages import errors as anthropic_errors
from cairn.http.messages import request as anthropic
from cairn.http.messages.objects import MessageObject, MessagesErrorEnvelope, TokenCount
from cairn.http.openapi import shapes
from cairn.http.responses import errors as responses_errors
from cairn.http.responses import request as responses
from cairn.http.wire.errors import ErrorEnvelope

ADDRESS = "/openapi.json"

_REFUSALS = {
    400: "A value cannot be used; the error names it.",
    401: "There is no API key, or none that is known.",
    403: "The host or the origin may not call this server.",
    404: "There is nothing of this name.",
    408: "The body did not arrive in time.",
    409: "There is an agent of this name already, or the agent is at work.",
    413: "The body is too large.",
    415: "The body is compressed.",
    429: "Too many requests wait. `retry-after` says when to come back.",
    500: "A fault of the server's, with the id under which it is on record.",
    503: "The server stops, or has no room. `retry-after` says when to come back.",
    504: "The answer was not complete in the time that a request may take.",
}
_OVERLOADED = {529: _REFUSALS[503]}

#: What every address may answer, and what one that takes a body, or makes an answer, may besides.
_ALWAYS = (400, 401, 403, 500)
_OF_BODIES = (408, 413, 415, 429, 503, 504)


@attrs.frozen(kw_only=True)
class Operation:
    """
    What an address does under a method.

    Attributes:
        summary: for people.
        answer: the shape of a good answer; None for a text.
        body: the struct that reads the request's; None where it takes none.
        example: such a body.
        may_be_empty: whether it may be left out.
        streams: whether the answer may be a stream instead.
        text: the type of an answer that is a text.
        query: names and schemas of parameters in the address.
        statuses: what it may answer beside what all may.
    """

    summary: str
    answer: type | None = None
    body: type | None = None
    example: Mapping[str, Any] = attrs.field(factory=dict)
    may_be_empty: bool = False
    streams: bool = False
    text: str = ""
    query: Mapping[str, Mapping[str, Any]] = attrs.field(factory=dict)
    statuses: tuple[int, ...] = ()


_PAGE_QUERY: Mapping[str, Mapping[str, Any]] = {
    "limit": {"type": "integer", "minimum": 1, "maximum": 100, "default": 20},
    "order": {"type": "string", "enum": ["asc", "desc"], "default": "desc"},
    "after": {"type": "string"},
}

_AGENT = f"{agents.ADDRESS}/{{name}}"

_HELLO = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 16}

OPERATIONS: Mapping[tuple[str, str], Operation] = {
    ("POST", "/v1/chat/completions"): Operation(
        summary="Answer a conversation.",
        body=openai._Request,
        example=_HELLO,
        answer=chat.ChatCompletion,
        streams=True,
        statuses=(404, *_OF_BODIES),
    ),
    ("POST", completions_errors.ADDRESS): Operation(
        summary="Go on with a text.",
        body=completions_request._Request,
        example={"prompt": "The path goes", "max_tokens": 16},
        answer=completions_answers.TextCompletion,
        streams=True,
        statuses=(404, *_OF_BODIES),
    ),
    ("POST", responses_errors.ADDRESS): Operation(
        summary="Answer a conversation in the form of responses.",
        body=responses._Request,
        example={"input": "Hello", "max_output_tokens": 16},
        answer=shapes.Response,
        streams=True,
        statuses=(404, *_OF_BODIES),
    ),
    ("GET", f"{responses_errors.ADDRESS}/{{name}}"): Operation(
        summary="A response that was kept.", answer=shapes.Response, statuses=(404, 503)
    ),
    ("DELETE", f"{responses_errors.ADDRESS}/{{name}}"): Operation(
        summary="Keep a response no longer.", answer=shapes.Deleted, statuses=(404, 503)
    ),
    ("GET", f"{responses_errors.ADDRESS}/{{name}}/input_items"): Operation(
        summary="What a kept response's request brought.",
        answer=shapes.ItemPage,
        query=_PAGE_QUERY,
        statuses=(404, 503),
    ),
    ("POST", anthropic_errors.ADDRESS): Operation(
        summary="Answer a conversation for clients of Anthropic's.",
        body=anthropic._Request,
        example=_HELLO,
        answer=MessageObject,
        streams=True,
        statuses=(404, *_OF_BODIES),
    ),
    ("POST", f"{anthropic_errors.ADDRESS}/count_tokens"): Operation(
        summary="How many tokens such a request's prompt has.",
        body=anthropic._Request,
        example=_HELLO,
        answer=TokenCount,
        statuses=(404, *_OF_BODIES),
    ),
    ("POST", agents.ADDRESS): Operation(
        summary="Create an agent: a conversation whose history the server keeps.",
        body=agents._NewAgent,
        example={"agent_id": "notes", "system_prompt": "Be brief."},
        answer=shapes.Agent,
        statuses=(404, 409, *_OF_BODIES),
    ),
    ("GET", agents.ADDRESS): Operation(summary="The agents.", answer=shapes.Agents),
    ("GET", _AGENT): Operation(
        summary="One of them, with what it was created with.",
        answer=shapes.Agent,
        statuses=(404, 503),
    ),
    ("DELETE", _AGENT): Operation(
        summary="Forget an agent and what was said with it.",
        answer=shapes.DeletedAgent,
        statuses=(404, 409, 503),
    ),
    ("GET", f"{_AGENT}/turns"): Operation(
        summary="What was said with it, turn by turn.",
        answer=shapes.AgentTurns,
        statuses=(404, 503),
    ),
    ("POST", f"{_AGENT}/fork"): Operation(
        summary="Create an agent whose history begins with this one's, up to a turn.",
        body=agents._Fork,
        may_be_empty=True,
        example={"agent_id": "notes-2", "turn": 1},
        answer=shapes.Agent,
        statuses=(404, 409, *_OF_BODIES),
    ),
    ("POST", f"{_AGENT}/generate"): Operation(
        summary="Answer new messages behind an agent's history.",
        body=agents.ASKED,
        example=_HELLO,
        answer=chat.ChatCompletion,
        streams=True,
        statuses=(404, 409, *_OF_BODIES),
    ),
    ("GET", "/v1/models"): Operation(summary="The models that are served.", answer=shapes.Models),
    ("GET", "/v1/models/{name}"): Operation(
        summary="One of them.", answer=shapes.Model, statuses=(404,)
    ),
    ("GET", "/health"): Operation(
        summary="What runs, and how full it is.", answer=shapes.Health, statuses=(503,)
    ),
    ("GET", "/metrics"): Operation(summary="Metrics for Prometheus.", text="text/plain"),
    ("GET", ADDRESS): Operation(summary="This description.", answer=dict[str, Any]),
    ("GET", "/"): Operation(summary="A page for people.", text="text/html"),
}


def description(*, with_keys: bool) -> dict[str, Any]:
    """
    The OpenAPI document.

    Args:
        with_keys: whether a request needs an API key.
    """
    found = [one.body for one in OPERATIONS.values()] + [one.answer for one in OPERATIONS.values()]
    kinds = [*dict.fromkeys(kind for kind in found if kind is not None)]
    kinds += [ErrorEnvelope, MessagesErrorEnvelope]
    schemas, components = msgspec.json.schema_components(
        kinds, ref_template="#/components/schemas/{name}"
    )
    by_kind = dict(zip(kinds, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for (method, address), operation in OPERATIONS.items():
        told = _operation(address, operation, by_kind)
        paths.setdefault(address, {})[method.lower()] = told
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "Cairn",
            "version": version("cairn-server"),
            "description": "A session server for local language models. What values are taken "
            "stands in docs/reference/http.md of its repository.",
        },
        "paths": paths,
        "components": {"schemas": {name: components[name] for name in sorted(components)}},
    }
    if with_keys:
        document["components"]["securitySchemes"] = {
            "bearer": {"type": "http", "scheme": "bearer"},
            "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        }
        document["security"] = [{"bearer": []}, {"key": []}]
    named: dict[str, Any] = _named(document)
    return named


def _operation(
    address: str, operation: Operation, by_kind: Mapping[Any, dict[str, Any]]
) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if operation.answer is not None:
        content["application/json"] = {"schema": by_kind[operation.answer]}
    good = "The answer."
    if operation.streams:
        # OpenAPI 3.1 has no way to tell the form of an event.
        content["text/event-stream"] = {}
        good = (
            "The answer; with `stream: true` server-sent events, whose data are lines of JSON. "
            "Once a stream has begun, an error is an event of it."
        )
    if operation.text:
        content[operation.text] = {"schema": {"type": "string"}}
    answers = {"200": {"description": good, "content": content}}
    for status, (why, error) in _refusals(address, operation).items():
        answers[str(status)] = {
            "description": why,
            "content": {"application/json": {"schema": by_kind[error]}},
        }
    if address == "/health":
        answers["503"] = {**answers["200"], "description": "It admits nothing, and says why."}
    told: dict[str, Any] = {"summary": operation.summary, "responses": answers}
    if parameters := [*_in_path(address), *_in_query(operation.query)]:
        told["parameters"] = parameters
    if operation.body is not None:
        body = {
            "application/json": {
                "schema": by_kind[operation.body],
                "example": dict(operation.example),
            }
        }
        told["requestBody"] = {"required": not operation.may_be_empty, "content": body}
    return told


def _refusals(address: str, operation: Operation) -> dict[int, tuple[str, type]]:
    whys = {status: _REFUSALS[status] for status in sorted({*_ALWAYS, *operation.statuses})}
    if not anthropic_errors.is_ours(address):
        return {status: (why, ErrorEnvelope) for status, why in whys.items()}
    whys = {**{status: why for status, why in whys.items() if status != 503}, **_OVERLOADED}
    return {status: (why, MessagesErrorEnvelope) for status, why in whys.items()}


def _in_path(address: str) -> Sequence[dict[str, Any]]:
    return [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in re.findall(r"\{(\w+)\}", address)
    ]


def _in_query(query: Mapping[str, Mapping[str, Any]]) -> Sequence[dict[str, Any]]:
    return [{"name": name, "in": "query", "schema": dict(schema)} for name, schema in query.items()]


def _named(value: Any) -> Any:
    """The document with names of components for people: of a struct's module and its own."""
    prefix = "#/components/schemas/"
    match value:
        case {"$ref": str(ref)}:
            return {**value, "$ref": prefix + _name(ref.removeprefix(prefix))}
        case {"schemas": dict(schemas), **rest}:
            named = {_name(key): _named(one) for key, one in schemas.items()}
            assert len(named) == len(schemas), "two structs have one name"
            return {**_named(rest), "schemas": named}
        case dict():
            return {key: _named(one) for key, one in value.items()}
        case list() | tuple():
            return [_named(one) for one in value]
        case _:
            return value


def _name(name: str) -> str:
    return name.removeprefix("cairn.http.").replace("._", ".").lstrip("_")
