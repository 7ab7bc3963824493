"""
Turns every exception into an HTTP error. The exceptions are named by whose fault they are::

    ClientError            the client's: a body, a parameter or a key cannot be used; 400, 401, ...
    HTTPException          the client's: a wrong address, method or size; its own status
    RefusalError           the tree in ``actors/errors.py``; statuses in ``_REFUSALS``
    anything else          ours: 500 with a new error id, and a traceback in the log

The body is OpenAI's, ``{"error": {"message", "type", "param", "code"}}``; ``messages/errors.py``
makes Anthropic's of the same answer. No part of a traceback is sent to a client.

A violated invariant gets here in three steps. The ledger records the bug and raises ``BugError``.
The session that was at work ends its request with ``Broken``, a ``RefusalError`` with the bug's id
(``actors/sessions/session.py``). ``_REFUSALS`` below answers it with 500 and the code
``kv_cache_inv_violation``.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

import attrs
import structlog
from werkzeug.exceptions import HTTPException

from cairn.actors.errors import (
    AgentBusy,
    AgentExists,
    AgentReleased,
    Broken,
    CannotForget,
    CannotHandOver,
    CannotRecord,
    FormatRefused,
    InputTooLong,
    JournalUnread,
    ModelBusy,
    ModelNotLoaded,
    NoMemory,
    NotForgotten,
    NotReleasedYet,
    PromptRefused,
    PromptTooLong,
    QueueFull,
    RefusalError,
    SessionBusy,
    StillStarting,
    Stopping,
    TimedOut,
    TooManyAgents,
    TooManyAnswers,
)
from cairn.http.wire.checks import BODY_BYTES_MAX, ClientError
from cairn.http.wire.sent import Sent

log = structlog.get_logger(__name__)

#: Trying again gives the same result; without this header, the official clients try twice more.
_NO_RETRY = MappingProxyType({"x-should-retry": "false"})


class ErrorObject(Sent):
    """What is wrong, and where in the body."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorEnvelope(Sent):
    """The body of an error answer, except at the addresses of Anthropic's messages."""

    error: ErrorObject


@attrs.frozen(kw_only=True)
class ErrorAnswer:
    """
    The answer to an error.

    Attributes:
        ids: of the request, the session and the bug, as far as they are known, for the log.
    """

    status: int
    message: str
    type: str
    code: str
    param: str | None = None
    headers: Mapping[str, str] = attrs.field(factory=dict)
    ids: Mapping[str, str] = attrs.field(factory=dict)

    def envelope(self) -> Sent:
        """The body, in the form that OpenAI's clients read."""
        return ErrorEnvelope(
            ErrorObject(message=self.message, type=self.type, param=self.param, code=self.code)
        )


@attrs.frozen(kw_only=True)
class FormatPlaces:
    """
    The paths of the conversation and of the constraints on an answer in a protocol's bodies.

    Attributes:
        prompt: the conversation.
        answer: the format of the answer's text.
        schema: the schema of that text.
        parameters: the schema of a tool's parameters, with ``{place}`` and ``{name}`` of the tool.
    """

    prompt: str = "messages"
    answer: str = "response_format"
    schema: str = "response_format.json_schema.schema"
    parameters: str = "tools[{place}].function.parameters"


@attrs.frozen(kw_only=True)
class _Kind:
    """
    The answer to every refusal of a class.

    Attributes:
        of_prompt: whether ``param`` is the path of the conversation.
        headers: sent if the refusal has no time for trying again.
    """

    status: int
    code: str
    type: str = "invalid_request_error"
    param: str | None = None
    of_prompt: bool = False
    headers: Mapping[str, str] = MappingProxyType({})


_REFUSALS: Mapping[type[RefusalError], _Kind] = {
    PromptTooLong: _Kind(status=400, code="context_length_exceeded", of_prompt=True),
    InputTooLong: _Kind(status=400, code="context_length_exceeded", param="input"),
    PromptRefused: _Kind(status=400, code="prompt_refused", of_prompt=True),
    TooManyAnswers: _Kind(status=400, code="invalid_value", param="n"),
    AgentBusy: _Kind(status=409, code="agent_busy"),
    ModelBusy: _Kind(status=409, code="model_busy"),
    AgentExists: _Kind(status=409, code="agent_exists", param="agent_id", headers=_NO_RETRY),
    AgentReleased: _Kind(status=410, code="agent_released", headers=_NO_RETRY),
    CannotHandOver: _Kind(status=409, code="cannot_hand_over", headers=_NO_RETRY),
    NotReleasedYet: _Kind(status=409, code="agent_not_released", headers=_NO_RETRY),
    JournalUnread: _Kind(status=503, code="journal_unread", type="overloaded_error"),
    TooManyAgents: _Kind(status=409, code="too_many_agents", headers=_NO_RETRY),
    SessionBusy: _Kind(status=409, code="session_busy"),
    CannotForget: _Kind(status=409, code="cannot_forget", headers=_NO_RETRY),
    NotForgotten: _Kind(status=503, code="not_forgotten", type="overloaded_error"),
    QueueFull: _Kind(status=429, code="queue_full", type="rate_limit_error"),
    TimedOut: _Kind(status=504, code="timed_out", type="timeout_error", headers=_NO_RETRY),
    ModelNotLoaded: _Kind(
        status=503, code="model_not_loaded", type="overloaded_error", param="model"
    ),
    NoMemory: _Kind(status=503, code="no_memory", type="overloaded_error"),
    CannotRecord: _Kind(status=503, code="journal_stalled", type="overloaded_error"),
    StillStarting: _Kind(status=503, code="server_starting", type="overloaded_error"),
    Stopping: _Kind(status=503, code="server_stopping", type="overloaded_error"),
    Broken: _Kind(
        status=500, code="kv_cache_inv_violation", type="internal_error", headers=_NO_RETRY
    ),
}
"""All of ``RefusalError``'s tree but ``FormatRefused``, whose ``param`` follows from the error."""


