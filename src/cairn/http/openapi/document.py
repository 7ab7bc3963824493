"""
The server's description of itself: OpenAPI 3.1, served at ``/openapi.json``.

Everything is derived from the structs that read the bodies and from those that are sent, and a test
ties the table of operations to the routes. What a struct cannot say, such as the range of a number,
is in docs/reference; a value out of range is a 400.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

import attrs
import msgspec

from cairn.http.agents import requests as agents
from cairn.http.agents.objects import (
    AgentList,
    AgentObject,
    AgentTurns,
    DeletedAgent,
    ReleasedAgent,
)
from cairn.http.chat_completions import request as chat_completions_request
from cairn.http.chat_completions.objects import ChatCompletion
from cairn.http.completions import errors as completions_errors
from cairn.http.completions import request as completions_request
from cairn.http.completions.objects import TextCompletion
from cairn.http.embeddings import errors as embeddings_errors
from cairn.http.embeddings import request as embeddings_request
from cairn.http.embeddings.objects import EmbeddingList
from cairn.http.health import Health, HealthWithoutKey, StartingHealth
from cairn.http.messages import errors as messages_errors
from cairn.http.messages import request as messages_request
from cairn.http.messages.objects import MessageObject, MessagesErrorEnvelope, TokenCount
from cairn.http.models import ModelList, ModelObject
from cairn.http.ollama import embeddings as ollama_embeddings
from cairn.http.ollama import errors as ollama_errors
from cairn.http.ollama import request as ollama_request
from cairn.http.ollama.answers import LINES
from cairn.http.ollama.objects import (
    OllamaChat,
    OllamaEmbedding,
    OllamaEmbeddings,
    OllamaErrorEnvelope,
    OllamaLoadedModels,
    OllamaModelFacts,
    OllamaModels,
    OllamaText,
    OllamaVersion,
)
from cairn.http.responses import errors as responses_errors
from cairn.http.responses import request as responses_request
from cairn.http.responses.objects import (
    CompactedResponse,
    DeletedResponse,
    InputTokens,
    ItemPage,
    Response,
)
from cairn.http.sessions import routes as sessions
from cairn.http.sessions.objects import (
    BugPage,
    CacheObject,
    ClosedSession,
    EventPage,
    ForgottenSessionObject,
    SessionDetails,
    SessionPage,
)
from cairn.http.tokens import request as tokens_request
from cairn.http.tokens.objects import Props, TokenList, TokensText
from cairn.http.wire.errors import ErrorEnvelope

ADDRESS = "/openapi.json"

_REFUSALS = {
    400: "A value cannot be used; the error names the parameter.",
    401: "The API key is missing or unknown.",
    403: "Requests to this host name, or from this origin, are not allowed.",
    404: "Not found.",
    408: "The body did not arrive in time.",
    409: "An agent with this name exists, or the agent or session is answering a request, or is as "
    "it cannot be changed; the error says why.",
    410: "Another node of the fleet has the agent now; the error and `x-cairn-agent` have its id.",
    413: "The body is too large.",
    415: "The body is compressed.",
    429: "The queue is full, or too many live streams are open. Try again after `retry-after` "
    "seconds.",
    500: "Internal error. The message has the id of its log entry.",
    503: "The server is stopping, or out of memory or disk space. Try again after `retry-after` "
    "seconds.",
    504: "The request timed out.",
}
_OVERLOADED = {529: _REFUSALS[503]}

#: The error statuses of every operation, and the further ones of operations that take a body.
_ALWAYS = (400, 401, 403, 500)
_OF_BODIES = (404, 408, 413, 415, 429, 503, 504)


@attrs.frozen(kw_only=True)
class Operation:
    """
    What a method of an address does.

    Attributes:
        summary: one sentence for readers.
        answer: the struct of a good answer; None for text.
        answer_without_key: the struct that a caller without an API key is sent; None if the call
            needs a key.
        answer_at_start: the struct that is sent while the server starts; None for an error.
        body: the struct that reads the request's body; None if it takes none.
        example: such a body.
        may_be_empty: whether the body may be left out.
        streams: whether the answer may be a stream instead.
        lines: whether that is one of lines, which it is unless the body says ``stream: false``.
        text: the content type of an answer that is text.
        query: names and schemas of the query parameters.
        statuses: the error statuses in addition to ``_ALWAYS`` and ``_OF_BODIES``.
    """

    summary: str
    answer: type | None = None
    answer_without_key: type | None = None
    answer_at_start: type | None = None
    body: type | None = None
    example: Mapping[str, Any] = attrs.field(factory=dict)
    may_be_empty: bool = False
    streams: bool = False
    lines: bool = False
    text: str = ""
    query: Mapping[str, Mapping[str, Any]] = attrs.field(factory=dict)
    statuses: tuple[int, ...] = ()


_PAGE_QUERY: Mapping[str, Mapping[str, Any]] = {
    "limit": {"type": "integer", "minimum": 1, "maximum": 100, "default": 20},
    "order": {"type": "string", "enum": ["asc", "desc"], "default": "desc"},
    "after": {"type": "string"},
}

_FLAG: Mapping[str, Any] = {"type": "boolean", "default": False}
_POSITION: Mapping[str, Any] = {"type": "integer", "minimum": 0}
_LIMIT: Mapping[str, Any] = {"type": "integer", "minimum": 1, "maximum": 100, "default": 50}
_SESSION = f"{sessions.ADDRESS}/{{name}}"

_AGENT = f"{agents.ADDRESS}/{{name}}"

_HELLO = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 16}

OPERATIONS: Mapping[tuple[str, str], Operation] = {
    ("POST", "/v1/chat/completions"): Operation(
        summary="Answer a conversation, as a chat completion.",
        body=chat_completions_request.RequestBody,
        example=_HELLO,
        answer=ChatCompletion,
        streams=True,
    ),
    ("POST", completions_errors.ADDRESS): Operation(
        summary="Continue a text.",
        body=completions_request.RequestBody,
        example={"prompt": "The path goes", "max_tokens": 16},
        answer=TextCompletion,
        streams=True,
    ),
    ("POST", responses_errors.ADDRESS): Operation(
        summary="Answer a conversation, as a response.",
        body=responses_request.RequestBody,
        example={"input": "Hello", "max_output_tokens": 16},
        answer=Response,
        streams=True,
    ),
    ("POST", f"{responses_errors.ADDRESS}/input_tokens"): Operation(
        summary="Count the prompt tokens of a request for a response.",
        body=responses_request.RequestBody,
        example={"input": "Hello"},
        answer=InputTokens,
    ),
    ("POST", f"{responses_errors.ADDRESS}/compact"): Operation(
        summary="Replace a conversation by what its user said and a summary.",
        body=responses_request.RequestBody,
        example={"input": "Hello", "max_output_tokens": 16},
        answer=CompactedResponse,
    ),
    ("GET", f"{responses_errors.ADDRESS}/{{name}}"): Operation(
        summary="Get a stored response.", answer=Response, statuses=(404, 503)
    ),
    ("DELETE", f"{responses_errors.ADDRESS}/{{name}}"): Operation(
        summary="Delete a stored response.", answer=DeletedResponse, statuses=(404, 503)
    ),
    ("GET", f"{responses_errors.ADDRESS}/{{name}}/input_items"): Operation(
        summary="List the input items of a stored response.",
        answer=ItemPage,
        query=_PAGE_QUERY,
        statuses=(404, 503),
    ),
    ("POST", messages_errors.ADDRESS): Operation(
        summary="Answer a conversation, as an Anthropic message.",
        body=messages_request.RequestBody,
        example=_HELLO,
        answer=MessageObject,
        streams=True,
    ),
    ("POST", f"{messages_errors.ADDRESS}/count_tokens"): Operation(
        summary="Count the prompt tokens of a request.",
        body=messages_request.RequestBody,
        example=_HELLO,
        answer=TokenCount,
    ),
    ("POST", embeddings_errors.ADDRESS): Operation(
        summary="The vectors of texts, by an embedding model.",
        body=embeddings_request.EmbeddingsBody,
        example={"input": ["The path goes", "up the hill"]},
        answer=EmbeddingList,
    ),
    ("POST", "/tokenize"): Operation(
        summary="The tokens of a text or a conversation.",
        body=tokens_request.TokenizeBody,
        example={"content": "The path goes"},
        answer=TokenList,
    ),
    ("POST", "/detokenize"): Operation(
        summary="The text of tokens.",
        body=tokens_request.DetokenizeBody,
        example={"tokens": [1, 2, 3]},
        answer=TokensText,
    ),
    ("GET", "/props"): Operation(summary="Facts about the loaded model.", answer=Props),
    ("POST", agents.ADDRESS): Operation(
        summary="Create an agent: a conversation whose history the server keeps.",
        body=agents.NewAgentBody,
        example={"agent_id": "notes", "system_prompt": "Be brief."},
        answer=AgentObject,
        statuses=(409, 410),
    ),
    ("GET", agents.ADDRESS): Operation(summary="List the agents.", answer=AgentList),
    ("GET", _AGENT): Operation(
        summary="Get an agent with its system prompt and tools.",
        answer=AgentObject,
        statuses=(404, 410, 503),
    ),
    ("DELETE", _AGENT): Operation(
        summary="Delete an agent and its history.",
        answer=DeletedAgent,
        statuses=(404, 409, 410, 503),
    ),
    ("GET", f"{_AGENT}/turns"): Operation(
        summary="Get the history of an agent, turn by turn.",
        answer=AgentTurns,
        statuses=(404, 410, 503),
    ),
    ("POST", f"{_AGENT}/fork"): Operation(
        summary="Create an agent that starts with the history of another one, up to a turn.",
        body=agents.ForkBody,
        may_be_empty=True,
        example={"agent_id": "notes-2", "turn": 1},
        answer=AgentObject,
        statuses=(409, 410),
    ),
    ("POST", f"{_AGENT}/release"): Operation(
        summary="Hand an agent over to another node of the fleet.",
        body=agents.ReleaseBody,
        example={"to": "n2.notes"},
        answer=ReleasedAgent,
        statuses=(404, 409, 410, 503),
    ),
    ("POST", f"{_AGENT}/adopt"): Operation(
        summary="Adopt an agent that another node of the fleet handed over.",
        body=agents.AdoptBody,
        example={"source": "n1.notes"},
        answer=AgentObject,
        statuses=(404, 409, 410, 503),
    ),
    ("POST", f"{_AGENT}/generate"): Operation(
        summary="Answer new messages that follow an agent's history.",
        body=agents.GenerateRequest,
        example=_HELLO,
        answer=ChatCompletion,
        streams=True,
        statuses=(409, 410),
    ),
    ("GET", sessions.ADDRESS): Operation(
        summary="List the sessions, the most recently used first.",
        answer=SessionPage,
        query={
            "limit": _LIMIT,
            "before": _POSITION,
            "q": {"type": "string"},
            "state": {"type": "string"},
            "model": {"type": "string"},
            "client": {"type": "string"},
            "tenant": {"type": "string"},
            "bugs": _FLAG,
            "texts": _FLAG,
        },
        statuses=(503,),
    ),
    ("GET", _SESSION): Operation(
        summary="Get a session with its last turns: what each reused, and why not more.",
        answer=SessionDetails,
        query={"limit": _LIMIT, "before": _POSITION, "texts": _FLAG},
        statuses=(404, 503),
    ),
    ("DELETE", _SESSION): Operation(
        summary="Close a session. Its texts stay in the journal.",
        answer=ClosedSession,
        statuses=(404, 409, 503),
    ),
    ("POST", f"{_SESSION}/forget"): Operation(
        summary="Forget a session: its texts cannot be read any more, in any copy of the journal.",
        answer=ForgottenSessionObject,
        query={"agent": _FLAG},
        statuses=(404, 409, 503),
    ),
    ("GET", f"{_SESSION}/events"): Operation(
        summary="List the events of a session, or follow them.",
        answer=EventPage,
        streams=True,
        query={
            "limit": _LIMIT,
            "after": _POSITION,
            "before": _POSITION,
            "stream": _FLAG,
            "texts": _FLAG,
        },
        statuses=(404, 429, 503),
    ),
    ("GET", sessions.CACHE): Operation(
        summary="What is in the cache, by session.", answer=CacheObject, query={"limit": _LIMIT}
    ),
    ("GET", sessions.BUGS): Operation(
        summary="List the violations of invariants, the last one first.",
        answer=BugPage,
        query={"limit": _LIMIT, "before": _POSITION, "texts": _FLAG},
        statuses=(503,),
    ),
    ("GET", "/v1/models"): Operation(summary="List the served models.", answer=ModelList),
    ("GET", "/v1/models/{name}"): Operation(
        summary="Get a served model.", answer=ModelObject, statuses=(404,)
    ),
    ("POST", "/v1/models/{name}/load"): Operation(
        summary="Have a served model loaded before a request needs it.",
        answer=ModelObject,
        statuses=(404, 429, 503),
    ),
    ("POST", "/v1/models/{name}/unload"): Operation(
        summary="Have the loaded model unloaded, if no request is in flight.",
        answer=ModelObject,
        statuses=(404, 409, 503),
    ),
    ("POST", f"{ollama_errors.ADDRESS}/chat"): Operation(
        summary="Answer a conversation, as Ollama does.",
        body=ollama_request.ChatBody,
        example={"messages": _HELLO["messages"], "options": {"num_predict": 16}},
        answer=OllamaChat,
        streams=True,
        lines=True,
    ),
    ("POST", f"{ollama_errors.ADDRESS}/generate"): Operation(
        summary="Answer a prompt, as Ollama does.",
        body=ollama_request.GenerateBody,
        example={"prompt": "Hello", "options": {"num_predict": 16}},
        answer=OllamaText,
        streams=True,
        lines=True,
    ),
    ("POST", f"{ollama_errors.ADDRESS}/embed"): Operation(
        summary="The vectors of texts, as Ollama has them.",
        body=ollama_embeddings.EmbedBody,
        example={"input": ["The path goes"]},
        answer=OllamaEmbeddings,
    ),
    ("POST", f"{ollama_errors.ADDRESS}/embeddings"): Operation(
        summary="The vector of a text, as older clients of Ollama's ask for it.",
        body=ollama_embeddings.EmbeddingsBody,
        example={"prompt": "The path goes"},
        answer=OllamaEmbedding,
    ),
    ("POST", f"{ollama_errors.ADDRESS}/show"): Operation(
        summary="Facts about a served model, as Ollama has them.",
        body=ollama_request.ShowBody,
        example={"model": "pebble"},
        answer=OllamaModelFacts,
    ),
    ("GET", f"{ollama_errors.ADDRESS}/tags"): Operation(
        summary="List the served models, as Ollama does.", answer=OllamaModels
    ),
    ("GET", f"{ollama_errors.ADDRESS}/ps"): Operation(
        summary="List the models in memory, as Ollama does.", answer=OllamaLoadedModels
    ),
    ("GET", f"{ollama_errors.ADDRESS}/version"): Operation(
        summary="The version of Ollama whose API this server follows.", answer=OllamaVersion
    ),
    ("GET", "/health"): Operation(
        summary="The state of the server.",
        answer=Health,
        answer_without_key=HealthWithoutKey,
        answer_at_start=StartingHealth,
        statuses=(503,),
    ),
    ("GET", "/metrics"): Operation(summary="Get metrics for Prometheus.", text="text/plain"),
    ("GET", ADDRESS): Operation(summary="Get this description.", answer=dict[str, Any]),
    ("GET", "/"): Operation(
        summary="The first page of the explorer: the sessions, for people.", text="text/html"
    ),
}


def description(*, with_keys: bool) -> dict[str, Any]:
    """
    The OpenAPI document.

    Args:
        with_keys: whether a request needs an API key.
    """
    operations = OPERATIONS.values()
    bodies = [one.body for one in operations]
    answers: list[Any] = [ErrorEnvelope, MessagesErrorEnvelope, OllamaErrorEnvelope]
    for one in operations:
        sent = one.answer, one.answer_without_key, one.answer_at_start
        answers += [kind for kind in sent if kind is not None]
    by_kind, components = _components([kind for kind in bodies if kind is not None])
    sent_by_kind, sent_components = _components(answers)
    for component in sent_components.values():
        _require_sent(component)
    by_kind |= sent_by_kind
    components |= sent_components
    paths: dict[str, dict[str, Any]] = {}
    for (method, address), operation in OPERATIONS.items():
        described = _operation(address, operation, by_kind)
        paths.setdefault(address, {})[method.lower()] = described
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "Cairn",
            "version": version("cairn-server"),
            "description": "A session server for local language models. The allowed "
            "values are in docs/reference of its repository.",
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


def _components(kinds: Sequence[type]) -> tuple[dict[type, dict[str, Any]], dict[str, Any]]:
    """The schemas of structs, and the components that they refer to."""
    kinds = list(dict.fromkeys(kinds))
    schemas, components = msgspec.json.schema_components(
        kinds, ref_template="#/components/schemas/{name}"
    )
    return dict(zip(kinds, schemas, strict=True)), components


def _require_sent(component: dict[str, Any]) -> None:
    """Require the fields that have defaults: they are always sent. Changes the component."""
    for name, schema in component.get("properties", {}).items():
        if "default" in schema:
            del schema["default"]
            component["required"].append(name)


def _operation(
    address: str, operation: Operation, by_kind: Mapping[Any, dict[str, Any]]
) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if operation.answer is not None:
        others = operation.answer_without_key, operation.answer_at_start
        schemas = [by_kind[kind] for kind in (operation.answer, *others) if kind is not None]
        schema = {"anyOf": schemas} if len(schemas) > 1 else schemas[0]
        content["application/json"] = {"schema": schema}
    description = "The answer."
    if operation.streams:
        # OpenAPI 3.1 cannot describe the schema of an event.
        content[LINES if operation.lines else "text/event-stream"] = {}
        description = (
            "Lines of JSON; with `stream: false`, the answer. "
            "Once a stream has begun, errors are sent as a line."
            if operation.lines
            else "The answer; with `stream: true`, server-sent events whose data is JSON. "
            "Once a stream has begun, errors are sent as an event."
        )
    if operation.text:
        content[operation.text] = {"schema": {"type": "string"}}
    answers = {"200": {"description": description, "content": content}}
    for status, (why, error) in _refusals(address, operation).items():
        answers[str(status)] = {
            "description": why,
            "content": {"application/json": {"schema": by_kind[error]}},
        }
    if address == "/health":
        answers["503"] = {
            **answers["200"],
            "description": "No requests are admitted; `status` says why, or that it starts.",
        }
    described: dict[str, Any] = {"summary": operation.summary, "responses": answers}
    if parameters := [*_in_path(address), *_in_query(operation.query)]:
        described["parameters"] = parameters
    if operation.body is not None:
        body = {
            "application/json": {
                "schema": by_kind[operation.body],
                "example": dict(operation.example),
            }
        }
        described["requestBody"] = {"required": not operation.may_be_empty, "content": body}
    return described


def _refusals(address: str, operation: Operation) -> dict[int, tuple[str, type]]:
    statuses = {*_ALWAYS, *operation.statuses, *(_OF_BODIES if operation.body is not None else ())}
    whys = {status: _REFUSALS[status] for status in sorted(statuses)}
    if not messages_errors.is_ours(address):
        envelope = OllamaErrorEnvelope if ollama_errors.is_ours(address) else ErrorEnvelope
        return {status: (why, envelope) for status, why in whys.items()}
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
    """The document with readable component names."""
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
    return name.removeprefix("cairn.http.").replace("._", ".").lstrip("_").removesuffix("Body")