def describe(error: BaseException, places: FormatPlaces = FormatPlaces()) -> ErrorAnswer:
    """
    The answer to an error. Logs unexpected errors.

    Args:
        places: where things are in the bodies of the protocol.
    """
    error = cause_of(error)
    for kind in type(error).__mro__:
        if (answer := _ANSWERS.get(kind)) is not None:
            return answer(error, places)
    return _unexpected(error, places)


def cause_of(error: BaseException) -> BaseException:
    """The error itself, if a nursery has wrapped it in a group of one."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


def _client_error(error: ClientError, places: FormatPlaces) -> ErrorAnswer:
    return ErrorAnswer(
        status=error.status,
        message=error.message,
        type="rate_limit_error" if error.status == 429 else "invalid_request_error",
        code=error.code,
        param=error.param,
        headers=error.headers,
    )


def _refusal(error: RefusalError, places: FormatPlaces) -> ErrorAnswer:
    kind = _REFUSALS.get(type(error))
    if kind is None:  # a refusal that is in the tree, but not in the table
        return _with_ids(_unexpected(error, places), error)
    retry_after_s = getattr(error, "retry_after_s", None)
    answer = ErrorAnswer(
        status=kind.status,
        message=error.message,
        type=kind.type,
        code=kind.code,
        param=places.prompt if kind.of_prompt else kind.param,
        headers=kind.headers if retry_after_s is None else _retry_after(retry_after_s),
    )
    if isinstance(error, AgentReleased):
        answer = attrs.evolve(answer, headers={**answer.headers, "x-cairn-agent": error.to})
    if isinstance(error, NotReleasedYet):
        answer = attrs.evolve(answer, headers={**answer.headers, "x-cairn-tenant": error.tenant})
    return _with_ids(answer, error)


def _with_ids(answer: ErrorAnswer, error: RefusalError) -> ErrorAnswer:
    """The answer with the ids that the error has, for the log and the headers."""
    named = ("request", "session", "bug_id")
    ids = {name: value for name in named if (value := getattr(error, name, None))}
    headers = {**answer.headers, **request_header(error.request)}
    return attrs.evolve(answer, ids=ids, headers=headers)


def _format_refused(error: FormatRefused, places: FormatPlaces) -> ErrorAnswer:
    where, hint = places.answer, f"leave out {places.answer} and tool_choice"
    match error.about:
        case "schema" if error.tool is not None:
            place, name = error.tool
            where = places.parameters.format(place=place, name=name[:200])
            hint = "change the schema"
        case "schema":
            where, hint = places.schema, "change the schema"
        case "calls":
            where, hint = "tool_choice", "send auto, or leave it out"
        case "calls_beside":
            hint = f"send {places.answer} without tools, or tools without it"
        case _:
            pass
    answer = ErrorAnswer(
        status=400,
        message=f"{where}: an answer cannot be constrained to this: {error.fact}; {hint}",
        type="invalid_request_error",
        code="format_refused",
        param=where,
    )
    return _with_ids(answer, error)


def request_header(request: str | None) -> dict[str, str]:
    """The header with the id by which a client can report its request to the operator."""
    return {} if request is None else {"x-request-id": request}


def _http_error(error: HTTPException, places: FormatPlaces) -> ErrorAnswer:
    status = error.code or 500
    match status:
        case 405:
            *others, last = _methods(error) or ["another method"]
            allowed = f"{', '.join(others)} and {last}" if others else last
            code, message = "method_not_allowed", f"this address accepts only {allowed}"
        case 408:
            code, message = "request_timeout", "the body did not arrive in time; send it again"
        case 413:
            most = BODY_BYTES_MAX // (1024 * 1024)
            code, message = (
                "request_too_large",
                f"the body is larger than {most} MiB; send a smaller one",
            )
        case _:
            code, message = "http_error", error.description or error.name
    kept = {"retry-after"}
    headers = {key: value for key, value in error.get_headers() if key.lower() in kept}
    if methods := _methods(error):
        headers["allow"] = ", ".join(methods)
    return ErrorAnswer(
        status=status,
        message=message,
        type="invalid_request_error" if status < 500 else "internal_error",
        code=code,
        headers=headers,
    )


def _methods(error: HTTPException) -> list[str]:
    """The methods that an address accepts, ``HEAD`` and ``OPTIONS`` last."""
    methods = getattr(error, "valid_methods", None) or ()
    return sorted(methods, key=lambda name: (name in ("HEAD", "OPTIONS"), name))


def _unexpected(error: BaseException, places: FormatPlaces) -> ErrorAnswer:
    error_id = str(uuid.uuid4())
    log.error("unexpected error", error_id=error_id, exc_info=error)
    return ErrorAnswer(
        status=500,
        message=f"internal error; the server's log has the details under error id {error_id}",
        type="internal_error",
        code="internal_error",
        headers=_NO_RETRY,
    )


def _retry_after(seconds: int) -> dict[str, str]:
    return {"retry-after": str(max(1, seconds))}


_ANSWERS: Final[Mapping[type, Callable[[Any, FormatPlaces], ErrorAnswer]]] = {
    ClientError: _client_error,
    FormatRefused: _format_refused,
    RefusalError: _refusal,
    HTTPException: _http_error,
}
"""By class, the function that answers an error of it or of a subclass."""
